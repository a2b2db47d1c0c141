"""What happens to signals and gradients inside a model: measured by hooks, drawn, tabled."""
