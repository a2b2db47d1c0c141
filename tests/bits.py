"""What a bad disk does: one bit of a file is another."""

import random
from pathlib import Path


def flip(path: Path, chance: random.Random) -> int:
    """Change one bit of a file, wherever `chance` has it, and return its place."""
    data = bytearray(path.read_bytes())
    place = chance.randrange(8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)
    return place
