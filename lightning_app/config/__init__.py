"""Settings: their names and types, grid files, and the id of an experiment."""
