"""What a grid of finished runs says: scores, figures, report, TensorBoard index."""
