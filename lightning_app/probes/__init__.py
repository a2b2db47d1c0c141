"""Measure signals and gradients inside a model by hooks; write tables and figures."""
