"""Losses: what a task sums over the tokens of a batch."""
