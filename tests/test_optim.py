"""Schedules against their formulas, and which parameters decay."""

import math
from typing import Any

import pytest
import torch

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.norm import LearnedScalars
from lightning_app.blocks.residual import Lerp
from lightning_app.blocks.spans import AdaptiveSpan
from lightning_app.core.errors import UserError
from lightning_app.models.heads import ArchitectureConfig, build_model
from lightning_app.models.initialization import initialize
from lightning_app.models.optim import (
    SCHEDULES,
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    build_schedule,
    parameter_groups,
)
from lightning_app.models.stack import stacks
from lightning_app.probes.hooks import Place
from lightning_app.probes.probe import learned_gains
from tests import tiny

SMALL: dict[str, Any] = {"decoder_depth": 2, "model_dim": 8, "ff_dim": 12, "num_heads": 2}


def model_of(block: BlockConfig, kind: Any = "encoder_decoder") -> torch.nn.Module:
    architecture = ArchitectureConfig(kind=kind, encoder_depth=2, **SMALL)
    return build_model(architecture, block, vocab_size=17, pad=0)


def rates(config: ScheduleConfig, total: int, lr: float = 1.0) -> list[float]:
    """The rates that an optimizer really steps with, t = 1 .. total."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    schedule = build_schedule(config, optimizer, total)
    taken = []
    for _ in range(total):
        taken.append(optimizer.param_groups[0]["lr"])
        parameter.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
    return taken


DECAYS = [
    ({"kind": "constant"}, lambda s: 1.0),
    ({"kind": "linear"}, lambda s: 1 - s),
    ({"kind": "sqrt"}, lambda s: 1 - math.sqrt(s)),
    ({"kind": "linear", "power": 1.2}, lambda s: (1 - s) ** 1.2),
    ({"kind": "cosine"}, lambda s: (1 + math.cos(math.pi * s)) / 2),
    ({"kind": "cosine", "floor": 0.1}, lambda s: 0.1 + 0.9 * (1 + math.cos(math.pi * s)) / 2),
]


@pytest.mark.parametrize("coupling", ["decoupled", "paper"])
@pytest.mark.parametrize("warmup", [0, 1, 6, 10])
@pytest.mark.parametrize(("fields", "decay"), DECAYS)
def test_a_decay_follows_its_formula(fields, coupling, warmup: int, decay) -> None:
    """Of the share of the decay that is done, after a ramp; a power bends the linear one."""
    total, reference = 50, 10
    how = {"warmup_steps": warmup, "reference_steps": reference, "coupling": coupling}
    start = reference if coupling == "decoupled" else max(1, warmup)
    for t, rate in enumerate(rates(ScheduleConfig(**fields, **how), total), start=1):
        ramp = 1.0 if warmup == 0 else min(1.0, t / warmup)
        assert rate == pytest.approx(ramp * decay(max(0, t - start) / (total - start + 1)))


@pytest.mark.parametrize("coupling", ["decoupled", "paper"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 20])
def test_inverse_square_root_follows_its_formula(coupling, warmup: int) -> None:
    config = ScheduleConfig(warmup_steps=warmup, reference_steps=20, coupling=coupling)
    start = 20 if coupling == "decoupled" else max(1, warmup)
    for t, rate in enumerate(rates(config, 100), start=1):
        ramp = 1.0 if warmup == 0 else min(1.0, t / warmup)
        assert rate == pytest.approx(ramp * min(1.0, (start / t) ** 0.5))


@pytest.mark.parametrize(
    ("kind", "reference", "total"),
    [
        *(("linear", 4000, 200), ("linear", 200, 200), ("linear", 50, 200), ("cosine", 80, 80)),
        ("inverse_sqrt", 15, 200),  # its largest rate would be half of `lr`
    ],
)
def test_a_decay_without_room_is_refused(kind: Any, reference: int, total: int) -> None:
    config = ScheduleConfig(kind=kind, warmup_steps=60, reference_steps=reference)
    with pytest.raises(UserError, match=rf"reference_steps: {reference}, .*warmup_steps 60"):
        build_schedule(config, torch.optim.SGD([torch.zeros(1)]), total)


def test_other_decays_need_no_such_room() -> None:
    for config in (
        ScheduleConfig(warmup_steps=60, reference_steps=60),
        ScheduleConfig(kind="linear", coupling="paper", warmup_steps=60),
        ScheduleConfig(kind="constant", warmup_steps=199),
        ScheduleConfig(warmup_steps=60),
    ):
        config.check(200)


def test_only_matrices_and_embeddings_decay() -> None:
    model = model_of(BlockConfig(preset="sas"))
    decaying, free = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(p)] for p in decaying["params"]}
    spared = {names[id(p)] for p in free["params"]}
    assert decayed | spared == set(names.values())
    assert not decayed & spared
    for name in names.values():
        matrix = name.endswith("weight") and "norm" not in name
        assert (name in decayed) == matrix, name
    assert {name.rsplit(".", 1)[1] for name in spared} >= {"alpha", "beta", "gamma", "gain", "bias"}
    assert decaying["weight_decay"] == 0.1
    assert free["weight_decay"] == 0.0
    # Numbers take none beside maps that do.
    model = tiny.encoder("hyper_connections")
    names = {id(parameter): name.rsplit(".", 1)[1] for name, parameter in model.named_parameters()}
    decayed, spared = ({names[id(p)] for p in g["params"]} for g in parameter_groups(model, 0.1))
    assert decayed >= {"read", "keep", "write"}
    assert {"scale_in", "scale_out"} <= spared - decayed


@pytest.mark.parametrize("warmup", [0, 1, 6, 49])
@pytest.mark.parametrize("coupling", ["decoupled", "paper"])
def test_the_schedule_of_bert_has_a_seam(coupling, warmup: int) -> None:
    """As its code counts steps, from 0: a ramp from 0, then the rest of a line over the run."""
    total, lr = 50, 0.25
    config = ScheduleConfig(kind="bert", warmup_steps=warmup, coupling=coupling)
    expected = []
    for done in range(total):
        line = lr * (1.0 - done / total)
        is_warmup = 1.0 if done < warmup else 0.0
        expected.append((1.0 - is_warmup) * line + is_warmup * lr * done / max(warmup, 1))
    taken = rates(config, total, lr)
    assert taken == pytest.approx(expected, abs=1e-15)
    assert (taken[0] == 0.0) == (warmup > 0)


@pytest.mark.parametrize("coupling", ["decoupled", "paper"])
@pytest.mark.parametrize("kind", list(SCHEDULES))
@pytest.mark.parametrize("warmup", [50, 51, 4000])
def test_a_warmup_of_the_whole_run_is_refused_by_every_schedule(kind, coupling, warmup) -> None:
    steps = {"warmup_steps": warmup, "reference_steps": warmup}
    config = ScheduleConfig(kind=kind, coupling=coupling, **steps)
    with pytest.raises(UserError, match=rf"warmup_steps: {warmup}, .* 50 steps"):
        build_schedule(config, torch.optim.SGD([torch.zeros(1)]), 50)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        *((OptimizerConfig, {"lr": x}, "lr") for x in (5e-324, 9e-31, 2e30, 0.0, -1.0, math.nan)),
        (OptimizerConfig, {"weight_decay": -1.0}, "weight_decay"),
        (OptimizerConfig, {"block_rate": 0.0}, "block_rate"),
        (OptimizerConfig, {"kind": "sgd", "bias_correction": False}, "for kinds adam"),
        (OptimizerConfig, {"betas": (0.9, 0.9999999), "bias_correction": False}, r"0\.999999"),
        (ScheduleConfig, {"reference_steps": 0}, "reference_steps"),
        (ScheduleConfig, {"warmup_steps": -1}, "warmup_steps"),
        (ScheduleConfig, {"kind": "linear", "floor": 0.1}, r"floor 0\.1:.*0"),
        *((ScheduleConfig, {"kind": "cosine", "floor": x}, "at least") for x in (-0.1, 1.0)),
    ],
)
def test_values_without_meaning_are_refused(kind: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kind(**fields)


class Span(LearnedScalars):
    """A learned scalar that nothing else knows: it stays between 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.span = torch.nn.Parameter(torch.full((3, 1, 1), 7.0))

    def reset(self) -> None:
        self.span.fill_(0.25)

    def after_step(self) -> None:
        self.span.clamp_(0.0, 1.0)


class DecayingSpan(Span):
    decays = True


def spanned(span: Span) -> torch.nn.Module:
    model = model_of(BlockConfig())
    _, block = next(iter(stacks(model)["encoder"].layers))
    block.self_attention.add_module("own_span", span)
    initialize(model)
    return model


def test_a_new_learned_scalar_registers_nowhere() -> None:
    for span, decays in ((Span(), False), (DecayingSpan(), True)):
        model = spanned(span)
        assert span.span.tolist() == [[[0.25]]] * 3
        decaying, free = parameter_groups(model, 0.1)
        assert any(p is span.span for p in decaying["params"]) == decays
        assert any(p is span.span for p in free["params"]) != decays
        places = [place for place, p in learned_gains(model) if p is span.span]
        assert places == [Place("span", "encoder", 1)]


OUTPUTS = ("attention.output.weight", "feed_forward.outer.weight")


def lengths(model: torch.nn.Module) -> torch.Tensor:
    """The lengths along the model dimension of all matrices of blocks and of the tables."""
    found = []
    for name, weight in model.named_parameters():
        if name == "embedding.tokens.weight":
            found.append(weight[1:].norm(dim=1))  # the first row is that of the padding
        elif "output_gate" in name:
            continue
        elif (".blocks." in name or name == "embedding.output.weight") and weight.dim() == 2:
            found.append(weight.norm(dim=0 if name.endswith(OUTPUTS) else 1))
    return torch.cat(found).detach()


@pytest.mark.parametrize(("preset", "tied"), [("ngpt", True), ("ngpt", False), ("pre_ln", True)])
@pytest.mark.parametrize("kind", ["encoder_decoder", "encoder", "decoder"])
def test_rows_of_unit_matrices_keep_length_1(kind: str, preset: str, tied: bool) -> None:
    sizes = {"model_dim": 12, "ff_dim": 20, "num_heads": 3, "activation": "swiglu"}
    sizes |= {"tie_embeddings": tied}
    architecture = ArchitectureConfig(kind=kind, encoder_depth=2, decoder_depth=2, **sizes)  # pyright: ignore[reportArgumentType]
    block = BlockConfig(preset=preset, unit_matrices=True, output_gate="head")
    model = build_model(architecture, block, vocab_size=17, pad=0)
    optimizer = build_optimizer(OptimizerConfig(lr=0.1), model, fused=False)
    tokens = torch.arange(12).reshape(2, 6) + 1
    inputs = {"encoder": (tokens, tokens[0]), "decoder": (tokens,)}.get(kind, (tokens, tokens))
    assert bool((model.embedding.tokens.weight[0] == 0.0).all())
    for _ in range(5):
        found = lengths(model)
        torch.testing.assert_close(found, torch.ones(len(found)), rtol=0, atol=1e-6)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        model(*inputs).square().sum().backward()
        optimizer.step()
        moved = zip(before, model.parameters(), strict=True)
        assert not any(torch.equal(old, new) for old, new in moved)
    torch.testing.assert_close(lengths(model), torch.ones(len(lengths(model))), rtol=0, atol=1e-6)


@pytest.mark.parametrize("gate", ["element", "head"])
def test_a_gate_of_unit_matrices_can_close(gate: str) -> None:
    """Rows of length 1 would keep ``sigmoid(u w)``, with u of length 1, above 0.26."""
    model = tiny.encoder(BlockConfig(preset="ngpt", output_gate=gate))
    optimizer = build_optimizer(OptimizerConfig(lr=0.3), model, fused=False)
    matrix = model.get_parameter("blocks.0.self_attention.output_gate.matrix.weight")
    u = torch.nn.functional.normalize(torch.ones(1, matrix.shape[1]), dim=1)
    for _ in range(20):
        optimizer.zero_grad()
        (u @ matrix.T).sigmoid().sum().backward()
        optimizer.step()
    assert float((u @ matrix.detach().T).sigmoid().max()) < 0.01


def test_a_scale_is_trained_faster_than_it_is_large() -> None:
    """nGPT's a starts at 0.05 and moves 0.05 sqrt(d) times as far as Adam's step."""
    rule = Lerp(16)
    assert rule.factor.tolist() == pytest.approx([0.05] * 16)
    assert [value.tolist() for _, value in rule.measured()] == [rule.factor.tolist()]
    optimizer = build_optimizer(OptimizerConfig(lr=0.1), rule, fused=False)
    rule.factor.sum().backward()
    optimizer.step()
    assert rule.factor.tolist() == pytest.approx([0.05 - 0.1 * 0.05 * 4.0] * 16)


@pytest.mark.parametrize("kind", ["adam", "adafactor", "signum", "lamb"])
def test_parameters_of_blocks_have_a_factor_of_the_rate(kind: str) -> None:
    """All but scalars with a rate of their own, here spans. The last norm and embeddings are not
    in blocks."""
    block = BlockConfig(adaptive_span=AdaptiveSpan(longest=8, ramp=2.0, lr=0.01))
    model = model_of(block, "decoder")
    initialize(model)
    config = OptimizerConfig(kind=kind, lr=0.5, block_rate=0.25)
    optimizer = build_optimizer(config, model, fused=False)
    _ = build_schedule(ScheduleConfig(warmup_steps=2), optimizer, 9000)
    found = {each: group["lr"] for group in optimizer.param_groups for each in group["params"]}
    names = dict(model.named_parameters())
    assert found.keys() == set(names.values())
    own = {
        parameter
        for part in model.modules()
        if isinstance(part, LearnedScalars) and part.lr is not None
        for parameter in part.parameters(recurse=False)
    }
    for name, parameter in names.items():
        if parameter not in own:
            assert found[parameter] == (0.0625 if "blocks" in name else 0.25), name
    assert len(own) == 2
    assert all(found[each] == 0.005 for each in own)
    outside = [name for name in names if "blocks" not in name]
    assert any("norm" in name for name in outside)
    assert any("embedding" in name for name in outside)
    if kind == "signum":
        before = {name: parameter.detach().clone() for name, parameter in names.items()}
        for parameter in names.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for name, parameter in names.items():
            moved = (before[name] - parameter.detach()).max().item()
            if parameter in own:  # clamped
                continue
            assert moved == pytest.approx(found[parameter], rel=1e-4), name


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize(("factor", "end"), [(1.0, 0.0), (-1.0, 1.0)])
def test_learned_scalars_return_to_their_range(kind: str, factor: float, end: float) -> None:
    span = Span()
    optimizer = build_optimizer(OptimizerConfig(kind=kind, lr=0.4), spanned(span), fused=False)
    for _ in range(9):
        optimizer.zero_grad()
        (factor * span.span.sum()).backward()
        optimizer.step()
        assert bool(((span.span >= 0.0) & (span.span <= 1.0)).all())
    assert bool((span.span == end).all())
