"""Scores of fine-tuned models as plain functions: GLUE, SQuAD, and the spans of answers."""
