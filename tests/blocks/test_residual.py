import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import full_mask
from lightning_app.blocks.norm import at_step
from lightning_app.blocks.residual import Gain, Residual, ResidualSpec
from lightning_app.blocks.stack import BranchRamp
from lightning_app.blocks.streams import DualStream, Stream, StreamPlace, StreamRule
from tests import reference, tiny

DIM = 7
DUAL_RULE = DualStream(StreamPlace(model_dim=DIM))
LEARNED = Gain(value=0.3, learned=True)
VECTOR = Gain(value=0.3, learned=True, vector=True)


def leave(residual: Residual, x: Tensor, branch: Tensor) -> Tensor:
    """Return the sum where there is one stream."""
    stream = residual(Stream(x), branch)
    assert stream.parts == ()
    return stream.x


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("branch", [LEARNED, VECTOR], ids=["scalar", "vector"])
def test_all_slots_are_the_formula(branch: Gain) -> None:
    """``norm_sum(skip * x + branch * norm_branch(f(scale * norm_input(x))))``, f = 3 x + 1."""
    norms: Any = {"norm_input": "layer_norm", "norm_branch": "rms_norm", "norm_sum": "layer_norm"}
    spec = ResidualSpec(**norms, input_scale=0.25, skip=Gain(value=0.7), branch=branch)
    residual = tiny.randomise(Residual(spec, DIM, dropout=0.0))
    x = torch.randn(3, 5, DIM)
    p = tiny.numpy_parameters(residual)
    u = 0.25 * reference.layer_norm(x.numpy(), p["norm_input.weight"], p["norm_input.bias"])
    f = reference.rms_norm(3 * u + 1, p["norm_branch.weight"])
    y = 0.7 * x.numpy() + p["branch.gain"] * f
    y = reference.layer_norm(y, p["norm_sum.weight"], p["norm_sum.bias"])
    assert p["branch.gain"].shape == ((DIM,) if branch.vector else ())
    ours = leave(residual, x, 3 * residual.enter(x) + 1)
    torch.testing.assert_close(ours, torch.from_numpy(y), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_the_second_stream_adds_up_branches_without_norm_or_skip() -> None:
    """ResiDual: ``r' = r + branch * f``, ``x' = N(skip * x + branch * f)``."""
    spec = ResidualSpec(norm_sum="layer_norm", skip=Gain(value=0.7), branch=Gain(value=0.3))
    residual = tiny.randomise(Residual(spec, DIM, dropout=0.0, stream=DUAL_RULE))
    x, total, branch = (torch.randn(3, 5, DIM) for _ in range(3))
    stream = residual(Stream(x, (total,)), branch)
    torch.testing.assert_close(stream.parts[0], total + 0.3 * branch)
    residual.stream = StreamRule(StreamPlace(model_dim=DIM))
    torch.testing.assert_close(stream.x, leave(residual, x, branch))


def test_a_skip_of_zero_is_absent_unless_it_is_learned() -> None:
    residual = Residual(ResidualSpec(skip=Gain(value=0.0)), DIM, 0.0)
    x, branch = torch.randn(3, 5, DIM), torch.randn(3, 5, DIM)
    infinite = torch.full((3, 5, DIM), math.inf)  # 0 * inf is NaN: it must not be computed
    assert torch.equal(leave(residual, infinite, branch), branch)
    gain = Gain(value=0.0, learned=True)
    assert not gain.absent
    residual = Residual(ResidualSpec(skip=gain), DIM, 0.0)
    y = leave(residual, x, branch)
    assert torch.equal(y, branch)
    y.sum().backward()
    (parameter,) = residual.parameters()
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, x.sum())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"value": math.nan}, "gain value"), ({"value": math.inf}, "gain value")),
        *(({"value": -math.inf}, "gain value"), ({"vector": True}, "gain vector: true")),
        ({"profiled": True}, "gain profiled: true"),
    ],
)
def test_gain_without_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gain(**changes)


def test_dropout_acts_on_the_branch_alone_after_its_norm_and_alike_in_both_streams() -> None:
    residual = Residual(ResidualSpec(branch=Gain(value=3.0)), DIM, dropout=0.5)
    x, branch = torch.randn(3, 50, DIM), torch.ones(3, 50, DIM)
    kept = leave(residual, x, branch) - x
    # A kept entry is divided by the share kept.
    assert set(kept.round(decimals=3).unique().tolist()) == {0.0, 6.0}
    residual.eval()
    torch.testing.assert_close(leave(residual, x, branch), x + 3.0)
    # Entries that are dropped stay zero: no norm moves them, and none sees them.
    residual = Residual(ResidualSpec(norm_branch="layer_norm"), DIM, dropout=0.5)
    x, branch = torch.zeros(3, 50, DIM), torch.randn(3, 50, DIM)
    dropped = leave(residual, x, branch)
    whole = leave(residual.eval(), x, branch)
    kept = dropped != 0.0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(dropped[kept], 2.0 * whole[kept])
    residual = Residual(ResidualSpec(), DIM, dropout=0.5, stream=DUAL_RULE)
    zero = torch.zeros(3, 50, DIM)
    stream = residual(Stream(zero, (zero,)), torch.ones(3, 50, DIM))
    assert set(stream.x.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(stream.x, stream.parts[0])


def test_a_norm_in_any_slot_normalizes() -> None:
    assert ResidualSpec(skip=Gain(value=2.0), branch=Gain(value=0.1)).unnormalized
    slots: Any = [{slot: "rms_norm"} for slot in ("norm_input", "norm_branch", "norm_sum")]
    assert not any(ResidualSpec(**slot).unnormalized for slot in slots)


ORDERS = {"deeper_later": [4, 8, 12], "equal": [12, 12, 12], "reverse": [12, 8, 4]}


@pytest.mark.parametrize("order", ORDERS)
def test_branches_rise_in_the_order_of_the_layers(order: Any) -> None:
    """ProRes: ``min(1, t / T_l)`` in step t, from 1, of every sub-layer alike."""
    ramp = BranchRamp(steps=12, order=order)
    model = tiny.translator(BlockConfig(branch_ramp=ramp), encoder_depth=3)
    for done in (0, 4, 7, 30):
        at_step(model, done, 100)
        layers = [block for _, block in model.encoder.layers]
        for block, steps in zip(layers, ORDERS[order], strict=True):
            for around in (block.around_self, block.around_ff):
                factor = around.branch.get_buffer("factor")
                assert float(factor) == pytest.approx(min(1.0, (done + 1) / steps), rel=1e-6)
    assert float(model.decoder.get_buffer("blocks.0.around_cross.branch.factor")) == 1.0


@pytest.mark.parametrize("preset", ["pre_ln", "post_ln", "deepnorm", "sandwich_ln", "mhc"])
def test_after_its_rise_a_block_is_the_one_without_to_the_last_bit(preset: str) -> None:
    torch.manual_seed(3)
    plain = tiny.translator(preset)
    torch.manual_seed(3)
    rising = tiny.translator(BlockConfig(preset=preset, branch_ramp=BranchRamp(steps=7)))
    source, target = tiny.sentences()
    outputs = []
    for model in (plain, rising):
        at_step(model, 6, 0)
        outputs.append(model(source, target))
        outputs[-1].square().mean().backward()
    assert torch.equal(*outputs)
    theirs = dict(plain.named_parameters())
    for name, parameter in rising.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=0.0, atol=0.0)
    at_step(rising, 0, 0)
    assert not torch.equal(rising(source, target), outputs[0])


@pytest.mark.usefixtures("float64")
def test_a_row_skips_a_branch_or_has_more_of_it() -> None:
    """Huang et al. 2016, equation 5, with the survivors divided by their chance."""
    residual = Residual(ResidualSpec(drop=0.25), DIM, dropout=0.0)
    x, branch = torch.randn(4000, 2, DIM), torch.randn(4000, 2, DIM)
    added = leave(residual, x, branch) - x
    rows = [bool(row.any()) for row in added]
    assert 0.72 < sum(rows) / len(rows) < 0.78
    torch.testing.assert_close(added[rows], branch[rows] / 0.75)
    torch.testing.assert_close(leave(residual.eval(), x, branch), x + branch)


@pytest.mark.usefixtures("float64")
def test_deeper_branches_are_dropped_more_often_and_for_whole_texts() -> None:
    """A last layer that computes only predicted tokens drops as if it computed them all."""
    block = BlockConfig(stochastic_depth=0.9)
    for stack in tiny.architecture(encoder_depth=3, decoder_depth=3).stacks(block).values():
        for layer, each in enumerate(stack.blocks, start=1):
            arounds = (each.around_self, each.around_cross, each.around_ff)
            assert [around.drop for around in arounds] == pytest.approx([0.3 * layer] * 3)
    model = tiny.masked_model(block).train()
    predicted = torch.rand(6, 8) < 0.5
    x, mask = torch.randn(6, 8, 10), full_mask(8, torch.device("cpu"))
    for seed in range(10):
        torch.manual_seed(seed)
        whole = model.encoder(x, mask)
        torch.manual_seed(seed)
        some = model.encoder(x, mask, kept=predicted.flatten().nonzero()[:, 0])
        torch.testing.assert_close(some[0], whole[predicted])
