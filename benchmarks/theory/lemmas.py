"""Statements of papers about models at initialisation, and the draws that test them.

Lemmas 1-3 and theorem 1 of Xiong et al. 2020 (2002.04745), on random encoders in the setting of
their section 3.3.

Letters: d the width, n tokens, L the depth, l a layer from 1, x_l the stream after l layers, q_l
its ``E ||x_l||^2 / d``, W1 and W2 the matrices of a feed-forward. Norms of gradients are Frobenius
norms, of the loss of one position: a mean over positions has other exponents.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.attention import Attention, AttentionSpec, ShapingSpec
from lightning_app.blocks.block import Sizes
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.feed_forward import FeedForward
from lightning_app.blocks.masks import full_mask
from lightning_app.blocks.norm import EPSILON, build_norm
from lightning_app.blocks.stack import Stack
from lightning_app.models.initialization import initialize
from lightning_app.models.stack import BlockStack
from lightning_app.probes.measures import squared_norms, token_cosines
from lightning_app.report.statistics import mean, t_interval

POST, PRE = "post_ln", "pre_ln"
XIONG_EXTENSION = "Xiong et al., after theorem 1 (no theorem)"
NAMES = {POST: "Post-LN", PRE: "Pre-LN"}


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One claim: the prediction, the measurement, and the range that would confirm it."""

    claim: str
    source: str
    predicted: float
    measured: float
    accepted: tuple[float, float]
    interval: tuple[float, float] = (math.nan, math.nan)
    """95 % interval of the measurement; NaN if nothing in it is random."""
    promised: bool = True
    """Whether the claim must hold here. Other claims are only shown."""

    @property
    def holds(self) -> bool:
        low, high = self.accepted
        return low <= self.measured <= high


class Fit(NamedTuple):
    """A straight line by least squares, with Student's 95 % interval of its slope."""

    slope: float
    low: float
    high: float
    intercept: float
    r_squared: float


def fitted_line(x: Sequence[float], y: Sequence[float]) -> Fit:
    """Return the line through the points."""
    from scipy import stats

    slope, intercept, r, _, error = map(float, stats.linregress(x, y))
    half = float(stats.t.ppf(0.975, len(x) - 2)) * error
    return Fit(slope, slope - half, slope + half, intercept, r * r)


def power_law(points: Mapping[int, Sequence[float]]) -> Fit:
    """Return the fit of ``log y = slope log x + intercept`` over every draw at every x."""
    pairs = [(math.log(x), math.log(y)) for x, values in points.items() for y in values]
    return fitted_line([x for x, _ in pairs], [y for _, y in pairs])


def of_draws(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the mean of independent draws and its 95 % interval."""
    low, high, _ = t_interval(values)
    return mean(values), (low, high)


def of_mean(
    claim: str,
    source: str,
    predicted: float,
    draws: Sequence[float],
    share: float,
    *,
    promised: bool = True,
) -> Statement:
    """Return a claim about the mean of draws, confirmed within a share of the prediction."""
    measured, interval = of_draws(draws)
    accepted = predicted * (1 - share), predicted * (1 + share)
    return Statement(
        claim=claim,
        source=source,
        predicted=predicted,
        measured=measured,
        interval=interval,
        accepted=accepted,
        promised=promised,
    )


def of_exponent(
    claim: str, source: str, predicted: float, fit: Fit, accepted: tuple[float, float], **more: bool
) -> Statement:
    """Return a claim about the exponent of a power law."""
    return Statement(
        claim=claim,
        source=source,
        predicted=predicted,
        measured=fit.slope,
        interval=(fit.low, fit.high),
        accepted=accepted,
        **more,
    )


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Draw from a separate generator, seeded by `numbers`; the global one is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(number * 1009**place for place, number in enumerate(numbers)))
        yield


def statements_to_csv(statements: Sequence[Statement]) -> str:
    """Return the table of statements, one per line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ends = ["low", "high", "accepted_low", "accepted_high"]
    names = ["statement", "predicted", "measured", "holds", "promised", *ends, "source"]
    writer.writerow(names)
    for one in statements:
        numbers = (*one.interval, *one.accepted)
        ends = ["" if math.isnan(number) else f"{number:.6g}" for number in numbers]
        yes = [str(answer).lower() for answer in (one.holds, one.promised)]
        row = [one.claim, f"{one.predicted:.6g}", f"{one.measured:.6g}", *yes, *ends, one.source]
        writer.writerow(row)
    return text.getvalue()


def statements_table(statements: Sequence[Statement]) -> Table:
    """Return the statements as a table that fits a terminal of 80 columns."""
    table = Table(
        *("", "predicted", "measured", "accepted", "holds"),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption="(yes) and (no): shown, not required",
        caption_justify="left",
    )
    for column in table.columns[1:4]:
        column.justify = "right"
        column.no_wrap = True
    source = ""
    for one in statements:
        if one.source != source:
            table.add_section()
            table.add_row(f"[bold]{one.source}[/bold]")
            source = one.source
        answer = "yes" if one.holds else "no"
        if not one.promised:
            answer = f"({answer})"
        elif not one.holds:
            answer = f"[bold red]{answer}[/bold red]"
        accepted = " to ".join(f"{end:.3g}" for end in one.accepted)
        numbers = (f"{one.predicted:.3g}", f"{one.measured:.3g}", accepted)
        table.add_row(one.claim, *numbers, answer)
    return table


@dataclass(frozen=True, kw_only=True)
class TheorySetting:
    """One head, all matrices d x d, n Gaussian tokens of squared norm d, `draws` random draws."""

    dim: int = 512
    tokens: int = 16
    draws: int = 12
    depths: tuple[int, ...] = (2, 4, 8, 16, 32)
    classes: int = 500
    """Rows of the output matrix E, with entries N(0, 1/d)."""


def theoretical_encoder(preset: str, depth: int, dim: int) -> BlockStack:
    """Return a stack of our blocks with the matrices of the theorems.

    W_Q = W_K = 0, so that attention is the mean over tokens times W_V; no output projection; W_V,
    W1 and W2 are N(0, 1/d), biases zero, norms one and zero.
    """
    config = BlockConfig(preset=preset, output_projection="identity")
    spec = config.resolve(Stack(depth=depth))
    encoder = BlockStack(spec, Sizes(model_dim=dim, ff_dim=dim, num_heads=1)).requires_grad_(False)
    for module in encoder.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=dim**-0.5)
            nn.init.zeros_(module.bias)
    for module in encoder.modules():
        if isinstance(module, Attention):
            nn.init.zeros_(module.query.weight)
            nn.init.zeros_(module.key.weight)
    return encoder


@dataclass(frozen=True)
class Draw:
    """One random encoder, input and loss."""

    squared: list[list[float]]
    """``||x||^2 / d`` of each token. Pre-LN: x_0 to x_L. Post-LN: the input of the last norm of
    each layer, x^{post,5}_1 to x^{post,5}_L."""
    gradients: list[float]
    """Norm of the gradient with respect to W2 in each requested layer, in layer order."""
    through_norm: float
    """Length of the gradient below the last norm over its length above it."""


def random_draw(
    preset: str, depth: int, setting: TheorySetting, *, every_layer: bool = False
) -> Draw:
    """Return a draw for the loss of one position: the cross-entropy of its logits ``x E^T``."""
    encoder = theoretical_encoder(preset, depth, setting.dim)
    x = torch.randn(1, setting.tokens, setting.dim)
    classes = torch.randn(setting.classes, setting.dim) * setting.dim**-0.5
    position = int(torch.randint(setting.tokens, ()))
    label = torch.randint(setting.classes, (1,))

    # The inputs of the norms are the stream, in every form that a block may use.
    norms: list[nn.Module] = []
    weights: list[Tensor] = []
    for _, block in encoder.layers:
        norms.append(block.around_ff.norm_sum if preset == POST else block.around_self.norm_input)
        weights.append(block.feed_forward.outer.weight)
    if preset == PRE:
        norms.append(encoder.final_norm)
    weights = weights if every_layer else weights[-1:]
    for weight in weights:
        weight.requires_grad_(True)

    passed: list[tuple[Tensor, Tensor]] = []

    def watch(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        passed.append((inputs[0], output))

    for norm in norms:
        norm.register_forward_hook(watch)
    states = encoder(x, full_mask(setting.tokens, x.device))
    loss = F.cross_entropy(states[:, position] @ classes.T, label)
    below, above, *gradients = torch.autograd.grad(loss, [*passed[-1], *weights])
    real = torch.ones(1, setting.tokens, dtype=torch.bool)
    return Draw(
        [squared_norms(stream.detach(), real).tolist() for stream, _ in passed],
        [gradient.norm().item() for gradient in gradients],
        (below.norm() / above.norm()).item(),
    )


@dataclass(frozen=True)
class Draws:
    """All draws of the theoretical setting."""

    setting: TheorySetting
    last: dict[str, dict[int, list[Draw]]]
    """By preset and depth."""
    every: dict[str, list[Draw]]
    """By preset at half the largest depth, gradients of every layer."""

    def gradients(self, preset: str) -> dict[int, list[float]]:
        """Return each draw's norm of the last W2's gradient, by depth."""
        return {
            L: [one.gradients[-1] for one in encoders] for L, encoders in self.last[preset].items()
        }

    def squared(self, preset: str) -> list[float]:
        """Return the mean ``||x||^2 / d`` of each layer at the largest depth."""
        drawn = self.last[preset][self.setting.depths[-1]]
        layers = zip(*[[mean(tokens) for tokens in one.squared] for one in drawn], strict=True)
        return [mean(layer) for layer in layers]


def draw_all(setting: TheorySetting) -> Draws:
    """Draw encoders with both norm placements at every depth."""
    last: dict[str, dict[int, list[Draw]]] = {}
    every: dict[str, list[Draw]] = {}
    for number, preset in enumerate((POST, PRE)):
        last[preset] = {depth: [] for depth in setting.depths}
        every[preset] = []
        for seed in range(setting.draws):
            for depth in setting.depths:
                with seeded(number, depth, seed):
                    last[preset][depth].append(random_draw(preset, depth, setting))
            with seeded(number, 1, seed):
                depth = setting.depths[-1] // 2
                every[preset].append(random_draw(preset, depth, setting, every_layer=True))
    return Draws(setting, last, every)


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
    """W2's gradient in layer l is near ``sqrt(d / (2 q_l))`` for every L, including the last layer.

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
        squares = feed_forward(x).square().mean(dim=(1, 2)) / s**2
        claim = f"E ||ReLU(X)||^2 / (s^2 d), s = {s:g}"
        yield of_mean(claim, "Xiong et al., lemma 1", 0.5, squares.tolist(), 0.03)


def lemma_2(draws: Draws) -> Iterator[Statement]:
    """``3/2 d`` before Post-LN's last norm; ``1 + l/2 <= q_l <= 1 + 3l/2`` for Pre-LN."""
    source, depth = "Xiong et al., lemma 2", draws.setting.depths[-1]
    each = [[mean(x) for x in one.squared] for one in draws.last[POST][depth]]
    claim = "Post-LN: ||x||^2 / d before the last norm, mean over layers"
    yield of_mean(claim, source, 1.5, [mean(one) for one in each], 0.03)
    yield Statement(
        claim="Post-LN: the layer farthest from it",
        source=source,
        predicted=1.5,
        measured=max(draws.squared(POST), key=lambda q: abs(q - 1.5)),
        accepted=(1.5 * 0.9, 1.5 * 1.1),
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
    claim = f"Pre-LN: q_{depth} against the limit of large d"
    yield of_mean(claim, "our recursion for lemma 2", expected[-1], ends, 0.1, promised=False)


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
        jacobian = torch.autograd.functional.jacobian(norm, x)
        assert isinstance(jacobian, Tensor)
        exact = layer_norm_jacobian(x)
        apart.append(((jacobian - exact).abs().max() / exact.abs().max()).item())
        y = x - x.mean()
        top = torch.linalg.matrix_norm(jacobian, 2)
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
        claim = f"{NAMES[preset]}, L = {depth}: the gradient's length through the last norm"
        yield of_mean(claim, source, value, ratios, 0.1)


def theorem_1(draws: Draws) -> Iterator[Statement]:
    """The last W2: ``O(d sqrt(ln d))`` for Post-LN, ``O(d sqrt(ln d / L))`` for Pre-LN."""
    source, setting = "Xiong et al., theorem 1", draws.setting
    depth = setting.depths[-1]
    span = f"L = {setting.depths[0]}..{depth}"
    for preset, exponent, accepted in (
        (POST, 0.0, (-0.1, 0.1)),
        (PRE, -0.5, (-0.60, -0.45)),
    ):
        claim = f"{NAMES[preset]}: exponent of the last W2 gradient in {span}"
        yield of_exponent(claim, source, exponent, power_law(draws.gradients(preset)), accepted)
    values = {POST: post_ln_gradient(setting), PRE: pre_ln_gradient(setting, depth)}
    for preset, formula in ((POST, "d / 3"), (PRE, "d / (2 q_L)")):
        claim = f"{NAMES[preset]}, L = {depth}: last W2 gradient against sqrt({formula})"
        of = "lemmas 1 to 3 at |dloss/dx| = 1"
        gradients = draws.gradients(preset)[depth]
        yield of_mean(claim, of, values[preset], gradients, 0.1, promised=False)
    # Their condition with eps = 0.1: they report at most this share of vectors above the bound.
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
    """Post-LN's last W2 in d: lemmas 1 and 3 give sqrt(d), below the bound d sqrt(ln d)."""
    widths = [setting.dim // 8, setting.dim // 4, setting.dim // 2, setting.dim]
    norms: dict[int, list[float]] = {}
    for width in widths:
        narrow = TheorySetting(dim=width, tokens=setting.tokens, classes=setting.classes)
        norms[width] = []
        for seed in range(setting.draws // 2):
            with seeded(5, width, seed):
                norms[width].append(random_draw(POST, setting.depths[0], narrow).gradients[-1])
    claim = f"Post-LN: exponent of the last W2 gradient in d = {widths[0]}..{widths[-1]}"
    source = "lemmas 1 and 3; the bound of theorem 1 is 1, up to the logarithm"
    yield of_exponent(claim, source, 0.5, power_law(norms), (0.4, 0.6))


def downward_factor(gradients: Sequence[float]) -> float:
    """Return the mean factor of the gradient from a layer to the one below it."""
    return math.exp(-fitted_line(range(len(gradients)), [math.log(g) for g in gradients]).slope)


def extension(draws: Draws) -> Iterator[Statement]:
    """``(2/3)^((L - l) / 2)``, which they derive from only the last norms of the layers above."""
    factors = [downward_factor(d.gradients) for d in draws.every[POST]]
    claim = "Post-LN: W2 gradient from a layer to the one below, one position's loss"
    yield of_mean(claim, XIONG_EXTENSION, math.sqrt(2 / 3), factors, 0.05, promised=False)
    claim = "the same, with the sqrt(3/2) that the feed-forward and its skip give back"
    source = "ours: 1 + ||W1 D W2||^2 = 3/2 meets 2/3"
    yield of_mean(claim, source, 1.0, factors, 0.05, promised=False)


@dataclass(frozen=True, kw_only=True)
class Skipless:
    """A sequence of attention sub-layers without skips, each after a norm."""

    dim: int = 256
    tokens: int = 32
    heads: int = 4
    depth: int = 18
    draws: int = 8


PLAIN = AttentionSpec()
PLAIN_IDENTITY = AttentionSpec(value="identity", output="identity")
SHAPED = AttentionSpec(
    shaping=ShapingSpec(), value="identity", output="identity", query_init="zeros"
)
SKIPLESS = {
    "plain, V and P random": PLAIN,
    "plain, V and P identity": PLAIN_IDENTITY,
    "shaped, V and P identity": SHAPED,
}
SAS = "sas, whole blocks"


def skipless_attention(spec: AttentionSpec, setting: Skipless) -> Attention:
    """Return attention with the same initial values as inside a block."""
    attention = Attention(spec, setting.dim, setting.heads, 0.0)
    initialize(attention)
    for part in (attention.query, attention.key, attention.value):
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight, gain=2**-0.5)
    if spec.query_init == "zeros":
        nn.init.zeros_(attention.query.weight)
    return attention


@torch.no_grad()
def skipless_cosines(spec: AttentionSpec, setting: Skipless) -> list[float]:
    """Return the mean token cosine of the input and after each of `depth` sub-layers."""
    norm = build_norm("layer_norm", setting.dim)
    x = torch.randn(1, setting.tokens, setting.dim)
    mask, real = full_mask(setting.tokens, x.device), torch.ones(1, setting.tokens).bool()
    cosines = [token_cosines(x, real).item()]
    for _ in range(setting.depth):
        attention = skipless_attention(spec, setting)
        u = norm(x)
        x, _ = attention(*attention.queries_keys_values(u, None), mask, None)
        cosines.append(token_cosines(x, real).item())
    return cosines


@torch.no_grad()
def block_cosines(preset: str, setting: Skipless) -> list[float]:
    """Return the mean token cosines for the whole blocks of an encoder of `preset`."""
    spec = BlockConfig(preset=preset).resolve(Stack(depth=setting.depth))
    sizes = Sizes(model_dim=setting.dim, ff_dim=4 * setting.dim, num_heads=setting.heads)
    encoder = BlockStack(spec, sizes)
    initialize(encoder)
    x = torch.randn(1, setting.tokens, setting.dim)
    real = torch.ones(1, setting.tokens).bool()
    cosines: list[float] = []

    def watch(module: nn.Module, inputs: tuple[Tensor]) -> None:
        cosines.append(token_cosines(inputs[0], real).item())

    for _, block in encoder.layers:
        block.around_self.norm_input.register_forward_pre_hook(watch)
    encoder.final_norm.register_forward_pre_hook(watch)
    encoder(x, full_mask(setting.tokens, x.device))
    return cosines


def collapse(setting: Skipless) -> dict[str, list[list[float]]]:
    """Return the cosines of every draw, by kind of attention."""
    cosines: dict[str, list[list[float]]] = {}
    for number, (name, spec) in enumerate(SKIPLESS.items()):
        cosines[name] = []
        for seed in range(setting.draws):
            with seeded(7, number, seed):
                cosines[name].append(skipless_cosines(spec, setting))
    cosines[SAS] = []
    for seed in range(setting.draws):
        with seeded(11, seed):
            cosines[SAS].append(block_cosines("sas", setting))
    return cosines


def rank_collapse(cosines: Mapping[str, Sequence[Sequence[float]]]) -> Iterator[Statement]:
    """Above 0.95 after 3 layers without a skip, below 0.05 in all layers for shaped maps."""
    for name, draws in cosines.items():
        if name.startswith("plain"):
            yield Statement(
                claim=f"{name}: smallest token cosine of any draw after 3",
                source="rank collapse without a skip (Dong et al. 2021, 2103.03404)",
                predicted=1.0,
                measured=min(one[3] for one in draws),
                accepted=(0.95, 1.0 + 1e-9),
            )
        else:
            yield Statement(
                claim=f"{name}: largest token cosine of any draw through {len(draws[0]) - 1}",
                source="He & Hofmann 2023 (2311.01906), equation 6",
                predicted=0.0,
                measured=max(max(one) for one in draws),
                accepted=(-1.0, 0.05),
            )
