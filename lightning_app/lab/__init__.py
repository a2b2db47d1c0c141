"""Beside the program: speed against other libraries, and statements of theory."""
