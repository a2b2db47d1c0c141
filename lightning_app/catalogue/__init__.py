"""What `ablate blocks` shows: the presets as a table, as drawings, as specifications."""
