"""How attention and norms are computed: which kernel, and what it stores."""
