"""The theory command: its instruments against plain formulas, its claims on small draws."""

import csv
import io
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.colors import to_hex, to_rgba_array
from torch import Tensor

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import full_mask
from lightning_app.blocks.norm import EPSILON
from lightning_app.core.errors import UserError
from lightning_app.lab.theory import lemmas, models, run
from lightning_app.lab.theory import lemmas as collapse
from lightning_app.lab.theory import lemmas as draws_module
from lightning_app.lab.theory import run as figures
from lightning_app.lab.theory.lemmas import (
    POST,
    PRE,
    Draw,
    Draws,
    Skipless,
    Statement,
    TheorySetting,
    fitted_line,
    power_law,
    seeded,
    statements_table,
    statements_to_csv,
)
from lightning_app.lab.theory.models import Fingerprint, Prints, ZipfCorpus
from lightning_app.models.heads import (
    ArchitectureConfig,
    CausalLanguageModel,
    EncoderDecoder,
    build_model,
)
from lightning_app.models.stack import BlockStack
from lightning_app.probes.figures import looks

pytestmark = pytest.mark.xdist_group("theory")  # what they share is made once

both = pytest.mark.parametrize("preset", [POST, PRE])
TINY = TheorySetting(dim=64, tokens=5, draws=3, depths=(2, 4), classes=7)


def statement(**changes) -> Statement:
    fields = {
        "claim": "c",
        "source": "s",
        "predicted": 1.0,
        "measured": 1.0,
        "accepted": (0.5, 2.0),
    }
    return Statement(**{**fields, **changes})


@pytest.mark.parametrize(
    ("measured", "holds"),
    [(0.5, True), (2.0, True), (0.49, False), (2.01, False), (math.nan, False)],
)
def test_a_claim_holds_within_its_range(measured: float, holds: bool) -> None:
    assert statement(measured=measured).holds == holds


def test_csv_says_what_was_predicted_and_found() -> None:
    rows = [
        statement(claim="a, b", interval=(0.9, 1.1)),
        statement(measured=3.0, promised=False),
    ]
    read = list(csv.DictReader(io.StringIO(statements_to_csv(rows))))
    assert list(read[0])[:4] == ["statement", "predicted", "measured", "holds"]
    assert [row["statement"] for row in read] == ["a, b", "c"]
    assert [row["holds"] for row in read] == ["true", "false"]
    assert [row["promised"] for row in read] == ["true", "false"]
    assert [row["low"] for row in read] == ["0.9", ""]


def test_table_marks_a_broken_promise_alone() -> None:
    rows = [statement(), statement(measured=3.0), statement(measured=3.0, promised=False)]
    shown = list(statements_table(rows).columns[-1].cells)
    assert [text for text in shown if text] == [
        "yes",
        "[bold red]no[/bold red]",
        "(no)",
    ]


def test_fits_find_a_known_exponent_and_its_interval() -> None:
    exact = power_law({2: [4.0 * 2**-0.5], 8: [4.0 * 8**-0.5], 32: [4.0 * 32**-0.5]})
    assert exact.slope == pytest.approx(-0.5)
    assert math.exp(exact.intercept) == pytest.approx(4.0)
    assert exact.high - exact.low < 1e-6
    # By hand: slope 4.4 / 5, intercept 0.08; Student's t of two degrees of freedom is 4.303.
    loose = fitted_line([0, 1, 2, 3], [0.1, 0.8, 2.1, 2.6])
    residual = sum((y - 0.08 - 0.88 * x) ** 2 for x, y in enumerate([0.1, 0.8, 2.1, 2.6])) / 2
    assert loose.slope == pytest.approx(0.88)
    assert loose.high - loose.slope == pytest.approx(4.302653 * (residual / 5) ** 0.5, rel=1e-6)


def test_drawing_leaves_the_generator_of_the_caller_alone() -> None:
    before = torch.get_rng_state()
    with seeded(1, 2):
        first = torch.randn(3)
    assert torch.equal(torch.get_rng_state(), before)
    with seeded(1, 2):
        assert torch.equal(torch.randn(3), first)
    with seeded(2, 1):
        assert not torch.equal(torch.randn(3), first)


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


# The theoretical setting.


@both
def test_theoretical_setting_is_that_of_the_paper(preset: str) -> None:
    dim = 96
    encoder = draws_module.theoretical_encoder(preset, 2, dim)
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
        found = draws_module.random_draw(preset, 3, TINY, every_layer=True)
    with seeded(9):
        encoder = draws_module.theoretical_encoder(preset, 3, TINY.dim)
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
        last = draws_module.random_draw(preset, 3, TINY)
    assert last.gradients == pytest.approx(found.gradients[-1:])


def test_growth_lies_between_the_bounds_and_meets_them() -> None:
    """One token is its own mean: the upper bound. Many tokens start along the lower one."""
    assert lemmas.pre_ln_growth(9, 1) == pytest.approx([1 + 1.5 * n for n in range(10)])
    assert lemmas.pre_ln_growth(1, 10**9)[1] == pytest.approx(1.5)
    for tokens in (2, 16, 500):
        for layer, q in enumerate(lemmas.pre_ln_growth(40, tokens)):
            assert 1 + layer / 2 <= q <= 1 + 1.5 * layer


def test_growth_takes_the_right_kernel() -> None:
    """E relu(u) relu(v) of two Gaussians of correlation c, against a sample."""
    u, v = torch.randn(2, 400_000, dtype=torch.float64)
    q, p = 1.0 + 1 / 4, 1 / 4  # after the attention of layer 1 with 4 tokens
    c = p / q
    sample = (u.relu() * (c * u + math.sqrt(1 - c * c) * v).relu()).mean().item()
    p, q = p + sample, q + 0.5
    expected = q + (1 / 4 + 3 / 4 * p / q) + 0.5
    assert lemmas.pre_ln_growth(2, 4)[2] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("length", [0.1, 1.0, 100.0])
def test_jacobian_of_the_norm(length: float) -> None:
    x = length * torch.randn(17, dtype=torch.float64) + 3.0
    found = torch.autograd.functional.jacobian(layer_norm, x)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(lemmas.layer_norm_jacobian(x), found, rtol=1e-9, atol=1e-9)
    y = x - x.mean()
    exact = (y.square().mean() + EPSILON) ** -0.5
    torch.testing.assert_close(torch.linalg.matrix_norm(found, 2), exact)


def test_downward_factor() -> None:
    assert lemmas.downward_factor([1.0, 2.0, 4.0]) == pytest.approx(0.5)
    assert lemmas.downward_factor([3.0, 3.0]) == pytest.approx(1.0)


@pytest.fixture(scope="module")
def draws() -> Draws:
    return draws_module.draw_all(TheorySetting(dim=128, classes=200))


def by_claim(statements) -> dict[str, Statement]:
    return {one.claim: one for one in statements}


@pytest.mark.parametrize("part", ["lemma_2", "lemma_3", "theorem_1", "extension"])
# Over 5 s: the draws that these tests share.
def test_promised_statements_hold(draws: Draws, part: str) -> None:
    found = list(getattr(lemmas, part)(draws))
    assert found
    assert [one for one in found if one.promised and not one.holds] == []


@pytest.mark.parametrize(
    "part", [pytest.param("lemma_1", marks=pytest.mark.slow), "theorem_1_by_width"]
)
def test_promised_statements_of_the_setting_hold(draws: Draws, part: str) -> None:
    found = list(getattr(lemmas, part)(draws.setting))
    assert found
    assert all(one.promised and one.holds for one in found)


@pytest.mark.slow
def test_lemma_1_is_tried_on_two_draws(draws: Draws) -> None:
    """ReLU is homogeneous: of one draw, the second scale could not fail alone."""
    small, large = lemmas.lemma_1(draws.setting)
    assert abs(small.measured - large.measured) > 1e-4


@pytest.mark.parametrize(("exponent", "holds"), [(0.5, True), (0.9, False), (0.1, False)])
def test_exponent_of_the_width_that_is_not_the_predicted_one_is_found_out(
    monkeypatch: pytest.MonkeyPatch, exponent: float, holds: bool
) -> None:
    def drawn(preset: str, depth: int, setting: TheorySetting) -> Draw:
        return Draw([], [setting.dim**exponent], 1.0)

    monkeypatch.setattr(lemmas, "random_draw", drawn)
    (found,) = lemmas.theorem_1_by_width(TINY)
    assert found.measured == pytest.approx(exponent)
    assert found.holds == holds


def test_what_tests_may_assert_of_depth(draws: Draws) -> None:
    """The numbers themselves: exponents, the line of squared norms and its constant."""
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


def test_streams_of_another_size_are_found_out(draws: Draws) -> None:
    def scaled(one: Draw) -> Draw:
        return replace(one, squared=[[0.3 * q for q in layer] for layer in one.squared])

    depth = draws.setting.depths[-1]
    last = {preset: {depth: [*map(scaled, draws.last[preset][depth])]} for preset in (POST, PRE)}
    held = [one.holds for one in lemmas.lemma_2(replace(draws, last=last))]
    # The mean and the extremes are wrong; a line stays a line.
    assert held == [False, False, False, False, True, False]


# Attention without a skip.


def test_rank_collapses_without_shaping_alone() -> None:
    cosines = collapse.collapse(Skipless(dim=96, tokens=12, draws=2))
    assert all(len(one) == 19 for found in cosines.values() for one in found)
    statements = list(collapse.rank_collapse(cosines))
    assert len(statements) == 4
    assert all(one.promised and one.holds for one in statements)
    for name, found in cosines.items():
        for one in found:
            assert abs(one[0]) < 0.05  # the input has no common direction
            assert (min(one[3:]) > 0.95) == name.startswith("plain")
            assert (max(one) < 0.05) == (not name.startswith("plain"))
    exchanged = dict(zip(cosines, reversed(cosines.values()), strict=True))
    assert not any(one.holds for one in collapse.rank_collapse(exchanged))


def test_skipless_attention_starts_as_it_does_in_a_block() -> None:
    setting = Skipless(dim=96, tokens=4)
    attention = collapse.skipless_attention(collapse.PLAIN, setting)
    bound = math.sqrt(0.5 * 6 / (2 * 96))
    for part in (attention.query, attention.key, attention.value):
        assert isinstance(part, torch.nn.Linear)
        assert 0.95 * bound < part.weight.abs().max() <= bound
    shaped = collapse.skipless_attention(collapse.SHAPED, setting)
    assert shaped.query.weight.count_nonzero() == 0


# Figure 3 in our models.

SMALL = ArchitectureConfig(
    encoder_depth=2, decoder_depth=3, model_dim=16, ff_dim=24, num_heads=2, dropout=0.0
)
FEW = ZipfCorpus(vocabulary=29, length=7, sentences=4, batches=2)


def test_corpus_is_zipf_without_padding() -> None:
    source, target = ZipfCorpus(vocabulary=50, length=11, sentences=2000).batch()
    assert source.shape == (2000, 11)
    assert target.shape == (2000, 12)
    for words in (source, target):
        assert words.min() == 1
        assert words.max() == 49
        counts = torch.bincount(words.flatten(), minlength=50).double()
        assert (counts[1] / counts[2]).item() == pytest.approx(2.0, rel=0.1)
        assert (counts[1] / counts[8]).item() == pytest.approx(8.0, rel=0.2)


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


def test_control_differs_from_the_decoder_alone_by_its_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "architecture", lambda kind, _: replace(SMALL, kind=kind))
    (control,) = models.without_mask(FEW, 1)
    for causal, same in ((False, True), (True, False)):
        with seeded(1):
            found = models.fingerprint(POST, replace(SMALL, kind="decoder"), FEW, causal=causal)
        assert (found == control) == same


def test_an_encoder_decoder_is_not_measured_without_its_mask() -> None:
    with seeded(4), pytest.raises(AssertionError):
        models.fingerprint(POST, SMALL, FEW, causal=False)


@pytest.mark.parametrize("preset", [POST, "admin", "dual_stream"])
def test_last_layer_alone_is_the_last_of_all(preset: str) -> None:
    with seeded(4):
        whole = models.fingerprint(preset, SMALL, FEW)
    with seeded(4):
        last = models.fingerprint(preset, SMALL, FEW, last_only=True)
    assert last.outer == {"encoder": [], "decoder": pytest.approx(whole.outer["decoder"][-1:])}
    assert last.loss == pytest.approx(whole.loss)


def test_admin_is_profiled_before_its_gradients_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with seeded(4):
        profiled = models.fingerprint("admin", SMALL, FEW)
    monkeypatch.setattr(models, "needs_profiling", lambda model: False)
    with seeded(4):
        unprofiled = models.fingerprint("admin", SMALL, FEW)
    with seeded(4):
        post = models.fingerprint(POST, SMALL, FEW)
    assert unprofiled.outer["decoder"] == pytest.approx(post.outer["decoder"], rel=1e-4)
    assert profiled.outer["decoder"] != pytest.approx(post.outer["decoder"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "recorded"), [(POST, 1.63), (PRE, 0.67)])
def test_final_gradient_of_the_real_size(preset: str, recorded: float) -> None:
    """6-6, d = 512, two seeds of the command's three."""
    sizes = models.architecture("encoder_decoder", 6)
    assert (sizes.model_dim, sizes.ff_dim, sizes.num_heads) == (512, 1024, 4)
    finals = []
    for number in (1, 2):
        with seeded(number):
            found = models.fingerprint(preset, sizes, ZipfCorpus(), last_only=True)
        finals.append(found.outer["decoder"][-1])
    assert sum(finals) / 2 == pytest.approx(recorded, rel=0.2)


def prints(final: float) -> Prints:
    shape = {"encoder": [1.0] * 6, "decoder": [1.5 ** (layer / 2) for layer in range(6)]}
    same = Fingerprint(9.2, shape, shape)
    every = {depth: [final, final] for depth in models.DEPTHS}
    finals = {name: every if name in (POST, PRE) else {6: [final]} for name in models.FINGERPRINTS}
    return Prints({POST: [same, same]}, finals)


def test_claims_about_models_follow_their_numbers() -> None:
    found = by_claim(models.figure_3(prints(1.7)))
    final = "expected W2 gradient of the final layer"
    assert found[f"post_ln, 6-6: {final}"].holds
    assert found[f"post_ln, 12-12: {final}"].holds
    assert not found[f"pre_ln, 6-6: {final}"].holds
    rows = {claim: one for claim, one in found.items() if claim.endswith(final)}
    assert all(one.promised for one in rows.values())
    assert {claim.split(":")[0]: one.predicted for claim, one in rows.items()} == {
        "post_ln, 6-6": 1.63,
        "post_ln, 12-12": 1.87,
        "pre_ln, 6-6": 0.67,
        "pre_ln, 12-12": 0.50,
        "peri_ln, 6-6": 0.64,
        "sandwich_ln, 6-6": 0.64,
        "deepnorm, 6-6": 0.69,
        "b2t, 6-6": 0.87,
        "admin, 6-6": 0.58,
        "dual_stream, 6-6": 2.44,
    }
    for one in rows.values():
        assert one.accepted == pytest.approx((0.8 * one.predicted, 1.2 * one.predicted))
    decoder, encoder = (one for claim, one in found.items() if "coder of 6-6" in claim)
    assert decoder.holds
    assert decoder.measured == pytest.approx((2 / 3) ** 0.5)
    assert not encoder.holds
    assert encoder.measured == pytest.approx(1.0)
    exponents = [one for claim, one in found.items() if "exponent" in claim]
    assert [one.holds for one in exponents] == [True, False]


def growing(factor: float) -> list[Fingerprint]:
    """Two decoders whose gradients have this factor from a layer to the one below."""
    norms = {"decoder": [factor**-layer for layer in range(6)]}
    return [Fingerprint(9.2, norms, norms)] * 2


@pytest.mark.parametrize(
    ("factor", "control", "held"),
    [
        ((2 / 3) ** 0.5, (2 / 3) ** 0.5, [True, False, False, True]),
        ((2 / 3) ** 0.5, 1.0, [True, False, False, False]),
        (1.0, 1.0, [False, True, True, True]),
        (0.9, 1.0, [False, False, False, False]),
    ],
)
def test_claims_about_a_decoder_alone_tell_the_mask_from_cross_attention(
    factor: float, control: float, held: list[bool]
) -> None:
    finals = {depth: [depth**-0.5] * 2 for depth in models.DEPTHS}
    alone = Prints({POST: growing(factor)}, {POST: finals, PRE: finals})
    found = list(models.decoder_alone(prints(1.7), alone, growing(control)))
    crossed = (2 / 3) ** 0.5
    assert [one.measured for one in found[:4]] == pytest.approx(
        [factor, factor, crossed / factor, factor / control]
    )
    assert [one.predicted for one in found[:4]] == pytest.approx([crossed, 1.0, crossed, 1.0])
    assert [one.holds for one in found[:4]] == held
    assert [one.holds for one in found[4:]] == [False, True]
    assert [one.measured for one in found[4:]] == pytest.approx([-0.5, -0.5])
    assert not any(one.promised for one in found)


@pytest.mark.slow
def test_gradients_of_the_real_size_grow_by_cross_attention() -> None:
    """6 layers, d = 512, one seed of the command's three; the decoder of 6-6 has 0.81."""
    with seeded(1):
        alone = models.fingerprint(POST, models.architecture("decoder", 6), ZipfCorpus())
    (factor,) = models.layer_factors([alone], "decoder")
    assert 0.92 < factor < 1.0


# The figures.


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were to be written."""
    kept: list[Any] = []

    def keep(figure: Any, path: Path) -> Path:
        kept.append(figure)
        return path

    monkeypatch.setattr(figures, "save", keep)
    return kept


def test_a_curve_under_another_can_be_seen(drawn: list[Any]) -> None:
    names = [*collapse.SKIPLESS, collapse.SAS]
    figures.draw_rank_collapse(Path("x"), {name: [[0.0, 1.0, 1.0]] * 2 for name in names})
    lines = {line.get_label(): line for line in drawn[0].axes[0].lines}
    below, over = (lines[name] for name in names[:2])
    assert below.get_linestyle() == "-"
    assert over.get_linestyle() == "--"
    assert below.get_linewidth() > 2 * over.get_linewidth()
    assert below.get_markersize() > 2 * over.get_markersize()
    assert len({lines[name].get_color() for name in names}) == 4


def prints_of(*presets: str) -> Prints:
    norms = {"encoder": [0.12, 0.2, 0.3, 0.5, 1.0, 2.0], "decoder": [0.6] * 6}
    found = [Fingerprint(9.2, norms, norms)] * 2
    finals = {depth: [0.6, 0.6] for depth in models.DEPTHS}
    return Prints(dict.fromkeys(presets, found), dict.fromkeys(presets, finals))


def test_the_axis_of_the_fingerprints_names_its_values(drawn: list[Any]) -> None:
    figures.fingerprints(Path("x"), prints_of(POST, PRE))
    (drawing,) = drawn
    drawing.canvas.draw()
    axes = drawing.axes[0]
    low, high = axes.get_ylim()
    ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    names = [text.get_text() for value, text in ticks if low <= value <= high]
    assert {"0.2", "0.5", "1", "2"} <= set(names)


def test_decoder_panels_show_the_decoder_alone(drawn: list[Any]) -> None:
    norms = {"decoder": [0.7, 0.8, 0.9, 1.1, 1.3, 1.7]}
    alone = Prints(dict.fromkeys((POST, PRE), [Fingerprint(9.2, norms, norms)] * 2), {})
    figures.draw_figure_3(Path("x"), prints_of(POST, PRE), alone)
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names.count("decoder only") == 1
    for axes in drawn[0].axes:
        # Other lines at these heights are the caps of the intervals.
        lines = [line for line in axes.lines if line.get_marker() == "s"]
        curves = [line for line in lines if list(line.get_ydata()) == norms["decoder"]]
        assert len(curves) == (2 if axes.get_title().startswith("decoder") else 0)
        assert {to_hex(line.get_color()).upper() for line in curves} <= {*figures.COLOUR.values()}
        assert len({line.get_color() for line in curves}) == len(curves)
        assert all(line.get_linestyle() == "--" for line in curves)


def test_placements_have_one_colour_in_every_figure(drawn: list[Any]) -> None:
    of = {preset: look["color"] for preset, look in looks((PRE, POST)).items()}
    assert of == figures.COLOUR
    figures.fingerprints(Path("x"), prints_of("admin", PRE, POST))
    figures.figure_3_depth(Path("x"), prints_of(POST, PRE))
    found = {
        text.get_text().split(":")[0]: to_hex(to_rgba_array(handle.get_color())[0]).upper()
        for legend in (figure.legends[0] for figure in drawn)
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
    }
    assert found[POST] == found["Post-LN"] == of[POST]
    assert found[PRE] == found["Pre-LN"] == of[PRE]


# The command.


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which the whole command takes seconds, and its claims mean nothing."""
    monkeypatch.setattr(run, "TheorySetting", lambda: TINY)
    monkeypatch.setattr(run, "Skipless", lambda: Skipless(dim=8, tokens=4, depth=4, draws=2))
    monkeypatch.setattr(run, "ZipfCorpus", lambda: FEW)
    monkeypatch.setattr(run, "FINGERPRINTS", (POST, PRE, "admin"))

    def sizes(kind: Any, depth: int) -> ArchitectureConfig:
        return replace(SMALL, kind=kind, encoder_depth=depth, decoder_depth=depth)

    for module in (models, models):
        monkeypatch.setattr(module, "architecture", sizes)


@pytest.mark.usefixtures("tiny")
# Over 5 s: seven figures.
def test_command_writes_tables_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.run_theory(tmp_path / "out") == 1
    out = capsys.readouterr().out
    assert "does not hold: post_ln, 6-6" in out
    rows = table(tmp_path / "out" / "theory.csv")
    assert len(rows) > 25
    assert {row["holds"] for row in rows} == {"true", "false"}
    broken = [row for row in rows if (row["holds"], row["promised"]) == ("false", "true")]
    assert out.count("does not hold: ") == len(broken)
    layers = table(tmp_path / "out" / "fingerprints.csv")
    alone = [row for row in layers if row["stack"] == "decoder only"]
    assert {row["preset"] for row in layers} == {POST, PRE, "admin"}
    assert {row["preset"] for row in alone} == {POST, PRE}
    assert not any(row["recorded"] for row in alone)
    assert len(alone) == 2 * (1 + 2 * 6)
    assert len(layers) - len(alone) == 3 * (1 + 2 * 2 * 6)
    names = {path.name for path in (tmp_path / "out").glob("*.svg")}
    assert names == {
        f"theory_{name}.svg"
        for name in (
            "theorem_1",
            "lemma_2",
            "layers",
            "rank_collapse",
            "figure_3",
            "figure_3_depth",
            "fingerprints",
        )
    }
    assert all("<svg" in path.read_text() for path in (tmp_path / "out").glob("*.svg"))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("promised", "code"), [(True, 1), (False, 0)])
def test_exit_code_tells_broken_promises_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promised: bool, code: int
) -> None:
    parts = ["lemma_1", "lemma_2", "lemma_3", "theorem_1", "theorem_1_by_width", "extension"]
    for name in [*parts, "rank_collapse"]:
        monkeypatch.setattr(run, name, lambda _: [])
    monkeypatch.setattr(run, "write_theory_figures", lambda *_: [])
    monkeypatch.setattr(run, "gather_prints", lambda *_, **__: prints(1.7))
    wrong = statement(measured=3.0, promised=promised)
    threads = []

    def found(_: Prints) -> list[Statement]:
        threads.append(torch.get_num_threads())
        return [statement(), wrong]

    monkeypatch.setattr(run, "figure_3", found)
    monkeypatch.setattr(run, "without_mask", lambda *_: growing(1.0))
    torch.set_num_threads(2)
    try:
        assert run.run_theory(tmp_path) == code
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert threads == [1]


def test_a_folder_that_cannot_be_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delattr(run, "draw_all")
    with pytest.raises(UserError, match="file/out: cannot be written"):
        run.run_theory(tmp_path / "file" / "out")


@pytest.mark.slow
def test_command_holds_in_under_three_minutes(tmp_path: Path) -> None:
    start = time.process_time()
    assert run.run_theory(tmp_path) == 0
    assert time.process_time() - start < 180  # of one thread
    promised = [row for row in table(tmp_path / "theory.csv") if row["promised"] == "true"]
    assert len(promised) >= 20
    assert all(row["holds"] == "true" for row in promised)
