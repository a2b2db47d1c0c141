"""Translate lines of text with a trained model."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from lightning_app.data.tokenizer import EOS, PAD, Tokenizer
from lightning_app.errors import UserError
from lightning_app.models.heads import EncoderDecoder
from lightning_app.models.search import SearchConfig, search
from lightning_app.tasks.translation import MARKS

TOKENS = 4096  # source tokens translated at once, including padding


def check_beam(beam: int | None, vocabulary: int | None = None) -> None:
    """Refuse a width of the search that has no meaning. None is that of the run's config."""
    if beam is not None and beam < 1:
        raise UserError(f"beam {beam}: expected at least 1, which is greedy search")
    if beam is not None and vocabulary is not None and beam > vocabulary:
        raise UserError(f"beam {beam}: expected at most the vocabulary, {vocabulary}")


def translate(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    how: SearchConfig,
    device: torch.device,
) -> list[str]:
    """Return the translation of each line; an empty line stays empty."""
    sources = [[*tokenizer.encode(line), EOS] for line in lines]
    translations = [""] * len(sources)
    # Sorted by length; a source with only its end mark has nothing to translate.
    order = sorted((i for i, s in enumerate(sources) if len(s) > 1), key=lambda i: len(sources[i]))
    while order:
        longest = len(sources[order[-1]])
        count = max(1, TOKENS // (longest * how.beam))
        rows, order = order[-count:], order[:-count]
        batch = [torch.tensor(sources[i], device=device) for i in rows]
        batch = pad_sequence(batch, batch_first=True, padding_value=PAD)
        for i, hypothesis in zip(rows, search(model, batch, MARKS, how), strict=True):
            translations[i] = tokenizer.decode(hypothesis.tokens)
    return translations
