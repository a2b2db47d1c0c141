"""Run several calls of `ablate` in one process, or in one group of ranks, one after the other."""

import json
import sys
from pathlib import Path

from lightning_app.cli import main

if __name__ == "__main__":
    for words in json.loads(Path(sys.argv[1]).read_text()):
        if code := main(words):
            sys.exit(code)
