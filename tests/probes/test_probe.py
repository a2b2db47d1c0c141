"""A probing of a whole model: gradients, predictions, gains; and a model that stays as it was."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.attention import ProjectionGains, ShapingSpec
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import Gain
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.probes.hooks import MODEL, Place, Row
from lightning_app.probes.measures import largest_singular_values
from lightning_app.probes.probe import evenly_spaced, learned_gains, probe, untouched
from lightning_app.scores.task_facts import STACKS, TASKS
from lightning_app.tasks.base import Task, build_task
from lightning_app.tasks.causal_lm import CausalBatch
from lightning_app.tasks.masked_lm import MaskedBatch
from lightning_app.tasks.translation import TranslationBatch
from tests import warm
from tests.tiny import PAD, causal_model, masked_model, randomise, sentences, translator, words

SMOOTHING = 0.1
each_kind = pytest.mark.parametrize("kind", ["translation", "masked_lm", "causal_lm"])


def objective(kind: str = "translation") -> Task:
    return build_task(ObjectiveConfig(kind=kind, label_smoothing=SMOOTHING))


def pairs() -> TranslationBatch:
    source, target = sentences()
    tokens = (target[:, 1:] != PAD).sum().float()
    return TranslationBatch(source, target, torch.arange(len(source)), tokens)


def windows() -> MaskedBatch:
    tokens, positions = words(3, 7), torch.tensor([0, 5, 8, 20])
    return MaskedBatch(tokens, positions, words(4), torch.arange(3), torch.tensor(4.0))


def texts() -> CausalBatch:
    """The last window is shorter; each window predicts its last four tokens at most."""
    tokens, labels = words(3, 7), words(3, 4)
    tokens[2, 5:], labels[2, 2:] = PAD, PAD
    return CausalBatch(tokens, labels, torch.arange(3), torch.tensor(10.0))


def subject(kind: str, block: str | BlockConfig, **sizes: Any) -> tuple[nn.Module, list[Any]]:
    if kind == "translation":
        return randomise(translator(block, **sizes)), [pairs(), pairs()]
    if kind == "causal_lm":
        return randomise(causal_model(block, **sizes)), [texts(), texts()]
    return randomise(masked_model(block, **sizes)), [windows(), windows()]


def predicted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The logits and the labels of the predicted tokens."""
    if isinstance(batch, MaskedBatch):
        return model(batch.tokens, batch.positions), batch.labels
    if isinstance(batch, CausalBatch):
        logits, labels = model(batch.tokens)[:, -batch.labels.shape[1] :], batch.labels
    else:
        logits, labels = model(batch.source, batch.target[:, :-1]), batch.target[:, 1:]
    return logits[labels != PAD], labels[labels != PAD]


def losses(model: nn.Module, batch: Any) -> Tensor:
    """The smoothed loss of each predicted token, by torch's own cross-entropy."""
    return F.cross_entropy(*predicted(model, batch), label_smoothing=SMOOTHING, reduction="none")


def gradient(model: nn.Module, name: str, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward(retain_graph=True)
    found = model.get_parameter(name).grad
    assert found is not None
    return found.clone()


def number(rows: list[Row], quantity: str, stack: str, layer: int | None, head=None) -> float:
    (found,) = (r.value for r in rows if r.place == Place(quantity, stack, layer, head))
    return found


@pytest.mark.usefixtures("float64")
@each_kind
def test_what_it_measures_of_gradients_and_of_the_whole_model(kind: str) -> None:
    """Gradients are those of backward; losses and predictions those of torch's functions."""
    model, batches = subject(kind, "post_ln")
    rows = probe(model, objective(kind), batches, positions=2)
    model.eval()
    depths = {"encoder": 3, "decoder": 2}
    stacks = {name: depths[name] for name in STACKS[TASKS[kind].architecture]}
    for stack, depth in stacks.items():
        for layer in range(1, depth + 1):
            for matrix, part in (("w1", "inner"), ("w2", "outer")):
                name = f"{stack}.blocks.{layer - 1}.feed_forward.{part}.weight"
                whole, single = [], []
                for batch in batches:
                    each = losses(model, batch)
                    whole.append(gradient(model, name, each.mean()))
                    single += [gradient(model, name, each[i]) for i in evenly_spaced(len(each), 2)]
                expected = {
                    "gradient": np.mean([float(g.norm()) for g in whole]),
                    "expected_gradient": float(torch.stack(whole).mean(dim=0).norm()),
                    "position_gradient": np.mean([float(g.norm()) for g in single]),
                }
                for quantity, value in expected.items():
                    found = number(rows, f"{matrix}_{quantity}", stack, layer)
                    assert found == pytest.approx(value), (quantity, name)

    smoothed = torch.cat([losses(model, batch) for batch in batches])
    assert number(rows, "loss", MODEL, None) == pytest.approx(smoothed.mean().item())
    logits, labels = [], []
    for batch in batches:
        for all_of, part in zip((logits, labels), predicted(model, batch), strict=True):
            all_of.append(part)
    p = torch.cat(logits).detach().softmax(dim=-1)
    nll = -p[torch.arange(len(p)), torch.cat(labels)].log().mean()
    assert number(rows, "nll", MODEL, None) == pytest.approx(float(nll))
    information = (p * (p / p.mean(dim=0)).log()).sum(dim=-1).mean()
    assert number(rows, "output_information", MODEL, None) == pytest.approx(float(information))


@each_kind
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.in_turn(4)
def test_every_preset_is_probed(preset: str, kind: str) -> None:
    model, batches = subject(kind, preset)
    rows = probe(model, objective(kind), batches, step=7)
    assert {row.step for row in rows} == {7}
    assert len({row.place for row in rows}) == len(rows)
    assert all(math.isfinite(row.value) for row in rows)
    assert {f"{p.quantity}" for p, _ in learned_gains(model)} <= {row.quantity for row in rows}


def test_a_model_is_left_as_it_was() -> None:
    """Modes, also after an error, gradients, RNG and weights; with dropout and noise before it."""
    noisy = BlockConfig(preset="realformer", query_key_noise=0.5)
    model, batches = subject("translation", noisy, dropout=0.5, attention_dropout=0.5)
    model.train()
    model.get_submodule("encoder").eval()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    kept = copy.deepcopy(model.state_dict())
    gradients = [parameter.grad for parameter in model.parameters()]
    copies = [g.clone() for g in gradients if g is not None]
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    first = probe(model, objective(), batches)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert probe(model, objective(), batches) == first
    with untouched(model):
        assert not any(module.training for module in model.modules())
    with pytest.raises(ZeroDivisionError), untouched(model):
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == modes
    for parameter, old, value in zip(model.parameters(), gradients, copies, strict=True):
        assert parameter.grad is old
        assert torch.equal(value, old)  # pyright: ignore[reportArgumentType]
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name


COMPILED = """
import sys, torch
from tests.probes.test_probe import objective, pairs, probe, randomise, translator
torch.set_num_threads(1)
torch.manual_seed(1)
model, batch = randomise(translator("post_ln")), pairs()
plain = probe(model, objective(), [batch])
model.compile(backend="eager")
model(batch.source, batch.target[:, :-1])
compiled = torch._dynamo.utils.counters["frames"]["ok"]
same = probe(model, objective(), [batch]) == plain
again = torch._dynamo.utils.counters["frames"]["ok"]
model(batch.source, batch.target[:, :-1])
sys.exit(f"{compiled=} {same=} {again=}" if not (compiled and same and again == compiled) else 0)
"""


@pytest.mark.slow
def test_hooks_see_a_compiled_model() -> None:
    """In a process of its own: the shape checks of the tests cannot be compiled."""
    done = warm.run(["-c", COMPILED], folder=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("count", "wanted"), [(1, 4), (3, 4), (4, 4), (10, 1), (101, 4)])
def test_positions_are_spread(count: int, wanted: int) -> None:
    places = evenly_spaced(count, wanted)
    assert len(set(places)) == len(places) == min(count, wanted)
    assert places == sorted(places)
    assert all(0 <= place < count for place in places)
    assert [count - 1 - place for place in reversed(places)] == pytest.approx(places, abs=1)


def test_gains_are_means_over_heads_each_head_and_ratios_of_change_to_what_is_kept() -> None:
    """Ratios where a projection has trained gains; b / a as He & Hofmann 2023 plot it."""
    gains = ProjectionGains(kept=Gain(learned=True), change=Gain(value=0.2, learned=True))
    block = BlockConfig(
        preset="sas",
        shaped_attention=ShapingSpec(per_head=True),
        ff_branch=Gain(learned=True),
        value_projection="identity_plus",
        first_value_projection="identity_plus",
        output_projection="orthogonal_plus",
        value_gains=gains,
        output_gains=ProjectionGains(kept=Gain(value=2.0), change=Gain(value=-0.5, learned=True)),
    )
    model = translator(block)
    alpha = model.encoder.blocks[1].get_submodule("self_attention.shaping").alpha
    assert isinstance(alpha, Tensor)
    with torch.no_grad():
        alpha[:, 0, 0] = torch.tensor([0.5, 2.0])
    rows = probe(model, objective(), [pairs()])
    assert number(rows, "alpha", "encoder", 2) == pytest.approx(1.25)
    assert number(rows, "alpha", "encoder", 2, head=1) == 2.0
    assert number(rows, "ff_branch", "decoder", 1) == 1.0
    for layer in (2, 3):
        assert number(rows, "value_change", "encoder", layer) == pytest.approx(0.2)
        assert number(rows, "output_change", "encoder", layer) == pytest.approx(0.25)


@pytest.mark.parametrize("preset", ["ngpt", "sigma_reparam", "sub_ln"])
def test_every_learned_gain_of_a_layer_has_a_name_of_its_own(preset: str) -> None:
    """And no other numbers per head than those of the heads."""
    norm = "dyt" if preset == "sub_ln" else None
    block = BlockConfig(preset=preset) if norm is None else BlockConfig(preset=preset, norm=norm)
    model, batches = subject("translation", block)
    with torch.no_grad():
        for number_of, part in enumerate(model.parameters()):
            part.add_(0.01 * number_of)
    gains = list(learned_gains(model))
    places = [place for place, _ in gains]
    assert len({*places}) == len(places) > 2
    rows = {row.place: row.value for row in probe(model, objective(), batches)}
    for place, gain in gains:
        assert rows[place] == pytest.approx(gain.detach().mean().item(), rel=1e-5), place
        heads = [r.head for r in rows if r._replace(head=None) == place and r.head is not None]
        assert len(heads) in (0, 2)
    if preset == "sigma_reparam":
        assert not any(place.quantity == "gamma" for place in places)  # of shaped attention


def test_a_model_that_diverged_is_no_error_and_infinite_weights_have_nan_values() -> None:
    model, batches = subject("translation", "post_ln")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    rows = probe(model, objective(), batches)
    assert math.isnan(number(rows, "nll", MODEL, None))
    assert math.isnan(number(rows, "w2_gradient", "decoder", 1))
    left, right = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    assert largest_singular_values(left, right).isfinite().all()
    left[1, 2, 3] = math.inf
    assert largest_singular_values(left, right).isnan().all()


def test_a_batch_with_blank_rows() -> None:
    """What a rank without a share of its own gets predicts nothing and counts for nothing."""
    source, target = sentences()
    blank = torch.full_like(target, PAD)
    blank[:, 0] = 2
    index, targets = torch.tensor([0, 1, 2, -1, -1, -1]), torch.cat([target, blank])
    both = TranslationBatch(torch.cat([source, source]), targets, index, torch.tensor(1.0))
    model = randomise(translator("post_ln"))
    first = both._replace(source=source, target=target, index=index[:3])
    alone, found = (probe(model, objective(), [batch]) for batch in (first, both))
    assert [row[:-1] for row in alone] == [row[:-1] for row in found]
    values = ([row.value for row in rows] for rows in (alone, found))
    np.testing.assert_allclose(*values, rtol=1e-3, atol=1e-6)
