"""Sinks, caps and cosines beside what their definitions imply; `test_reference` has the values."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention, AttentionSpec, CosineScale
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import attend, attention_form, own_scores, softmax_map
from lightning_app.blocks.masks import Mask, causal_mask, mask_of
from lightning_app.blocks.stack import Stack
from lightning_app.models.initialization import initialize
from lightning_app.probes.hooks import scores
from tests import tiny

pytestmark = pytest.mark.usefixtures("float64")

AXES: dict[str, dict[str, Any]] = {
    "zero": {"sink": "zero"},
    "learned": {"sink": "learned"},
    "cap": {"score_cap": 0.6},
    "cosine": {"scores": "cosine"},
    "all": {"sink": "learned", "score_cap": 3.0, "scores": "cosine"},
}
every = pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
BATCH, LENGTH, HEADS, MODEL = 3, 6, 2, 10


def attention(**spec: Any) -> Attention:
    return tiny.randomise(Attention(AttentionSpec(**spec), MODEL, HEADS, 0.0))


def run(made: Attention, u: Tensor, mask: Mask) -> Tensor:
    return made(*made.queries_keys_values(u, None), mask, None)[0]


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@every
def test_a_query_without_keys_has_zeros_and_no_other_parameter_starts_elsewhere(axes: Any) -> None:
    seen = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    seen[1, :, :4] = False
    made, u = attention(**axes), torch.randn(BATCH, LENGTH, MODEL, requires_grad=True)
    assert isinstance(made.output, nn.Linear)
    out = run(made, u, mask_of(seen))
    same(out[1, :4], made.output.bias.expand(4, MODEL))
    same(out[0], run(made, u, causal_mask(LENGTH, u.device))[0])
    out.square().sum().backward()
    for each in (u, *made.parameters()):
        assert each.grad is not None
        assert bool(each.grad.isfinite().all())
    states = []
    for block in (BlockConfig(), BlockConfig(**axes)):
        torch.manual_seed(3)
        model = tiny.translator(block)
        initialize(model)
        states.append(model.state_dict())
    plain, ours = states
    assert all(torch.equal(value, ours[name]) for name, value in plain.items())
    starts = {name.rpartition(".")[2]: value for name, value in ours.items() if name not in plain}
    for name, value in starts.items():
        assert value.flatten().tolist() == [math.log(10.0) if name == "log_scale" else 0.0] * HEADS


def test_cosines_depend_on_directions_and_their_factor_is_at_most_100() -> None:
    made, u = attention(scores="cosine"), torch.randn(BATCH, LENGTH, MODEL)
    mask = causal_mask(LENGTH, u.device)
    (scale,) = (part for part in made.modules() if isinstance(part, CosineScale))
    with torch.no_grad():
        scale.log_scale.copy_(torch.tensor([math.log(100.0), 1.0])[:, None, None])
    before = run(made, u, mask)
    query, key, _ = made.queries_keys_values(u, None)
    largest = own_scores(query, key, mask).detach().abs().amax(dim=(0, 2, 3))
    assert bool((largest <= torch.tensor([100.0, math.e])).all())
    assert float(largest[0]) > 50.0
    with torch.no_grad():
        for each in (*made.query.parameters(), *made.key.parameters()):
            each.mul_(7.0)
        scale.log_scale[0] = 9.0
    after = run(made, u, mask)
    same(after, before)
    after.square().sum().backward()
    assert scale.log_scale.grad is not None
    assert [bool(each) for each in scale.log_scale.grad.flatten()] == [False, True]


def test_a_cap_has_a_second_derivative() -> None:
    mask = causal_mask(4, torch.device("cpu"))
    parts = [torch.randn(1, 2, 4, 3, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(
        lambda query, key, value: attend(query, key, value, mask, 0.0, cap=0.5), parts
    )


@pytest.mark.parametrize("form", ["reversible", "blocked"])
@pytest.mark.parametrize("carry", ["sum", "mean"])
def test_carried_scores_beside_a_sink_in_every_form(form: Any, carry: Any) -> None:
    config = BlockConfig(preset="post_ln", residual_attention=carry, sink="zero")
    model = tiny.randomise(tiny.causal_model(config, decoder_depth=3))
    tokens = tiny.words(2, 150)
    found = []
    for used in ("plain", form):
        with attention_form(used):
            logits = model(tokens)
            loss = logits.log_softmax(dim=-1)[..., 5].sum()
            grads = torch.autograd.grad(loss, list(model.parameters()))
        found.append((logits, *grads))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "axes",
    [
        *({"residual_attention": carry, "sink": "zero"} for carry in ("none", "sum", "qk_sum")),
        *({"residual_attention": carry, "sink": "learned"} for carry in ("none", "mean")),
        {"score_cap": 0.6, "sink": "learned"},
    ],
)
def test_probes_see_maps_divided_by_the_sums_of_their_rows(axes: dict[str, Any]) -> None:
    """Heads are those of the probe's map times the share of the keys, ``1 - A_sink``."""
    model = tiny.randomise(tiny.causal_model(BlockConfig(**axes), decoder_depth=2)).eval()
    found: list[tuple[Attention, Tensor, Tensor, Tensor]] = []

    def hook(module: Attention, args: Any, kwargs: Any, output: Any) -> None:
        mask, _, total = scores(module, args, kwargs, output[1])
        maps = softmax_map(total, mask, kwargs["divisor"])
        masked = (total / kwargs["divisor"]).masked_fill(~mask.allowed, -torch.inf)
        found.append((module, maps, maps @ args[2], masked.logsumexp(dim=-1, keepdim=True)))

    heads: list[Tensor] = []
    for _, block in model.decoder.layers:
        block.self_attention.register_forward_hook(hook, with_kwargs=True)
        block.self_attention.output.register_forward_pre_hook(lambda _, x: heads.append(x[0]))
    with torch.no_grad():
        model(tiny.words(2, 7))
    assert len(found) == len(heads) == 2
    for (module, maps, mixed, total), joined in zip(found, heads, strict=True):
        same(maps.sum(dim=-1), torch.ones(maps.shape[:3]))
        logit = torch.zeros(()) if module.sink is None else module.sink.sink_logit.detach()
        share = (total - logit).sigmoid()
        assert 0.0 < float(share.min()) < float(share.max()) < 1.0
        same((share * mixed).transpose(1, 2).flatten(2), joined)


@pytest.mark.parametrize("other", ["none", "learned"])
@pytest.mark.parametrize("part", ["self_attention", "cross_attention"])
def test_one_kind_of_sink_serves_a_chain(part: str, other: str) -> None:
    config = BlockConfig(preset="realformer", sink="zero")
    spec = config.resolve(Stack(depth=2, peer_depth=2, causal=True, cross=True))
    first, last = spec.blocks
    last = replace(last, **{part: replace(getattr(last, part), sink=other)})
    with pytest.raises(ValueError, match="sink differs between layers"):
        replace(spec, blocks=(first, last))
