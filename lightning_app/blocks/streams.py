"""The states that pass from sub-layer to sub-layer besides x, and the rules that keep them.

A stack starts its stream from the embedding, each sub-layer reads an input from it and writes its
output back, and the end of the stack reads once more. In most blocks the stream is one state x; in
others it is two states, several, or every earlier one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_app.blocks.norm import EPSILON, LearnedScalars, Norm, build_norm
from lightning_app.core.registry import Registry

StreamKind = str
"""A name of `STREAM_RULES`."""

PLAIN: StreamKind = "plain"
DUAL: StreamKind = "dual"

States = Float[Tensor, "batch token model"]
Join = Callable[[Tensor, Tensor], Tensor]
"""Returns the sum of a skip and a branch, or the result of a residual rule in its place."""


class Stream(NamedTuple):
    """The state of a stack: `x`, which probes measure, and the parts that its rule keeps besides.

    The first two dimensions of every part are batch and token; no part may mix tokens.
    """

    x: States
    parts: tuple[Tensor, ...] = ()

    def at(self, kept: Int[Tensor, " kept"]) -> "Stream":
        """Return the stream at the tokens `kept`: see `select_tokens`."""
        parts = tuple(select_tokens(part, kept) for part in self.parts)
        return Stream(select_tokens(self.x, kept), parts)


def unrounded(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in the type that both have: autocast would round the states of the stream,
    which a sum with a branch leaves in float32."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def select_tokens(
    x: Float[Tensor, "batch token *rest"], kept: Int[Tensor, " kept"]
) -> Float[Tensor, "1 kept *rest"]:
    """Return the tokens `kept`, flat indices into batch * token, as one row."""
    return x.flatten(0, 1).index_select(0, kept).unsqueeze(0)


@dataclass(frozen=True, kw_only=True)
class StreamPlace:
    """Where a stack uses a stream rule: at one of its sub-layers, or at its end.

    Attributes:
        model_dim: The width of a state.
        number: The sub-layer, from 1; the end of the stack follows the last one.
        layer: The layer of the sub-layer, from 1.
        ends_layer: Whether it is the last sub-layer of its layer.
        sub_layers: The number of sub-layers of the stack.
        streams: The number of parallel states, `StackSpec.streams`.
        norm: The type of the norms of the stack.
    """

    model_dim: int
    number: int = 1
    layer: int = 1
    ends_layer: bool = False
    sub_layers: int = 2
    streams: int = 1
    norm: Norm = "layer_norm"

    @property
    def ends_stack(self) -> bool:
        """Whether this is the end of the stack."""
        return self.number > self.sub_layers

    @property
    def depth(self) -> int:
        """The number of layers of the stack, for the last sub-layer of a layer."""
        return self.sub_layers * self.layer // self.number


class StreamRule(nn.Module):
    """A stream of one state, and the base of every other rule.

    A stack builds one for each sub-layer and one for its end, so that each has parameters of its
    own. Put them in a `LearnedScalars`, which sets their initial values and weight decay, or in a
    norm, and matrices in an `nn.Linear`. All methods must treat tokens alike and separately.
    """

    drawn_last: ClassVar[bool] = True
    """What it draws is drawn after everything else (`initialize`), so that the matrices that two
    variants share start equal."""

    joins: ClassVar[bool] = True
    """Whether `write` calls `join`; if not, skips, `norm_sum` and `residual_rule` have no effect
    and are refused."""

    words: ClassVar[str] = ""
    """The text of a drawing about the rule, with ``{streams}`` for their number."""

    norms_sum: ClassVar[bool] = False
    """Whether every sub-layer must have a `norm_sum`."""

    norms_end: ClassVar[bool] = False
    """Whether `end` needs a final norm, whatever `norm_placement` says."""

    several: ClassVar[bool] = False
    """Whether the rule uses `StreamPlace.streams`."""

    def __init__(self, place: StreamPlace) -> None:
        super().__init__()

    @classmethod
    def in_words(cls, streams: int) -> str:
        """Return `words` after a colon; for several states without words, their number."""
        words = cls.words or "{streams} states" * cls.several
        return f": {words.format(streams=streams)}" if words else ""

    def start(self, x: States) -> Stream:
        """Return the stream that begins with the embedding; called at the end of the stack."""
        return Stream(x)

    def read(self, stream: Stream) -> States:
        """Return x, the input of the sub-layer before its norm."""
        return stream.x

    def write(self, stream: Stream, branch: States, join: Join) -> Stream:
        """Return the stream after the sub-layer.

        Args:
            stream: The stream that `read` has read.
            branch: The output of the sub-layer with its norm, dropout and gain.
            join: ``norm_sum(skip * x + branch)`` of an x and a branch.
        """
        return Stream(join(stream.x, branch))

    def end(self, stream: Stream, norm: nn.Module) -> States:
        """Return the output of the stack; `norm` is its final norm."""
        return norm(self.read(stream))


STREAM_RULES: Registry[type[StreamRule]] = Registry("model.block.stream", slots=("stream",))
"""The stream rules by name; `STREAM_RULES.register` is the decorator that adds a class."""

STREAM_RULES.add(PLAIN, StreamRule)


@STREAM_RULES.register(DUAL)
@final
class DualStream(StreamRule):
    """``x' = join(x, f)``, ``r' = r + f``; the end is ``x + N(r)`` (ResiDual, 2304.14802)."""

    norms_sum = True
    norms_end = True

    def start(self, x: States) -> Stream:
        return Stream(x, (x,))

    def write(self, stream: Stream, branch: Tensor, join: Join) -> Stream:
        (total,) = stream.parts
        return Stream(join(stream.x, branch), (total + branch,))

    def end(self, stream: Stream, norm: nn.Module) -> States:
        return stream.x + norm(stream.parts[0])


@STREAM_RULES.register("siamese")
@final
class SiameseStream(StreamRule):
    """A normalised state x and a plain sum y, which every sub-layer reads together.

    ``u = x + N_y(y)``, ``x' = N_x(x + f(u) / sqrt(2 l))``, ``y' = y + f(u)``, l the layer from 1;
    with h the embedding x starts as ``N_x(h)`` and y as h, and the stack returns
    ``N(x + N_y(y))`` (SiameseNorm, 2602.08064). After a sub-layer N_x is its `norm_sum`.
    """

    words = "y sums all branches, sub-layers and the end read x + N(y); x takes f / sqrt(2 l)"

    norms_sum = True
    norms_end = True

    def __init__(self, place: StreamPlace) -> None:
        super().__init__(place)
        self.norm_total = build_norm(place.norm, place.model_dim)
        self.share = (2 * place.layer) ** -0.5
        self.norm_start = build_norm(place.norm if place.ends_stack else "none", place.model_dim)

    def start(self, x: States) -> Stream:
        return Stream(self.norm_start(x), (x,))

    def read(self, stream: Stream) -> States:
        return stream.x + self.norm_total(stream.parts[0])

    def write(self, stream: Stream, branch: Tensor, join: Join) -> Stream:
        return Stream(join(stream.x, self.share * branch), (stream.parts[0] + branch,))


@final
class StaticMix(LearnedScalars):
    """The static weights of a hyper-connection: A_m, A_r and B of Zhu et al. 2024."""

    def __init__(self, place: StreamPlace) -> None:
        super().__init__()
        n = place.streams
        self.read = nn.Parameter(torch.eye(n)[(place.number - 1) % n].clone())
        self.keep = nn.Parameter(torch.eye(n))
        self.write = nn.Parameter(torch.ones(n))


@final
class DynamicMix(LearnedScalars):
    """``s tanh(N(H) W)``, added to the static weights of a hyper-connection; W starts at zero."""

    decays = True

    def __init__(self, place: StreamPlace) -> None:
        super().__init__()
        self.norm = build_norm(place.norm, place.model_dim)
        self.read = nn.Parameter(torch.zeros(place.model_dim))
        self.keep = nn.Parameter(torch.zeros(place.model_dim, place.streams))
        self.write = nn.Parameter(torch.zeros(place.model_dim))
        self.scale_in = nn.Parameter(torch.tensor(0.01))
        self.scale_out = nn.Parameter(torch.tensor(0.01))

    def scale(self, name: str) -> Tensor:
        """Return s of a weight."""
        return self.scale_out if name == "write" else self.scale_in


class _Several(StreamRule):
    """The base of rules with n parallel states H, one part (batch, token, stream, model)."""

    joins = False
    several = True
    norms_end = True

    def __init__(self, place: StreamPlace) -> None:
        super().__init__(place)
        self.streams = place.streams

    def start(self, x: States) -> Stream:
        return Stream(x, (x.unsqueeze(2).expand(-1, -1, self.streams, -1),))

    def _mixed(self, states: Tensor) -> Stream:
        return Stream(states.mean(dim=2), (states,))

    def end(self, stream: Stream, norm: nn.Module) -> States:
        return norm(stream.parts[0].sum(dim=2))


@STREAM_RULES.register("hyper_static")
class StaticHyperConnections(_Several):
    """``u = A_m^T H``, ``H' = A_r^T H + B^T f(u)``; the end sums the n states (2409.19606).

    At the start A_m has a 1 at state k mod n in sub-layer k, from 0, A_r is the identity and B is
    1: the states stay equal, and the final norm cancels their number, as in Pre-LN.
    """

    words = "{streams} states, mixed before and after each sub-layer; the end reads their sum"

    def __init__(self, place: StreamPlace) -> None:
        super().__init__(place)
        # At the end of a stack the states are summed, without weights.
        self.static = None if place.ends_stack else StaticMix(place)

    def weights(self, states: Tensor, *names: str) -> list[Tensor]:
        """Return A_m (`read`), A_r (`keep`) or B (`write`), whose shapes broadcast over tokens."""
        return [getattr(self.static, name) for name in names]

    def read(self, stream: Stream) -> States:
        (states,) = stream.parts
        (read,) = self.weights(states, "read")
        return (read.unsqueeze(-1) * states).sum(dim=2)

    def write(self, stream: Stream, branch: Tensor, join: Join) -> Stream:
        (states,) = stream.parts
        keep, write = self.weights(states, "keep", "write")
        kept = unrounded(keep.to(states.dtype).transpose(-2, -1), states)
        return self._mixed(kept + write.unsqueeze(-1) * branch.unsqueeze(2))


@STREAM_RULES.register("hyper_dynamic")
@final
class DynamicHyperConnections(StaticHyperConnections):
    """Hyper-connections whose weights also depend on the states of the token.

    ``A_m + s_a tanh(N(H) W_m)``, ``A_r + s_a tanh(N(H) W_r)``, ``B + s_b tanh(N(H) W_b)``, all W
    zero and s 0.01 at the start (Zhu et al. 2024, 2409.19606, section 2.3).
    """

    def __init__(self, place: StreamPlace) -> None:
        super().__init__(place)
        self.dynamic = None if self.static is None else DynamicMix(place)

    def weights(self, states: Tensor, *names: str) -> list[Tensor]:
        assert self.dynamic is not None
        normed = self.dynamic.norm(states)
        return [
            static + self.dynamic.scale(name) * torch.tanh(normed @ getattr(self.dynamic, name))
            for name, static in zip(names, super().weights(states, *names), strict=True)
        ]


SINKHORN_STEPS, SINKHORN_EPSILON = 20, 1e-6


@final
class Projected(LearnedScalars):
    """phi, which projects all states of a token onto weights; N(0, 0.02^2) at the start."""

    decays = True

    def __init__(self, weights: int, place: StreamPlace) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.zeros(weights, place.streams * place.model_dim))

    def reset(self) -> None:
        nn.init.normal_(self.phi, std=0.02)

    def forward(self, states: Float[Tensor, "batch token stream model"], rows: slice) -> Tensor:
        """Return ``phi RMSNorm(vec(H))`` of some rows of phi, in float32 at least."""
        kept = torch.promote_types(states.dtype, torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            flat = states.flatten(2).to(kept)
            scale = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + SINKHORN_EPSILON)
            return (flat * scale) @ self.phi[rows].to(kept).T


@final
class Offset(LearnedScalars):
    """b and the scale of the projected weights, 0 and 1 at the start."""

    def __init__(self, weights: int, scales: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(weights))
        self.scale = nn.Parameter(torch.ones(scales))


def doubly_stochastic(logits: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Return ``exp(logits)`` with rows and columns scaled to a sum of 1 (Sinkhorn and Knopp 1967).

    Rows first, by softmax, then columns, then 19 times both, each sum plus 1e-6: columns are exact
    to that, rows nearly.
    """
    # Rows and columns first, so that every step runs along the tokens.
    matrix = logits.movedim((-2, -1), (0, 1)).softmax(dim=1) + SINKHORN_EPSILON
    matrix = matrix / (matrix.sum(dim=0, keepdim=True) + SINKHORN_EPSILON)
    for _ in range(SINKHORN_STEPS - 1):
        for dim in (1, 0):
            matrix = matrix / (matrix.sum(dim=dim, keepdim=True) + SINKHORN_EPSILON)
    return matrix.movedim((0, 1), (-2, -1)).contiguous()


@STREAM_RULES.register("hyper_manifold")
@final
class ManifoldHyperConnections(_Several):
    """Hyper-connections whose mixing of states is doubly stochastic (mHC, 2512.24880).

    With ``z = phi RMSNorm(vec(H))``: ``u = sum_i (sigmoid(s z_i + b_i) + eps) H_i``,
    ``H' = M^T H + 2 sigmoid(s z + b) f(u)``, M from `doubly_stochastic`; the end reads as a
    sub-layer does. As in transformers' DeepSeek-V4, with its start: phi N(0, 0.02^2), b 0, s 1.
    """

    words = "{streams} states, mixed by doubly stochastic weights around each sub-layer"

    def __init__(self, place: StreamPlace) -> None:
        super().__init__(place)
        n = place.streams
        weights, scales = (n, 1) if place.ends_stack else (n * (n + 2), 3)
        self.projected = Projected(weights, place)
        self.offset = Offset(weights, scales)

    def read(self, stream: Stream) -> States:
        (states,) = stream.parts
        n, scale, bias = self.streams, self.offset.scale, self.offset.bias
        read = (scale[0] * self.projected(states, slice(0, n)) + bias[:n]).sigmoid()
        return ((read + SINKHORN_EPSILON).to(states.dtype).unsqueeze(-1) * states).sum(dim=2)

    def write(self, stream: Stream, branch: Tensor, join: Join) -> Stream:
        (states,) = stream.parts
        n, scale, bias = self.streams, self.offset.scale, self.offset.bias
        gates, logits = self.projected(states, slice(n, None)).split([n, n * n], dim=-1)
        write = 2.0 * (scale[1] * gates + bias[n : 2 * n]).sigmoid()
        mixing = doubly_stochastic((scale[2] * logits + bias[2 * n :]).unflatten(-1, (n, n)))
        kept = unrounded(mixing.to(states.dtype).transpose(-2, -1), states)
        return self._mixed(kept + write.to(states.dtype).unsqueeze(-1) * branch.unsqueeze(2))

    def end(self, stream: Stream, norm: nn.Module) -> States:
        return norm(self.read(stream))


@final
class DepthQuery(LearnedScalars):
    """The pseudo-query w of attention over depth; zero at the start, so that the mean is read."""

    def __init__(self, model_dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(model_dim))


@STREAM_RULES.register("attention")
@final
class AttentionOverDepth(StreamRule):
    """``u = sum_i softmax_i(w . RMSNorm(v_i)) v_i`` over the embedding and all earlier branches.

    Attention Residuals (Kimi Team 2026, 2603.15031), the full form. Every sub-layer and the end of
    the stack have a w, zero at the start, and a gain of the norm of the keys. At the start u is the
    mean, and the norms that read it make the stack Pre-LN.
    """

    words = "sub-layers and the end read a softmax over the embedding and all branches so far"

    joins = False
    norms_end = True

    def __init__(self, place: StreamPlace) -> None:
        super().__init__(place)
        self.over = DepthQuery(place.model_dim)
        self.norm_keys = nn.RMSNorm(place.model_dim, eps=EPSILON)

    def start(self, x: States) -> Stream:
        return Stream(x, (x,))

    def read(self, stream: Stream) -> States:
        values = torch.stack(stream.parts, dim=2)
        weights = (self.norm_keys(values) @ self.over.query).softmax(dim=-1)
        return (weights.unsqueeze(-1) * values).sum(dim=2)

    def write(self, stream: Stream, branch: Tensor, join: Join) -> Stream:
        return Stream(stream.x + branch, (*stream.parts, branch))


@final
class DepthWeights(LearnedScalars):
    """The weights of the states up to one layer; at the start 1 for the last and 0 for others."""

    def __init__(self, states: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(states)[-1].clone())


@STREAM_RULES.register("average")
@final
class DepthAverage(StreamRule):
    """After layer i ``x = sum_(j <= i) w_ij X_j``: X_0 the embedding, X_j the output of layer j.

    DenseFormer's depth-weighted average (Pagliardini et al. 2024, 2402.02622), after every layer
    and without dilation. ``w_ii = 1`` and else 0 at the start, which changes nothing.
    """

    words = "after each layer a weighted average of the outputs of all layers so far"

    def __init__(self, place: StreamPlace) -> None:
        super().__init__(place)
        self.over = DepthWeights(place.layer + 1) if place.ends_layer else None

    def start(self, x: States) -> Stream:
        return Stream(x, (x,))

    def write(self, stream: Stream, branch: Tensor, join: Join) -> Stream:
        x = join(stream.x, branch)
        if self.over is None:
            return Stream(x, stream.parts)
        parts = (*stream.parts, x)
        states = torch.stack(parts, dim=-1)  # without a skip, outputs may be narrower than X_0
        return Stream(unrounded(states, self.over.weight.to(states.dtype)), parts)


class Blend(LearnedScalars):
    """``kept x + again x_0``, both learned."""

    def __init__(self, kept: float, again: float) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.tensor(kept))
        self.again = nn.Parameter(torch.tensor(again))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.kept * x + self.again * embedding


@STREAM_RULES.register("embedding")
@final
class EmbeddingBlend(StreamRule):
    """Before layer l ``x = lambda_l x + mu_l x_0``, x_0 the embedding (nanochat, modded-nanogpt).

    From the first layer to the last, lambda starts at 1.15 to 1.05 and mu at 0.2 to 0.05, evenly
    spaced, as in nanochat.
    """

    words = "before each layer x is blended with the embedding"

    def __init__(self, place: StreamPlace) -> None:
        super().__init__(place)
        self.blend: Blend | None = None
        before = 0 if place.ends_stack else place.layer  # the layers before the next one
        if place.ends_stack or (place.ends_layer and place.number < place.sub_layers):
            depth = place.layer - 1 if place.ends_stack else place.depth
            share = before / max(depth - 1, 1)
            self.blend = Blend(1.15 - 0.1 * share, 0.2 - 0.15 * share)

    def start(self, x: States) -> Stream:
        return self._blended(x, x)

    def write(self, stream: Stream, branch: Tensor, join: Join) -> Stream:
        return self._blended(join(stream.x, branch), *stream.parts)

    def _blended(self, x: Tensor, embedding: Tensor) -> Stream:
        return Stream(x if self.blend is None else self.blend(x, embedding), (embedding,))
