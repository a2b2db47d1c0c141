"""The kernels of attention and norms: their choice, and the tensors that they store."""
