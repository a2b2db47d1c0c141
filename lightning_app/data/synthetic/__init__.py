"""A synchronous grammar of German and English, and the corpus that it draws."""
