"""What papers prove or plot of a fresh model, measured on our own blocks."""
