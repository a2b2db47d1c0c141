"""Auxiliary losses of Al-Rfou et al.: their sum, the layers that predict, what stays as it is."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_app.blocks.norm import at_step
from lightning_app.blocks.spans import auxiliary_terms
from lightning_app.core.errors import UserError
from lightning_app.models.auxiliary_heads import (
    AuxiliaryHeads,
    AuxiliarySpec,
    add_heads,
    after_next,
    watched,
)
from lightning_app.models.loss import LossSums, ObjectiveConfig, output_sums, sums_of_all_heads
from lightning_app.tasks.masked_lm import MaskedBatch, MaskedLanguageModelling
from lightning_app.tasks.translation import Translation, TranslationBatch
from tests import tiny
from tests.reference import REFERENCE, Array, masked_stack, next_stack, target_stack, transformed
from tests.reference_auxiliary import Auxiliary, losses
from tests.slopes import Parameters, check_slopes

pytestmark = pytest.mark.usefixtures("float64")

PRESETS = ("post_ln", "pre_ln", "realformer", "sas", "dual_stream")
KINDS = ("translation", "masked_lm", "causal")
SMOOTHING = 0.1
POSITIONS = torch.tensor([0, 2, 3, 13, 7])
LABELS = torch.tensor([5, 9, 6, 5, 11])
GELU = {"activation": "gelu"}


@dataclass(frozen=True)
class Subject:
    """A model of one kind with a batch, and the same by the reference."""

    model: Any
    sums: Callable[[], LossSums]
    expected: Callable[[Auxiliary, Parameters], tuple[float, float, float]]

    def loss(self) -> Tensor:
        """The training loss, summed over tokens."""
        loss = self.sums().loss
        for term in auxiliary_terms(self.model, torch.tensor(1.0)).values():
            loss = loss + term
        return loss


def subject(kind: str, preset: str, spec: AuxiliarySpec, cap: float | None = None) -> Subject:
    """Return a model whose predicting stack has three layers, with noise on every parameter."""
    torch.manual_seed(1)
    depths = {"decoder_depth": 3, "encoder_depth": 1 if kind == "translation" else 3}
    changes: dict[str, Any] = {**GELU, **depths, "logit_cap": cap}
    reference = REFERENCE[preset]
    if kind == "translation":
        model = tiny.translator(preset, **changes)
        source, target = tiny.sentences()
        rows = torch.arange(len(source))
        batch = TranslationBatch(source, target, rows, (target[:, 1:] != tiny.PAD).sum())
        task = Translation(ObjectiveConfig(label_smoothing=SMOOTHING))
        sums = partial(task.sums, model, batch)
        numbers = tiny.reference_sizes(tiny.architecture(**changes))
        labels = target[:, 1:].numpy()

        def expected(auxiliary: Auxiliary, at: Parameters) -> tuple[float, float, float]:
            inputs = source.numpy(), target[:, :-1].numpy()
            stack, x = target_stack(reference, at, numbers, *inputs)
            return losses(auxiliary, stack, x, labels, labels != tiny.PAD)

    elif kind == "masked_lm":
        model = tiny.masked_model(preset, **changes)
        tokens = tiny.words(3, 7)
        masked = MaskedBatch(tokens, POSITIONS, LABELS, torch.arange(3), torch.tensor(5))
        task = MaskedLanguageModelling(ObjectiveConfig(kind="masked_lm", label_smoothing=SMOOTHING))
        sums = partial(task.sums, model, masked)
        numbers = tiny.reference_sizes(tiny.architecture(kind="encoder", **changes))

        def expected(auxiliary: Auxiliary, at: Parameters) -> tuple[float, float, float]:
            def finish(states: Array) -> Array:
                return transformed(at, states, POSITIONS.numpy())

            stack, x = masked_stack(reference, at, numbers, tokens.numpy())
            labels = LABELS.numpy()
            return losses(auxiliary, stack, x, labels, labels >= 0, finish)

    else:
        model = tiny.causal_model(preset, **changes)
        texts = tiny.words(3, 8)
        inputs, labels = texts[:, :-1], texts[:, 1:]
        numbers = tiny.reference_sizes(tiny.architecture(kind="decoder", **changes))

        def sums() -> LossSums:
            """What a task of one causal stack does."""
            seen = watched(model.auxiliary)
            states = model.states(inputs, seen)
            summed = partial(output_sums, label_smoothing=SMOOTHING)
            every = torch.ones_like(labels, dtype=torch.bool)
            return sums_of_all_heads(summed, model, states, labels, every, seen)

        def expected(auxiliary: Auxiliary, at: Parameters) -> tuple[float, float, float]:
            stack, x = next_stack(reference, at, numbers, inputs.numpy())
            answers = labels.numpy()
            return losses(auxiliary, stack, x, answers, answers >= 0)

    add_heads(model, spec)
    return Subject(tiny.randomise(model), sums, expected)


def spec_of(kind: str, *, own: bool = False, second: float = 0.5) -> AuxiliarySpec:
    """Every loss that a model of this kind can have; weights that are none of the paper's."""
    second = 0.0 if kind == "masked_lm" else second
    return AuxiliarySpec(intermediate=0.7, second_target=second, own_tables=own)


def reference_of(spec: AuxiliarySpec, done: int, total: int) -> Auxiliary:
    weights = {"intermediate": spec.intermediate, "second_target": spec.second_target}
    progress = Fraction(done, total)
    return Auxiliary(**weights, own_tables=spec.own_tables, progress=progress, smoothing=SMOOTHING)


@pytest.mark.in_turn(10)
@pytest.mark.parametrize(
    ("preset", "own", "cap"),
    [*((name, False, None) for name in PRESETS), ("pre_ln", True, None), ("pre_ln", True, 1.5)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_slopes_are_right(kind: str, preset: str, own: bool, cap: float | None) -> None:
    """With three layers: both of the lower ones predict at .1, the second alone at .2."""
    spec = spec_of(kind, own=own)
    one = subject(kind, preset, spec, cap)
    for done in (1, 2, 4):
        at_step(one.model, done, 10)
        auxiliary = reference_of(spec, done, 10)
        at = tiny.numpy_parameters(one.model)
        last, below, ahead = one.expected(auxiliary, at)
        assert (below > 0.0) == (done < 4)
        found = one.sums()
        terms = auxiliary_terms(one.model, torch.tensor(1.0))
        assert found.loss.item() == pytest.approx(last, rel=1e-11)
        assert terms["intermediate"].item() == pytest.approx(below, rel=1e-11)
        assert ("second_target" in terms) == (kind != "masked_lm")
        if "second_target" in terms:
            assert terms["second_target"].item() == pytest.approx(ahead, rel=1e-11)
    at_step(one.model, 2, 10)
    auxiliary = reference_of(spec, 2, 10)
    check_slopes(one.model, one.loss(), lambda at: sum(one.expected(auxiliary, at)))


def heads(depth: int, **weights: Any) -> AuxiliaryHeads:
    model = tiny.causal_model("pre_ln", decoder_depth=depth)
    add_heads(model, AuxiliarySpec(**{"intermediate": 1.0, **weights}))
    assert model.auxiliary is not None
    return model.auxiliary


@pytest.mark.parametrize("depth", [2, 3, 6, 7, 11])
def test_layer_l_of_n_predicts_until_l_of_2n_of_the_steps_are_done(depth: int) -> None:
    several = heads(depth)
    for total in (1, 7, 24, 100, 2 * depth * 10):
        for done in range(total + 1):
            several.at_step(done, total)
            progress = Fraction(done, total)
            expected = [n for n in range(1, depth) if progress < Fraction(n, 2 * depth)]
            assert several.active == expected
            assert not (several.active and 2 * done >= total)


@pytest.mark.parametrize(("preset", "own"), [("post_ln", False), ("pre_ln", True)])
@pytest.mark.parametrize("kind", KINDS)
def test_after_half_of_a_run_the_loss_is_plain(kind: str, preset: str, own: bool) -> None:
    plain = subject(kind, preset, AuxiliarySpec())
    added = subject(kind, preset, spec_of(kind, own=own, second=0.0))
    added.model.load_state_dict(plain.model.state_dict(), strict=False)
    at_step(added.model, 5, 10)
    assert torch.equal(added.loss(), plain.loss())
    for one in (plain, added):
        one.loss().backward()
    expected = {name: p.grad for name, p in plain.model.named_parameters()}
    for name, parameter in added.model.named_parameters():
        if name.startswith("auxiliary."):
            assert parameter.grad is None, name
        else:
            assert torch.equal(parameter.grad, expected[name]), name


def test_a_weight_of_zero_is_a_loss_that_is_absent() -> None:
    model = tiny.causal_model("pre_ln")
    names = list(model.state_dict())
    add_heads(model, AuxiliarySpec(intermediate=0.0, second_target=0.0))
    assert model.auxiliary is None
    assert list(model.state_dict()) == names
    assert ObjectiveConfig().auxiliary().absent
    one = heads(3)
    assert [len(part) for part in (one.norms, one.tables, one.second_tables)] == [2, 0, 0]
    one = heads(3, intermediate=0.0, second_target=0.5)
    assert [len(part) for part in (one.norms, one.tables, one.second_tables)] == [0, 0, 1]


@pytest.mark.parametrize("preset", PRESETS)
def test_heads_leave_the_initial_values_of_the_model_as_they_are(preset: str) -> None:
    torch.manual_seed(3)
    plain = tiny.translator(preset, decoder_depth=3).state_dict()
    torch.manual_seed(3)
    model = tiny.translator(preset, decoder_depth=3)
    add_heads(model, AuxiliarySpec(intermediate=1.0, second_target=0.5, own_tables=True))
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    added = {name: value for name, value in found.items() if name not in plain}
    tables = [value for name, value in added.items() if "tables" in name]
    assert len(tables) == 2 + 3
    spread = torch.stack(tables).std().item()
    assert spread == pytest.approx(tiny.SIZES["model_dim"] ** -0.5, rel=0.1)
    norms = [name for name in added if "norms" in name]
    assert len(norms) == (0 if preset in ("post_ln", "realformer") else 2 * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_never_sees_them(kind: str) -> None:
    """Nor does a pass of training without gradients, such as that which profiles skips."""
    plain = subject(kind, "pre_ln", AuxiliarySpec())
    added = subject(kind, "pre_ln", spec_of(kind, own=True))
    added.model.load_state_dict(plain.model.state_dict(), strict=False)
    expected = plain.sums().loss
    added.model.eval()
    assert torch.equal(added.sums().loss, expected)
    added.model.train()
    with torch.no_grad():
        assert torch.allclose(added.sums().loss, expected)
    with pytest.raises(UserError):  # no pass was scored
        auxiliary_terms(added.model, torch.tensor(1.0))


def test_a_second_target_is_never_padding_nor_of_another_text() -> None:
    labels = torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0], [2, 3, 0, 0]])[:, 1:]
    ahead, known = after_next(labels, labels != 0)
    assert known.tolist() == [[True, True, False], [True, False, False], [False, False, False]]
    assert ahead[known].tolist() == [8, 3, 3]


def test_a_rank_without_predictions_gives_every_head_a_gradient_of_zeros() -> None:
    model = tiny.masked_model("pre_ln")
    add_heads(model, AuxiliarySpec(intermediate=1.0, own_tables=True))
    nothing = torch.empty(0, dtype=torch.int64)
    blank = MaskedBatch(tiny.words(1, 7), nothing, nothing, torch.tensor([-1]), torch.tensor(4))
    loss = MaskedLanguageModelling(ObjectiveConfig(kind="masked_lm")).sums(model, blank).loss
    (term,) = auxiliary_terms(model, torch.tensor(4.0)).values()
    (loss + term).backward()
    assert term.item() == 0.0
    slopes = {n: p.grad for n, p in model.named_parameters() if n.startswith("auxiliary.")}
    assert [name for name, grad in slopes.items() if grad is None or grad.any()] == []


def test_a_pass_is_scored_and_counted_once() -> None:
    model = tiny.causal_model("pre_ln")
    add_heads(model, AuxiliarySpec(intermediate=1.0))
    model.states(tiny.words(2, 5))
    with pytest.raises(UserError, match="this task has"):
        auxiliary_terms(model, torch.tensor(1.0))
    one = subject("causal", "pre_ln", spec_of("causal"))
    one.sums()
    auxiliary_terms(one.model, torch.tensor(1.0))
    with pytest.raises(UserError):
        auxiliary_terms(one.model, torch.tensor(1.0))


def test_a_model_without_them_and_an_unknown_number_of_steps_where_one_stops_are_refused() -> None:
    wanted = AuxiliarySpec(intermediate=1.0)
    with pytest.raises(UserError, match="Linear takes no"):
        add_heads(torch.nn.Linear(2, 2), wanted)
    with pytest.raises(UserError, match="decoder_depth 1"):
        add_heads(tiny.causal_model("pre_ln", decoder_depth=1), wanted)
    with pytest.raises(UserError, match="an encoder predicts"):
        add_heads(tiny.masked_model("pre_ln"), AuxiliarySpec(second_target=0.5))
    heads(3, intermediate=0.0, second_target=0.5).at_step(0, -1)
    with pytest.raises(UserError, match="set max_steps or max_epochs"):
        heads(3, intermediate=1.0, second_target=0.5).at_step(0, -1)
