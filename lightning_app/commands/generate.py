"""Continue a text with the checkpoint of a run."""

from itertools import pairwise
from pathlib import Path

import torch

from lightning_app.commands.trained import load_trained
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD, UNK, Tokenizer
from lightning_app.errors import UserError
from lightning_app.models.generation import Sampling, sample_texts

NEVER = (PAD, UNK, BOS, MASK)  # no text


def generate_text(
    run: str | Path,
    prompt: str,
    *,
    texts: int,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    checkpoint: str,
) -> int:
    """Print `prompt` with what the model of `run` writes after it, `texts` times."""
    for option, value in (("--texts", texts), ("--tokens", tokens)):
        if value < 1:
            raise UserError(f"generate: {option} {value}: expected at least 1")
    try:
        how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    except ValueError as error:
        raise UserError(f"generate: --{str(error).replace('_', '-', 1)}") from error
    _, model, tokenizer, _, device = load_trained("generate", run, checkpoint, "causal_lm")
    given = ids_of(prompt, tokenizer)
    if UNK in given:
        raise UserError(f"generate: --prompt {prompt!r}: has text outside the run's vocabulary")
    if len(given) + tokens - 1 > model.longest:
        raise UserError(
            f"generate: --tokens {tokens}: with a prompt of {len(given)} tokens at most "
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
    for number, row in enumerate(found.tolist()):
        if number:
            print("-" * 20)
        print(text_of([*given[1:], *row], tokenizer))
    return 0


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
