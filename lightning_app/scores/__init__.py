"""Scores of fine-tuned models as plain functions: GLUE, SQuAD and answer spans."""
