"""A synchronous grammar of German and English, and the corpus drawn from it."""
