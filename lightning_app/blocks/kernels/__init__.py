"""How attention and norms are computed: which kernel runs, and what it stores."""
