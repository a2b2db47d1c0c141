"""Damage of a bad disk: one bit of a file changes."""

import random
from pathlib import Path


def flip(path: Path, chance: random.Random) -> int:
    """Change a random bit of a file, and return its place."""
    data = bytearray(path.read_bytes())
    place = chance.randrange(8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)
    return place
