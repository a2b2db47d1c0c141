"""Continue a text with a trained model."""

from itertools import pairwise

import torch

from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD, UNK, Tokenizer
from lightning_app.errors import UserError
from lightning_app.models.generation import Sampling, sample_texts
from lightning_app.models.heads import CausalLanguageModel

NEVER = (PAD, UNK, BOS, MASK)  # no text


def sampling(*, texts: int, tokens: int, temperature: float, top_k: int, top_p: float) -> Sampling:
    """Return how tokens are drawn. Raises `UserError` naming the argument."""
    for name, value in (("texts", texts), ("tokens", tokens)):
        if value < 1:
            raise UserError(f"{name} {value}: expected at least 1")
    try:
        return Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    except ValueError as error:
        raise UserError(str(error)) from error


def continue_text(
    model: CausalLanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    how: Sampling,
    device: torch.device,
    *,
    texts: int,
    tokens: int,
    seed: int,
) -> list[str]:
    """Return `prompt` with `tokens` tokens that the model writes after it, `texts` times.

    Raises:
        UserError: for a prompt with text outside of the vocabulary, and for too many tokens.
    """
    given = ids_of(prompt, tokenizer)
    if UNK in given:
        raise UserError(f"prompt {prompt!r}: has text outside the run's vocabulary")
    if len(given) + tokens - 1 > model.longest:
        raise UserError(
            f"tokens {tokens}: with a prompt of {len(given)} tokens at most "
            f"{max(0, int(model.longest) - len(given) + 1)}: the model has {int(model.longest)} "
            "learned positions"
        )
    found = sample_texts(
        model,
        given,
        texts=texts,
        tokens=tokens,
        how=how,
        never=NEVER,
        generator=torch.Generator(device).manual_seed(seed),
    )
    return [text_of([*given[1:], *row], tokenizer) for row in found.tolist()]


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text of several lines, after the end of a line."""
    ids = [EOS]
    for number, line in enumerate(text.split("\n")):
        ids += [EOS] * (number > 0) + tokenizer.encode(line)
    return ids


def text_of(ids: list[int], tokenizer: Tokenizer) -> str:
    """Return the lines of `ids`, each ended by EOS."""
    ends = [-1, *(place for place, token in enumerate(ids) if token == EOS), len(ids)]
    return "\n".join(tokenizer.decode(ids[a + 1 : b]) for a, b in pairwise(ends))
