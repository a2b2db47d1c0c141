"""Which experiment a config is: what can change its result, and the id made of it."""
