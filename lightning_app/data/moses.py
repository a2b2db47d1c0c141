"""Moses' tokenisation of IWSLT14, as in fairseq (Koehn et al. 2007), and its inverse."""

import re
from functools import cache
from typing import Any

_LAST_STOP = re.compile(r"(?<=[^\s.])\.$")


@cache
def _tools(language: str) -> tuple[Any, Any]:
    from sacremoses import MosesDetokenizer, MosesTokenizer

    return MosesTokenizer(language), MosesDetokenizer(language)


def tokenize(text: str, language: str) -> str:
    """Return the tokens of `text`, separated by single spaces and escaped.

    sacremoses keeps the full stop of an abbreviation at the end of a line ("U.S."); the script
    behind the published splits removed it.
    """
    tokens = _tools(language)[0].tokenize(text, return_str=True)
    return _LAST_STOP.sub(" .", tokens)


def detokenize(text: str, language: str) -> str:
    """Return plain text: entities decoded, punctuation and contractions attached to their words."""
    return _tools(language)[1].detokenize(text.split())
