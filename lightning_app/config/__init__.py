"""The config of one run: its schema, the reading of files and command lines, its checks."""
