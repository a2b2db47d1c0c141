"""Compare memory, spans, halting and value embeddings with the code that their authors published.

    git clone https://github.com/kimiyoung/transformer-xl PUBLIC/transformer-xl
    git clone https://github.com/facebookresearch/adaptive-span PUBLIC/adaptive-span
    git clone https://github.com/andreamad8/Universal-Transformer-Pytorch PUBLIC/ut
    git clone https://github.com/karpathy/nanochat PUBLIC/nanochat
    python benchmarks/public_code.py PUBLIC

Everything is float64 with the same weights on both sides. A line has the largest difference, and
the program ends with code 1 where one is above its bound. What is changed in the published files
before they run, and why, stands beside each change.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.peers import Projections, linears
from lightning_app.blocks.attention import Attention, AttentionSpec
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import causal_mask
from lightning_app.blocks.memory import MemorySpec
from lightning_app.blocks.spans import AdaptiveSpan, SpanMask
from lightning_app.blocks.steps import Halting, HaltingSpec, Pondering
from lightning_app.models.heads import ArchitectureConfig, CausalLanguageModel, build_model
from lightning_app.models.positions import RelativeTerm

WORDS, WIDTH, HEADS, DEPTH, SEGMENT = 17, 12, 2, 3, 4


class Difference(NamedTuple):
    """The largest difference of what was compared, and the largest that rounding explains."""

    what: str
    found: float
    bound: float


def published(path: Path, changes: dict[str, str], **names: Any) -> dict[str, Any]:
    """Run a published file with `changes` of its text, and return its names."""
    text = path.read_text(encoding="utf-8")
    for old, new in changes.items():
        if old not in text:
            sys.exit(f"{path}: no '{old}' in it; another version than the one compared here")
        text = text.replace(old, new)
    space: dict[str, Any] = {"__name__": path.stem, **names}
    exec(compile(text, str(path), "exec"), space)
    return space


def largest(ours: Tensor, theirs: Tensor) -> float:
    """Infinite where one is not a number: Python's `max` would pass over it."""
    difference = float((ours - theirs).detach().abs().max())
    return math.inf if math.isnan(difference) else difference


class NoSoftmax(nn.Module):
    """In the place of the adaptive softmax, which needs CUDA and is not compared."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.out_layers: list[Any] = []


def transformer_xl(folder: Path) -> Iterator[Difference]:
    """States of segments with a memory, and gradients of u and W_R, of `post_ln` and `pre_ln`."""
    for name in ("proj_adaptive_softmax", "log_uniform_sampler"):
        stub: Any = ModuleType(name)
        stub.ProjectedAdaptiveLogSoftmax = NoSoftmax
        stub.LogUniformSampler = stub.sample_logits = None
        sys.modules[name] = stub
    changes = {
        ".byte()": ".bool()",  # masks of bytes are no longer taken
        "attn_score.float().masked_fill": "attn_score.masked_fill",  # scores in float64
    }
    theirs = published(folder / "transformer-xl/pytorch/mem_transformer.py", changes)
    for preset in ("post_ln", "pre_ln"):
        for length in (2, 4, 6, 9, 30):
            yield _segments(theirs, preset, MemorySpec(length=length))
        for length in (2, 4, 6):
            yield _segments(theirs, preset, MemorySpec(length=length, same_length=True))
        longer = MemorySpec(length=4, evaluation_length=9)
        for clamp in (None, 2, 3):
            yield _segments(theirs, preset, longer, clamp=clamp, trains=False)


def _segments(
    space: dict[str, Any],
    preset: str,
    memory: MemorySpec,
    *,
    clamp: int | None = None,
    trains: bool = True,
) -> Difference:
    torch.manual_seed(3)
    architecture = ArchitectureConfig(
        kind="decoder",
        decoder_depth=DEPTH,
        model_dim=WIDTH,
        ff_dim=20,
        num_heads=HEADS,
        dropout=0.0,
        positions="relative",
        clamp_length=clamp,
    )
    ours = build_model(architecture, BlockConfig(preset=preset, memory=memory), WORDS, pad=0)
    assert isinstance(ours, CausalLanguageModel)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ours.train(trains)
    theirs = space["MemTransformerLM"](
        *(WORDS, DEPTH, HEADS, WIDTH, WIDTH // HEADS, 20, 0.0, 0.0),
        tie_weight=False,
        pre_lnorm=preset == "pre_ln",
        tgt_len=SEGMENT,
        ext_len=0,
        mem_len=memory.lengths[0 if trains else 1],
        same_length=memory.same_length,
        clamp_len=clamp or -1,
    )
    (term,) = (part for part in ours.modules() if isinstance(part, RelativeTerm))
    _copy(ours, theirs, term, preset)
    tokens = torch.randint(1, WORDS, (2, 14))
    state, memories, worst = None, tuple(theirs.init_mems()), 0.0
    shared: tuple[Any, Any] = term.biases[0].content, term.projections[0].weight
    owned = theirs.r_w_bias, theirs.layers[0].dec_attn.r_net.weight
    for segment in tokens.split(SEGMENT, dim=1):
        mine, state = ours.states_after(state, segment)
        other, memories = theirs._forward(segment.t(), mems=memories)
        other = other.transpose(0, 1)
        if preset == "pre_ln":  # theirs has no norm after the last layer
            other = ours.decoder.final_norm(other)
        worst = max(worst, largest(mine, other))
        weight = torch.randn_like(mine)
        one = torch.autograd.grad((mine * weight).sum(), shared)
        two = torch.autograd.grad((other * weight).sum(), owned)
        for a, b in zip(one, two, strict=True):
            worst = max(worst, largest(a.reshape(b.shape), b))
    return Difference(f"Transformer-XL, {preset}, {memory}, clamp_length {clamp}", worst, 1e-12)


@torch.no_grad()
def _copy(ours: CausalLanguageModel, theirs: Any, term: Any, preset: str) -> None:
    theirs.word_emb.emb_layers[0].weight.copy_(ours.embedding.tokens.weight)
    theirs.r_w_bias.copy_(term.biases[0].content[:, 0])
    theirs.r_r_bias.copy_(term.biases[0].position[:, 0])
    norm = "norm_input" if preset == "pre_ln" else "norm_sum"
    for number, block in enumerate(ours.decoder.blocks):
        part: Any = block
        layer = theirs.layers[number]
        maps = Projections.of(part.self_attention)
        for each in maps:  # theirs have no biases
            each.bias.zero_()
        layer.dec_attn.qkv_net.weight.copy_(torch.cat([each.weight for each in maps[:3]]))
        layer.dec_attn.o_net.weight.copy_(maps.output.weight)
        layer.dec_attn.r_net.weight.copy_(term.projections[number].weight)
        inner = layer.pos_ff.CoreNet
        for target, source in zip((inner[0], inner[3]), linears(part.feed_forward), strict=True):
            target.load_state_dict(source.state_dict())
        layer.dec_attn.layer_norm.load_state_dict(getattr(part.around_self, norm).state_dict())
        layer.pos_ff.layer_norm.load_state_dict(getattr(part.around_ff, norm).state_dict())


def adaptive_span(folder: Path) -> Iterator[Difference]:
    """Weights of random scores, their gradients, and the penalty.

    Their rows are divided by their sum + 1e-8, which explains differences of 1e-6; their distances
    count from the token before, ours from the token itself. The last draw has spans of 0: both ends
    of the ramp lie on a key.
    """
    longest, ramp = 39, 7.0
    space = published(folder / "adaptive-span/adaptive_span.py", {})
    theirs = space["AdaptiveSpan"](longest + 1, 2e-6, ramp, 0.0, False, HEADS)
    ours = SpanMask(AdaptiveSpan(longest=longest, ramp=ramp, penalty=2e-6), HEADS)
    distance = torch.arange(longest, -1, -1)[None, None, None]
    for draw in range(6):
        torch.manual_seed(draw)
        span = longest * torch.rand(HEADS, 1, 1) * (draw < 5)
        with torch.no_grad():
            theirs._mask.current_val.copy_(span / (longest + 1))
            ours.fraction.copy_(span / longest)
        scores = torch.randn(2, HEADS, 5, longest + 1, requires_grad=True)
        rows = theirs(scores.softmax(-1).view(2 * HEADS, 5, -1)).view_as(scores)
        mine = (scores + ours.log_weights(ours.tokens[None], distance)).softmax(-1)
        weight = torch.randn_like(rows)
        one = torch.autograd.grad((mine * weight).sum(), (scores, ours.fraction))
        two = torch.autograd.grad((rows * weight).sum(), (scores, theirs._mask.current_val))
        worst = max(largest(mine, rows), largest(one[0], two[0]))
        worst = max(worst, largest(one[1] / longest, two[1] / (longest + 1)))
        (term,) = ours.auxiliary_terms().values()
        worst = max(worst, largest(term.weight * term.value, theirs.get_loss()))
        yield Difference(f"adaptive span, draw {draw}", worst, 1e-6)


def halting(folder: Path) -> Iterator[Difference]:
    """Steps and remainders of tokens that halt before the maximum.

    Its average of states is another one than that of Graves and is not compared; at the maximum it
    has no remainder.
    """
    text = (folder / "ut/models/UTransformer.py").read_text(encoding="utf-8")
    whole = text[text.index("class ACT_basic") :]
    space: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(whole.replace(".cuda()", ""), space)
    most, shape = 12, (4, 50, WIDTH)
    for bias in (-3.0, -1.0, 0.0, 1.0):
        torch.manual_seed(1)
        states = [torch.randn(shape) for _ in range(most)]
        theirs, ours = space["ACT_basic"](WIDTH), Halting(HaltingSpec(epsilon=0.1), WIDTH)
        with torch.no_grad():
            theirs.p.bias.fill_(bias)
            theirs.p.weight.mul_(3.0)
            ours.unit.load_state_dict(theirs.p.state_dict())
        following = iter([*states[1:], states[-1]])  # it halts on the state before a step
        nothing = torch.zeros(1, max(shape[1], most) + 1, WIDTH)
        _, (remainder, steps) = theirs(
            states[0], states[0], lambda _, rest=following: next(rest), nothing, nothing, most
        )
        found = Pondering.start(states[0])
        for number, state in enumerate(states, start=1):
            found = ours(found, state, last=number == most)
        early = steps < most
        if not bool(early.any()):
            sys.exit(f"halting, bias {bias}: no token halts before the maximum")
        worst = largest(found.steps[early].double(), steps[early])
        worst = max(worst, largest(found.remainder[early], remainder[early]))
        yield Difference(f"halting, bias {bias}, {int(early.sum())} tokens", worst, 1e-12)


def value_embeddings(folder: Path) -> Iterator[Difference]:
    """A self-attention with the part of docs/own-block.md, with equal and with grouped heads.

    Their factor of 1.2 on queries and keys is a gain of our norm. Rotations, which commute with
    it, are left out, as are smear and backout, which are no part of a block.
    """
    page = (Path(__file__).parents[1] / "docs/own-block.md").read_text(encoding="utf-8")
    (example,) = (text for text in page.split("```") if "reads_tokens = " in text)
    exec(example.removeprefix("python"), {})
    text = (folder / "nanochat/nanochat/gpt.py").read_text(encoding="utf-8")
    space: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional}
    space |= published(folder / "nanochat/nanochat/flash_attention.py", {})
    exec(text[text.index("def norm(x)") : text.index("class MLP")], space)
    for groups in (HEADS, HEADS // 2):
        torch.manual_seed(1)
        config = SimpleNamespace(n_head=HEADS, n_kv_head=groups, n_embd=WIDTH, n_layer=1)
        theirs: Any = space["CausalSelfAttention"](config, 0)
        spec = AttentionSpec(value_carry="embedded", qk_norm="rms_norm")
        ours = Attention(spec, WIDTH, HEADS, 0.0, groups, WORDS)
        carry: Any = ours.value_carry
        pairs = {"query": "c_q", "key": "c_k", "value": "c_v", "output": "c_proj"}
        with torch.no_grad():
            for mine, other in pairs.items():
                getattr(ours, mine).weight.copy_(getattr(theirs, other).weight)
                getattr(ours, mine).bias.zero_()
            carry.gate.weight.copy_(theirs.ve_gate.weight)
            norms: list[Any] = [ours.query_norm, ours.key_norm]
            for norm in norms:
                norm.weight.fill_(1.2)
                norm.eps = torch.finfo(torch.float64).eps
        tokens, u = torch.randint(WORDS, (3, 7)), torch.randn(3, 7, WIDTH)
        query, key, value = ours.queries_keys_values(u, None)
        result, _ = ours(query, key, carry(value, u, tokens), causal_mask(7, u.device), None)
        expected = theirs(u, carry.table(tokens), (torch.ones(1), torch.zeros(1)), (7, 0), None)
        yield Difference(f"value embeddings, {groups} heads", largest(result, expected), 1e-12)


def main() -> int:
    """Print every comparison; return 1 if a difference is above its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path, help="the folder of the clones")
    folder = parser.parse_args().checkouts
    torch.set_default_dtype(torch.float64)
    differs = False
    for compare in (transformer_xl, adaptive_span, halting, value_embeddings):
        for what, found, bound in compare(folder):
            fails = not found <= bound
            differs |= fails
            print(f"{found:.1e} {'above' if fails else 'within'} {bound:.0e}  {what}")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
