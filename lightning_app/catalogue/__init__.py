"""The output of `ablate blocks`: the presets as a table, as drawings and as specifications."""
