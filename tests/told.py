"""What a message tells, whatever its words: sources, fields, values and numbers, in this order."""

import re


def told(parts: str) -> re.Pattern[str]:
    """Matches a text with all `parts`, between which "…" stands for any words."""
    return re.compile(r"[^\n]*?".join(re.escape(part.strip()) for part in parts.split("…")))
