"""Several documents in one row: each has the states and gradients that it has alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_app.blocks import windows
from lightning_app.blocks.attention import ShapingSpec
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import Shape, attention_form, centred
from lightning_app.blocks.masks import document_mask
from lightning_app.blocks.placed import within_documents
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.spans import AdaptiveSpan
from lightning_app.blocks.steps import HaltingSpec
from lightning_app.blocks.windows import LocalisedSpan
from lightning_app.models.auxiliary_heads import AuxiliarySpec, add_heads
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.probes.probe import attention_maps
from lightning_app.tasks.base import build_task
from lightning_app.tasks.causal_lm import CausalBatch
from tests import tiny

pytestmark = pytest.mark.usefixtures("float64")

Rows = Sequence[Sequence[int]]
"""The documents of each row of a batch, in tokens; together as many in each."""
SHORT: Rows = ((5, 1, 7), (2, 11), (13,))
LONG: Rows = ((50, 87, 13), (75, 75))
"""Rows of which tiles of attention have a part."""


def numbers(rows: Rows = SHORT) -> Tensor:
    """Return the number of the document of each token; it goes on from row to row."""
    count, found = 4, []
    for lengths in rows:
        found.append([count + place for place, n in enumerate(lengths) for _ in range(n)])
        count += len(lengths) - 1  # the last document of a row goes on in the next one
    return torch.tensor(found)


def pieces(batch: Tensor, rows: Rows = SHORT) -> list[Tensor]:
    """Return each document of each row, as a batch of one row."""
    return [
        piece[None]
        for row, lengths in zip(batch, rows, strict=True)
        for piece in row.split(tuple(lengths))
    ]


def gradients(model: CausalLanguageModel, total: Tensor) -> list[Tensor]:
    parameters = [each for each in model.parameters() if each.requires_grad]
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return [
        torch.zeros_like(each) if gradient is None else gradient
        for each, gradient in zip(parameters, found, strict=True)
    ]


def check(model: CausalLanguageModel, rows: Rows = SHORT) -> None:
    """Compare packed documents with the same ones alone, forward and backward."""
    tokens = tiny.words(len(rows), sum(rows[0]))
    weights = torch.randn(*tokens.shape, tiny.VOCABULARY)
    packed = model(tokens, numbers(rows))
    alone = [model(piece) for piece in pieces(tokens, rows)]
    for ours, theirs in zip(pieces(packed, rows), alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    ours = gradients(model, (packed * weights).sum())
    parts = zip(alone, pieces(weights, rows), strict=True)
    theirs = gradients(model, torch.stack([(one * of).sum() for one, of in parts]).sum())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    # What makes the comparison worth something: joined, the documents see each other.
    assert (model(tokens) - packed)[0, rows[0][0] :].abs().amax(-1).min() > 1e-6


def build(block: BlockConfig | str, **changes: Any) -> CausalLanguageModel:
    return tiny.randomise(tiny.causal_model(block, activation="gelu", **changes)).eval()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_packed_documents_are_documents_alone(preset: str, positions: str) -> None:
    check(build(preset, positions=positions))


def test_blocks_of_queries_are_refused_from_python_too() -> None:
    """They are cut from the start of the row, so a packed document would see other keys."""
    tokens = tiny.words(len(SHORT), sum(SHORT[0]))
    blocks = LocalisedSpan(query_block=2, memory=4)
    model = build(BlockConfig(preset="pre_ln", localised_span=blocks))
    assert model(tokens).isfinite().all()
    with pytest.raises(ValueError, match="query_block 2"):
        model(tokens, numbers())
    check(build(BlockConfig(preset="pre_ln", localised_span=replace(blocks, query_block=1))))


@pytest.mark.parametrize("positions", ["rope", "relative", "relative_untied"])
@pytest.mark.parametrize("preset", ["pre_ln", "realformer", "sas", "dual_stream"])
def test_positions_begin_with_the_document(preset: str, positions: str) -> None:
    check(build(preset, positions=positions, model_dim=12))


@pytest.mark.parametrize("form", ["plain", "stored", "reversible", "blocked"])
@pytest.mark.parametrize("carry", ["sum", "mean", "qk_sum"])
@pytest.mark.parametrize("preset", ["post_ln", "sas"])
def test_carried_scores_in_every_form(preset: str, carry: Any, form: Any) -> None:
    model = build(BlockConfig(preset=preset, residual_attention=carry), decoder_depth=3)
    with attention_form(form):
        check(model)


@pytest.mark.parametrize("form", ["reversible", "blocked"])
@pytest.mark.parametrize("preset", ["realformer", "sas"])
def test_carried_scores_in_several_tiles(preset: str, form: Any) -> None:
    model = build(BlockConfig(preset=preset, residual_attention="mean"))
    with attention_form(form):
        check(model, LONG)


@pytest.mark.parametrize("form", ["plain", "stored", "reversible"])
@pytest.mark.parametrize("gamma", [None, 0.7])
def test_shaped_maps_in_every_form(gamma: float | None, form: Any) -> None:
    """The last one is SDPA beside the mean of values."""
    model = build(BlockConfig(preset="pre_ln", shaped_attention=ShapingSpec(gamma=gamma)))
    with attention_form(form):
        check(model)


AXES: dict[str, dict[str, Any]] = {
    "adaptive span": {"adaptive_span": AdaptiveSpan(longest=6, ramp=2.0, start=0.4)},
    "trimmed span": {"adaptive_span": AdaptiveSpan(longest=9, ramp=2.0, start=0.2, trim=True)},
    "sliding window": {"localised_span": LocalisedSpan(query_block=1, memory=3)},
    "steps": {"share": "all", "step_signal": "sinusoidal", "halting": HaltingSpec()},
    "learned steps": {"share": "all", "step_signal": "learned"},
}


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("folds", [True, False])
@pytest.mark.parametrize("preset", ["pre_ln", "realformer", "v_skipinit"])
@pytest.mark.parametrize("axis", AXES)
def test_span_steps(monkeypatch: pytest.MonkeyPatch, preset: str, axis: str, folds: bool) -> None:
    if axis == "trimmed span" and preset == "realformer":
        preset = "post_ln"  # residual attention takes no trimming
    monkeypatch.setattr(windows, "FEWEST", 1 if folds else 99)
    check(build(BlockConfig(preset=preset, **AXES[axis]), positions="learned", decoder_depth=3))


@pytest.mark.parametrize(
    "axes",
    [
        {"sink": "learned", **AXES["sliding window"]},
        {"sink": "zero", "residual_attention": "mean"},
        {"sink": "learned", "score_cap": 0.7, **AXES["adaptive span"]},
        {"score_cap": 0.7, "scores": "cosine"},
    ],
)
def test_sinks_caps_and_cosines(axes: dict[str, Any]) -> None:
    check(build(BlockConfig(**axes), positions="rope", model_dim=12, decoder_depth=3))


def test_the_centre_is_over_the_keys_that_are_seen() -> None:
    """``C V`` by a loop, and its gradient."""
    documents = numbers()
    value = torch.randn(3, 2, 13, 5, requires_grad=True)
    expected = torch.stack(
        [
            value[b, :, [j for j in range(i + 1) if documents[b, j] == documents[b, i]]].mean(dim=1)
            for b in range(3)
            for i in range(13)
        ]
    ).view(3, 13, 2, 5)
    expected = expected.transpose(1, 2)
    mask = document_mask(documents)
    torch.testing.assert_close(centred(value, mask), expected)
    weight, one = torch.randn_like(value), torch.ones(1, 1, 1)
    shaped: Any = Shape.apply(torch.zeros_like(value), value, 0 * one, one, -one, mask)
    (ours,) = torch.autograd.grad((shaped * weight).sum(), value)
    (theirs,) = torch.autograd.grad((expected * weight).sum(), value)
    torch.testing.assert_close(ours, theirs)


def test_positions_count_from_the_start_of_a_document() -> None:
    expected = [[0, 1, 2, 3, 4, 0, *range(7)], [0, 1, *range(11)], [*range(13)]]
    assert within_documents(numbers()).tolist() == expected
    assert within_documents(torch.tensor([[7]])).tolist() == [[0]]


@pytest.mark.parametrize("preset", ["pre_ln", "realformer", "sas"])
def test_probes_see_the_maps_of_documents(preset: str) -> None:
    """NaN where a token does not see another, and weights that sum to 1 elsewhere."""
    model, tokens = build(preset), tiny.words(3, 13)
    task = build_task(ObjectiveConfig(kind="causal_lm"))
    batch = CausalBatch(tokens, tokens, torch.arange(3), torch.tensor(39), documents=numbers())
    found = attention_maps(model, task, task.alone(batch, 12))["decoder"]
    visible = document_mask(numbers()[:1]).allowed[0, 0]
    assert torch.equal(found.isnan(), ~visible.expand_as(found))
    torch.testing.assert_close(found.nansum(dim=-1), torch.ones_like(found[..., 0]))


@pytest.mark.parametrize("tables", ["tied", "own"])
def test_auxiliary_losses_are_those_of_documents_alone(tables: Any) -> None:
    """A second target of another document is none."""
    objective = ObjectiveConfig(
        kind="causal_lm", intermediate_weight=1.0, second_target_weight=0.5, auxiliary_tables=tables
    )
    task: Any = build_task(objective)
    model = build("pre_ln", decoder_depth=3).train()
    spec = objective.auxiliary()
    assert isinstance(spec, AuxiliarySpec)
    add_heads(model, spec)
    assert model.auxiliary is not None
    heads = model.auxiliary
    heads.at_step(0, 100)

    def losses(tokens: Tensor, labels: Tensor, documents: Tensor | None) -> dict[str, Tensor]:
        batch = CausalBatch(tokens, labels, torch.arange(len(tokens)), torch.tensor(tokens.numel()))
        main = task.sums(model, batch._replace(documents=documents)).loss
        return {"main": main} | {k: term.value for k, term in heads.auxiliary_terms().items()}

    tokens, labels = tiny.words(3, 13), tiny.words(3, 13)
    packed = losses(tokens, labels, numbers())
    alone = [losses(*pair, None) for pair in list(zip(pieces(tokens), pieces(labels), strict=True))]
    assert packed.keys() == {"main", "intermediate", "second_target"}
    for name, value in packed.items():
        torch.testing.assert_close(value, torch.stack([of[name] for of in alone]).sum())
