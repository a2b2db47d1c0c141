"""Lemmas 1-3 and theorem 1 of Xiong et al. 2020 (2002.04745), in the setting of section 3.3.

Letters: d the width, n tokens, L the depth, l a layer from 1, x_l the stream after l layers, q_l
its ``E ||x_l||^2 / d``, W1 and W2 the matrices of a feed-forward. Norms of gradients are Frobenius
norms, of the loss of one position: a mean over positions has other exponents.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_app.analysis.statistics import mean
from lightning_app.blocks.feed_forward import FeedForward
from lightning_app.blocks.norm import EPSILON, build_norm
from lightning_app.theory.draws import Draws, TheorySetting, random_draw
from lightning_app.theory.statements import (
    NAMES,
    POST,
    PRE,
    Statement,
    fitted_line,
    of_draws,
    power_law,
    seeded,
    within,
)


def pre_ln_growth(depth: int, tokens: int) -> list[float]:
    """Return q_0 to q_L of Pre-LN in the theoretical setting, as d goes to infinity.

    With p the inner product of two tokens over d and c = p / q: the mean of n normalised tokens
    has the squared norm ``m = 1/n + (1 - 1/n) c``, which attention adds to q and to p. The
    feed-forward adds 1/2 to q (lemma 1) and ``(sqrt(1 - c^2) + (pi - arccos c) c) / (2 pi)`` to p
    (Cho & Saul 2009, the arc-cosine kernel of degree 1). m <= 1 gives lemma 2's bounds.
    """
    q, p = 1.0, 0.0
    grown = [q]
    for _ in range(depth):
        m = 1 / tokens + (1 - 1 / tokens) * p / q
        q, p = q + m, p + m
        c = min(1.0, p / q)
        p += (math.sqrt(1 - c * c) + (math.pi - math.acos(c)) * c) / (2 * math.pi)
        q += 0.5
        grown.append(q)
    return grown


def pre_ln_gradient(setting: TheorySetting, depth: int) -> float:
    """W2's gradient in layer l is near ``sqrt(d / (2 q_l))`` for every L, also in the last layer.

    It is the product of ``||ReLU||^2 = d/2`` from the forward pass and the gradient from above:
    the final norm divides by ``sqrt(q_L)`` and each block between multiplies by about
    ``sqrt(q_(l+1) / q_l)``. The gradient of the loss has length 1.
    """
    return math.sqrt(setting.dim / (2 * pre_ln_growth(depth, setting.tokens)[-1]))


def post_ln_gradient(setting: TheorySetting) -> float:
    """``sqrt(d / 3)``: ``||ReLU||^2 = d/2``, and the last norm's Jacobian is ``sqrt(2/3)``."""
    return math.sqrt(setting.dim / 3)


def lemma_1(setting: TheorySetting) -> Iterator[Statement]:
    """``E ||ReLU(X)||^2 = s^2 d / 2`` for X ~ N(0, s^2 I), through our feed-forward."""
    feed_forward = FeedForward(setting.dim, setting.dim, "relu").requires_grad_(False)
    for matrix in (feed_forward.inner, feed_forward.outer):
        nn.init.eye_(matrix.weight)
        nn.init.zeros_(matrix.bias)
    for number, s in enumerate((0.5, 2.0)):
        # ReLU is homogeneous: with the same draw both numbers would be equal.
        with seeded(1, setting.dim, number):
            x = s * torch.randn(setting.draws, setting.tokens, setting.dim)
        found = feed_forward(x).square().mean(dim=(1, 2)) / s**2
        measured, interval = of_draws(found.tolist())
        yield Statement(
            claim=f"E ||ReLU(X)||^2 / (s^2 d), s = {s:g}",
            source="Xiong et al., lemma 1",
            predicted=0.5,
            measured=measured,
            interval=interval,
            accepted=within(0.5, 0.03),
        )


def lemma_2(draws: Draws) -> Iterator[Statement]:
    """``3/2 d`` before Post-LN's last norm; ``1 + l/2 <= q_l <= 1 + 3l/2`` for Pre-LN."""
    source, depth = "Xiong et al., lemma 2", draws.setting.depths[-1]
    each = [[mean(x) for x in one.squared] for one in draws.last[POST][depth]]
    measured, interval = of_draws([mean(one) for one in each])
    yield Statement(
        claim="Post-LN: ||x||^2 / d before the last norm, mean over layers",
        source=source,
        predicted=1.5,
        measured=measured,
        interval=interval,
        accepted=within(1.5, 0.03),
    )
    yield Statement(
        claim="Post-LN: the layer farthest from it",
        source=source,
        predicted=1.5,
        measured=max(draws.squared(POST), key=lambda q: abs(q - 1.5)),
        accepted=within(1.5, 0.1),
    )
    grown, expected = draws.squared(PRE), pre_ln_growth(depth, draws.setting.tokens)
    for name, choose in (("smallest", min), ("largest", max)):
        yield Statement(
            claim=f"Pre-LN: {name} (q_l - 1) / l, l = 1..{depth}",
            source=source,
            predicted=choose((q - 1) / layer for layer, q in enumerate(expected) if layer),
            measured=choose((q - 1) / layer for layer, q in enumerate(grown) if layer),
            accepted=(0.5, 1.5),
        )
    yield Statement(
        claim="Pre-LN: R^2 of q_l against l",
        source=source,
        predicted=1.0,
        measured=fitted_line(range(depth + 1), grown).r_squared,
        accepted=(0.98, 1.0),
    )
    ends = [mean(one.squared[-1]) for one in draws.last[PRE][depth]]
    measured, interval = of_draws(ends)
    yield Statement(
        claim=f"Pre-LN: q_{depth} against the limit of large d",
        source="our recursion for lemma 2",
        predicted=expected[-1],
        measured=measured,
        interval=interval,
        accepted=within(expected[-1], 0.1),
        promised=False,
    )


def layer_norm_jacobian(x: Tensor) -> Tensor:
    """``J = (1/s) (I - y^T y / (d s^2)) (I - 1^T 1 / d)`` with ``s^2 = ||y||^2 / d + eps``.

    y is the centred x. Without eps, ``sqrt(d) / ||y|| (I - y^T y / ||y||^2) (I - 1^T 1 / d)``.
    """
    d = x.numel()
    y = x - x.mean()
    variance = y.square().mean() + EPSILON
    centring = torch.eye(d, dtype=x.dtype) - 1 / d
    along = torch.eye(d, dtype=x.dtype) - torch.outer(y, y) / (d * variance)
    return along @ centring / variance.sqrt()


def lemma_3(draws: Draws) -> Iterator[Statement]:
    """``||J_LN(x)||_2 = sqrt(d) / ||y||``, y the centred x."""
    source, dim = "Xiong et al., lemma 3", 128
    norm = build_norm("layer_norm", dim).double().requires_grad_(False)
    apart, spectral = [], []
    for seed, length in enumerate((0.5, 1.0, 5.0, 50.0)):
        with seeded(3, seed):
            x = length * (torch.randn(dim, dtype=torch.float64) + 0.5)
        found = torch.autograd.functional.jacobian(norm, x)
        assert isinstance(found, Tensor)
        exact = layer_norm_jacobian(x)
        apart.append(((found - exact).abs().max() / exact.abs().max()).item())
        y = x - x.mean()
        top = torch.linalg.matrix_norm(found, 2)
        spectral.append(abs((top * y.norm() / math.sqrt(dim)).item() - 1))
    yield Statement(
        claim="largest entry of J_LN minus its formula, over the largest of J_LN",
        source=source,
        predicted=0.0,
        measured=max(apart),
        accepted=(0.0, 1e-12),
    )
    yield Statement(
        claim="largest departure of ||J_LN(x)||_2 ||y|| / sqrt(d) from 1",
        source=source,
        predicted=0.0,
        measured=max(spectral),
        accepted=(0.0, 1e-4),  # eps 1e-5 is added to a variance of 0.25 and more
    )
    depth = draws.setting.depths[-1]
    last = pre_ln_growth(depth, draws.setting.tokens)[-1]
    for preset, value in ((POST, math.sqrt(2 / 3)), (PRE, last**-0.5)):
        ratios = [one.through_norm for one in draws.last[preset][depth]]
        measured, interval = of_draws(ratios)
        yield Statement(
            claim=f"{NAMES[preset]}, L = {depth}: the gradient's length through the last norm",
            source=source,
            predicted=value,
            measured=measured,
            interval=interval,
            accepted=within(value, 0.1),
        )


def theorem_1(draws: Draws) -> Iterator[Statement]:
    """The last W2: ``O(d sqrt(ln d))`` for Post-LN, ``O(d sqrt(ln d / L))`` for Pre-LN."""
    source, setting = "Xiong et al., theorem 1", draws.setting
    depth = setting.depths[-1]
    span = f"L = {setting.depths[0]}..{depth}"
    for preset, exponent, accepted in (
        (POST, 0.0, (-0.1, 0.1)),
        (PRE, -0.5, (-0.60, -0.45)),
    ):
        fit = power_law(draws.gradients(preset))
        yield Statement(
            claim=f"{NAMES[preset]}: exponent of the last W2 gradient in {span}",
            source=source,
            predicted=exponent,
            measured=fit.slope,
            interval=(fit.low, fit.high),
            accepted=accepted,
        )
    values = {POST: post_ln_gradient(setting), PRE: pre_ln_gradient(setting, depth)}
    for preset, formula in ((POST, "d / 3"), (PRE, "d / (2 q_L)")):
        measured, interval = of_draws(draws.gradients(preset)[depth])
        yield Statement(
            claim=f"{NAMES[preset]}, L = {depth}: last W2 gradient against sqrt({formula})",
            source="lemmas 1 to 3 at |dloss/dx| = 1",
            predicted=values[preset],
            measured=measured,
            interval=interval,
            accepted=within(values[preset], 0.1),
            promised=False,
        )
    # Their condition with eps = 0.1: they found at most this share of vectors above the bound.
    for preset in (POST, PRE):
        last = [q for one in draws.last[preset][depth] for q in one.squared[-1]]
        yield Statement(
            claim=f"{NAMES[preset]}, L = {depth}: share of ||x||^2 over 1.1 times its mean",
            source="Xiong et al., (eps, delta)-bounded, as they measured it",
            predicted=0.125,
            measured=mean([float(q > 1.1 * mean(last)) for q in last]),
            accepted=(0.0, 0.125),
            promised=False,
        )


def theorem_1_by_width(setting: TheorySetting) -> Iterator[Statement]:
    """Post-LN's last W2 in d: lemmas 1 and 3 give sqrt(d), under the bound d sqrt(ln d)."""
    widths = [setting.dim // 8, setting.dim // 4, setting.dim // 2, setting.dim]
    found: dict[int, list[float]] = {}
    for width in widths:
        narrow = TheorySetting(dim=width, tokens=setting.tokens, classes=setting.classes)
        found[width] = []
        for seed in range(setting.draws // 2):
            with seeded(5, width, seed):
                found[width].append(random_draw(POST, setting.depths[0], narrow).gradients[-1])
    fit = power_law(found)
    yield Statement(
        claim=f"Post-LN: exponent of the last W2 gradient in d = {widths[0]}..{widths[-1]}",
        source="lemmas 1 and 3; the bound of theorem 1 is 1, up to the logarithm",
        predicted=0.5,
        measured=fit.slope,
        interval=(fit.low, fit.high),
        accepted=(0.4, 0.6),
    )


def downward_factor(gradients: Sequence[float]) -> float:
    """Return the mean factor of the gradient from a layer to the one below it."""
    return math.exp(-fitted_line(range(len(gradients)), [math.log(g) for g in gradients]).slope)


def extension(draws: Draws) -> Iterator[Statement]:
    """``(2/3)^((L - l) / 2)``, which they derive only from the last norms of the layers above."""
    measured, interval = of_draws([downward_factor(d.gradients) for d in draws.every[POST]])
    yield Statement(
        claim="Post-LN: W2 gradient from a layer to the one below, one position's loss",
        source="Xiong et al., after theorem 1 (no theorem)",
        predicted=math.sqrt(2 / 3),
        measured=measured,
        interval=interval,
        accepted=within(math.sqrt(2 / 3), 0.05),
        promised=False,
    )
    yield Statement(
        claim="the same, with the sqrt(3/2) that the feed-forward and its skip give back",
        source="ours: 1 + ||W1 D W2||^2 = 3/2 meets 2/3",
        predicted=1.0,
        measured=measured,
        interval=interval,
        accepted=within(1.0, 0.05),
        promised=False,
    )
