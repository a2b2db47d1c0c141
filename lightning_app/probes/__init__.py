"""Measure signals and gradients inside a model with hooks; write tables and figures."""
