"""Grids of runs: the cells, the queue, and the supervisor that runs what is missing."""
