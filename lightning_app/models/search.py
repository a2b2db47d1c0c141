"""Greedy and beam search over cached decoding."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from lightning_app.models.heads import DecodingState, EncoderDecoder


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How hypotheses are searched and compared.

    A hypothesis y of n tokens, its end mark included, scores ``log P(y | x) / n^length_penalty``
    (Wu et al. 2016 as in fairseq). It has at most ``length_ratio * |x| + length_extra`` tokens, and
    no more than a learned table has positions.
    """

    beam: int = 5
    length_penalty: float = 1.0
    length_ratio: float = 1.5
    length_extra: int = 10

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise ValueError(f"beam {self.beam}: at least 1, which is greedy search")


class Hypothesis(NamedTuple):
    """Target tokens without the begin and end marks, and the score they were chosen by."""

    tokens: list[int]
    score: float


@torch.no_grad()
def search(
    model: EncoderDecoder, source: Int[Tensor, "batch source"], bos: int, eos: int, s: SearchConfig
) -> list[Hypothesis]:
    """Return the best hypothesis of each source sentence.

    Beam search keeps the `beam` best unfinished prefixes of a sentence. A prefix that ends is
    finished when it stands among the best `beam` candidates; a sentence is done when `beam` have
    finished or its length limit is reached, where every prefix is made to end. Done sentences
    leave the batch at once. A beam of 1 is greedy search.
    """
    device, pad = source.device, model.pad
    width = s.beam
    lengths = (source != pad).sum(dim=1)
    limits = (lengths * s.length_ratio + s.length_extra).clamp(max=model.longest).long().tolist()
    state = repeat(model.start(source), width)
    finished: list[list[Hypothesis]] = [[] for _ in limits]
    alive = list(range(len(limits)))  # the sentences still searched, in the order of the rows
    prefixes = torch.full((len(alive), width, 1), bos, dtype=torch.long, device=device)
    # All beams start equal: let the first speak for all of them.
    scores = torch.full((len(alive), width), -torch.inf, device=device)
    scores[:, 0] = 0.0

    step = 0
    while alive:
        step += 1
        logits, state = model.step(prefixes[:, :, -1:].flatten(0, 1), state)
        log_probs = logits.float().log_softmax(dim=-1)
        log_probs[:, pad] = -torch.inf
        log_probs[:, bos] = -torch.inf
        vocabulary = log_probs.shape[-1]
        must_end = torch.tensor([limits[i] <= step for i in alive], device=device)
        not_end = torch.ones(vocabulary, dtype=torch.bool, device=device)
        not_end[eos] = False
        log_probs = log_probs.view(len(alive), width, vocabulary)
        log_probs = log_probs.masked_fill(must_end[:, None, None] & not_end, -torch.inf)

        # Each prefix can end in one way only, so 2 * beam candidates hold `beam` that go on.
        candidates = (scores[:, :, None] + log_probs).flatten(1)
        top, flat = candidates.topk(min(2 * width, candidates.shape[1]), dim=1)
        origin, token = flat // vocabulary, flat % vocabulary
        ends = token == eos

        done: set[int] = set()
        ending = (ends[:, :width] & top[:, :width].isfinite()).nonzero().tolist()
        for row, rank in ending:
            sentence = alive[row]
            if len(finished[sentence]) < width:
                tokens = prefixes[row, int(origin[row, rank]), 1:].tolist()
                score = float(top[row, rank]) / step**s.length_penalty
                finished[sentence].append(Hypothesis(tokens, score))
        for row, sentence in enumerate(alive):
            if len(finished[sentence]) >= width or limits[sentence] <= step:
                done.add(row)

        # The best `beam` candidates that go on, in order: ended ones sort last, stably.
        keep = ends.long().argsort(dim=1, stable=True)[:, :width]
        scores = top.gather(1, keep).masked_fill(ends.gather(1, keep), -torch.inf)
        beams = origin.gather(1, keep)
        prefixes = torch.cat(
            [
                prefixes.gather(1, beams[:, :, None].expand(-1, -1, prefixes.shape[2])),
                token.gather(1, keep)[:, :, None],
            ],
            dim=2,
        )
        kept = torch.tensor([r for r in range(len(alive)) if r not in done], device=device).long()
        rows = (kept[:, None] * width + beams[kept]).flatten()
        state = state.select(rows) if done else state.reorder(rows)
        scores, prefixes = scores[kept], prefixes[kept]
        alive = [alive[r] for r in kept.tolist()]
    return [max(hypotheses, key=lambda h: h.score) for hypotheses in finished]


def repeat(state: DecodingState, times: int) -> DecodingState:
    """Return `state` with each row `times` times in succession."""
    rows = torch.arange(state.source_allowed.shape[0], device=state.source_allowed.device)
    return state.select(rows.repeat_interleave(times))
