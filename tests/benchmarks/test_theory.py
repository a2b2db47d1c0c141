"""The program of the theory: its instruments against plain formulas, its claims on small draws."""

import csv
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.theory import lemmas, models, run
from benchmarks.theory.lemmas import (
    POST,
    PRE,
    Draws,
    Skipless,
    TheorySetting,
    fitted_line,
    power_law,
    seeded,
)
from benchmarks.theory.models import ZipfCorpus
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import full_mask
from lightning_app.blocks.norm import EPSILON
from lightning_app.models.heads import (
    ArchitectureConfig,
    CausalLanguageModel,
    EncoderDecoder,
    build_model,
)
from lightning_app.models.stack import BlockStack

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("theory")]  # the draws are shared

both = pytest.mark.parametrize("preset", [POST, PRE])
TINY = TheorySetting(dim=64, tokens=5, draws=3, depths=(2, 4), classes=7)


# The theoretical setting.


@both
def test_theoretical_setting_is_that_of_the_paper(preset: str) -> None:
    dim = 96
    encoder = lemmas.theoretical_encoder(preset, 2, dim)
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    for _, block in encoder.layers:
        attention, feed_forward = block.self_attention, block.feed_forward
        assert isinstance(attention.value, torch.nn.Linear)
        assert isinstance(attention.output, torch.nn.Identity)
        assert attention.num_heads == 1
        for part in (attention.query, attention.key):
            assert part.weight.count_nonzero() == 0
        for part in (attention.value, feed_forward.inner, feed_forward.outer):
            assert part.weight.shape == (dim, dim)
            assert part.weight.std().item() == pytest.approx(dim**-0.5, rel=0.05)
            # Normal, not uniform of the same spread.
            assert (part.weight.abs() > 2 * dim**-0.5).float().mean() > 0.03
            assert part.bias.count_nonzero() == 0
        x = torch.randn(1, 5, dim)
        parts = attention.queries_keys_values(x, None)
        found, _ = attention(*parts, full_mask(5, x.device), None)
        mean = (x @ attention.value.weight.T).mean(dim=1, keepdim=True)
        torch.testing.assert_close(found, mean.expand_as(found), atol=1e-5, rtol=1e-4)


def layer_norm(x: Tensor) -> Tensor:
    y = x - x.mean(dim=-1, keepdim=True)
    return y / (y.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt()


def plain_draw(
    preset: str, encoder: BlockStack, x: Tensor
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """The same stack with matrices alone: streams, output, and the W2 of each layer."""
    streams, outer = ([x] if preset == PRE else []), []
    for _, block in encoder.layers:
        assert isinstance(block.self_attention.value, torch.nn.Linear)
        value = block.self_attention.value.weight.T
        inner = block.feed_forward.inner.weight.T
        outer.append(block.feed_forward.outer.weight.T.detach().clone().requires_grad_(True))
        if preset == POST:
            x = layer_norm(x + (x @ value).mean(dim=0))
            x = x + torch.relu(x @ inner) @ outer[-1]
            streams.append(x)
            x = layer_norm(x)
        else:
            x = x + (layer_norm(x) @ value).mean(dim=0)
            x = x + torch.relu(layer_norm(x) @ inner) @ outer[-1]
            streams.append(x)
    return streams, (layer_norm(x) if preset == PRE else x), outer


@both
@pytest.mark.usefixtures("float64")
def test_draws_are_those_of_the_plain_formulas(preset: str) -> None:
    with seeded(9):
        found = lemmas.random_draw(preset, 3, TINY, every_layer=True)
    with seeded(9):
        encoder = lemmas.theoretical_encoder(preset, 3, TINY.dim)
        x = torch.randn(1, TINY.tokens, TINY.dim)[0]
        classes = torch.randn(TINY.classes, TINY.dim) * TINY.dim**-0.5
        position = int(torch.randint(TINY.tokens, ()))
        label = torch.randint(TINY.classes, (1,))
    streams, states, outer = plain_draw(preset, encoder, x)
    loss = -(classes @ states[position]).log_softmax(dim=0)[label].squeeze()
    below, above, *gradients = torch.autograd.grad(loss, [streams[-1], states, *outer])
    assert len(found.squared) == (4 if preset == PRE else 3)
    expected = torch.stack([stream.square().sum(dim=-1) / TINY.dim for stream in streams])
    torch.testing.assert_close(torch.tensor(found.squared), expected.detach())
    assert found.gradients == pytest.approx([gradient.norm().item() for gradient in gradients])
    assert found.through_norm == pytest.approx((below.norm() / above.norm()).item())
    with seeded(9):
        last = lemmas.random_draw(preset, 3, TINY)
    assert last.gradients == pytest.approx(found.gradients[-1:])


def test_growth_lies_between_the_bounds_and_meets_them() -> None:
    """One token is its own mean: the upper bound. Many tokens start along the lower one."""
    assert lemmas.pre_ln_growth(9, 1) == pytest.approx([1 + 1.5 * n for n in range(10)])
    assert lemmas.pre_ln_growth(1, 10**9)[1] == pytest.approx(1.5)
    for tokens in (2, 16, 500):
        for layer, q in enumerate(lemmas.pre_ln_growth(40, tokens)):
            assert 1 + layer / 2 <= q <= 1 + 1.5 * layer


@pytest.fixture(scope="module")
def draws() -> Draws:
    return lemmas.draw_all(TheorySetting(dim=128, classes=200))


def test_what_tests_may_assert_of_depth(draws: Draws) -> None:
    assert abs(power_law(draws.gradients(POST)).slope) < 0.1
    assert -0.60 <= power_law(draws.gradients(PRE)).slope <= -0.45
    grown = draws.squared(PRE)
    assert fitted_line(range(len(grown)), grown).r_squared > 0.98
    flat = draws.squared(POST)
    assert abs(fitted_line(range(len(flat)), flat).slope) < 0.01
    assert sum(flat) / len(flat) == pytest.approx(1.5, rel=0.03)
    # Gradients do not grow towards the output in an encoder: (2/3)^(1/2) is not what is found.
    factors = [lemmas.downward_factor(one.gradients) for one in draws.every[POST]]
    assert sum(factors) / len(factors) == pytest.approx(1.0, abs=0.05)


def test_exchanged_placements_are_found_out(draws: Draws) -> None:
    """The claims can fail: what is said of one placement is untrue of the other."""
    swapped = {POST: draws.last[PRE], PRE: draws.last[POST]}
    wrong = list(lemmas.theorem_1(replace(draws, last=swapped)))
    assert sum(one.promised and not one.holds for one in wrong) == 2


# Attention without a skip.


def test_rank_collapses_without_shaping_alone() -> None:
    cosines = lemmas.collapse(Skipless(dim=96, tokens=12, draws=2))
    assert all(len(one) == 19 for found in cosines.values() for one in found)
    statements = list(lemmas.rank_collapse(cosines))
    assert len(statements) == 4
    assert all(one.promised and one.holds for one in statements)
    for name, found in cosines.items():
        for one in found:
            assert abs(one[0]) < 0.05  # the input has no common direction
            assert (min(one[3:]) > 0.95) == name.startswith("plain")
            assert (max(one) < 0.05) == (not name.startswith("plain"))
    exchanged = dict(zip(cosines, reversed(cosines.values()), strict=True))
    assert not any(one.holds for one in lemmas.rank_collapse(exchanged))


# Figure 3 in our models.

SMALL = ArchitectureConfig(
    encoder_depth=2, decoder_depth=3, model_dim=16, ff_dim=24, num_heads=2, dropout=0.0
)
FEW = ZipfCorpus(vocabulary=29, length=7, sentences=4, batches=2)


@both
@pytest.mark.usefixtures("float64")
def test_expected_gradient_is_averaged_before_the_norm(preset: str) -> None:
    with seeded(4):
        found = models.fingerprint(preset, SMALL, FEW)
    with seeded(4):
        model = build_model(SMALL, BlockConfig(preset=preset), FEW.vocabulary, 0)
        batches = [FEW.batch() for _ in range(2)]
    assert isinstance(model, EncoderDecoder)
    # Both batches in one: they are of one size, so the mean over all is the mean of means.
    source, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
    logits = model(source, target[:, :-1])
    logs = logits.log_softmax(dim=-1)
    right = logs.gather(-1, target[:, 1:, None]).mean()
    loss = -(0.9 * right + 0.1 * logs.mean())
    loss.backward()
    assert found.loss == pytest.approx(loss.item())
    for stack, part in (("encoder", model.encoder), ("decoder", model.decoder)):
        assert len(found.outer[stack]) == len(part.blocks)
        for layer in range(len(part.blocks)):
            for norms, name in ((found.inner, "inner"), (found.outer, "outer")):
                weight = part.get_parameter(f"blocks.{layer}.feed_forward.{name}.weight")
                assert weight.grad is not None
                assert norms[stack][layer] == pytest.approx(weight.grad.norm().item())


def plain_decoder(model: CausalLanguageModel, preset: str, tokens: Tensor, seen: Tensor) -> Tensor:
    """The logits of a decoder alone, with matrices and loops over sentences, blocks and heads."""
    named = dict(model.named_parameters())
    table, positions = named["embedding.tokens.weight"], tokens.shape[1]
    d, heads = SMALL.model_dim, SMALL.num_heads
    angles = torch.arange(positions)[:, None] / 10_000 ** (torch.arange(0, d, 2) / d)
    order = torch.zeros(positions, d)
    order[:, 0::2], order[:, 1::2] = angles.sin(), angles.cos()

    def attend(x: Tensor, block: str) -> Tensor:
        query, key, value, output = (
            named[f"{block}.self_attention.{part}.weight"].T
            for part in ("query", "key", "value", "output")
        )
        read = []
        for columns in torch.arange(d).split(d // heads):
            scores = (x @ query[:, columns]) @ (x @ key[:, columns]).T / (d // heads) ** 0.5
            weights = scores.exp() * seen
            read.append(weights / weights.sum(dim=1, keepdim=True) @ x @ value[:, columns])
        return torch.cat(read, dim=1) @ output

    def forward(x: Tensor, block: str) -> Tensor:
        inner, outer = (named[f"{block}.feed_forward.{n}.weight"].T for n in ("inner", "outer"))
        return torch.relu(x @ inner) @ outer

    logits = []
    for sentence in tokens:
        x = table[sentence] * d**0.5 + order
        for layer in range(SMALL.decoder_depth):
            for part in (attend, forward):
                block = f"decoder.blocks.{layer}"
                if preset == POST:
                    x = layer_norm(x + part(x, block))
                else:
                    x = x + part(layer_norm(x), block)
        logits.append((layer_norm(x) if preset == PRE else x) @ table.T)
    return torch.stack(logits)


@both
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.usefixtures("float64")
def test_decoder_alone_has_the_gradients_of_the_plain_formulas(preset: str, causal: bool) -> None:
    sizes = replace(SMALL, kind="decoder")
    with seeded(4):
        found = models.fingerprint(preset, sizes, FEW, causal=causal)
    with seeded(4):
        model = build_model(sizes, BlockConfig(preset=preset), FEW.vocabulary, 0)
        target = torch.cat([FEW.batch()[1] for _ in range(2)])
    assert isinstance(model, CausalLanguageModel)
    every = torch.ones(FEW.length, FEW.length)
    logits = plain_decoder(model, preset, target[:, :-1], every.tril() if causal else every)
    logs = logits.log_softmax(dim=-1)
    right = logs.gather(-1, target[:, 1:, None]).mean()
    loss = -(0.9 * right + 0.1 * logs.mean())
    assert found.loss == pytest.approx(loss.item())
    assert list(found.outer) == list(found.inner) == ["decoder"]
    for norms, name in ((found.inner, "inner"), (found.outer, "outer")):
        weights = [
            model.decoder.get_parameter(f"blocks.{layer}.feed_forward.{name}.weight")
            for layer in range(SMALL.decoder_depth)
        ]
        exact = torch.autograd.grad(loss, weights, retain_graph=True)
        assert norms["decoder"] == pytest.approx([gradient.norm().item() for gradient in exact])


@pytest.mark.parametrize(("preset", "recorded"), [(POST, 1.63), (PRE, 0.67)])
def test_final_gradient_of_the_real_size(preset: str, recorded: float) -> None:
    """6-6, d = 512, two seeds of the program's three."""
    sizes = models.architecture("encoder_decoder", 6)
    finals = []
    for number in (1, 2):
        with seeded(number):
            found = models.fingerprint(preset, sizes, ZipfCorpus(), last_only=True)
        finals.append(found.outer["decoder"][-1])
    assert sum(finals) / 2 == pytest.approx(recorded, rel=0.2)


def test_gradients_of_the_real_size_grow_by_cross_attention() -> None:
    """6 layers, d = 512, one seed of the program's three; the decoder of 6-6 has 0.81."""
    with seeded(1):
        alone = models.fingerprint(POST, models.architecture("decoder", 6), ZipfCorpus())
    (factor,) = models.layer_factors([alone], "decoder")
    assert 0.92 < factor < 1.0


def test_the_promised_statements_hold(tmp_path: Path) -> None:
    """The whole program, about two minutes: `python benchmarks/theory/run.py`."""
    program = Path(run.__file__)
    environment = {**os.environ, "PYTHONPATH": str(program.parents[2])}
    command = [sys.executable, str(program), "--out", str(tmp_path)]
    subprocess.run(command, env=environment, check=True)
    with (tmp_path / "theory.csv").open(encoding="utf-8") as file:
        promised = [row for row in csv.DictReader(file) if row["promised"] == "true"]
    assert len(promised) >= 20
    assert all(row["holds"] == "true" for row in promised)
    assert len(list(tmp_path.glob("theory_*.svg"))) == 7
