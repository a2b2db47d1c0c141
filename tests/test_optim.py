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


@pytest.mark.parametrize("warmup", [0, 1, 7, 20])
def test_decoupled_inverse_sqrt_follows_its_formula(warmup: int) -> None:
    config = ScheduleConfig(warmup_steps=warmup, reference_steps=20)
    for t, rate in enumerate(rates(config, 100), start=1):
        ramp = 1.0 if warmup == 0 else min(1.0, t / warmup)
        assert rate == pytest.approx(ramp * min(1.0, (20 / t) ** 0.5))


@pytest.mark.parametrize("warmup", [1, 5, 40])
def test_paper_inverse_sqrt_peaks_at_its_warmup(warmup: int) -> None:
    taken = rates(ScheduleConfig(warmup_steps=warmup, coupling="paper"), 100)
    for t, rate in enumerate(taken, start=1):
        assert rate == pytest.approx(min(t / warmup, math.sqrt(warmup / t)))
    assert taken[warmup - 1] == pytest.approx(1.0)


def test_paper_reads_no_warmup_as_one_step() -> None:
    none = rates(ScheduleConfig(warmup_steps=0, coupling="paper"), 50)
    assert none == rates(ScheduleConfig(warmup_steps=1, coupling="paper"), 50)


@pytest.mark.parametrize("coupling", ["decoupled", "paper"])
@pytest.mark.parametrize("warmup", [0, 1, 6, 10])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_cosine_follows_its_formula(coupling, warmup: int, floor: float) -> None:
    """Half a period: from 1 at the step where the decay begins to `floor` after the last step."""
    total, reference = 50, 10
    how = {"reference_steps": reference, "coupling": coupling, "floor": floor}
    config = ScheduleConfig(kind="cosine", warmup_steps=warmup, **how)
    start = reference if coupling == "decoupled" else max(1, warmup)
    taken = rates(config, total)
    for t, rate in enumerate(taken, start=1):
        ramp = 1.0 if warmup == 0 else min(1.0, t / warmup)
        angle = math.pi * max(0, t - start) / (total - start + 1)
        assert rate == pytest.approx(ramp * (floor + (1 - floor) * (1 + math.cos(angle)) / 2))
    assert max(taken) == pytest.approx(1.0)
    assert floor <= taken[-1] < floor + 0.01


@pytest.mark.parametrize(
    ("fields", "coupling", "warmup", "decay"),
    [
        *(
            ({"kind": "linear"}, coupling, warmup, lambda s: 1 - s)
            for coupling in ("decoupled", "paper")
            for warmup in (0, 1, 6, 10)
        ),
        # 1 - sqrt(s), s the completed share of the decay
        *(
            ({"kind": "sqrt"}, coupling, warmup, lambda s: 1 - math.sqrt(s))
            for coupling in ("decoupled", "paper")
            for warmup in (0, 1, 6, 10)
        ),
        *(
            ({"kind": "linear", "power": 1.2}, coupling, 6, lambda s: (1 - s) ** 1.2)
            for coupling in ("decoupled", "paper")
        ),
    ],
)
def test_a_decay_follows_its_formula(fields, coupling, warmup: int, decay) -> None:
    """Of the share of the decay that is done, after a ramp; a power bends the linear one."""
    total, reference = 50, 10
    how = {"warmup_steps": warmup, "reference_steps": reference, "coupling": coupling}
    start = reference if coupling == "decoupled" else max(1, warmup)
    for t, rate in enumerate(rates(ScheduleConfig(**fields, **how), total), start=1):
        ramp = 1.0 if warmup == 0 else min(1.0, t / warmup)
        assert rate == pytest.approx(ramp * decay(max(0, t - start) / (total - start + 1)))


def test_a_floor_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"floor 0\.1:.*0"):
        ScheduleConfig(kind="linear", floor=0.1)
    for floor in (-0.1, 1.0):
        with pytest.raises(ValueError, match="at least"):
            ScheduleConfig(kind="cosine", floor=floor)


def test_cosine_does_not_fit_into_a_run_that_is_over_before() -> None:
    config = ScheduleConfig(kind="cosine", warmup_steps=5, reference_steps=20)
    with pytest.raises(UserError, match="warmup_steps 5"):
        rates(config, 20)


@pytest.mark.parametrize(("reference", "total"), [(4000, 200), (200, 200), (50, 200)])
def test_a_linear_decay_without_room_is_refused(reference: int, total: int) -> None:
    config = ScheduleConfig(kind="linear", warmup_steps=60, reference_steps=reference)
    with pytest.raises(UserError) as caught:
        build_schedule(config, torch.optim.SGD([torch.zeros(1)]), total)
    assert str(caught.value) == (
        f"model.schedule.reference_steps: {reference}, where the decoupled linear decay begins; "
        "at least warmup_steps 60, when the rate reaches lr, and below "
        f"the {total} steps of the run"
    )


def test_an_inverse_root_that_begins_before_the_warm_up_ends_is_refused() -> None:
    """Its largest rate would be half of `lr`."""
    with pytest.raises(UserError, match=r"reference_steps: 15, where .* at least warmup_steps 60"):
        ScheduleConfig(warmup_steps=60, reference_steps=15).check(200)


def test_other_decays_need_no_such_room() -> None:
    for config in (
        ScheduleConfig(warmup_steps=60, reference_steps=60),
        ScheduleConfig(kind="linear", coupling="paper", warmup_steps=60),
        ScheduleConfig(kind="constant", warmup_steps=199),
        ScheduleConfig(warmup_steps=60),
    ):
        config.check(200)


def test_constant_is_constant_after_its_warmup() -> None:
    taken = rates(ScheduleConfig(kind="constant", warmup_steps=4), 20, lr=0.5)
    assert taken == pytest.approx([0.125, 0.25, 0.375, *[0.5] * 17])


def test_only_matrices_and_embeddings_decay() -> None:
    model = build_model(
        ArchitectureConfig(encoder_depth=2, **SMALL),
        BlockConfig(preset="sas"),
        vocab_size=17,
        pad=0,
    )
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


@pytest.mark.parametrize("lr", [5e-324, 1e-320, 9e-31, 2e30, 1e300, 0.0, -1.0])
def test_a_rate_that_moves_nothing_or_everything_is_refused(lr: float) -> None:
    with pytest.raises(ValueError, match="1e-30 to 1e"):
        OptimizerConfig(lr=lr)


def test_a_correction_that_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="for kinds adam"):
        OptimizerConfig(kind="sgd", bias_correction=False)
    with pytest.raises(ValueError, match=r"each must be at most 0\.999999"):
        OptimizerConfig(betas=(0.9, 0.9999999), bias_correction=False)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *((OptimizerConfig, "lr", 0.0), (OptimizerConfig, "lr", math.nan)),
        *((OptimizerConfig, "weight_decay", -1.0), (OptimizerConfig, "block_rate", 0.0)),
        *((ScheduleConfig, "warmup_steps", -1), (ScheduleConfig, "reference_steps", 0)),
    ],
)
def test_values_without_meaning_are_refused(kind, field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        kind(**{field: value})


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
    """Return a model with `span` in the self-attention of its first layer, initialised."""
    model = build_model(
        ArchitectureConfig(encoder_depth=2, **SMALL), BlockConfig(), vocab_size=17, pad=0
    )
    _, block = next(iter(stacks(model)["encoder"].layers))
    block.self_attention.add_module("own_span", span)
    initialize(model)
    return model


def test_a_new_learned_scalar_registers_nowhere() -> None:
    """Its start, its weight decay, its range and its name in probes follow from its class."""
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


def test_numbers_take_no_decay_beside_maps_that_do() -> None:
    model = tiny.encoder("hyper_connections")
    names = {id(parameter): name.rsplit(".", 1)[1] for name, parameter in model.named_parameters()}
    decayed, spared = ({names[id(p)] for p in g["params"]} for g in parameter_groups(model, 0.1))
    assert decayed >= {"read", "keep", "write"}
    assert {"scale_in", "scale_out"} <= spared - decayed


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
    architecture = ArchitectureConfig(kind="decoder", **SMALL)
    block = BlockConfig(adaptive_span=AdaptiveSpan(longest=8, ramp=2.0, lr=0.01))
    model = build_model(architecture, block, vocab_size=17, pad=0)
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
