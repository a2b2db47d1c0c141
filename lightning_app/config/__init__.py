"""The config of one run: its schema, how files and a command line are read, and its checks."""
