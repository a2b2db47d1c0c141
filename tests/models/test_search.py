"""Beam search against a search without cache, batch or vectors, and against exhaustion."""

import itertools
import math
from typing import Any

import pytest
import torch

from lightning_app.blocks.config import BlockConfig
from lightning_app.models.heads import ArchitectureConfig, EncoderDecoder, build_model
from lightning_app.models.search import Marks, SearchConfig, search

PAD, BOS, EOS, MASK = 0, 2, 3, 4
MARKS = Marks(bos=BOS, eos=EOS, mask=MASK)


def tiny(preset: str, vocab_size: int = 11, seed: int = 0, **positions: Any) -> EncoderDecoder:
    torch.manual_seed(seed)
    sizes = {"encoder_depth": 2, "decoder_depth": 2, "model_dim": 12, "ff_dim": 14, "num_heads": 3}
    architecture = ArchitectureConfig(**sizes, dropout=0.0, **positions)
    model = build_model(architecture, BlockConfig(preset=preset), vocab_size, PAD)
    assert isinstance(model, EncoderDecoder)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def plain_beam(model, source: torch.Tensor, s: SearchConfig) -> list[int]:
    """The search as its docstring says it, one sentence, the whole prefix run at each step."""
    source = source[source != PAD]
    limit = int(len(source) * s.length_ratio + s.length_extra)
    alive: list[tuple[float, list[int]]] = [(0.0, [BOS])]
    finished: list[tuple[float, list[int]]] = []
    for step in range(1, limit + 1):
        candidates = []
        for score, prefix in alive:
            row = log_probs(model, source, prefix)
            for token, value in enumerate(row):
                if step == limit and token != EOS:
                    continue
                if value > -math.inf:
                    candidates.append((score + value, [*prefix, token]))
        candidates.sort(key=lambda c: -c[0])
        for rank, (score, tokens) in enumerate(candidates[: s.beam]):
            if tokens[-1] == EOS and len(finished) < s.beam:
                assert rank < s.beam
                finished.append((score / step**s.length_penalty, tokens[1:-1]))
        alive = [c for c in candidates[: 2 * s.beam] if c[1][-1] != EOS][: s.beam]
        if len(finished) >= s.beam or not alive:
            break
    return max(finished, key=lambda f: f[0])[1]


def log_probs(model: EncoderDecoder, source: torch.Tensor, prefix: list[int]) -> list[float]:
    with torch.no_grad():
        values = model(source[None], torch.tensor([prefix]))[0, -1].log_softmax(-1)
    values[[PAD, BOS, MASK]] = -math.inf
    return values.tolist()


SOURCE = torch.tensor([[5, 6, 7, 8, 3], [9, 4, 3, 0, 0], [10, 10, 6, 3, 0], [3, 0, 0, 0, 0]])


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("preset", ["post_ln", "realformer", "sas", "sas_p_no_norm"])
@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("length_penalty", [0.0, 1.2])
def test_equals_the_plain_search(preset: str, beam: int, length_penalty: float) -> None:
    model = tiny(preset)
    how = SearchConfig(beam=beam, length_penalty=length_penalty, length_ratio=1.0, length_extra=3)
    found = search(model, SOURCE, MARKS, how)
    assert [h.tokens for h in found] == [plain_beam(model, row, how) for row in SOURCE]


def test_a_wide_beam_finds_the_best_of_all_sequences() -> None:
    model = tiny("pre_ln", vocab_size=7, seed=3)
    source = torch.tensor([[6, 5, 3]])
    how = SearchConfig(beam=200, length_penalty=1.0, length_ratio=0.0, length_extra=4)
    best = (-math.inf, ())
    for length in range(4):
        for body in itertools.product([1, 5, 6], repeat=length):
            row = [BOS, *body, EOS]
            score = sum(log_probs(model, source[0], row[:i])[row[i]] for i in range(1, len(row)))
            best = max(best, (score / (length + 1), body))
    found = search(model, source, MARKS, how)[0]
    assert tuple(found.tokens) == best[1]
    assert found.score == pytest.approx(best[0], abs=1e-5)


def endless(**sizes: Any) -> Any:
    """A model that would rather never end."""
    model = tiny("pre_ln", seed=7, **sizes)
    with torch.no_grad():
        model.embedding.tokens.weight[EOS] -= 3.0
    return model


def test_every_hypothesis_keeps_its_length_limit() -> None:
    how = SearchConfig(beam=2, length_ratio=1.0, length_extra=2)
    for row, hypothesis in zip(SOURCE, search(endless(), SOURCE, MARKS, how), strict=True):
        assert len(hypothesis.tokens) < int((row != PAD).sum()) + 2


@pytest.mark.parametrize("room", [5, 7])
def test_a_learned_table_of_positions_bounds_the_search(room: int) -> None:
    """A hypothesis with its EOS takes as many positions as there are, and no sentence fails."""
    model = endless(positions="learned", max_positions=room)
    found = search(model, SOURCE, MARKS, SearchConfig(beam=2, length_ratio=1.0, length_extra=20))
    assert max(len(hypothesis.tokens) for hypothesis in found) == room - 1


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_other_positions_equal_the_plain_search(positions: str) -> None:
    model = tiny("realformer", positions=positions, max_positions=19)
    how = SearchConfig(beam=3, length_penalty=1.0, length_ratio=1.0, length_extra=3)
    found = search(model, SOURCE, MARKS, how)
    assert [h.tokens for h in found] == [plain_beam(model, row, how) for row in SOURCE]


@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("unwanted", [PAD, BOS, MASK])
def test_what_is_no_text_is_never_written(unwanted: int, beam: int) -> None:
    """Whatever the model makes of it, as one that was trained to fill masks may."""
    model = tiny("pre_ln", seed=7)
    step = model.step

    def preferring(tokens: torch.Tensor, state: Any) -> Any:
        logits, state = step(tokens, state)
        logits[:, unwanted] += 50.0
        return logits, state

    model.step = preferring
    found = search(model, SOURCE, MARKS, SearchConfig(beam=beam, length_ratio=1.0, length_extra=4))
    assert max(len(hypothesis.tokens) for hypothesis in found) > 1
    assert all(token not in (PAD, BOS, EOS, MASK) for h in found for token in h.tokens)


def test_a_beam_under_one_is_refused() -> None:
    with pytest.raises(ValueError, match="beam 0"):
        SearchConfig(beam=0)
