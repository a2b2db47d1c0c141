"""Each preset as its paper writes it: NumPy, float64, one query, one key at a time.

Nothing here is shared with the package. A model's parameters come as a flat mapping with the names
of its `state_dict`; everything else is said again, from the papers. Row vectors: ``x W^T + b``.

Letters: x the stream, N a norm, SA self-attention, CA cross-attention, FF the feed-forward, f any
of the three, n the layer from 1, L the depth of its stack.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Tokens = NDArray[np.int64]
Parameters = Mapping[str, Array]
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the parameters do not say. One stack alone has its depth in `encoder_depth`."""

    encoder_depth: int
    decoder_depth: int
    num_heads: int
    kv_heads: int | None = None
    logit_cap: float = math.inf
    activation: str = "relu"
    slope: float = 0.01
    positions: str = "sinusoidal"
    pad: int = 0


# --- Functions of arrays -------------------------------------------------------------------------


def layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    """``g (x - mean) / sqrt(var + eps) + b`` of each token (Ba et al. 2016)."""
    y = np.empty_like(x)
    for place in np.ndindex(x.shape[:-1]):
        row = x[place]
        mean = sum(row) / len(row)
        variance = sum((row - mean) ** 2) / len(row)
        y[place] = gain * (row - mean) / math.sqrt(variance + EPSILON) + bias
    return y


def rms_norm(x: Array, gain: Array) -> Array:
    """``g x / sqrt(mean(x^2) + eps)`` of each token (Zhang & Sennrich 2019)."""
    y = np.empty_like(x)
    for place in np.ndindex(x.shape[:-1]):
        row = x[place]
        y[place] = gain * row / math.sqrt(sum(row**2) / len(row) + EPSILON)
    return y


def gelu(x: Array) -> Array:
    """``x Phi(x)``, Phi the normal distribution function."""
    return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def softmax(row: Array) -> Array:
    e = np.exp(row - row.max())
    return e / e.sum()


def softmax_map(scores: Array, allowed: Flags, sinks: Array | None = None) -> Array:
    """Softmax over the allowed keys of each query; zeros where a query may see nothing.

    `scores` is (batch, head, query, key), `allowed` (batch, query, key). With `sinks` the softmax
    of each head is over one more logit, whose column is dropped (gpt-oss, 2508.10925).
    """
    attention = np.zeros_like(scores)
    for b, h, i in np.ndindex(scores.shape[:3]):
        keys = np.flatnonzero(allowed[b, i])
        if len(keys):
            row = scores[b, h, i, keys]
            row = row if sinks is None else np.append(row, sinks[h])
            attention[b, h, i, keys] = softmax(row)[: len(keys)]
    return attention


def scaled_scores(query: Array, key: Array, num_heads: int) -> Array:
    """``q_i . k_j / sqrt(d_k)`` of each head; `query` and `key` are (batch, token, model)."""
    batch, queries, model = query.shape
    dim = model // num_heads
    scores = np.empty((batch, num_heads, queries, key.shape[1]))
    for b, h, i, j in np.ndindex(scores.shape):
        columns = slice(h * dim, (h + 1) * dim)
        scores[b, h, i, j] = query[b, i, columns] @ key[b, j, columns] / math.sqrt(dim)
    return scores


def mix(attention: Array, value: Array) -> Array:
    """``concat_h(sum_j A_hij v_hj)``; `value` is (batch, key, model)."""
    batch, num_heads, queries, keys = attention.shape
    dim = value.shape[-1] // num_heads
    mixed = np.zeros((batch, queries, value.shape[-1]))
    for b, h, i, j in np.ndindex(batch, num_heads, queries, keys):
        columns = slice(h * dim, (h + 1) * dim)
        mixed[b, i, columns] += attention[b, h, i, j] * value[b, j, columns]
    return mixed


def rotate(x: Array, num_heads: int) -> Array:
    """RoPE (Su et al. 2021, 2104.09864); `x` is (batch, token, model).

    Entries (2k, 2k+1) of a head turn by the angle ``i * 10000^(-2k/d_k)`` at position i.
    """
    batch, length, model = x.shape
    dim = model // num_heads
    turned = np.empty_like(x)
    for b, i, h, k in np.ndindex(batch, length, num_heads, dim // 2):
        angle = i * 10000.0 ** (-2 * k / dim)
        first = h * dim + 2 * k
        p, q = x[b, i, first], x[b, i, first + 1]
        turned[b, i, first] = p * math.cos(angle) - q * math.sin(angle)
        turned[b, i, first + 1] = p * math.sin(angle) + q * math.cos(angle)
    return turned


def sinusoids(length: int, dim: int) -> Array:
    """``PE(i, 2k) = sin(i / 10000^(2k/d))``, ``PE(i, 2k+1) = cos(i / 10000^(2k/d))``."""
    table = np.empty((length, dim))
    for i, c in np.ndindex(length, dim):
        angle = i / 10000.0 ** ((c - c % 2) / dim)
        table[i, c] = math.cos(angle) if c % 2 else math.sin(angle)
    return table


def limit(allowed: Flags, query_block: int, memory: int) -> Flags:
    """Parmar et al. 2018 (1802.05751, section 4.3), one dimension; `allowed` is causal or not.

    The queries of a block see the block and the `memory` positions before it.
    """
    limited = allowed.copy()
    for b, i, j in np.ndindex(allowed.shape):
        first = query_block * math.floor(i / query_block)
        limited[b, i, j] &= first - memory <= j <= first + query_block - 1
    return limited


def soft_mask(distance: float, span: float, ramp: float) -> float:
    """``m_z(x) = min(max((R + z - x) / R, 0), 1)`` (Sukhbaatar et al. 2019, 1905.07799, eq. 3)."""
    return min(max((ramp + span - distance) / ramp, 0.0), 1.0)


def masked_map(
    scores: Array,
    allowed: Flags,
    spans: Array,
    longest: int,
    ramp: float,
    sinks: Array | None = None,
) -> Array:
    """``m_z(|i - j|) exp(s_ij) / sum_q m_z(|i - q|) exp(s_iq)`` of each head (equation 4).

    No key is seen at a distance over `longest`; `spans` are in tokens, (batch, head, query). A sink
    adds its exponential to the sum.
    """
    attention = np.zeros_like(scores)
    for b, h, i in np.ndindex(scores.shape[:3]):
        keys = [j for j in np.flatnonzero(allowed[b, i]) if abs(i - j) <= longest]
        weights = [soft_mask(abs(i - int(j)), float(spans[b, h, i]), ramp) for j in keys]
        top = max((scores[b, h, i, j] for j in keys), default=0.0)
        parts = [m * math.exp(scores[b, h, i, j] - top) for j, m in zip(keys, weights, strict=True)]
        total = sum(parts) + (0.0 if sinks is None else math.exp(sinks[h] - top))
        for j, part in zip(keys, parts, strict=True):
            attention[b, h, i, j] = part / total if total else 0.0
    return attention


def output_table(parameters: Parameters) -> Array:
    """That of the input, unless the output layer has its own.

    With nGPT (2410.01131) each row times an entry of s_z, stored as 1 / sqrt(d).
    """
    table = parameters.get("embedding.output.weight", parameters["embedding.tokens.weight"])
    if "embedding.logit_scale.scale" not in parameters:
        return table
    return (parameters["embedding.logit_scale.scale"] * math.sqrt(table.shape[1]) * table.T).T


def over_vocabulary(sizes: Sizes, states: Array, table: Array, bias: Array | float = 0.0) -> Array:
    """``z = E h + b``, or ``c tanh(z / c)`` with a cap (Gemma Team 2024, 2408.00118)."""
    logits = states @ table.T + bias
    if sizes.logit_cap == math.inf:
        return logits
    return sizes.logit_cap * np.tanh(logits / sizes.logit_cap)


def linear(parameters: Parameters, name: str, x: Array, *, bias: bool = True) -> Array:
    """``W x + b``, or with ``gamma W / |W|_2`` (Zhai et al. 2023, 2303.06296)."""
    matrix = parameters[f"{name}.weight"]
    if f"{name}.size.gamma" in parameters:
        matrix = parameters[f"{name}.size.gamma"] * matrix / np.linalg.norm(matrix, 2)
    return x @ matrix.T + (parameters[f"{name}.bias"] if bias else 0.0)


def bounded(parameters: Parameters, name: str, x: Array) -> Array:
    """DyT (2503.10622): ``g tanh(a x) + b``; Derf (2512.10938): ``g erf(a x + s) + b``."""
    inside, bound = parameters[f"{name}.slope"] * x, np.tanh
    if f"{name}.shift" in parameters:
        inside, bound = inside + parameters[f"{name}.shift"], np.vectorize(math.erf)
    return parameters[f"{name}.weight"] * bound(inside) + parameters[f"{name}.bias"]


def unit(parameters: Parameters, name: str, x: Array) -> Array:
    """``x / |x|`` of each token, or the norm whose gain is there."""
    if f"{name}.weight" in parameters:
        return norm(parameters, name, x)
    y = np.empty_like(x)
    for place in np.ndindex(x.shape[:-1]):
        y[place] = x[place] / math.sqrt(sum(x[place] ** 2))
    return y


def norm(parameters: Parameters, name: str, x: Array) -> Array:
    if f"{name}.slope" in parameters:
        return bounded(parameters, name, x)
    if f"{name}.weight" not in parameters:
        return rms_norm(x, np.ones(x.shape[-1]))
    if f"{name}.bias" in parameters:
        return layer_norm(x, parameters[f"{name}.weight"], parameters[f"{name}.bias"])
    return rms_norm(x, parameters[f"{name}.weight"])


# --- What a preset says, and what its layers share -----------------------------------------------

Projection = Literal["full", "identity", "anchored"]
"""``u W + b``; ``u``; ``u (a W_0 + b dW)`` (He & Hofmann 2023, section 4.2)."""


def full_projections(number: int, depth: int) -> tuple[Projection, Projection]:
    """The value and the output projection of layer `number`: matrices with a bias."""
    return "full", "full"


def only_first_value(number: int, depth: int) -> tuple[Projection, Projection]:
    """None, except for the first layer's values (He & Hofmann 2023, footnote 6)."""
    return ("anchored" if number == 1 else "identity"), "identity"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A preset. `dataclasses.replace` makes of it what the axes make of the preset."""

    layer: "Callable[[Layer, Array], Array]"
    last: "Literal['nothing', 'norm', 'sum'] | Callable[[Stack, Array], Array]" = "nothing"
    """After the last layer: x; N(x); x + N(r), r ResiDual's total; N of what a function returns."""
    first: Literal["nothing", "norm", "unit"] = "nothing"
    """Before the first layer: x; N(x); x / |x|."""
    projections: Callable[[int, int], tuple[Projection, Projection]] = full_projections
    value_gains: tuple[float, float] = (1.0, 1.0)
    """a and b of an anchored projection, where they are not trained."""
    output_gains: tuple[float, float] = (1.0, 1.0)
    shaped: Literal["no", "identity", "centre"] = "no"
    """A; ``alpha I + beta A``; ``alpha I + beta A - gamma C``, in self-attention."""
    carry: Literal["no", "sum", "mean", "qk_sum", "paper"] = "no"
    """Residual attention; `paper` is the mean in translation and the sum in an encoder alone."""
    temperature: float = 1.0
    """A further divisor of carried scores."""
    norm_heads: tuple[str, ...] = ()
    """Which of query, key and value pass a norm over the dimension of their head."""
    scale_heads: bool = False
    localised_span: tuple[int, int] | None = None
    """l_q and l_m, if self-attention is limited to blocks and their memory."""
    adaptive_span: tuple[int, float] | None = None
    """S and R, if the heads of self-attention have learned spans."""
    dynamic_span: bool = False
    """Whether these are spans of each token."""
    gate: Literal["no", "head", "element"] = "no"
    """What multiplies the heads before the output projection."""
    values: Literal["own", "half", "learned", "first"] = "own"
    """Whether layers above the first mix their values with its values, or have only those."""
    differs: bool = False
    """Whether a head is the difference of two maps over values of twice the width."""
    cosine: bool = False
    """Scores that are cosines times a learned factor of each head."""
    features: bool = False
    """Scores of directions of q and k, each times one learned vector of each head."""
    scale_inner: bool = False
    """Learned vectors times W1 x + b1 and W3 x + b3 of the feed-forward."""
    cap: float | None = None
    """c of ``c tanh(L / c)``."""
    sink: Literal["no", "zero", "learned"] = "no"
    """One more logit of each softmax."""
    norm_joined: bool = False
    """A norm of the joined heads of self-attention before the output matrix."""
    stops: dict[str, Array] | None = None
    """What has no gradient, by place: the values of the first run. None: those of every run."""
    norm_inner: bool = False
    """A norm between activation and outer matrix of the feed-forward."""
    steps: "Callable[[Stack, Array], Array] | None" = None
    """What runs in place of layers with parameters of their own: see `reference_steps`."""


@dataclass
class Stack:
    """The parts that the layers of one stack share, and the states besides the stream."""

    reference: Reference
    parameters: Parameters
    side: Literal["encoder", "decoder"]
    depth: int
    sizes: Sizes
    allowed: Flags
    """(batch, query, key) of self-attention."""
    memory: Array | None = None
    memory_allowed: Flags = field(default_factory=lambda: np.empty((0, 0, 0), dtype=np.bool_))
    sums: dict[str, Array] = field(default_factory=dict)
    """Running sums of scores, or of queries and keys, one a chain."""
    spans: list[Array] = field(default_factory=list)
    """The learned spans of each layer in tokens, (batch, head, token)."""
    total: Array | float = 0.0
    """r, the embedding and the sum of all branches (ResiDual)."""
    first_values: Array = field(default_factory=lambda: np.empty(0))
    """V of the first layer."""
    states: list[Array] = field(default_factory=list)
    """The states besides x: see the presets with several."""


@dataclass
class Layer:
    """Layer `number`, from 1: its sub-layers f, without norms and skips around them."""

    stack: Stack
    number: int

    def name(self, part: str) -> str:
        return f"{self.stack.side}.blocks.{self.number - 1}.{part}"

    def weight(self, part: str) -> Array:
        return self.stack.parameters[self.name(part)]

    def linear(self, part: str, x: Array) -> Array:
        return linear(self.stack.parameters, self.name(part), x)

    def norm(self, part: str, x: Array) -> Array:
        return norm(self.stack.parameters, self.name(part), x)

    def sub_layers(self) -> list[tuple[str, Callable[[Array], Array]]]:
        """SA, CA in a decoder, FF, each with the name of the residual around it."""
        cross = [] if self.stack.memory is None else [("around_cross", self.cross_attend)]
        return [("around_self", self.attend), *cross, ("around_ff", self.feed_forward)]

    def feed_forward(self, x: Array) -> Array:
        """``W2 act(W1 x + b1) + b2`` (Vaswani et al. 2017, equation 2), or GEGLU's.

        GEGLU (Shazeer 2020, 2002.05202): ``act(..) = gelu(W1 x + b1) (W3 x + b3)``.
        """
        inner, gate = self.inner("inner", x), x
        if self.stack.sizes.activation in ("swiglu", "geglu"):
            gate = self.inner("gate", x)
        match self.stack.sizes.activation:
            case "relu":
                inner = np.maximum(inner, 0.0)
            case "leaky_relu":
                inner = np.where(inner > 0.0, inner, self.stack.sizes.slope * inner)
            case "gelu":
                inner = gelu(inner)
            case "relu_squared":
                inner = np.maximum(inner, 0.0) ** 2
            case "swiglu":
                silu = inner / (1.0 + np.exp(-inner))
                inner = silu * gate
            case "geglu":
                inner = gelu(inner) * gate
            case other:
                raise ValueError(other)
        if self.stack.reference.norm_inner:
            inner = self.norm("feed_forward.norm_inner", inner)
        return self.linear("feed_forward.outer", inner)

    def inner(self, part: str, x: Array) -> Array:
        """``W x + b``; nGPT (2410.01131, code) has it times s_uv sqrt(d), s_uv stored as 1."""
        y = self.linear(f"feed_forward.{part}", x)
        if not self.stack.reference.scale_inner:
            return y
        return y * self.weight(f"feed_forward.scale_{part}.scale") * math.sqrt(x.shape[-1])

    @property
    def heads(self) -> int:
        return self.stack.sizes.num_heads

    @property
    def kv_heads(self) -> int:
        return self.stack.sizes.kv_heads or self.heads

    def of_each_query_head(self, x: Array) -> Array:
        """The keys or values of head h of the queries are those of head ``h kv_heads // heads``.

        Ainslie et al. 2023 (2305.13245), section 2.2: neighbours form a group.
        """
        dim = x.shape[-1] // self.kv_heads
        groups = [h * self.kv_heads // self.heads for h in range(self.heads)]
        return np.concatenate([x[..., g * dim : (g + 1) * dim] for g in groups], axis=-1)

    def norm_heads(self, name: str, part: str, x: Array) -> Array:
        """N over the entries of each head, with one gain for all heads, where the preset does."""
        if part not in self.stack.reference.norm_heads:
            return x
        heads = x.reshape(*x.shape[:2], self.kv_heads if part != "query" else self.heads, -1)
        return self.norm(f"{name}.{part}_norm", heads).reshape(x.shape)

    def scores(self, name: str, x: Array, memory: Array) -> Array:
        """What the softmax of `name` is taken of, (batch, head, query, key).

        RealFormer (He et al. 2021, section 3.2): ``Z_n / c``, ``Z_n = Q K^T / sqrt(d_k) + Z_(n-1)``
        with c = n for the mean. Su's form: ``(Q_1 + .. + Q_n) (K_1 + .. + K_n)^T / sqrt(d_k)``.
        """
        heads, carry = self.stack.sizes.num_heads, self.stack.reference.carry
        query = self.norm_heads(name, "query", self.linear(f"{name}.query", x))
        key = self.norm_heads(name, "key", self.linear(f"{name}.key", memory))
        if self.stack.reference.cosine:
            query, key = self.unit(query, heads), self.unit(key, self.kv_heads)
            query = self.per_head(query, self.cosine_factors(name))
        if self.stack.reference.features:
            # nGPT's s_qk, stored as 1 / sqrt(d), of both, here of queries, before they rotate;
            # scores are times sqrt(d_k), not divided by it.
            model = query.shape[-1]
            s = self.weight(f"{name}.query_norm.1.scale").reshape(-1) * math.sqrt(model)
            query = self.unit(query, heads) * s * s * (model // heads)
            key = self.unit(key, self.kv_heads)
        if self.stack.sizes.positions == "rope" and name == "self_attention":
            query, key = rotate(query, heads), rotate(key, self.kv_heads)
        key = self.of_each_query_head(key)
        if carry == "paper":
            carry = "mean" if self.stack.sizes.decoder_depth else "sum"
        divisor = self.stack.reference.temperature * (self.number if carry == "mean" else 1)
        if carry == "qk_sum":
            query = query + self.stack.sums.get(f"{name}.query", 0.0)
            key = key + self.stack.sums.get(f"{name}.key", 0.0)
            self.stack.sums |= {f"{name}.query": query, f"{name}.key": key}
        scores = scaled_scores(query, key, heads)
        if self.stack.sizes.positions.startswith("relative") and name == "self_attention":
            scores = self.relative_scores(query, key)
        if carry in ("sum", "mean"):
            scores = self.stack.sums[name] = scores + self.stack.sums.get(name, 0.0)
        cap = self.stack.reference.cap
        return scores / divisor if cap is None else cap * np.tanh(scores / divisor / cap)

    def unit(self, x: Array, num_heads: int) -> Array:
        """Each head divided by its Euclidean length."""
        heads = x.reshape(*x.shape[:2], num_heads, -1)
        lengths = np.sqrt((heads * heads).sum(axis=-1, keepdims=True))
        return (heads / lengths).reshape(x.shape)

    def cosine_factors(self, name: str) -> Array:
        """Liu et al. 2022 (Swin V2, 2111.09883), their code: ``exp(min(s_h, ln 100))``.

        `scaled_scores` divides by sqrt(d_k), and cosines do not.
        """
        logs = self.weight(f"{name}.query_norm.1.log_scale").reshape(-1)
        model = self.weight(f"{name}.query.weight").shape[0]
        return np.array([math.exp(min(s, math.log(100.0))) for s in logs]) * math.sqrt(
            model // len(logs)
        )

    def per_head(self, x: Array, factors: Array) -> Array:
        return x * np.repeat(factors, x.shape[-1] // len(factors))

    def sinks(self, name: str) -> Array | None:
        """The additional logit of each head: 0, or learned."""
        if self.stack.reference.sink == "no":
            return None
        if self.stack.reference.sink == "zero":
            return np.zeros(self.stack.sizes.num_heads)
        return self.weight(f"{name}.sink.sink_logit").reshape(-1)

    def relative_scores(self, query: Array, key: Array) -> Array:
        """``((q_i + u) . k_j + (q_i + v) . W r_(i-j)) / sqrt(d_k)`` (Dai et al. 2019, section 3.3).

        ``r_x = [sin(x w) ; cos(x w)]``, ``w_k = 10000^(-2k/d)``, cell by cell.
        """
        heads, side = self.stack.sizes.num_heads, self.stack.side
        dim = query.shape[-1] // heads
        untied = self.stack.sizes.positions == "relative_untied"
        pair = f"{side}.place.biases.{self.number - 1 if untied else 0}"
        u, v = (self.stack.parameters[f"{pair}.{part}"] for part in ("content", "position"))
        weight = self.stack.parameters[f"{side}.place.projections.{self.number - 1}.weight"]
        width = weight.shape[1]
        rates = [10000.0 ** (-2 * k / width) for k in range(width // 2)]
        batch, length = query.shape[:2]
        scores = np.empty((batch, heads, length, length))
        for i in range(length):
            for j in range(length):
                angles = [(i - j) * rate for rate in rates]
                distance = weight @ np.array([*map(math.sin, angles), *map(math.cos, angles)])
                for h in range(heads):
                    part = slice(h * dim, (h + 1) * dim)
                    content = (query[:, i, part] + u[h, 0]) * key[:, j, part]
                    position = (query[:, i, part] + v[h, 0]) * distance[part]
                    scores[:, h, i, j] = (content + position).sum(axis=-1) / math.sqrt(dim)
        return scores

    def shape(self, scores: Array, attention: Array) -> Array:
        """``alpha I + beta A - gamma C`` of each head (He & Hofmann 2023, equation 6).

        C is A at zero scores. V-SkipInit has no C (equation 4). One triple may serve all heads.
        """
        centre = softmax_map(np.zeros_like(scores), self.stack.allowed)
        alpha, beta = (self.weight(f"self_attention.shaping.{part}") for part in ("alpha", "beta"))
        gamma = np.zeros_like(alpha)
        if self.stack.reference.shaped == "centre":
            gamma = self.weight("self_attention.shaping.gamma")
        shaped = np.empty_like(scores)
        for b, h, i, j in np.ndindex(scores.shape):
            row = h if len(alpha) > 1 else 0
            shaped[b, h, i, j] = beta[row, 0, 0] * attention[b, h, i, j]
            shaped[b, h, i, j] -= gamma[row, 0, 0] * centre[b, h, i, j]
            if i == j:
                shaped[b, h, i, j] += alpha[row, 0, 0]
        return shaped

    def mixed(self, name: str, attention: Array, values: Array) -> Array:
        """``concat_h(A_h V_h)``; Ye et al. 2024 (2410.05258), section 2.1, if maps differ.

        Head p has ``(A_2p - lambda A_2p+1) V_p``, V_p the p-th of half as many wide heads, then
        RMSNorm and ``1 - lambda_0``.
        """
        if not self.stack.reference.differs:
            return mix(attention, self.of_each_query_head(values))
        (q1, q2), (k1, k2) = self.weight(f"{name}.difference.vectors")
        start = 0.8 - 0.6 * math.exp(-0.3 * (self.number - 1))
        subtracted = math.exp(q1 @ k1) - math.exp(q2 @ k2) + start
        maps = attention[:, 0::2] - subtracted * attention[:, 1::2]
        width = values.shape[-1] // (self.kv_heads // 2)
        groups = [h * self.kv_heads // self.heads for h in range(self.heads // 2)]
        wide = [values[..., g * width : (g + 1) * width] for g in groups]
        mixed = mix(maps, np.concatenate(wide, axis=-1))
        for columns in np.split(np.arange(mixed.shape[-1]), self.heads // 2):
            mixed[..., columns] = self.norm(f"{name}.difference.norm", mixed[..., columns])
        return (1.0 - start) * mixed

    def scaled(self, name: str, mixed: Array) -> Array:
        """``concat_h(g_h head_h)`` (Shleifer et al. 2021, NormFormer, 2110.09456)."""
        if not self.stack.reference.scale_heads:
            return mixed
        gain = self.weight(f"{name}.head_gain.gain")
        heads = len(gain)
        dim = mixed.shape[-1] // heads
        scaled = mixed.copy()
        for h in range(heads):
            scaled[..., h * dim : (h + 1) * dim] *= gain[h, 0, 0]
        return scaled

    def gated(self, name: str, mixed: Array, x: Array) -> Array:
        """Qiu et al. 2025 (2505.06708): ``mixed * sigmoid(x W_g)``, for each entry or head."""
        if self.stack.reference.gate == "no":
            return mixed
        gate = self.name(f"{name}.output_gate.matrix")
        logits = linear(self.stack.parameters, gate, x, bias=False)
        gates = 1.0 / (1.0 + np.exp(-logits))
        if self.stack.reference.gate == "head":
            gates = np.repeat(gates, mixed.shape[-1] // gates.shape[-1], axis=-1)
        return mixed * gates

    def with_first(self, values: Array) -> Array:
        """Zhou et al. 2024 (2410.17897): ``l_1 V_1 + l_2 V_n`` above the first layer."""
        if self.number == 1:
            self.stack.first_values = values
        if self.number == 1 or self.stack.reference.values in ("own", "first"):
            return values
        first = own = np.float64(0.5)
        if self.stack.reference.values == "learned":
            first, own = (
                self.weight(f"self_attention.value_carry.{part}") for part in ("first", "own")
            )
        return first * self.stack.first_values + own * values

    def project(self, kind: Projection, part: str, u: Array, gains: tuple[float, float]) -> Array:
        """One of the three projections; W_0 is the identity where no other is kept."""
        if kind == "identity":
            return u
        if kind == "full":
            return self.linear(part, u)
        parameters = self.stack.parameters
        kept = parameters.get(self.name(f"{part}.kept.gain"), gains[0])
        departure = parameters.get(self.name(f"{part}.departure.gain"), gains[1])
        initial = parameters.get(self.name(f"{part}.initial"), np.eye(u.shape[-1]))
        return u @ (kept * initial + departure * self.weight(f"{part}.change.weight")).T

    def attend(self, x: Array) -> Array:
        """SA(x), Vaswani et al. 2017, section 3.2; shaped and projected as the preset says."""
        reference = self.stack.reference
        value, output = reference.projections(self.number, self.stack.depth)
        scores = self.scores("self_attention", x, x)
        sinks = self.sinks("self_attention")
        attention = softmax_map(scores, self.stack.allowed, sinks)
        if reference.adaptive_span is not None:
            longest, ramp = reference.adaptive_span
            spans = self.spans(x, longest)
            self.stack.spans.append(spans)
            attention = masked_map(scores, self.stack.allowed, spans, longest, ramp, sinks)
        if reference.shaped != "no":
            attention = self.shape(scores, attention)
        values = self.stack.first_values
        if reference.values != "first" or self.number == 1:
            values = self.project(value, "self_attention.value", x, reference.value_gains)
            values = self.norm_heads("self_attention", "value", values)
        values = self.with_first(values)
        mixed = self.scaled("self_attention", self.mixed("self_attention", attention, values))
        mixed = self.gated("self_attention", mixed, x)
        if reference.norm_joined:
            mixed = self.norm("self_attention.output_norm", mixed)
        return self.project(output, "self_attention.output", mixed, reference.output_gains)

    def spans(self, x: Array, longest: int) -> Array:
        """``z = S z'``, or the dynamic ``z_t = S sigmoid(v . x_t + b)`` (Sukhbaatar et al. 2019).

        (batch, head, token) in tokens; x is what the queries are projected from.
        """
        spans = np.empty((x.shape[0], self.stack.sizes.num_heads, x.shape[1]))
        for b, h, i in np.ndindex(spans.shape):
            if self.stack.reference.dynamic_span:
                direction = self.weight("self_attention.span.direction")[h]
                logit = x[b, i] @ direction + self.weight("self_attention.span.bias")[h]
                spans[b, h, i] = longest / (1.0 + math.exp(-logit))
            else:
                spans[b, h, i] = longest * self.weight("self_attention.span.fraction")[h, 0, 0]
        return spans

    def cross_attend(self, x: Array) -> Array:
        """CA(x): queries from the decoder, keys and values from the encoder's output."""
        assert self.stack.memory is not None
        scores = self.scores("cross_attention", x, self.stack.memory)
        values = self.linear("cross_attention.value", self.stack.memory)
        values = self.norm_heads("cross_attention", "value", values)
        sinks = self.sinks("cross_attention")
        attention = softmax_map(scores, self.stack.memory_allowed, sinks)
        mixed = self.mixed("cross_attention", attention, values)
        mixed = self.gated("cross_attention", self.scaled("cross_attention", mixed), x)
        return self.linear("cross_attention.output", mixed)

    def pre_ln_cross(self, x: Array) -> Array:
        """``x + CA(N(x))`` in a decoder, x in an encoder."""
        if self.stack.memory is None:
            return x
        return x + self.cross_attend(self.norm("around_cross.norm_input", x))


# --- One formula around every sub-layer ----------------------------------------------------------

SubLayer = Callable[[Array], Array]
Rule = Callable[[Layer, str, SubLayer, Array], Array]


def each(rule: Rule) -> Callable[[Layer, Array], Array]:
    """Return the layer that has `rule` around SA, CA and FF in turn."""

    def layer(layer: Layer, x: Array) -> Array:
        for around, f in layer.sub_layers():
            x = rule(layer, around, f, x)
        return x

    return layer


def post_ln(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Xiong et al. 2020, table 1, left: ``N(x + f(x))``."""
    return layer.norm(f"{around}.norm_sum", x + f(x))


def pre_ln(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Xiong et al. 2020, table 1, right: ``x + f(N(x))``."""
    return x + f(layer.norm(f"{around}.norm_input", x))


def peri_ln(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Kim et al. 2025 (2502.02732); Ding et al. 2021 (CogView, 2105.13290): ``x + N(f(N(x)))``."""
    return x + layer.norm(f"{around}.norm_branch", f(layer.norm(f"{around}.norm_input", x)))


def normformer(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Shleifer et al. 2021: attention as in Sandwich-LN; the norm of FF is inside FF."""
    return pre_ln(layer, around, f, x) if around == "around_ff" else peri_ln(layer, around, f, x)


def deepnorm(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Wang et al. 2022, table of alpha and beta: ``N(alpha x + f(x))``, N and M the two depths."""
    n, m = layer.stack.sizes.encoder_depth, layer.stack.sizes.decoder_depth
    if m == 0:
        alpha = (2 * n) ** (1 / 4)
    elif layer.stack.side == "encoder":
        alpha = 0.81 * (n**4 * m) ** (1 / 16)
    else:
        alpha = (3 * m) ** (1 / 4)
    return layer.norm(f"{around}.norm_sum", alpha * x + f(x))


def admin(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Liu et al. 2020 (Admin, 2004.08249): ``N(omega x + f(x))``, omega a vector."""
    return layer.norm(f"{around}.norm_sum", layer.weight(f"{around}.skip.gain") * x + f(x))


def dual_stream(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Xie et al. 2023 (ResiDual, 2304.14802): ``o = f(x)``, ``r += o``, ``x' = N(x + o)``."""
    o = f(x)
    layer.stack.total = layer.stack.total + o
    return layer.norm(f"{around}.norm_sum", x + o)


def siamese(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """SiameseNorm (2602.08064), the authors' `Block.forward` with the norm of x moved to its end.

    ``o = f(N(x + N_y(y)))``, ``x' = N_x(x + o / sqrt(2 l))``, ``y' = y + o``; x_0 is normed too.
    """
    stack = layer.stack
    if not stack.states:
        stack.states = [x]
        x = norm(stack.parameters, f"{stack.side}.stream_end.norm_start", x)
    (y,) = stack.states
    u = x + layer.norm(f"{around}.stream.norm_total", y)
    o = f(layer.norm(f"{around}.norm_input", u))
    stack.states = [y + o]
    return layer.norm(f"{around}.norm_sum", x + o / math.sqrt(2 * layer.number))


def siamese_end(stack: Stack, x: Array) -> Array:
    """Both streams, each with its norm."""
    return x + norm(stack.parameters, f"{stack.side}.stream_end.norm_total", stack.states[0])


def hyper_connections(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Zhu et al. 2024 (2409.19606), equations 1-2 and 10-13, one state at a time.

    ``h = sum_i A_m[i] H_i``, ``H'_j = sum_i A_r[i, j] H_i + B_j f(N(h))``; where the parameters
    have dynamic ones, each weight of state i has ``s tanh(N(H_i) . w)`` added. Returns the mean.
    """
    stack, part = layer.stack, f"{around}.stream"
    read, keep, write = (layer.weight(f"{part}.static.{n}") for n in ("read", "keep", "write"))
    n = len(read)
    states = stack.states or [x] * n
    reads, writes = [read[i] * np.ones(x.shape[:-1]) for i in range(n)], []
    keeps = [[keep[i, j] * np.ones(x.shape[:-1]) for j in range(n)] for i in range(n)]
    for i, state in enumerate(states):
        writes.append(write[i] * np.ones(x.shape[:-1]))
        if layer.name(f"{part}.dynamic.read") not in stack.parameters:
            continue
        normed = layer.norm(f"{part}.dynamic.norm", state)
        inward = layer.weight(f"{part}.dynamic.scale_in")
        reads[i] = reads[i] + inward * np.tanh(normed @ layer.weight(f"{part}.dynamic.read"))
        outward = layer.weight(f"{part}.dynamic.scale_out")
        writes[i] = writes[i] + outward * np.tanh(normed @ layer.weight(f"{part}.dynamic.write"))
        for j in range(n):
            column = layer.weight(f"{part}.dynamic.keep")[:, j]
            keeps[i][j] = keeps[i][j] + inward * np.tanh(normed @ column)
    h = sum((reads[i][..., None] * states[i] for i in range(n)), np.zeros_like(x))
    o = f(layer.norm(f"{around}.norm_input", h))
    stack.states = []
    for j in range(n):
        kept = sum((keeps[i][j][..., None] * states[i] for i in range(n)), np.zeros_like(x))
        stack.states.append(kept + writes[j][..., None] * o)
    return sum(stack.states, np.zeros_like(x)) / n


def hyper_end(stack: Stack, x: Array) -> Array:
    """The sum of the states."""
    return sum(stack.states, np.zeros_like(x))


def manifold_weights(stack: Stack, name: str, n: int) -> tuple[Array, Array]:
    """``sigmoid(s phi RMSNorm(vec(H)) + b)`` of each token, and the same without the sigmoid."""
    rows = np.concatenate(stack.states, axis=-1)  # vec(H) of each token
    normed = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + 1e-6)
    projected = normed @ stack.parameters[f"{name}.projected.phi"].T
    scale, bias = (stack.parameters[f"{name}.offset.{part}"] for part in ("scale", "bias"))
    each_scale = np.repeat(scale, [n, n, n * n][: len(scale)])
    weights = projected * each_scale + bias
    return 1.0 / (1.0 + np.exp(-weights)), weights


def sinkhorn(logits: Array) -> Array:
    """Rows and columns in turn, as DeepSeek-V4's code does: softmax, columns, 19 times both."""
    m = np.stack([softmax(row) for row in logits]) + 1e-6
    m = m / (m.sum(axis=0) + 1e-6)
    for _ in range(19):
        m = m / (m.sum(axis=1, keepdims=True) + 1e-6)
        m = m / (m.sum(axis=0) + 1e-6)
    return m


def mhc(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """mHC (2512.24880), equations 7-8 as in DeepSeek-V4's code, one token at a time."""
    stack, name = layer.stack, layer.name(f"{around}.stream")
    n = len(stack.states) or round(len(layer.weight(f"{around}.stream.offset.bias")) ** 0.5 - 0.5)
    stack.states = stack.states or [x] * n
    gates, weights = manifold_weights(stack, name, n)
    h = sum(((gates[..., i] + 1e-6)[..., None] * stack.states[i] for i in range(n)), 0 * x)
    o = f(layer.norm(f"{around}.norm_input", h))
    new = [np.zeros_like(x) for _ in range(n)]
    for place in np.ndindex(x.shape[:-1]):
        mixing = sinkhorn(weights[(*place, slice(2 * n, None))].reshape(n, n))
        for j in range(n):
            new[j][place] = 2.0 * gates[(*place, n + j)] * o[place]
            for i in range(n):
                new[j][place] += mixing[i, j] * stack.states[i][place]
    stack.states = new
    return sum(new, np.zeros_like(x)) / n


def mhc_end(stack: Stack, x: Array) -> Array:
    """One more reading of the states."""
    n = len(stack.states)
    gates, _ = manifold_weights(stack, f"{stack.side}.stream_end", n)
    return sum(((gates[..., i] + 1e-6)[..., None] * stack.states[i] for i in range(n)), 0 * x)


def over_depth(stack: Stack, name: str, values: list[Array]) -> Array:
    """Kimi Team 2026 (2603.15031): ``sum_i softmax_i(w . RMSNorm(v_i)) v_i``, token by token."""
    query = stack.parameters[f"{name}.over.query"]
    gain = stack.parameters[f"{name}.norm_keys.weight"]
    read = np.zeros_like(values[0])
    keys = [rms_norm(value, gain) for value in values]
    for place in np.ndindex(read.shape[:-1]):
        weights = softmax(np.array([key[place] @ query for key in keys]))
        for weight, value in zip(weights, values, strict=True):
            read[place] += weight * value[place]
    return read


def attention_residuals(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Sub-layers read all earlier outputs and the embedding. Returns their sum."""
    stack = layer.stack
    stack.states = stack.states or [x]
    h = over_depth(stack, layer.name(f"{around}.stream"), stack.states)
    stack.states.append(f(layer.norm(f"{around}.norm_input", h)))
    return sum(stack.states, np.zeros_like(x))


def attention_end(stack: Stack, x: Array) -> Array:
    """One more reading."""
    return over_depth(stack, f"{stack.side}.stream_end", stack.states)


def after_each(block: Callable[[Layer, Array], Array]) -> Callable[[Layer, Array], Array]:
    """Pagliardini et al. 2024 (2402.02622), equation 1: a block, then the average over depth."""

    def layer(layer: Layer, x: Array) -> Array:
        stack = layer.stack
        stack.states = stack.states or [x]
        x = block(layer, x)
        stack.states.append(x)
        weights = layer.weight("around_ff.stream.over.weight")
        return sum((w * s for w, s in zip(weights, stack.states, strict=True)), np.zeros_like(x))

    return layer


def rezero(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Bachlechner et al. 2020 (2003.04887): ``x + a f(x)``, one a for all of a layer."""
    return x + layer.weight("around_self.branch.gain") * f(x)


def skipinit(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """De & Smith 2020 (2002.10444): ``x + a f(x)``, one a for each branch."""
    return x + layer.weight(f"{around}.branch.gain") * f(x)


def layer_scale(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Touvron et al. 2021 (CaiT, 2103.17239): ``x + diag(lambda) f(N(x))``."""
    u = layer.norm(f"{around}.norm_input", x)
    return x + layer.weight(f"{around}.branch.gain") * f(u)


def t_fixup(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Huang et al. 2020 (T-Fixup): ``x + f(x)``, no norm; all else is initialisation."""
    return x + f(x)


def mix_ln(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Li et al. 2024 (2412.13795): Post-LN in the first quarter of layers, Pre-LN after it.

    A quarter holds whole layers alone; the first layer is Post-LN however few there are.
    """
    first_quarter = layer.number == 1 or layer.number <= layer.stack.depth / 4
    return (post_ln if first_quarter else pre_ln)(layer, around, f, x)


def layer_norm_scaling(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Sun et al. 2025 (2502.05795): ``x + f(N(x) / sqrt(n))``."""
    return x + f(layer.norm(f"{around}.norm_input", x) / math.sqrt(layer.number))


def keel(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Keel (2601.19895): ``N(alpha x + f(N(x)))``, alpha the sub-layers of the whole stack."""
    alpha = layer.stack.depth * len(layer.sub_layers())
    y = alpha * x + f(layer.norm(f"{around}.norm_input", x))
    return layer.norm(f"{around}.norm_sum", y)


def hybrid_norm(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Zhuo et al. 2025 (2503.04598): ``y = x + f(x)``, normed after a layer's last attention."""
    y = x + f(x)
    last = "around_self" if layer.stack.memory is None else "around_cross"
    return layer.norm(f"{around}.norm_sum", y) if around == last else y


def reordered_norm(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """OLMo 2 (2501.00656): ``x + N(f(x))``."""
    return x + layer.norm(f"{around}.norm_branch", f(x))


def laurel(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """LAuReL-RW (2411.07501): ``b x + a f(N(x))``."""
    a, b = (layer.weight(f"{around}.{part}.gain") for part in ("branch", "skip"))
    return b * x + a * f(layer.norm(f"{around}.norm_input", x))


def inverse_depth(power: float) -> Rule:
    """Depth-muP (2310.02244), CompleteP (2505.01618): ``x + f(N(x)) / L^power``."""

    def rule(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
        return x + f(layer.norm(f"{around}.norm_input", x)) / layer.stack.depth**power

    return rule


def prores(step: int, total: int, order: str = "deeper_later") -> Rule:
    """ProRes (2603.05369): ``x + a f(N(x))``, ``a = min(1, t / T_l)`` with T_l of layer l."""

    def rule(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
        first, depth = total / layer.stack.depth, layer.stack.depth
        spans = np.linspace(first, total, depth)  # as in the authors' code
        if order == "equal":
            spans = np.full(depth, total)
        elif order == "reverse":
            spans = np.flip(spans)
        a = min(1.0, step / spans[layer.number - 1])
        return x + a * f(layer.norm(f"{around}.norm_input", x))

    return rule


def gpas(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """GPAS (2506.22049): ``y - silu(g) stop(y)``, ``y = x + f(N(x))``, one g for each layer."""
    y = x + f(layer.norm(f"{around}.norm_input", x))
    stops = layer.stack.reference.stops
    stopped = y if stops is None else stops.setdefault(layer.name(around), y)
    g = layer.weight("around_self.rule.gate")
    return y - g / (1.0 + np.exp(-g)) * stopped


def blended(block: Callable[[Layer, Array], Array]) -> Callable[[Layer, Array], Array]:
    """Nanochat: ``lambda_l x + mu_l x_0`` before each layer, x_0 the embedding."""

    def layer(layer: Layer, x: Array) -> Array:
        stack = layer.stack
        if layer.number == 1:
            stack.states = [x]
        place = f"{stack.side}.stream_end"
        if layer.number > 1:
            last = "around_ff"  # of the layer before
            place = f"{stack.side}.blocks.{layer.number - 2}.{last}.stream"
        kept, again = (stack.parameters[f"{place}.blend.{part}"] for part in ("kept", "again"))
        return block(layer, kept * x + again * stack.states[0])

    return layer


def ngpt(layer: Layer, around: str, f: SubLayer, x: Array) -> Array:
    """Loshchilov et al. 2024 (2410.01131), the authors' code: ``|x + |a| (|f(x)| - x)|``.

    Bars of vectors divide by the length; a is stored as 1 / sqrt(d) and starts at 0.05.
    """
    a = np.abs(layer.weight(f"{around}.rule.scale") * (0.05 * math.sqrt(x.shape[-1])))
    parameters = layer.stack.parameters
    y = unit(parameters, layer.name(f"{around}.norm_branch"), f(x))
    return unit(parameters, layer.name(f"{around}.norm_sum"), x + a * (y - x))


# --- Layers that are more than one formula in turn -----------------------------------------------


def b2t(layer: Layer, x: Array) -> Array:
    """Takase et al. 2022 (2206.00330): Post-LN, the layer's input in its last sum once more."""
    *others, (around, f) = layer.sub_layers()
    y = x
    for name, g in others:
        y = post_ln(layer, name, g, y)
    return layer.norm(f"{around}.norm_sum", y + f(y) + x)


def parallel(layer: Layer, x: Array) -> Array:
    """He & Hofmann 2023, equation 7: ``x + FF(u) + SA(u)``, ``u = N(x)``; then CA as in Pre-LN."""
    u = layer.norm("around_self.norm_input", x)
    return layer.pre_ln_cross(x + layer.feed_forward(u) + layer.attend(u))


def skipless_attention(layer: Layer, u: Array) -> Array:
    """``b SA(u)``, He & Hofmann 2023, equations 4 and 12, the branch with its trained gain."""
    return layer.weight("around_self.branch.gain") * layer.attend(u)


def gained_feed_forward(layer: Layer, x: Array) -> Array:
    """``b FF(x)`` with the trained gain of the simplified blocks."""
    return layer.weight("around_ff.branch.gain") * layer.feed_forward(x)


def sas(layer: Layer, x: Array) -> Array:
    """He & Hofmann 2023, equations 12-13; CA between the two as in Pre-LN.

    V-SkipInit (He et al. 2023, 2302.10322) is the same block with another map and with matrices.
    """
    y = skipless_attention(layer, layer.norm("around_self.norm_input", x))
    y = layer.pre_ln_cross(y)
    return y + gained_feed_forward(layer, layer.norm("around_ff.norm_input", y))


def sas_p(layer: Layer, x: Array) -> Array:
    """He & Hofmann 2023, section 4.3: the parallel form with the skip's gain at 0."""
    u = layer.norm("around_self.norm_input", x)
    return layer.pre_ln_cross(skipless_attention(layer, u) + gained_feed_forward(layer, u))


def sas_p_no_norm(layer: Layer, x: Array) -> Array:
    """He & Hofmann 2023, section 4.4: of the norms inside blocks only the first layer's stays."""
    u = layer.norm("around_self.norm_input", x) if layer.number == 1 else x
    return layer.pre_ln_cross(skipless_attention(layer, u) + gained_feed_forward(layer, u))


def simplified(layer: Callable[[Layer, Array], Array]) -> Reference:
    """Shaped attention with no values but the first layer's and no output projection."""
    return Reference(layer=layer, last="norm", shaped="centre", projections=only_first_value)


REFERENCE: dict[str, Reference] = {
    "post_ln": Reference(layer=each(post_ln)),
    "pre_ln": Reference(layer=each(pre_ln), last="norm"),
    "peri_ln": Reference(layer=each(peri_ln), first="norm", last="norm"),
    "sandwich_ln": Reference(layer=each(peri_ln), last="norm"),
    "normformer": Reference(layer=each(normformer), last="norm", scale_heads=True, norm_inner=True),
    "deepnorm": Reference(layer=each(deepnorm)),
    "b2t": Reference(layer=b2t),
    "admin": Reference(layer=each(admin)),
    "dual_stream": Reference(layer=each(dual_stream), last="sum"),
    "rezero": Reference(layer=each(rezero)),
    "skipinit": Reference(layer=each(skipinit)),
    "layer_scale": Reference(layer=each(layer_scale), last="norm"),
    "t_fixup": Reference(layer=each(t_fixup)),
    "mix_ln": Reference(layer=each(mix_ln), last="norm"),
    "layer_norm_scaling": Reference(layer=each(layer_norm_scaling), last="norm"),
    "keel": Reference(layer=each(keel)),
    "hybrid_norm": Reference(
        layer=each(hybrid_norm), last="norm", norm_heads=("query", "key", "value")
    ),
    # Dehghani et al. 2023 (ViT-22B, 2302.05442).
    "qk_norm": Reference(layer=each(pre_ln), last="norm", norm_heads=("query", "key")),
    "realformer": Reference(layer=each(post_ln), carry="paper"),
    "parallel": Reference(layer=parallel, last="norm"),
    "v_skipinit": Reference(layer=sas, last="norm", shaped="identity"),
    "sas": simplified(sas),
    "sas_p": simplified(sas_p),
    "sas_p_no_norm": simplified(sas_p_no_norm),
    "siamese_norm": Reference(layer=each(siamese), last=siamese_end),
    "hyper_connections": Reference(layer=each(hyper_connections), last=hyper_end),
    "mhc": Reference(layer=each(mhc), last=mhc_end),
    "attention_residuals": Reference(layer=each(attention_residuals), last=attention_end),
    "denseformer": Reference(layer=after_each(each(pre_ln)), last="norm"),
    "gated_attention": Reference(layer=each(pre_ln), last="norm", gate="element"),
    "resformer": Reference(layer=each(pre_ln), last="norm", values="half"),
    "reordered_norm": Reference(
        layer=each(reordered_norm), last="norm", norm_heads=("query", "key")
    ),
    "laurel": Reference(layer=each(laurel), last="norm"),
    "inverse_sqrt_depth": Reference(layer=each(inverse_depth(0.5)), last="norm"),
    "inverse_depth": Reference(layer=each(inverse_depth(1.0)), last="norm"),
    "sub_ln": Reference(layer=each(pre_ln), last="norm", norm_joined=True, norm_inner=True),
    "prores": Reference(layer=each(prores(1, 100)), last="norm"),
    "gpas": Reference(layer=each(gpas), last="norm"),
    "zero_output": Reference(layer=each(pre_ln), last="norm"),
    "speedrun": Reference(
        layer=blended(each(pre_ln)), first="norm", last="norm", norm_heads=("query", "key")
    ),
    "swin_v2": Reference(layer=each(reordered_norm), last="norm", cosine=True),
    "ngpt": Reference(layer=each(ngpt), first="unit", features=True, scale_inner=True),
    "differential": Reference(layer=each(pre_ln), last="norm", differs=True),
    "sigma_reparam": Reference(layer=each(post_ln)),
}


# --- Whole models --------------------------------------------------------------------------------


def embed(parameters: Parameters, tokens: Tokens, positions: str) -> Array:
    """``sqrt(d) E[token] + PE(position)`` (Vaswani et al. 2017, sections 3.4-3.5).

    With a norm of the sum where the parameters have one (Devlin et al. 2019, the official code).
    """
    if "embedding.norm.weight" in parameters:
        bare = {name: value for name, value in parameters.items() if ".norm." not in name}
        return norm(parameters, "embedding.norm", embed(bare, tokens, positions))
    table = parameters["embedding.tokens.weight"]
    length, dim = tokens.shape[1], table.shape[1]
    embedded = math.sqrt(dim) * table[tokens]
    match positions:
        case "sinusoidal":
            return embedded + sinusoids(length, dim)
        case "learned":
            return embedded + parameters["embedding.position_table.weight"][:length]
        case "rope" | "relative" | "relative_untied" | "before each step":
            return embedded
        case other:
            raise ValueError(other)


def run_stack(stack: Stack, x: Array) -> Array:
    """Run the layers of `stack` and the parts before and after them."""
    (*_, (x, total)) = run_layers(stack, x)
    return end(stack, x, total, f"{stack.side}.final_norm")


def run_layers(stack: Stack, x: Array) -> Iterator[tuple[Array, Array]]:
    """Yield x and ResiDual's total r after each layer."""
    parameters, reference = stack.parameters, stack.reference
    if reference.first == "norm":
        x = norm(parameters, f"{stack.side}.input_norm", x)
    elif reference.first == "unit":
        x = unit(parameters, f"{stack.side}.input_norm", x)
    stack.total = x
    if reference.localised_span is not None:
        stack.allowed = limit(stack.allowed, *reference.localised_span)
    if reference.steps is not None:
        yield reference.steps(stack, x), np.asarray(stack.total)
        return
    for n in range(1, stack.depth + 1):
        x = reference.layer(Layer(stack, n), x)
        yield x, np.asarray(stack.total)


def end(stack: Stack, x: Array, total: Array, name: str) -> Array:
    """Return what a stack gives after its last layer, the norm `name` there if it has one."""
    match stack.reference.last:
        case "nothing":
            return x
        case "norm":
            return norm(stack.parameters, name, x)
        case "sum":
            return x + norm(stack.parameters, name, total)
        case read:
            return norm(stack.parameters, name, read(stack, x))


@dataclass(frozen=True)
class Translation:
    """What an encoder-decoder computes, each (batch, token, model or vocabulary)."""

    memory: Array
    states: Array
    logits: Array


def translate(
    reference: Reference, parameters: Parameters, sizes: Sizes, source: Tokens, target: Tokens
) -> Translation:
    """Encoder-decoder with teacher forcing. No query sees padding, none of the target's ahead."""
    decoder, x = target_stack(reference, parameters, sizes, source, target)
    states = run_stack(decoder, x)
    assert decoder.memory is not None
    logits = over_vocabulary(sizes, states, output_table(parameters))
    return Translation(decoder.memory, states, logits)


def target_stack(
    reference: Reference, parameters: Parameters, sizes: Sizes, source: Tokens, target: Tokens
) -> tuple[Stack, Array]:
    """The decoder of a translation, with the encoder's output as its memory, and its input."""
    batch, queries = target.shape
    keys = source.shape[1]
    real_source, real_target = source != sizes.pad, target != sizes.pad
    source_allowed = np.zeros((batch, keys, keys), dtype=np.bool_)
    target_allowed = np.zeros((batch, queries, queries), dtype=np.bool_)
    cross_allowed = np.zeros((batch, queries, keys), dtype=np.bool_)
    for b in range(batch):
        source_allowed[b] = real_source[b][None, :]
        cross_allowed[b] = real_source[b][None, :]
        for i in range(queries):
            for j in range(i + 1):
                target_allowed[b, i, j] = real_target[b, j]
    encoder = Stack(reference, parameters, "encoder", sizes.encoder_depth, sizes, source_allowed)
    memory = run_stack(encoder, embed(parameters, source, sizes.positions))
    decoder = Stack(reference, parameters, "decoder", sizes.decoder_depth, sizes, target_allowed)
    decoder.memory, decoder.memory_allowed = memory, cross_allowed
    return decoder, embed(parameters, target, sizes.positions)


def predict_masked(
    reference: Reference, parameters: Parameters, sizes: Sizes, tokens: Tokens, positions: Tokens
) -> Array:
    """Devlin et al. 2019: an encoder, then ``E N(gelu(W h + b)) + c`` at flat `positions`."""
    states = run_stack(*masked_stack(reference, parameters, sizes, tokens))
    chosen = transformed(parameters, states, positions)
    bias = parameters["output_bias"]
    return over_vocabulary(sizes, chosen, output_table(parameters), bias)


def masked_stack(
    reference: Reference, parameters: Parameters, sizes: Sizes, tokens: Tokens
) -> tuple[Stack, Array]:
    """An encoder alone, and its input."""
    batch, length = tokens.shape
    everything = np.ones((batch, length, length), dtype=np.bool_)
    encoder = Stack(reference, parameters, "encoder", sizes.encoder_depth, sizes, everything)
    return encoder, embed(parameters, tokens, sizes.positions)


def transformed(parameters: Parameters, states: Array, positions: Tokens) -> Array:
    """``N(gelu(W h + b))`` at flat `positions`."""
    length = states.shape[1]
    chosen = np.stack([states[p // length, p % length] for p in positions])
    return norm(parameters, "norm", gelu(linear(parameters, "transform", chosen)))


def predict_next(
    reference: Reference, parameters: Parameters, sizes: Sizes, tokens: Tokens
) -> Array:
    """One causal stack without cross-attention: logits of the token after each of `tokens`."""
    states = run_stack(*next_stack(reference, parameters, sizes, tokens))
    return over_vocabulary(sizes, states, output_table(parameters))


def next_stack(
    reference: Reference, parameters: Parameters, sizes: Sizes, tokens: Tokens
) -> tuple[Stack, Array]:
    """A causal stack alone, and its input."""
    batch, length = tokens.shape
    allowed = np.zeros((batch, length, length), dtype=np.bool_)
    for i in range(length):
        allowed[:, i, : i + 1] = True
    stack = Stack(reference, parameters, "decoder", sizes.encoder_depth, sizes, allowed)
    return stack, embed(parameters, tokens, sizes.positions)
