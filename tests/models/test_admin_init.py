"""Admin's profiling pass against the naive reference."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import LearnedGain
from lightning_app.models.initialization import needs_profiling, profile
from tests import reference, tiny
from tests.reference import Array, Layer, SubLayer

pytestmark = pytest.mark.usefixtures("float64")


class Profile:
    """Liu et al. 2020, as their code profiles: the ratio r of each stack starts at 1, and at each
    sub-layer ``omega = r``, then ``r = sqrt(Var(omega x) + Var(f(x)))`` over all real entries."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.real = {
            "encoder": (source != tiny.PAD).numpy(),
            "decoder": (target != tiny.PAD).numpy(),
        }
        self.ratio = {"encoder": 1.0, "decoder": 1.0}
        self.omega: dict[str, float] = {}

    def __call__(self, layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
        side = layer.stack.side
        real, omega = self.real[side], self.ratio[side]
        self.omega[layer.name(f"{around}.skip.gain")] = omega
        branch = f(x)
        self.ratio[side] = math.sqrt(float(np.var(omega * x[real]) + np.var(branch[real])))
        return layer.norm(f"{around}.norm_sum", omega * x + branch)


def omegas(model: torch.nn.Module) -> dict[str, float]:
    """Return the profiled skips, each one value in all dimensions."""
    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith("skip.gain"):
            assert parameter.shape == (10,)
            (found[name],) = parameter.unique().tolist()
    return found


def test_translation_is_profiled_as_in_the_reference() -> None:
    model = tiny.translator("admin", activation="gelu")
    source, target = tiny.sentences()
    expected = Profile(source, target)
    block = replace(reference.REFERENCE["admin"], layer=reference.each(expected))
    profiling = tiny.predicted(block, model, source, target, activation="gelu")
    logits: list[Tensor] = []
    profile(model, lambda: logits.append(model(source, target)))
    assert omegas(model) == pytest.approx(expected.omega, rel=1e-10)
    assert len(expected.omega) == 2 * 3 + 3 * 2
    # The pass itself runs with the skips that it sets.
    real = target != tiny.PAD
    ours, theirs = logits[0][real], torch.from_numpy(profiling.logits)[real]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model(source, target)[real], ours)


def test_masked_model_is_profiled_over_whole_windows() -> None:
    model = tiny.masked_model("admin")
    tokens = tiny.words(3, 7)
    expected = Profile(tokens, tokens)
    block = replace(reference.REFERENCE["admin"], layer=reference.each(expected))
    positions = torch.tensor([0, 5, 20])
    tiny.predicted(block, model, tokens, positions)
    profile(model, lambda: model(tokens, positions))
    assert omegas(model) == pytest.approx(expected.omega, rel=1e-10)


def test_rows_without_data_change_no_skip() -> None:
    """A rank with no row of a small first batch reads a blank one, of which no token is real."""
    model, other = tiny.translator("admin"), tiny.translator("admin")
    other.load_state_dict(model.state_dict())
    source, target = tiny.sentences()
    profile(model, lambda: model(source, target))
    wide = [torch.cat([x, tiny.words(2, x.shape[1])]) for x in (source, target)]
    present = torch.tensor([True] * len(source) + [False] * 2)[:, None]
    real = {name: present.expand(-1, 3) for name in ("encoder", "decoder")}
    profile(other, lambda: other(*wide), real=real)
    assert omegas(other) == pytest.approx(omegas(model), rel=1e-10)


def test_ranks_that_add_up_their_moments_set_the_skips_of_the_whole_batch() -> None:
    """Two ranks with a half each, played in turn: each moment is the sum of both halves."""
    whole, half = tiny.masked_model("admin"), tiny.masked_model("admin")
    half.load_state_dict(whole.state_dict())
    tokens, positions = tiny.words(4, 7), torch.arange(3)
    profile(whole, lambda: whole(tokens, positions))
    # Both halves are the same sentences: the other rank's moments equal this one's.
    twice = torch.cat([tokens[:2], tokens[:2]])
    doubled = tiny.masked_model("admin")
    doubled.load_state_dict(whole.state_dict())
    profile(doubled, lambda: doubled(twice, positions))
    profile(half, lambda: half(tokens[:2], positions), total=lambda moments: 2 * moments)
    assert omegas(half) == pytest.approx(omegas(doubled), rel=1e-10)
    assert omegas(half) != pytest.approx(omegas(whole), rel=1e-4)


def test_only_admin_needs_a_pass_which_leaves_no_hook_and_changes_nothing_else() -> None:
    """Also if it fails."""
    model = tiny.translator("admin", dropout=0.3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = count_hooks(model)
    profile(model, lambda: model(*tiny.sentences()))
    assert count_hooks(model) == hooks
    with pytest.raises(IndexError):
        profile(model, lambda: [][1])
    assert count_hooks(model) == hooks
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert changed
    assert all(name.endswith("skip.gain") for name in changed)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert [name for name in PRESETS if needs_profiling(tiny.translator(name))] == ["admin"]


def test_admin_with_residual_attention_and_rms_norm_is_profiled_too() -> None:
    model = tiny.translator(BlockConfig(preset="admin", residual_attention="mean", norm="rms_norm"))
    profile(model, lambda: model(*tiny.sentences()))
    gains = [m.gain for m in model.modules() if isinstance(m, LearnedGain)]
    assert sum(bool((gain == 1.0).all()) for gain in gains) == 2
    assert all(bool(gain.isfinite().all()) for gain in gains)


def count_hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
