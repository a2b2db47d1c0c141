"""What a run leaves: its paths, its strict records, and its provenance."""
