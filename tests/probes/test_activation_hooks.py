"""Hooks that see what a loop in NumPy computes from the same inputs, and that change nothing."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.probes.hooks import ActivationHooks, Row
from lightning_app.probes.probe import stacks
from tests.probes.test_measures import divergence, entropy
from tests.probes.test_probe import number
from tests.tiny import PAD, masked_model, randomise, sentences, translator, words

CONFIGS = {
    "post_ln": BlockConfig(preset="post_ln"),
    "sum": BlockConfig(preset="realformer", residual_attention="sum"),
    "mean": BlockConfig(preset="realformer", residual_attention="mean"),
    "qk_sum": BlockConfig(preset="pre_ln", residual_attention="qk_sum"),
    "shaped": BlockConfig(preset="sas"),
}
Maps = dict[tuple[str, str, int], dict[str, Any]]


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(getattr(module, name))
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    )


def real_of(source: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"encoder": source != PAD, "decoder": target[:, 1:] != PAD}


def watched(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[Row]:
    with ActivationHooks(model) as taps, torch.no_grad():
        for source, target in batches:
            taps.expect(real_of(source, target))
            model(source, target[:, :-1])
    return taps.rows(0)


def naive_maps(model: nn.Module, source: Tensor, target: Tensor) -> Maps:
    """The maps of every attention, a loop over cells, from what its linear layers were given."""
    seen: dict[tuple[str, str, int], dict[str, Tensor]] = {}
    makers: Any = {"queries_keys_values": ("query", "key")}
    makers |= {"queries": ("query",), "keys_values": ("key",)}
    watched = pytest.MonkeyPatch()
    for stack_name, stack in stacks(model).items():
        for layer, block in enumerate(stack.blocks, start=1):
            for kind in ("self", "cross"):
                attention = getattr(block, f"{kind}_attention", None)
                if attention is None:
                    continue
                key = (stack_name, kind, layer)
                seen[key] = {}
                for method, parts in makers.items():
                    made = getattr(attention, method)

                    def keep(x, angles, key=key, parts=parts, make=made):
                        seen[key] |= dict.fromkeys(parts, x)
                        return make(x, angles)

                    watched.setattr(attention, method, keep)
    with torch.no_grad():
        model(source, target[:, :-1])
    watched.undo()

    real = {name: mask.numpy() for name, mask in real_of(source, target).items()}
    found: Maps = {}
    for (stack_name, kind, layer), inputs in sorted(seen.items(), key=lambda item: item[0][2]):
        attention = getattr(stacks(model)[stack_name].blocks[layer - 1], f"{kind}_attention")
        found[stack_name, kind, layer] = cells_of(
            attention,
            inputs,
            real[stack_name],
            present=(source != PAD).numpy(),
            causal=(stack_name, kind) == ("decoder", "self"),
            below=found.get((stack_name, kind, layer - 1)),
        )
    return found


def cells_of(
    attention: Attention, inputs: Any, real: Any, present: Any, causal: bool, below: Any
) -> dict[str, Any]:
    """Scores and maps of one attention, for the rows that count and see two keys or more."""
    parts, alone = {}, {}
    for name in ("query", "key"):
        weight = getattr(attention, name).weight.detach().numpy()
        bias = getattr(attention, name).bias.detach().numpy()
        parts[name] = alone[name] = inputs[name].numpy() @ weight.T + bias
        if attention.spec.carry == "qk_sum" and below is not None:
            parts[name] = parts[name] + below[name]
    heads = attention.num_heads
    width = parts["query"].shape[-1] // heads
    rows, own, total = [], {}, {}
    for b, i in itertools.product(*map(range, real.shape)):
        keys = range(i + 1) if causal else np.flatnonzero(present[b])
        if not real[b, i] or len(keys) < 2:
            continue
        rows.append((b, i))
        for h, j in itertools.product(range(heads), keys):
            cut = slice(h * width, (h + 1) * width)
            score = parts["query"][b, i, cut] @ parts["key"][b, j, cut] / math.sqrt(width)
            own[b, i, h, j] = alone["query"][b, i, cut] @ alone["key"][b, j, cut] / width**0.5
            total[b, i, h, j] = score
            if attention.spec.carry == "scores" and below is not None:
                total[b, i, h, j] = score + below["total"][b, i, h, j]
    maps = {}
    for (b, i), h in itertools.product(rows, range(heads)):
        keys = sorted(j for at in total if at[:3] == (b, i, h) for j in at[3:])
        logits = np.array([total[b, i, h, j] for j in keys]) / attention.spec.score_divisor
        p = np.exp(logits - logits.max())
        maps[b, i, h] = p / p.sum()
    logits = [value / attention.spec.score_divisor for value in total.values()]
    return {**parts, "own": own, "total": total, "maps": maps, "rows": rows, "logits": logits}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", CONFIGS)
def test_attention_is_seen_and_compared_as_by_a_loop(name: str) -> None:
    model = randomise(translator(CONFIGS[name])).eval()
    source, target = sentences()
    rows = watched(model, [(source, target)])
    naive = naive_maps(model, source, target)
    for (stack, kind, layer), cells in naive.items():
        prefix = "cross_" if kind == "cross" else ""
        entropies = {key: entropy(p) for key, p in cells["maps"].items()}

        def check(quantity: str, right: float, head=None, at=(f"{prefix}", stack, layer)) -> None:
            found = number(rows, f"{at[0]}{quantity}", at[1], at[2], head)
            assert found == pytest.approx(right, rel=1e-9, abs=1e-9), (quantity, *at)

        check("attention_entropy", float(np.mean(list(entropies.values()))))
        of_head = [value for (_, _, h), value in entropies.items() if h == 1]
        check("attention_entropy_p25", float(np.quantile(of_head, 0.25)), head=1)
        free = [math.log(len(cells["maps"][*row, 0])) for row in cells["rows"]]
        check("attention_free_entropy", float(np.mean(free)))
        check("peaked_rows", float(np.mean([p.max() > 0.99 for p in cells["maps"].values()])))
        check("largest_logit", max(cells["logits"]))
        if CONFIGS[name].residual_attention not in (None, "none"):
            squares = [sum(v**2 for v in cells[part].values()) for part in ("own", "total")]
            found = number(rows, f"{prefix}score_ratio", stack, layer)
            assert found == pytest.approx(math.sqrt(squares[0] / squares[1]))
            # The two norms of equal scores may differ in the last bit: the order of their sums
            # depends on how the memory is aligned.
            assert layer > 1 or found == pytest.approx(1.0, rel=1e-12)
        else:
            assert not any(row.quantity.endswith("score_ratio") for row in rows)
        below = naive.get((stack, kind, layer - 1))
        if below is None:
            here = [r for r in rows if r.quantity.startswith("cross_") == bool(prefix)]
            names = [r.quantity for r in here if (r.layer, r.stack) == (layer, stack)]
            assert not any("attention_distance" in each for each in names)
            continue
        maps, lower, places = cells["maps"], below["maps"], cells["rows"]
        table = np.empty((2, 2))
        for i, j in np.ndindex(2, 2):
            table[i, j] = np.mean([divergence(maps[*row, i], lower[*row, j]) for row in places])
        check("attention_distance", np.trace(table) / 2)
        check("attention_distance", table[1, 1], head=1)
        check("attention_matched", min(np.trace(table), np.trace(table[::-1])) / 2)


@pytest.mark.usefixtures("float64")
@torch.no_grad()
def test_states_are_those_of_the_stream() -> None:
    """Pre-LN by hand: the stream of an encoder, what enters it, and its output after the norm."""
    model = randomise(masked_model("pre_ln")).eval()
    tokens = words(3, 7)
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[2] = False  # a blank row
    places = torch.tensor([1, 4])
    with ActivationHooks(model) as taps:
        taps.expect({"encoder": real})
        model(tokens, places)
    rows = taps.rows(0)
    x = model.embedding(tokens)
    for layer in range(4):
        if layer:
            block: Any = model.encoder.blocks[layer - 1]
            u = block.around_self.norm_input(x)
            mask = torch.ones(1, 1, 1, 7, dtype=torch.bool)
            attention = block.self_attention
            projections = (attention.query, attention.key, attention.value)
            parts = [f(u).unflatten(-1, (2, -1)).transpose(1, 2) for f in projections]
            heads = nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask)
            x = x + attention.output(heads.transpose(1, 2).flatten(2))
            x = x + block.feed_forward(block.around_ff.norm_input(x))
        expected = float(x[:2].square().mean())
        assert number(rows, "hidden_norm", "encoder", layer) == pytest.approx(expected)
        if layer:
            assert number(rows, "sum_norm", "encoder", layer) == pytest.approx(expected)
        cosine = nn.functional.cosine_similarity(x[:2, :, None], x[:2, None], dim=-1)
        pairs = float((cosine.sum() - 2 * 7) / (2 * 7 * 6))
        assert number(rows, "token_cosine", "encoder", layer) == pytest.approx(pairs)
        assert 1.0 < number(rows, "token_rank", "encoder", layer) < 7.0
    expected = float(model.encoder.final_norm(x)[:2].square().mean())
    assert number(rows, "output_norm", "encoder", None) == pytest.approx(expected)


@pytest.mark.usefixtures("float64")
def test_the_sum_before_post_ln_is_not_its_norm() -> None:
    """Lemma 2's vector: after Post-LN's norm of a fresh model every squared norm is d."""
    model = translator("post_ln").eval()
    source, target = sentences()
    rows = watched(model, [(source, target)])
    for layer in (1, 2, 3):
        assert number(rows, "hidden_norm", "encoder", layer) == pytest.approx(1.0, abs=1e-3)
        assert number(rows, "sum_norm", "encoder", layer) > 1.05


def test_batches_are_weighed_by_what_is_in_them_without_padding() -> None:
    """Two batches, one of them of a single sentence, are as one of all sentences."""
    model = randomise(translator("realformer")).eval()
    source, target = sentences()
    whole = watched(model, [(source, target)])
    parts = watched(model, [(source[:1], target[:1]), (source[1:], target[1:])])
    skipped = ("score_ratio", "cross_score_ratio")  # a ratio of norms is no mean over items
    pairs = [(a, b) for a, b in zip(whole, parts, strict=True) if a.quantity not in skipped]
    assert [a[:-1] for a, _ in pairs] == [b[:-1] for _, b in pairs]
    values = ([row.value for row in rows] for rows in zip(*pairs, strict=True))
    np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-5)
    longer = [nn.functional.pad(part, (0, 4), value=PAD) for part in (source, target)]
    padded = watched(model, [(longer[0], longer[1])])  # the same rows
    assert [row[:-1] for row in whole] == [row[:-1] for row in padded]
    values = ([row.value for row in of] for of in (whole, padded))
    np.testing.assert_allclose(*values, rtol=2e-3, atol=1e-5)


def outputs(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
    model.zero_grad()
    logits = model(*inputs)
    yield logits
    logits.square().sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield parameter.grad.clone()


@pytest.mark.in_turn(24)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("positions", ["sinusoidal", "rope"])
def test_hooks_change_no_bit_and_are_removed_even_after_an_error(
    preset: str, positions: str
) -> None:
    heads = 2 if preset == "differential" else 1
    architecture: dict[str, Any] = {"model_dim": 12, "num_heads": heads}
    model = randomise(translator(preset, positions=positions, **architecture)).eval()
    source, target = sentences()
    inputs = (source, target[:, :-1])
    before = list(outputs(model, inputs))
    hooks = hooks_of(model)
    with ActivationHooks(model) as taps:
        assert hooks_of(model) > hooks
        taps.expect(real_of(source, target))
        during = list(outputs(model, inputs))
    assert hooks_of(model) == hooks
    after = list(outputs(model, inputs))
    for a, b, c in zip(before, during, after, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    rows = taps.rows(0)
    assert all(math.isfinite(row.value) for row in rows)
    for stack, depth in (("encoder", 3), ("decoder", 2)):
        for layer in range(1, depth + 1):
            for quantity in ("hidden_norm", "sum_norm", "token_cosine", "attention_entropy"):
                number(rows, quantity, stack, layer)

    with pytest.raises(ZeroDivisionError), ActivationHooks(model):
        raise ZeroDivisionError
    assert hooks_of(model) == hooks
