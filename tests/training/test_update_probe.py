"""What steps do, as the callback logs it: equal to direct computations, and training unchanged."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.config.classes import made_object
from lightning_app.core.errors import UserError
from lightning_app.models.optim import LATE, OPTIMIZERS, OptimizerConfig, build_optimizer
from lightning_app.models.optimizers import Library
from lightning_app.models.stack import stacks
from lightning_app.probes.hooks import MODEL, Place, from_csv
from lightning_app.probes.steps import (
    Passage,
    Step,
    TrainedPart,
    critical_factor,
    curvature_rows,
    gradients_of,
    pass_rows,
    passage,
    trained_parts,
)
from lightning_app.training.callbacks.probes import UpdateProbe, model_of
from lightning_app.training.module import TransformerModule
from tests.probes.test_probe import objective, pairs
from tests.probes.test_sharpness import SIZES, dense
from tests.runs import data, module, trainer
from tests.tiny import randomise, translator

SOME = {"steps": [1, 3, 4, 6], "pass_steps": [2, 4]}
EVERY = {**SOME, "curvature_steps": [4]}


def fit(
    folder: Path,
    cache: str,
    *callbacks: pl.Callback,
    optimizer: OptimizerConfig | None = None,
    start: Path | None = None,
    preset: str = "realformer",
    **settings: Any,
) -> TransformerModule:
    pl.seed_everything(5, verbose=False)
    trained = module(dropout=0.3, preset=preset)
    if optimizer is not None:
        trained.optimizer = optimizer
    common: dict[str, Any] = {"max_steps": 6, "gradient_clip_val": 0.5, **settings}
    fitter = trainer(folder, callbacks=list(callbacks), **common)
    fitter.fit(trained, datamodule=data(cache), ckpt_path=start, weights_only=True)
    return trained


class Seen(pl.Callback):
    """Weights, gradients and moments of every step, by name of the parameter."""

    def __init__(self) -> None:
        self.old, self.new, self.gradients, self.first, self.second = ({} for _ in range(5))
        self.rate: dict[int, float] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        step = trainer.global_step + 1
        named = dict(model_of(pl_module).named_parameters())
        self.old[step] = {n: p.detach().double().clone() for n, p in named.items()}
        slopes = {n: p.grad for n, p in named.items() if p.grad is not None}
        self.gradients[step] = {n: g.double().clone() for n, g in slopes.items()}
        state = optimizer.state
        kept = {n: state[p]["exp_avg"].double().clone() for n, p in named.items() if p in state}
        self.first[step] = kept
        self.rate[step] = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        step = trainer.global_step
        named = dict(model_of(pl_module).named_parameters())
        self.new[step] = {n: p.detach().double().clone() for n, p in named.items()}
        state = trainer.optimizers[0].state
        self.second[step] = {n: state[p]["exp_avg_sq"].double() for n, p in named.items()}
        self.second[step] = {n: v.clone() for n, v in self.second[step].items()}


def joined(tensors: dict[str, Tensor], prefix: str) -> Tensor:
    return torch.cat([t.flatten() for name, t in tensors.items() if name.startswith(prefix)])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def test_quantities_of_a_step_equal_direct_ones(tmp_path: Path, cache: str) -> None:
    seen, step = Seen(), 4
    config = OptimizerConfig(kind="adamw", lr=3e-3, eps=3e-5, weight_decay=0.2)
    fit(tmp_path, cache, UpdateProbe(**SOME), seen, optimizer=config)
    values = {(r.step, r.place): r.value for r in from_csv(tmp_path / "probes.csv")}
    assert (1, Place("momentum_cosine", MODEL)) not in values
    assert (1, Place("gradient_cosine", MODEL)) not in values
    for place, prefix in (
        (Place("", "encoder", 2), "encoder.blocks.1."),
        (Place("", "decoder", 1), "decoder.blocks.0."),
        (Place("", MODEL), ""),
    ):
        old, new, g = (joined(d[step], prefix) for d in (seen.old, seen.new, seen.gradients))
        expected = {
            "momentum_cosine": cosine(joined(seen.first[step], prefix), g),
            "gradient_cosine": cosine(joined(seen.gradients[step - 1], prefix), g),
            "update_rms": float((new - old).square().mean().sqrt()) / seen.rate[step],
        }
        angles = []
        for name, w in seen.old[step].items():
            if name.startswith(prefix) and w.ndim == 2:
                cosines = nn.functional.cosine_similarity(w, seen.new[step][name], dim=1, eps=0.0)
                angles.append(cosines[w.norm(dim=1) > 0].clamp(max=1.0).acos())
        expected["row_angle"] = float(torch.cat(angles).mean())
        root = (joined(seen.second[step], prefix) / (1 - 0.98**step)).sqrt()
        inverse = 1 / root[root >= config.eps]
        expected["inverse_root_spread"] = float(inverse.std(correction=0) / inverse.mean())
        expected["below_eps"] = float((root < config.eps).double().mean())
        found = {name: values[step, place._replace(quantity=name)] for name in expected}
        assert found == pytest.approx(expected, rel=2e-4, abs=1e-7), place
        assert 0.0 < expected["below_eps"] < 1.0
    line = math.sqrt(2 * seen.rate[step] * 0.2 * 0.1 / 1.9)
    assert values[step, Place("row_equilibrium", MODEL)] == pytest.approx(line)


@pytest.mark.parametrize("late", [False, True])
def test_updates_by_pure_noise_are_on_the_line_in_every_step(late: bool) -> None:
    """From the first step on; without bias correction, which torch has from step 2^24, no line."""
    generator = torch.Generator().manual_seed(5)
    weight = nn.Parameter(torch.zeros(400, 400))
    optimizer = torch.optim.Adam([weight], lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    part = TrainedPart([], [weight], [optimizer.param_groups[0]])
    for step in range(1, 31):
        weight.grad = torch.randn(400, 400, generator=generator)
        if late and step == 1:
            zeros = torch.zeros_like(weight)
            start = {"step": torch.tensor(LATE), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
            optimizer.state[weight] = start
        made = Step([part], optimizer, [weight.grad.flatten().clone()], None)
        optimizer.step()
        made.finish()
        values = {row.quantity: row.value for row in made.rows(step)}
        if late:
            assert "update_rms_noise" not in values
        else:
            assert values["update_rms"] == pytest.approx(values["update_rms_noise"], rel=0.02)


class Stepped(NamedTuple):
    """A model after a step, a copy from before it, and what was measured."""

    batch: Any
    model: nn.Module
    copy: nn.Module
    made: Step
    moved: float
    before: Passage
    after: Passage


def stepped(preset: str = "post_ln", kind: str = "adam", **optimizer: Any) -> Stepped:
    model, batch, task = randomise(translator(preset, **SIZES)), pairs(), objective()
    model.eval()
    known = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "nadam": torch.optim.NAdam}
    made = known[kind](model.parameters(), **{"lr": 1e-2, **optimizer})

    def backward() -> None:
        made.zero_grad()
        task.mean_loss(task.predictions(model, batch)).backward()

    for _ in range(2):
        backward()
        made.step()
    earlier = copy.deepcopy(model)
    backward()
    parts = trained_parts(model, made)
    step, before = Step(parts, made, gradients_of(parts), None), passage(model, task, batch)
    made.step()
    step.finish()
    return Stepped(batch, model, earlier, step, step.length, before, passage(model, task, batch))


Named = dict[str, Tensor]


def run_through(model: nn.Module, batch: Any) -> tuple[Tensor, Named, Named]:
    """The gradient, the outputs of stacks, and the inputs of modules by name."""
    outputs: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(part: nn.Module, read: tuple[Tensor], output: Tensor) -> None:
            inputs[name], outputs[name] = read[0].detach(), output.detach()

        return note

    watched = {n: part for n, part in model.named_modules() if isinstance(part, nn.Linear)}
    parts = {**watched, **stacks(model)}
    handles = [part.register_forward_hook(hook(name)) for name, part in parts.items()]
    task = objective()
    loss = task.mean_loss(task.predictions(model, batch))
    found = torch.autograd.grad(loss, list(model.parameters()))
    for handle in handles:
        handle.remove()
    return torch.cat([g.flatten() for g in found]), outputs, inputs


@pytest.mark.usefixtures("float64")
def test_quantities_of_passes_equal_direct_ones() -> None:
    batch, model, before, _, moved, old, new = stepped()
    task = objective()
    found = {row.place: row.value for row in pass_rows(model, old, new, moved, 3)}
    g, outputs, inputs = run_through(before, batch)
    h, changed, _ = run_through(model, batch)
    w, v = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (before, model))
    assert moved == pytest.approx(float((v - w).norm()))
    smoothness = float((h - g).norm() / (v - w).norm())
    assert found[Place("local_smoothness", MODEL)] == pytest.approx(smoothness)
    real = task.real_tokens(batch)
    for name in ("encoder", "decoder"):
        x, y = outputs[name][real[name]], changed[name][real[name]]
        ratio = ((y - x).norm(dim=-1) / x.norm(dim=-1)).mean()
        assert found[Place("representation_change", name)] == pytest.approx(float(ratio))
        square = (y - x).square().sum(dim=-1).mean() / x.shape[-1]
        assert found[Place("output_change", name)] == pytest.approx(float(square))
    # Without an input norm, the projections of the first layer read the input of the stack.
    ratios = []
    matrices = dict(model.named_parameters())
    for name, weight in before.named_parameters():
        if name.startswith("encoder.blocks.0.") and name.endswith(".weight") and weight.ndim == 2:
            place = name.removesuffix(".weight")
            read = place if place.endswith(("output", "inner", "outer")) else "encoder"
            x, dw = inputs[read][real["encoder"]], matrices[name] - weight
            whole = (x @ weight.mT).norm(dim=-1)
            ratios.append(((x @ dw.mT).norm(dim=-1) / whole)[whole > 0])
    assert len(ratios) == 6
    expected = float(torch.cat(ratios).mean().detach())
    assert found[Place("relative_change", "encoder", 1)] == pytest.approx(expected)
    heads = SIZES["num_heads"]
    names = (f"decoder.blocks.0.cross_attention.{part}.weight" for part in ("query", "key"))
    queries, keys = (matrices[name].detach().unflatten(0, (heads, -1)) for name in names)
    largest = torch.linalg.matrix_norm(queries.mT @ keys, ord=2)
    place = Place("cross_qk_singular_value", "decoder", 1)
    assert [found[place._replace(head=n)] for n in range(heads)] == pytest.approx(largest.tolist())
    assert found[place] == pytest.approx(float(largest.max()))


@pytest.mark.in_turn(3)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("kind", "settings", "limit"),
    [
        ("adam", {"betas": (0.8, 0.9), "eps": 1e-3}, 3.6 / 0.2),
        ("sgd", {"momentum": 0.5}, 3.0),
        ("nadam", {}, None),
    ],
)
def test_curvature_equals_the_dense_one_over_its_threshold(kind, settings, limit) -> None:
    batch, model, before, step, *_ = stepped(kind=kind, **settings)
    weights = [p.detach().clone() for p in model.parameters()]
    found = {row.quantity: row.value for row in curvature_rows(model, objective(), batch, step, 3)}
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    if limit is None:
        assert "sharpness_over_threshold" not in found
    else:
        state = step.optimizer.state
        scales, eps = torch.ones(sum(w.numel() for w in weights)), 0.0
        if kind == "adam":
            moments = [state[p]["exp_avg_sq"] / (1 - 0.9**3) for p in model.parameters()]
            scales, eps = torch.cat([v.sqrt().flatten() for v in moments]), 1e-3
        expected = 1e-2 * float(dense(copy.deepcopy(model), batch, scales, eps)[-1]) / limit
        assert found["sharpness_over_threshold"] == pytest.approx(expected, rel=1e-3)
    factor = critical_factor(model, objective(), batch, step)
    assert factor is not None
    assert found["critical_rate"] == pytest.approx(factor * 1e-2)
    assert found["rate_over_critical"] == pytest.approx(1 / factor)

    def loss(scale: float) -> float:
        trial, task = copy.deepcopy(before), objective()
        with torch.no_grad():
            for p, old, new in zip(trial.parameters(), before.parameters(), weights, strict=True):
                p.copy_(old + scale * (new - old))
            return float(task.mean_loss(task.predictions(trial, batch)))

    assert loss(factor / 1.05) <= loss(0.0) < loss(factor * 1.05)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_has_them(preset: str) -> None:
    _, model, _, step, moved, old, new = stepped(preset, "sgd")
    rows = [*step.rows(3), *pass_rows(model, old, new, moved, 3)]
    assert all(math.isfinite(row.value) for row in rows)
    found = {row.place for row in rows}
    for place in (Place("relative_change", "encoder", 1), Place("row_angle", "decoder", 1)):
        assert place in found
    missing = {"momentum_cosine", "inverse_root_spread", "below_eps", "row_equilibrium"}
    assert missing.isdisjoint({place.quantity for place in found})


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_every_optimizer_has_what_its_state_allows(kind: str) -> None:
    model, batch, task = randomise(translator("post_ln", **SIZES)), pairs(), objective()
    decay, momentum = 0.1 * (kind == "rotational_adamw"), 0.9 * ("muon" in kind)
    config = OptimizerConfig(kind=kind, weight_decay=decay, momentum=momentum)
    optimizer = build_optimizer(config, model, fused=False)
    parts = trained_parts(model, optimizer)

    def made() -> Step:
        optimizer.zero_grad()
        task.mean_loss(task.predictions(model, batch)).backward()
        step = Step(parts, optimizer, gradients_of(parts), None)
        optimizer.step()
        return step

    made()
    step = made()
    step.finish()
    rows = step.rows(2)
    assert all(math.isfinite(row.value) for row in rows)
    found = {row.quantity for row in rows}
    assert {"update_rms", "row_angle"} <= found
    other = isinstance(OPTIMIZERS[kind], Library)  # whose moments mean something else
    assert ("momentum_cosine" in found) == (kind != "sgd" and not other)
    assert ("inverse_root_spread" in found) == (kind not in ("sgd", "lion", "signum") and not other)


def test_layers_that_share_a_block_have_inputs_of_their_own() -> None:
    sizes, batch = {**SIZES, "encoder_depth": 3}, pairs()
    model = randomise(translator(BlockConfig(share="all"), **sizes))
    inputs = passage(model, objective(), batch).inputs
    layers = [layer for stack, layer, *_ in inputs if stack == "encoder"]
    assert sorted(layers) == sorted([1, 2, 3] * 6)
    cross = model.get_submodule("decoder.blocks.0.cross_attention")
    reads = [len(x) for *_, part, x in inputs if part is cross.key]  # pyright: ignore[reportAttributeAccessIssue]
    assert reads == [int(objective().real_tokens(batch)["encoder"].sum())]


def test_moments_in_another_basis_are_left_out() -> None:
    step = stepped().made
    for state in step.optimizer.state.values():
        state["Q"] = torch.eye(2)
    step.finish()
    found = {row.quantity for row in step.rows(3)}
    assert found.isdisjoint({"inverse_root_spread", "below_eps"})
    assert "update_rms" in found


@pytest.mark.parametrize("preset", ["realformer", "sigma_reparam"])
def test_logging_changes_no_bit(tmp_path: Path, cache: str, preset: str) -> None:
    left = fit(tmp_path / "plain", cache, preset=preset)
    state = torch.get_rng_state()
    steps = EVERY if preset == "realformer" else SOME  # the other has no Hessian
    right = fit(tmp_path / "probed", cache, UpdateProbe(**steps), preset=preset)
    assert torch.equal(state, torch.get_rng_state())
    for (name, a), b in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    assert not any(getattr(part, kind) for part in right.modules() for kind in hooks)
    rows = {(r.step, r.place): r.value for r in from_csv(tmp_path / "probed" / "probes.csv")}
    assert {step for step, _ in rows} == {1, 2, 3, 4, 6}
    # In Adam's first step every coordinate with a gradient moves by its rate.
    assert rows[1, Place("update_rms", "encoder", 1)] == pytest.approx(1.0, abs=0.05)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_has_the_rows_of_an_undisturbed_one(tmp_path: Path, cache: str) -> None:
    """The checkpoint lies between two steps whose gradients are compared."""
    fit(tmp_path / "whole", cache, UpdateProbe(**SOME))
    parts = tmp_path / "parts"
    saver = ModelCheckpoint(dirpath=tmp_path, filename="at", every_n_train_steps=5)
    fit(parts, cache, UpdateProbe(**SOME), saver, max_steps=5, enable_checkpointing=True)
    start = next(tmp_path.glob("at*.ckpt"))
    fit(parts, cache, UpdateProbe(**SOME), saver, start=start, enable_checkpointing=True)
    whole, resumed = ((tmp_path / name / "probes.csv").read_bytes() for name in ("whole", "parts"))
    assert b"\n6,model,,gradient_cosine," in whole
    assert resumed == whole


def test_loggers_get_those_of_the_model_and_of_stacks(tmp_path: Path, cache: str) -> None:
    logger = [kind(tmp_path, name="", version="") for kind in (CSVLogger, TensorBoardLogger)]
    fit(tmp_path, cache, UpdateProbe(steps=[2], pass_steps=[2]), logger=logger, max_steps=2)
    header = (tmp_path / "metrics.csv").read_text().partition("\n")[0].split(",")
    of_model = "momentum_cosine gradient_cosine update_rms update_rms_noise row_angle "
    of_model += "inverse_root_spread below_eps local_smoothness relative_change"
    changes, sides = ("representation_change", "output_change"), ("encoder", "decoder")
    stacks = {f"probe/{quantity}/{stack}" for quantity in changes for stack in sides}
    expected = {f"probe/{quantity}/model" for quantity in of_model.split()} | stacks
    assert {name for name in header if name.startswith("probe/")} == expected
    drawn = {*EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]}
    assert {"probe/update_rms/model", *stacks} <= drawn


@pytest.mark.parametrize("name", ["steps", "pass_steps", "curvature_steps"])
def test_steps_count_from_one(name: str) -> None:
    path = "lightning_app.training.callbacks.probes.UpdateProbe"
    entry = {"class_path": path, "init_args": {name: [5, 0]}}
    with pytest.raises(UserError, match=f"{name} 0: steps count from 1"):
        made_object("trainer.callbacks", entry, imports=False)


def test_a_model_that_stops_gradients_has_no_curvature(tmp_path: Path, cache: str) -> None:
    fitter = trainer(tmp_path, callbacks=[UpdateProbe(curvature_steps=[1])], max_steps=1)
    for preset, named in (("gpas", "residual_rule gpas"), ("sigma_reparam", "sigma_reparam")):
        with pytest.raises(UserError, match=f"curvature_steps and {named}"):
            fitter.fit(module(preset=preset), datamodule=data(cache))


def test_first_rank_measures(tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl.Trainer, "is_global_zero", property(lambda self: False))
    fit(tmp_path, cache, UpdateProbe(**EVERY), max_steps=2)
    assert not (tmp_path / "probes.csv").exists()
