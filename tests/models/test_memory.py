"""Segment recurrence against its equation, and against one pass over the whole text."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import attention_form
from lightning_app.blocks.memory import MemorySpec
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.spans import AdaptiveSpan
from lightning_app.blocks.steps import HaltingSpec
from lightning_app.blocks.windows import LocalisedSpan
from lightning_app.models.heads import CausalLanguageModel
from tests import tiny
from tests.reference import REFERENCE
from tests.reference_memory import predict_segment
from tests.slopes import check_slopes

pytestmark = pytest.mark.usefixtures("float64")

T = 4
LENGTHS = (2, 4, 6, 9, 30)
MAIN = ("post_ln", "pre_ln", "realformer", "sas", "dual_stream")
STREAMS = ("mhc", "attention_residuals")


def architecture(positions: str, **changes: Any) -> dict[str, Any]:
    """Sizes of a decoder alone; rope turns pairs, so its heads have an even width."""
    even = {"model_dim": 12} if positions == "rope" else {}
    return {"positions": positions, "decoder_depth": 3, **even, **changes}


def model(preset: str, memory: Any, positions: str = "relative", **axes: Any) -> Any:
    config = BlockConfig(preset=preset, memory=memory, **axes)
    return tiny.randomise(tiny.causal_model(config, **architecture(positions, activation="gelu")))


def alike(
    one: CausalLanguageModel, preset: str, positions: str, memory: Any = None, **axes: Any
) -> CausalLanguageModel:
    """Return a model with the parameters of `one` and another block."""
    other = model(preset, memory, positions, **axes)
    other.load_state_dict(one.state_dict())
    return other


def read(made: CausalLanguageModel, tokens: Tensor, length: int = T) -> Tensor:
    """Return the states of texts that are read in segments."""
    memory, found = None, []
    for segment in tokens.split(length, dim=1):
        states, memory = made.states_after(memory, segment)
        found.append(states)
    return torch.cat(found, dim=1)


def close(*both: Any) -> None:
    torch.testing.assert_close(*map(torch.as_tensor, both), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("positions", ["relative", "relative_untied", "rope"])
@pytest.mark.parametrize("preset", [*MAIN, *STREAMS])
@pytest.mark.in_turn(3)
def test_segments_are_one_pass_over_the_text(preset: str, positions: str, length: int) -> None:
    """The naive reference, with the mask of l_q = T and l_m = M over the whole text."""
    made, tokens = model(preset, MemorySpec(length=length), positions), tiny.words(2, 14)
    limited = replace(REFERENCE[preset], localised_span=(T, length))
    expected = tiny.predicted(limited, made, tokens, **architecture(positions, activation="gelu"))
    close(made.embedding.logits(read(made, tokens)), expected)


@pytest.mark.parametrize("length", [3, 6])
@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"resformer"}))
def test_every_preset_reads_in_segments(preset: str, length: int) -> None:
    made, tokens = model(preset, MemorySpec(length=length)).eval(), tiny.words(2, 14)
    span = LocalisedSpan(query_block=T, memory=length)
    whole = alike(made, preset, "relative", localised_span=span).eval()
    close(read(made, tokens), whole.states(tokens))


SIX = {"localised_span": LocalisedSpan(query_block=T, memory=6)}
REACH = {"adaptive_span": AdaptiveSpan(longest=5, ramp=2.0, start=0.4, trim=True)}
SLIDING = {"localised_span": LocalisedSpan(query_block=1, memory=4)}
SOFTMAX: list[dict[str, Any]] = [
    *({"sink": "learned"}, {"sink": "zero", "residual_attention": "sum"}),
    *({"score_cap": 0.7, "sink": "zero"}, {"scores": "cosine"}),
]


@pytest.mark.parametrize(
    ("memory", "axes", "positions", "mask"),
    [
        *((MemorySpec(length=6), axes, "relative", SIX) for axes in (*SOFTMAX, {"share": "all"})),
        *((MemorySpec(length=6), axes, "rope", SIX) for axes in SOFTMAX),
        *(
            (MemorySpec(length=5, same_length=True), {"preset": name}, "relative", SLIDING)
            for name in ("pre_ln", "sas")
        ),
        (MemorySpec(length=6), {"preset": "post_ln", **REACH}, "relative", {}),
    ],
)
def test_axes_read_in_segments(memory: MemorySpec, axes: Any, positions: str, mask: Any) -> None:
    preset, rest = axes.get("preset", "pre_ln"), {k: v for k, v in axes.items() if k != "preset"}
    made, tokens = model(preset, memory, positions, **rest), tiny.words(2, 14)
    close(read(made, tokens), alike(made, preset, positions, **mask, **rest).states(tokens))


@pytest.mark.parametrize("carry", ["sum", "mean", "qk_sum"])
@pytest.mark.parametrize("form", ["plain", "stored", "reversible", "blocked"])
def test_chains_in_every_form(form: Any, carry: Any) -> None:
    """Forward, and the gradient of the last segment."""
    made = model("sas", MemorySpec(length=6), "rope", residual_attention=carry)
    tokens = tiny.words(2, 12)
    with torch.no_grad():
        first, second = (tokens[:, a : a + T] for a in (0, T))
        memory = made.states_after(made.states_after(None, first)[1], second)[1]
    found = []
    for used in ("plain", form):
        with attention_form(used):
            states = made.states_after(memory, tokens[:, 2 * T :])[0]
        gradients = torch.autograd.grad(states.square().sum(), list(made.decoder.parameters()))
        found.append((states, *gradients))
    for plain, other in zip(*found, strict=True):
        close(other, plain)


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize("positions", ["relative", "rope"])
@pytest.mark.parametrize("preset", MAIN)
def test_gradients_are_of_the_equation(preset: str, positions: str, same_length: bool) -> None:
    """Parameters change the keys and values of the memory, but not the memory itself."""
    spec = MemorySpec(length=6, same_length=same_length)
    made, tokens = model(preset, spec, positions), tiny.words(1, 11)
    sizes = tiny.reference_sizes(
        tiny.architecture(kind="decoder", **architecture(positions, activation="gelu"))
    )
    memory, before = None, [np.zeros((1, 0, made.embedding.model_dim))] * 3
    at, reference = tiny.numpy_parameters(made), REFERENCE[preset]
    for segment in tokens[:, : 2 * T].split(T, dim=1):
        states, memory = made.states_after(memory, segment)
        expected, before = predict_segment(
            reference, at, sizes, segment.numpy(), before, 6, same_length
        )
        close(states, expected)
        for ours, theirs in zip(memory.layers, before, strict=True):
            close(ours, theirs)
    last, weight = tokens[:, 2 * T :], torch.randn(1, 3, made.embedding.model_dim)

    def reference_loss(parameters: Any) -> float:
        states, _ = predict_segment(
            reference, parameters, sizes, last.numpy(), before, 6, same_length
        )
        return float((states * weight.numpy()).sum())

    check_slopes(made, (made.states_after(memory, last)[0] * weight).sum(), reference_loss)


def double_loop(made: CausalLanguageModel, tokens: Tensor, clamp: int) -> Tensor:
    """The states of one layer over a whole text, each cell of the scores on its own."""
    block: Any = made.decoder.blocks[0]
    place: Any = made.decoder.place
    final_norm: Any = made.decoder.final_norm
    attention = block.self_attention
    x = made.embedding(tokens)
    u = block.around_self.enter(x)
    query, key, value = (
        part(u).unflatten(-1, (2, 5)).transpose(1, 2)
        for part in (attention.query, attention.key, attention.value)
    )
    weight, biases = place.projections[0].weight.unflatten(0, (2, 5)), place.biases[0]
    rates = 10000.0 ** (-torch.arange(0, 10, 2) / 10)
    scores = torch.full((*query.shape[:3], tokens.shape[1]), -torch.inf)
    for h in range(2):
        for i in range(tokens.shape[1]):
            for j in range(i + 1):
                angles = min(i - j, clamp) * rates
                distance = weight[h] @ torch.cat([angles.sin(), angles.cos()])
                cell = (query[:, h, i] + biases.content[h, 0]) * key[:, h, j]
                cell = cell + (query[:, h, i] + biases.position[h, 0]) * distance
                scores[:, h, i, j] = cell.sum(dim=-1) / 5**0.5
    after = x + attention.output((scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2))
    return final_norm(after + block.feed_forward(block.around_ff.enter(after)))


@torch.no_grad()
@pytest.mark.parametrize("clamp", [1, 3, 9])
def test_large_distances_count_as_one_in_evaluation(clamp: int) -> None:
    """One pass, in segments and from caches; training does not clamp."""
    config = BlockConfig(preset="pre_ln", memory=MemorySpec(length=20))
    sizes = {**architecture("relative", activation="gelu"), "decoder_depth": 1}
    made = tiny.randomise(tiny.causal_model(config, **sizes, clamp_length=clamp)).eval()
    tokens = tiny.words(2, 11)
    expected = double_loop(made, tokens, clamp)
    close(made.states(tokens), expected)
    close(read(made, tokens), expected)
    state, logits = made.start(2), made.embedding.logits(expected)
    for place in range(11):
        found, state = made.step(tokens[:, place : place + 1], state)
        close(found, logits[:, place])
    close(made.train().states(tokens), double_loop(made, tokens, 11))


def test_a_memory_of_everything_is_a_causal_pass() -> None:
    made, tokens = model("realformer", MemorySpec(length=40)), tiny.words(2, 14)
    close(made.embedding.logits(read(made, tokens)), made(tokens))


@pytest.mark.parametrize(
    ("spec", "length"),
    [(MemorySpec(length=2, evaluation_length=5), 5), (MemorySpec(length=5, same_length=True), 4)],
)
@pytest.mark.parametrize("preset", ["realformer", "sas"])
def test_cached_decoding_sees_evaluation_memory(preset: str, spec: MemorySpec, length: int) -> None:
    """One token at a time: a sliding window over the text, also once old tokens are dropped."""
    made, tokens = model(preset, spec).eval(), tiny.words(2, 30)
    whole = alike(
        made, preset, "relative", localised_span=LocalisedSpan(query_block=1, memory=length)
    ).eval()
    expected, state = whole(tokens), made.start(2)
    for place in range(30):
        logits, state = made.step(tokens[:, place : place + 1], state)
        close(logits, expected[:, place])
    assert state.caches[0].room < 30
    close(made.embedding.logits(read(made, tokens, 1)), expected)


def test_training_and_evaluation_have_lengths_of_their_own() -> None:
    made, tokens = model("pre_ln", MemorySpec(length=2, evaluation_length=7)), tiny.words(2, 12)
    for training, length in ((True, 2), (False, 7)):
        made.train(training)
        span = LocalisedSpan(query_block=T, memory=length)
        whole = alike(made, "pre_ln", "relative", localised_span=span)
        close(read(made, tokens), whole.states(tokens))


FIVE, BLOCKS = AdaptiveSpan(longest=5), LocalisedSpan(query_block=2, memory=1)


@pytest.mark.parametrize(
    ("axes", "positions", "said"),
    [
        ({"halting": HaltingSpec(), "share": "all"}, "relative", "memory with halting"),
        ({"localised_span": BLOCKS}, "relative", "memory with localised_span"),
        ({"adaptive_span": AdaptiveSpan(longest=7)}, "relative", "of 6 tokens with adaptive_span"),
        (
            {"memory": MemorySpec(length=5, same_length=True), "adaptive_span": FIVE},
            "relative",
            "same_length true: .* at least 6",
        ),
        *(({}, name, f"positions {name} with") for name in ("sinusoidal", "learned")),
        ({"residual_attention": "qk_sum"}, "relative", "qk_sum"),
        ({"clamp_length": 0}, "relative", "clamp_length 0: must be at least 1"),
        ({"preset": "resformer"}, "relative", "memory with value_carry"),
        ({"clamp_length": 3}, "rope", "clamp_length 3"),
        ({"clamp_length": 3, "preset": "sas"}, "relative", "clamp_length 3 with a shaped"),
        (
            {"clamp_length": 3, "adaptive_span": FIVE},
            "relative",
            "clamp_length 3 with localised_span or adaptive_span",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(axes: Any, positions: str, said: str) -> None:
    axes = {"preset": "pre_ln", "memory": MemorySpec(length=6), **axes}
    sizes = {"clamp_length": axes.pop("clamp_length", None), "positions": positions}
    with pytest.raises(ValueError, match=said):
        tiny.causal_model(BlockConfig(**axes), **architecture(**sizes))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"length": -1}, "length -1: must be at least 0"),
        ({"length": 2, "evaluation_length": -3}, "evaluation_length -3"),
        ({"same_length": True}, "same_length true.*0"),
        ({"length": 4, "evaluation_length": 0, "same_length": True}, "no token would"),
    ],
)
def test_lengths_without_meaning_are_refused(fields: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MemorySpec(**fields)
