"""Ablations of Transformer blocks, and how sensitive each one is to learning-rate warm-up."""

__version__ = "0.1.0"
