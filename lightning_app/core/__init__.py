"""Errors, whole files, registries, strict YAML and facts of tasks; nothing here imports torch."""
