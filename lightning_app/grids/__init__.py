"""Grids of runs: plan, queue, supervisor and workers."""
