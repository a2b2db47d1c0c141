"""The sentences of documents, found by one simple rule.

A line is split after each ``.``, ``!`` or ``?`` that white space and a capital letter follow.
Closing quotes and brackets directly after the mark belong to the sentence, and opening ones may
precede the capital. The end of a line always ends a sentence, so that a file with one sentence a
line is read as it is written. An abbreviation before a name splits a sentence in two. Next sentence
prediction does not mind: it needs contiguous pieces of text, not grammar.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

_END = re.compile(r"""[.!?]["'”’»)\]]*\s+(?=["'“‘«(\[]*(\w))""")


class Sentences(NamedTuple):
    """The sentences of a split.

    Attributes:
        sentences: In the order of the text; none is empty.
        documents: The sentence at which each document begins, the first one at 0.
        left_out: The number of lines with text that are no sentences, such as headings.
    """

    sentences: list[str]
    documents: list[int]
    left_out: int


def split_sentences(line: str) -> list[str]:
    """Return the sentences of a line; none for a blank line."""
    ends = [match.end() for match in _END.finditer(line) if match[1].isupper()]
    parts = (line[begin:end].strip() for begin, end in pairwise([0, *ends, len(line)]))
    return [part for part in parts if part]


def sentences_of(
    lines: Sequence[str], begins: Sequence[int], left_out: Callable[[str], bool]
) -> Sentences:
    """Return the sentences of the documents that begin at the lines `begins`.

    Lines for which `left_out` is true have none. A document without sentences is no document.
    """
    sentences: list[str] = []
    documents: list[int] = []
    without = 0
    for begin, end in pairwise([*begins, len(lines)]):
        first = len(sentences)
        for line in filter(str.strip, lines[begin:end]):
            if left_out(line):
                without += 1
            else:
                sentences += split_sentences(line)
        if len(sentences) > first:
            documents.append(first)
    return Sentences(sentences, documents, without)
