"""Greedy and beam search, and sampled texts, by decoding with caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_app.models.heads import CausalLanguageModel, EncoderDecoder


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """The settings of a search and the score of a hypothesis.

    A hypothesis y of n tokens, including its end mark, scores ``log P(y | x) / n^length_penalty``
    (Wu et al. 2016 as in fairseq). It has at most ``length_ratio * |x| + length_extra`` tokens, and
    no more than the positions of a learned table.
    """

    beam: int = 5
    length_penalty: float = 1.0
    length_ratio: float = 1.5
    length_extra: int = 10

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise ValueError(f"beam {self.beam}: must be at least 1, which is greedy search")


class Marks(NamedTuple):
    """The ids of special tokens; a hypothesis contains neither these nor the model's padding."""

    bos: int
    eos: int
    mask: int


class Hypothesis(NamedTuple):
    """Target tokens without begin and end marks, and the score by which they were chosen."""

    tokens: list[int]
    score: float
    cut: bool = False
    """Whether it was ended by the limit of its length."""


class Beams(NamedTuple):
    """The state of a search between steps, per sentence, all on the device."""

    sentence: Int[Tensor, " row"]
    limit: Int[Tensor, " row"]
    prefixes: Int[Tensor, "row beam longest"]
    scores: Float[Tensor, "row beam"]
    finished: Int[Tensor, " row"]
    best: Int[Tensor, "row longest"]
    best_length: Int[Tensor, " row"]
    best_score: Float[Tensor, " row"]

    @classmethod
    def start(cls, limit: Int[Tensor, " row"], width: int, longest: int) -> "Beams":
        """Return `width` empty prefixes of each sentence."""
        rows = len(limit)
        none = torch.zeros_like(limit)
        scores = torch.full((rows, width), -torch.inf, dtype=torch.float32, device=limit.device)
        scores[:, 0] = 0.0  # all beams start equal: continue only the first
        return cls(
            sentence=torch.arange(rows, device=limit.device),
            limit=limit,
            prefixes=limit.new_zeros(rows, width, longest),
            scores=scores,
            finished=none,
            best=limit.new_zeros(rows, longest),
            best_length=none,
            best_score=torch.full_like(limit, -torch.inf, dtype=torch.float64),
        )

    def select(self, rows: Int[Tensor, " kept"]) -> "Beams":
        """Return the sentences in `rows`."""
        return Beams(*(part.index_select(0, rows) for part in self))

    def advance(
        self,
        top: Float[Tensor, "row candidate"],
        origin: Int[Tensor, "row candidate"],
        token: Int[Tensor, "row candidate"],
        step: int,
        eos: int,
        length_penalty: float,
    ) -> tuple["Beams", Int[Tensor, "row beam"], Bool[Tensor, " row"]]:
        """Take the best candidates, best first: a score, the beam it continues, a token each.

        Returns the beams after `step` tokens, the earlier beam that each one continues, and which
        sentences are finished.
        """
        width = self.scores.shape[1]
        ends = token == eos
        ending = ends[:, :width] & top[:, :width].isfinite()
        # All candidates that end now have the same length, so the first of them is the best.
        first = ending.long().argmax(dim=1, keepdim=True)
        score = top.gather(1, first).squeeze(1).double() / step**length_penalty
        better = ending.any(dim=1) & (score > self.best_score)
        ended = self.prefixes.gather(1, over(origin.gather(1, first), self.prefixes)).squeeze(1)
        finished = self.finished + ending.sum(dim=1)

        # The best `beam` unfinished candidates, in order: finished ones sort last, stably.
        keep = ends.long().argsort(dim=1, stable=True)[:, :width]
        origin = origin.gather(1, keep)
        prefixes = self.prefixes.gather(1, over(origin, self.prefixes))
        prefixes[:, :, step - 1] = token.gather(1, keep)
        beams = self._replace(
            prefixes=prefixes,
            scores=top.gather(1, keep).masked_fill(ends.gather(1, keep), -torch.inf),
            finished=finished,
            best=torch.where(better[:, None], ended, self.best),
            best_length=torch.where(better, step - 1, self.best_length),
            best_score=torch.where(better, score, self.best_score),
        )
        return beams, origin, (finished >= width) | (self.limit <= step)

    def hypotheses(self) -> dict[int, Hypothesis]:
        """Return the best hypothesis of each sentence."""
        cut = self.best_length + 1 == self.limit  # with the end mark
        parts = (self.sentence, self.best, self.best_length, self.best_score, cut)
        return {
            sentence: Hypothesis(tokens[:length], *rest)
            for sentence, tokens, length, *rest in zip(*(p.tolist() for p in parts), strict=True)
        }


def over(beams: Int[Tensor, "row beam"], parts: Tensor) -> Tensor:
    """Return `beams` as an index that gathers whole beams of `parts`, (row, beam, length)."""
    return beams[:, :, None].expand(-1, -1, parts.shape[2])


@torch.no_grad()
def search(
    model: EncoderDecoder, source: Int[Tensor, "batch source"], marks: Marks, s: SearchConfig
) -> list[Hypothesis]:
    """Return the best hypothesis of each source sentence.

    Beam search keeps the `beam` best unfinished prefixes of a sentence. A prefix that ends is
    finished when it is among the best `beam` candidates; a sentence is done when `beam` have
    finished or its length limit is reached, where every prefix is ended. Finished sentences
    leave the batch at once. A beam of 1 is greedy search.
    """
    lengths = (source != model.pad).sum(dim=1)
    limits = (lengths * s.length_ratio + s.length_extra).clamp(min=1, max=model.longest).long()
    reached = set(limits.tolist())
    state = model.start(source, s.beam)
    beams = Beams.start(limits, s.beam, max(reached, default=0))
    newest = torch.full_like(beams.scores, marks.bos, dtype=torch.long)
    unwritten = [model.pad, marks.bos, marks.mask]
    found: dict[int, Hypothesis] = {}

    for step in range(1, max(reached, default=0) + 1):
        logits, state = model.step(newest, state)
        candidates = logits.float().log_softmax(dim=-1).unflatten(0, newest.shape)
        candidates[..., unwritten] = -torch.inf
        vocabulary = candidates.shape[2]
        if step in reached:
            goes_on = torch.arange(vocabulary, device=source.device) != marks.eos
            candidates.masked_fill_((beams.limit == step)[:, None, None] & goes_on, -torch.inf)
        candidates += beams.scores[:, :, None]
        # Each prefix can end in only one way, so 2 * beam candidates hold `beam` unfinished ones.
        top, flat = candidates.flatten(1).topk(min(2 * s.beam, s.beam * vocabulary), dim=1)
        beams, origin, done = beams.advance(
            top, flat // vocabulary, flat % vocabulary, step, marks.eos, s.length_penalty
        )
        newest, state = beams.prefixes[:, :, step - 1], state.reorder(origin)
        if done.any():
            found |= beams.select(done.nonzero().squeeze(1)).hypotheses()
            rows = (~done).nonzero().squeeze(1)
            if not len(rows):
                break
            beams, newest, state = beams.select(rows), newest[rows], state.select(rows)
    return [found[sentence] for sentence in range(len(source))]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from ``softmax(logits / temperature)``.

    Attributes:
        temperature: 0 takes the likeliest token, the limit of small values.
        top_k: Only the `top_k` likeliest tokens are drawn; 0 for all.
        top_p: Only the likeliest tokens are drawn, as few as reach a total probability of `top_p`
            (Holtzman et al. 2020, 1904.09751); 1 for all. It applies after `top_k`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature}: must be at least 0, which is greedy")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be at least 1, or 0 for all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p {self.top_p}: must be above 0 and at most 1")


def probabilities(
    logits: Float[Tensor, "text vocabulary"], how: Sampling
) -> Float[Tensor, "text vocabulary"]:
    """Return the probability with which each token is drawn."""
    logits = logits.double()
    if how.temperature == 0.0:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).double()
    ordered, order = (logits / how.temperature).sort(dim=-1, descending=True, stable=True)
    if how.top_k:
        ordered[:, how.top_k :] = -torch.inf
    p = ordered.softmax(dim=-1)
    # A token is dropped if those before it already have enough probability.
    p = p.masked_fill(p.cumsum(dim=-1) - p >= how.top_p, 0.0)
    p = p / p.sum(dim=-1, keepdim=True)
    return torch.zeros_like(p).scatter_(1, order, p)


@torch.no_grad()
def sample_texts(
    model: CausalLanguageModel,
    prompt: Sequence[int],
    *,
    texts: int,
    tokens: int,
    how: Sampling,
    never: Sequence[int],
    generator: torch.Generator,
) -> Int[Tensor, "text token"]:
    """Return `texts` continuations of `prompt`, each of `tokens` tokens.

    Args:
        model: The model, in evaluation mode.
        prompt: The prompt, at least one token.
        texts: The number of continuations.
        tokens: The number of new tokens per text.
        how: How the next token is drawn.
        never: Tokens that are not drawn.
        generator: The generator of the draws, on the model's device.
    """
    device = model.embedding.tokens.weight.device
    newest = torch.tensor(prompt, device=device).expand(texts, -1)
    state, found = model.start(texts), []
    logits = None
    for place in range(newest.shape[1]):
        logits, state = model.step(newest[:, place : place + 1], state)
    for drawn in range(tokens):
        assert logits is not None
        logits[:, list(never)] = -torch.inf
        found.append(torch.multinomial(probabilities(logits, how), 1, generator=generator))
        if drawn + 1 < tokens:
            logits, state = model.step(found[-1], state)
    return torch.cat(found, dim=1)
