"""`python -m lightning_app` is the command `ablate`."""

import sys

from lightning_app.cli import main

if __name__ == "__main__":
    sys.exit(main())
