"""One run: module, data module, checkpoints and records."""
