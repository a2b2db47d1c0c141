"""Each preset as its paper writes it: NumPy, float64, one query, one key at a time.

Nothing here is shared with the package. A model's parameters come as a flat mapping with the names
of its `state_dict`; everything else is said again, from the papers. Row vectors: ``x W^T + b``.

Letters: x the stream, N a norm, SA self-attention, CA cross-attention, FF the feed-forward.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the parameters do not say. `decoder_depth` is 0 where there is no decoder."""

    encoder_depth: int
    decoder_depth: int
    num_heads: int
    activation: str = "relu"
    pad: int = 0


def layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    """``g (x - mean) / sqrt(var + eps) + b`` of each token (Ba et al. 2016)."""
    y = np.empty_like(x)
    for place in np.ndindex(x.shape[:-1]):
        row = x[place]
        mean = sum(row) / len(row)
        variance = sum((entry - mean) ** 2 for entry in row) / len(row)
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


def softmax_map(scores: Array, allowed: Flags) -> Array:
    """Softmax over the allowed keys of each query; zeros where a query may see nothing.

    `scores` is (batch, head, query, key), `allowed` (batch, query, key).
    """
    attention = np.zeros_like(scores)
    for b, h, i in np.ndindex(scores.shape[:3]):
        keys = np.flatnonzero(allowed[b, i])
        if len(keys):
            attention[b, h, i, keys] = softmax(scores[b, h, i, keys])
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


def sinusoids(length: int, dim: int) -> Array:
    """``PE(i, 2k) = sin(i / 10000^(2k/d))``, ``PE(i, 2k+1) = cos(i / 10000^(2k/d))``."""
    table = np.empty((length, dim))
    for i, c in np.ndindex(length, dim):
        angle = i / 10000.0 ** ((c - c % 2) / dim)
        table[i, c] = math.cos(angle) if c % 2 else math.sin(angle)
    return table


@dataclass
class Layer:
    """One layer's parameters and what it reads besides the stream."""

    parameters: Mapping[str, Array]
    prefix: str
    number: int
    """n, from 1."""
    sizes: Sizes
    allowed: Flags
    """(batch, query, key) of self-attention."""
    sums: dict[str, Array]
    """RealFormer's running sums of scores, one a chain of this stack."""
    memory: Array | None = None
    memory_allowed: Flags = field(default_factory=lambda: np.empty((0, 0, 0), dtype=np.bool_))

    def weight(self, name: str) -> Array:
        return self.parameters[self.prefix + name]

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.weight(f"{name}.weight").T + self.weight(f"{name}.bias")

    def norm(self, name: str, x: Array) -> Array:
        if f"{self.prefix}{name}.bias" in self.parameters:
            return layer_norm(x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))
        return rms_norm(x, self.weight(f"{name}.weight"))

    def feed_forward(self, x: Array) -> Array:
        """Vaswani et al. 2017, equation 2."""
        inner = self.linear("feed_forward.inner", x)
        inner = gelu(inner) if self.sizes.activation == "gelu" else np.maximum(inner, 0.0)
        return self.linear("feed_forward.outer", inner)

    def scores(self, name: str, x: Array, memory: Array) -> Array:
        query, key = self.linear(f"{name}.query", x), self.linear(f"{name}.key", memory)
        return scaled_scores(query, key, self.sizes.num_heads)

    def attend(self, x: Array) -> Array:
        """SA(x), Vaswani et al. 2017, section 3.2."""
        attention = softmax_map(self.scores("self_attention", x, x), self.allowed)
        mixed = mix(attention, self.linear("self_attention.value", x))
        return self.linear("self_attention.output", mixed)

    def cross_attend(self, x: Array) -> Array:
        """CA(x): queries from the decoder, keys and values from the encoder's output."""
        assert self.memory is not None
        scores = self.scores("cross_attention", x, self.memory)
        attention = softmax_map(scores, self.memory_allowed)
        mixed = mix(attention, self.linear("cross_attention.value", self.memory))
        return self.linear("cross_attention.output", mixed)

    def pre_ln_cross(self, x: Array) -> Array:
        """``x + CA(N(x))`` in a decoder, x in an encoder."""
        if self.memory is None:
            return x
        return x + self.cross_attend(self.norm("around_cross.norm_input", x))

    def residual_attend(self, name: str, x: Array, memory: Array, allowed: Flags) -> Array:
        """RealFormer, section 3.2: ``softmax(Z_n / c) V``, ``Z_n = Q K^T / sqrt(d_k) + Z_(n-1)``.

        c is n in translation (the authors' running mean) and 1 in an encoder alone.
        """
        self.sums[name] = self.scores(name, x, memory) + self.sums.get(name, 0.0)
        temperature = self.number if self.sizes.decoder_depth else 1
        attention = softmax_map(self.sums[name] / temperature, allowed)
        return self.linear(f"{name}.output", mix(attention, self.linear(f"{name}.value", memory)))

    def shaped_attend(self, u: Array) -> Array:
        """He & Hofmann 2023, equation 12: ``concat_h((alpha I + beta A - gamma C) u_h)``.

        C is A at zero scores. The first layer alone has values: ``u (I + W)`` (footnote 6).
        """
        scores = self.scores("self_attention", u, u)
        attention = softmax_map(scores, self.allowed)
        centre = softmax_map(np.zeros_like(scores), self.allowed)
        shaped = np.empty_like(scores)
        for b, h, i, j in np.ndindex(scores.shape):
            alpha, beta, gamma = (
                self.weight(f"self_attention.shaping.{name}")[h, 0, 0]
                for name in ("alpha", "beta", "gamma")
            )
            identity = 1.0 if i == j else 0.0
            shaped[b, h, i, j] = (
                alpha * identity + beta * attention[b, h, i, j] - gamma * centre[b, h, i, j]
            )
        value = u
        if self.number == 1:
            value = u + u @ self.weight("self_attention.value.change.weight").T
        return self.weight("around_self.branch.gain") * mix(shaped, value)

    def gained_feed_forward(self, x: Array) -> Array:
        """``b FF(x)`` with the trained gain of the simplified blocks."""
        return self.weight("around_ff.branch.gain") * self.feed_forward(x)


def post_ln(layer: Layer, x: Array) -> Array:
    """Xiong et al. 2020, table 1, left: ``N(x + f(x))``."""
    x = layer.norm("around_self.norm_sum", x + layer.attend(x))
    if layer.memory is not None:
        x = layer.norm("around_cross.norm_sum", x + layer.cross_attend(x))
    return layer.norm("around_ff.norm_sum", x + layer.feed_forward(x))


def pre_ln(layer: Layer, x: Array) -> Array:
    """Xiong et al. 2020, table 1, right: ``x + f(N(x))``."""
    x = x + layer.attend(layer.norm("around_self.norm_input", x))
    x = layer.pre_ln_cross(x)
    return x + layer.feed_forward(layer.norm("around_ff.norm_input", x))


def realformer(layer: Layer, x: Array) -> Array:
    """He et al. 2021: Post-LN with residual scores in three chains."""
    attended = layer.residual_attend("self_attention", x, x, layer.allowed)
    x = layer.norm("around_self.norm_sum", x + attended)
    if layer.memory is not None:
        crossed = layer.residual_attend("cross_attention", x, layer.memory, layer.memory_allowed)
        x = layer.norm("around_cross.norm_sum", x + crossed)
    return layer.norm("around_ff.norm_sum", x + layer.feed_forward(x))


def parallel(layer: Layer, x: Array) -> Array:
    """He & Hofmann 2023, equation 7: ``x + FF(u) + SA(u)``, ``u = N(x)``; then CA as in Pre-LN."""
    u = layer.norm("around_self.norm_input", x)
    return layer.pre_ln_cross(x + layer.feed_forward(u) + layer.attend(u))


def sas(layer: Layer, x: Array) -> Array:
    """He & Hofmann 2023, equations 12-13; CA between the two as in Pre-LN."""
    y = layer.shaped_attend(layer.norm("around_self.norm_input", x))
    y = layer.pre_ln_cross(y)
    return y + layer.gained_feed_forward(layer.norm("around_ff.norm_input", y))


def sas_p(layer: Layer, x: Array) -> Array:
    """He & Hofmann 2023, section 4.3: the parallel form with the skip's gain at 0."""
    u = layer.norm("around_self.norm_input", x)
    return layer.pre_ln_cross(layer.shaped_attend(u) + layer.gained_feed_forward(u))


def sas_p_no_norm(layer: Layer, x: Array) -> Array:
    """He & Hofmann 2023, section 4.4: of the norms inside blocks only the first layer's stays."""
    u = layer.norm("around_self.norm_input", x) if layer.number == 1 else x
    return layer.pre_ln_cross(layer.shaped_attend(u) + layer.gained_feed_forward(u))


@dataclass(frozen=True)
class Reference:
    """A preset: what a layer does, and whether a norm stands after the last."""

    layer: Callable[[Layer, Array], Array]
    final_norm: bool


REFERENCE: dict[str, Reference] = {
    "post_ln": Reference(post_ln, final_norm=False),
    "pre_ln": Reference(pre_ln, final_norm=True),
    "realformer": Reference(realformer, final_norm=False),
    "parallel": Reference(parallel, final_norm=True),
    "sas": Reference(sas, final_norm=True),
    "sas_p": Reference(sas_p, final_norm=True),
    "sas_p_no_norm": Reference(sas_p_no_norm, final_norm=True),
}


def embed(parameters: Mapping[str, Array], tokens: NDArray[np.int64]) -> Array:
    """``sqrt(d) E[token] + PE(position)`` (Vaswani et al. 2017, sections 3.4-3.5)."""
    table = parameters["embedding.tokens.weight"]
    dim = table.shape[1]
    return math.sqrt(dim) * table[tokens] + sinusoids(tokens.shape[1], dim)


def run_stack(
    preset: str,
    parameters: Mapping[str, Array],
    stack: str,
    depth: int,
    x: Array,
    sizes: Sizes,
    allowed: Flags,
    memory: Array | None = None,
    memory_allowed: Flags | None = None,
) -> Array:
    """Run the layers of `stack` ("encoder." or "decoder.") and its final norm."""
    sums: dict[str, Array] = {}
    for n in range(1, depth + 1):
        layer = Layer(parameters, f"{stack}blocks.{n - 1}.", n, sizes, allowed, sums)
        if memory is not None and memory_allowed is not None:
            layer.memory, layer.memory_allowed = memory, memory_allowed
        x = REFERENCE[preset].layer(layer, x)
    if REFERENCE[preset].final_norm:
        x = Layer(parameters, stack, depth, sizes, allowed, sums).norm("final_norm", x)
    return x


@dataclass(frozen=True)
class Translation:
    """What an encoder-decoder computes, each (batch, token, model or vocabulary)."""

    memory: Array
    states: Array
    logits: Array


def translate(
    preset: str,
    parameters: Mapping[str, Array],
    sizes: Sizes,
    source: NDArray[np.int64],
    target: NDArray[np.int64],
) -> Translation:
    """Encoder-decoder with teacher forcing. No query sees padding, none of the target's ahead."""
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
    memory = run_stack(
        preset,
        parameters,
        "encoder.",
        sizes.encoder_depth,
        embed(parameters, source),
        sizes,
        source_allowed,
    )
    states = run_stack(
        preset,
        parameters,
        "decoder.",
        sizes.decoder_depth,
        embed(parameters, target),
        sizes,
        target_allowed,
        memory,
        cross_allowed,
    )
    return Translation(memory, states, states @ parameters["embedding.tokens.weight"].T)


def predict_masked(
    preset: str,
    parameters: Mapping[str, Array],
    sizes: Sizes,
    tokens: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> Array:
    """Devlin et al. 2019: an encoder, then ``E N(gelu(W h + b)) + c`` at flat `positions`."""
    batch, length = tokens.shape
    everything = np.ones((batch, length, length), dtype=np.bool_)
    states = run_stack(
        preset,
        parameters,
        "encoder.",
        sizes.encoder_depth,
        embed(parameters, tokens),
        sizes,
        everything,
    )
    head = Layer(parameters, "", 1, sizes, everything, {})
    chosen = np.stack([states[p // length, p % length] for p in positions])
    chosen = head.norm("norm", gelu(head.linear("transform", chosen)))
    return chosen @ parameters["embedding.tokens.weight"].T + parameters["output_bias"]
