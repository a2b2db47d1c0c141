"""One run: module, data module, checkpoint, and what it records."""
