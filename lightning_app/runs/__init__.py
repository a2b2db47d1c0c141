"""The traces of a run: its paths, its strict records and its provenance."""
