"""The models of the statements.

Figure 3 of Xiong et al. 2020 (2002.04745) in our models, and the gradients of other variants.

Their figure has a third curve, Post-LN after its warm-up, which needs training and is not drawn
here.

Lone decoders: does the causal mask or cross-attention make Post-LN's gradients grow?

In the 6-6 model the expected gradient of W2 grows from one decoder layer to the next, and is about
constant in the encoder. The stacks differ in the causal mask and in cross-attention; a language
model has only the mask.

Predictions of the blocks. Each sub-layer is ``LN(x + f(x))``. If f adds the variance v to a stream
of variance 1, the norm divides the gradient by ``sqrt(1 + v)``; if the gradient through f is w
times as long, squared, skip and branch together multiply it by ``sqrt(1 + w)``.

- Feed-forward: both matrices scale forward and backward passes alike, and half of the ReLU's inputs
  pass. v = w, so the factor is 1.
- Self-attention at the start is nearly a mean over the visible tokens, and the value and output
  matrices halve its square: v = m/2, where m is the squared norm of that mean over d; it is 1 if
  the tokens are equal. The rows of the map sum to 1 with and without a causal mask, so the map
  leaves the sum of the gradients over positions unchanged. The loss is a mean over positions, and
  the expected gradient of W2 is mostly this sum: w = 1/2. The factor is ``sqrt(3 / (2 + m))``,
  which is 1 if tokens are equal.
- Cross-attention: v = m/2 with the m of the memory's tokens. Its gradient goes to the encoder,
  except for the small part through the queries: w = 0. The factor is ``sqrt(2 / (2 + m))``, which
  is ``sqrt(2/3)`` if the memory's tokens are equal.

So cross-attention causes the growth: a lone decoder has the factor 1, and the decoder of a 6-6
model has ``sqrt(2/3)`` times that of a lone decoder.

All of the above was written before the measurement, the control without the mask after it. Three
seeds give 0.807 in the decoder of the 6-6 model, 0.948 (95 % interval 0.936 to 0.961) in a lone
decoder and 0.964 (0.957 to 0.972) without its mask. In logarithms, cross-attention accounts for
three quarters of the growth and the mask for a twelfth. Neither explains the rest: the prediction 1
misses it, just outside its range.

The final gradient of Pre-LN is not a power of the depth here: it falls from 0.92 at 6 layers to
0.61 at 8 and 0.51 at 14, and the fitted exponent is -0.68 (-0.89 to -0.48). A likely reason, not
tested: the output shares its table with the embedding, which is a large part of the stream of few
layers. A lone Pre-LN decoder (seed 1) gives the probability 0.45 to its own input token at 6
layers, 0.23 at 8 and 0.06 at 14.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from rich import box
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from benchmarks.theory.lemmas import (
    POST,
    PRE,
    XIONG_EXTENSION,
    Statement,
    downward_factor,
    of_draws,
    of_exponent,
    of_mean,
    power_law,
    seeded,
)
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.feed_forward import FeedForward
from lightning_app.blocks.masks import full_mask
from lightning_app.models.heads import (
    ArchitectureConfig,
    CausalLanguageModel,
    EncoderDecoder,
    build_model,
)
from lightning_app.models.initialization import needs_profiling, profile
from lightning_app.models.stack import stacks
from lightning_app.report.statistics import mean

STACKS = ("encoder", "decoder")
ALONE = "decoder only"
Model = EncoderDecoder | CausalLanguageModel
"""The models that are fingerprinted."""


@dataclass(frozen=True, kw_only=True)
class ZipfCorpus:
    """Random sentences; word r of a Zipf(1) vocabulary has weight 1/r."""

    vocabulary: int = 10_000
    length: int = 24
    sentences: int = 16
    batches: int = 2

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return sources ``(sentence, length)`` and targets ``(sentence, length + 1)``."""
        weights = 1 / torch.arange(1, self.vocabulary, dtype=torch.float64)
        words = torch.multinomial(weights, self.sentences * (2 * self.length + 1), True) + 1
        source, target = words.split(
            [self.sentences * self.length, self.sentences * (self.length + 1)]
        )
        return source.view(self.sentences, -1), target.view(self.sentences, -1)


@dataclass(frozen=True)
class Fingerprint:
    """A fresh model's loss and the norms of its expected gradients, from the first layer."""

    loss: float
    inner: dict[str, list[float]]
    outer: dict[str, list[float]]


def feed_forwards(model: Model) -> Iterator[tuple[str, FeedForward]]:
    """Yield each feed-forward with the name of its stack."""
    for name, stack in stacks(model).items():
        for _, block in stack.layers:
            yield name, block.feed_forward


def logits_of(model: Model, source: Tensor, target: Tensor, *, causal: bool = True) -> Tensor:
    """Return the logits of ``target[:, 1:]``; a lone decoder has no source.

    Without `causal`, each token of a lone decoder sees the whole sentence.
    """
    before = target[:, :-1]
    if isinstance(model, EncoderDecoder):
        assert causal
        return model(source, before)
    if causal:
        return model(before)
    mask = full_mask(before.shape[1], before.device)
    return model.embedding.logits(model.decoder(model.embedding(before), mask))


def fingerprint(
    preset: str,
    architecture: ArchitectureConfig,
    corpus: ZipfCorpus,
    *,
    last_only: bool = False,
    causal: bool = True,
) -> Fingerprint:
    """Return the norms of the gradients of W1 and W2, averaged over batches before the norm.

    Xiong et al. 3.4 call this the expected gradient. `last_only`: only the last decoder layer,
    which needs little of the backward pass. Label smoothing is 0.1. A lone decoder reads the
    targets of the corpus, without their sources; without `causal`, it has no mask either.
    """
    model = build_model(architecture, BlockConfig(preset=preset), corpus.vocabulary, 0)
    assert isinstance(model, Model)
    model.requires_grad_(False)
    if needs_profiling(model):
        source, target = corpus.batch()
        profile(model, lambda: logits_of(model, source, target, causal=causal))
    parts = list(feed_forwards(model))
    parts = parts[-1:] if last_only else parts
    weights = [matrix.weight for _, ff in parts for matrix in (ff.inner, ff.outer)]
    for weight in weights:
        weight.requires_grad_(True)
    sums = [torch.zeros_like(weight) for weight in weights]
    losses: list[float] = []
    for _ in range(corpus.batches):
        source, target = corpus.batch()
        logits = logits_of(model, source, target, causal=causal).flatten(0, 1)
        loss = F.cross_entropy(logits, target[:, 1:].flatten(), label_smoothing=0.1)
        for total, gradient in zip(sums, torch.autograd.grad(loss, weights), strict=True):
            total += gradient
        losses.append(loss.item())
    norms = [(total / corpus.batches).norm().item() for total in sums]
    names = list(stacks(model))
    result = Fingerprint(mean(losses), {s: [] for s in names}, {s: [] for s in names})
    for (stack, _), inner, outer in zip(parts, norms[::2], norms[1::2], strict=True):
        result.inner[stack].append(inner)
        result.outer[stack].append(outer)
    return result


FINGERPRINTS = (POST, PRE, "peri_ln", "sandwich_ln", "deepnorm", "b2t", "admin", "dual_stream")
DEPTHS = (6, 8, 10, 12, 14)


@dataclass(frozen=True)
class RecordedNorms:
    """Numbers of a JAX implementation with the same initial values and kind of data (one seed).

    One variant at depth 6: its loss, and the norms of W2's gradients, NaN where unrecorded.
    """

    loss: float
    encoder: tuple[float, ...]
    decoder: tuple[float, ...]


def _ends(first: float, last: float) -> tuple[float, ...]:
    return (first, math.nan, math.nan, math.nan, math.nan, last)


PERI = RecordedNorms(
    9.7, (1.43, 1.15, 0.99, 0.89, 0.79, 0.70), (1.03, 0.87, 0.81, 0.74, 0.69, 0.64)
)
RECORDS = {
    POST: RecordedNorms(
        9.5, (1.92, 1.89, 1.81, 1.65, 1.79, 1.61), (0.60, 0.84, 1.09, 1.38, 1.42, 1.63)
    ),
    PRE: RecordedNorms(
        9.8, (1.21, 1.06, 0.92, 0.83, 0.78, 0.68), (0.99, 0.92, 0.82, 0.77, 0.70, 0.67)
    ),
    "peri_ln": PERI,
    "sandwich_ln": PERI,
    "deepnorm": RecordedNorms(19.4, (0.15,) * 6, (0.69,) * 6),
    "b2t": RecordedNorms(19.3, (0.12,) * 6, _ends(0.80, 0.87)),
    "admin": RecordedNorms(9.7, _ends(1.27, 0.67), _ends(1.06, 0.58)),
    "dual_stream": RecordedNorms(10.6, _ends(3.9, 2.7), _ends(0.80, 2.44)),
}
"""The record says "peri" but not whether the embedding was normalised.

Our model gives the recorded numbers of DeepNorm's encoder (0.14) if its value matrices are
multiplied by 1/sqrt(2): Xavier's gain beta times fairseq's 1/sqrt(2); the paper has only beta.
"""
NOTE = (
    "deepnorm's recorded encoder is ours with the value matrices at beta / sqrt(2), fairseq's gain "
    "times beta; the paper, and we, have beta"
)


FINAL_AT_12 = {POST: 1.87, PRE: 0.50}
"""Norm of the final decoder layer's W2 gradient that it reported at depth 12."""


def recorded_final(preset: str) -> dict[int, float]:
    """Return the recorded W2 gradients of the final decoder layer, by depth.

    At depth 6 another of its runs reported 1.59 for Post-LN and 0.63 for Pre-LN.
    """
    final = {DEPTHS[0]: RECORDS[preset].decoder[-1]}
    return {**final, 12: FINAL_AT_12[preset]} if preset in FINAL_AT_12 else final


@dataclass(frozen=True)
class Prints:
    """Fingerprints of every seed: of all layers at depth 6, of the final layer at every depth."""

    whole: dict[str, list[Fingerprint]]
    final: dict[str, dict[int, list[float]]]


Kind = Literal["encoder_decoder", "decoder"]


def architecture(kind: Kind, depth: int) -> ArchitectureConfig:
    """Return the IWSLT14 sizes of Xiong et al., `depth` layers in each stack, no dropout."""
    return ArchitectureConfig(kind=kind, encoder_depth=depth, decoder_depth=depth, dropout=0.0)


def gather_prints(
    corpus: ZipfCorpus, seeds: int, presets: Sequence[str], kind: Kind = "encoder_decoder"
) -> Prints:
    """Return the fingerprints of `presets` at depth 6, and of Post-LN and Pre-LN at every depth."""
    prints = Prints({}, {})
    for preset in presets:
        prints.final[preset] = {}
        for depth in DEPTHS if preset in (POST, PRE) else DEPTHS[:1]:
            whole = depth == DEPTHS[0]
            runs: list[Fingerprint] = []
            for seed in range(1, seeds + 1):
                with seeded(seed):
                    sizes = architecture(kind, depth)
                    runs.append(fingerprint(preset, sizes, corpus, last_only=not whole))
            if whole:
                prints.whole[preset] = runs
            prints.final[preset][depth] = [one.outer["decoder"][-1] for one in runs]
    return prints


def figure_3(prints: Prints) -> Iterator[Statement]:
    """The gradient of W2 in the final feed-forward, and how it changes from layer to layer."""
    source = "another implementation, initial values and data alike"
    for preset, final in prints.final.items():
        for depth, value in recorded_final(preset).items():
            claim = f"{preset}, {depth}-{depth}: expected W2 gradient of the final layer"
            yield of_mean(claim, source, value, final[depth], 0.2)
    post, predicted = prints.whole[POST], math.sqrt(2 / 3)
    claim = "post_ln, decoder of 6-6: expected W2 gradient from a layer to the one below"
    yield factor_statement(claim, XIONG_EXTENSION, predicted, layer_factors(post, "decoder"))
    claim = "post_ln, encoder of 6-6: the same"
    yield factor_statement(claim, XIONG_EXTENSION, predicted, layer_factors(post, "encoder"))
    yield from depth_exponents(prints, "6-6 to 14-14")


def layer_factors(runs: Sequence[Fingerprint], stack: str) -> list[float]:
    """Return the mean factor of W2's gradient from a layer to the one below, per seed."""
    return [downward_factor(one.outer[stack]) for one in runs]


def factor_statement(
    claim: str, source: str, predicted: float, factors: Sequence[float]
) -> Statement:
    """Return an optional claim about the mean of `factors`, confirmed within 5 %."""
    return of_mean(claim, source, predicted, factors, 0.05, promised=False)


def depth_exponents(prints: Prints, span: str) -> Iterator[Statement]:
    """The gradient of W2 in the final feed-forward as a power of the depth."""
    for preset, exponent in ((POST, 0.0), (PRE, -0.5)):
        claim = f"{preset}, {span}: exponent of the final W2's expected gradient"
        source = "Xiong et al., theorem 1, which is about the loss of one position"
        fit, accepted = power_law(prints.final[preset]), (exponent - 0.1, exponent + 0.1)
        yield of_exponent(claim, source, exponent, fit, accepted, promised=False)


def by_layer(runs: Sequence[Fingerprint], stack: str, matrix: str) -> list[list[float]]:
    """Return the norm per seed, layer by layer."""
    parts = [(one.inner if matrix == "W1" else one.outer)[stack] for one in runs]
    return [list(values) for values in zip(*parts, strict=True)]


def prints_to_csv(prints: Prints, alone: Prints) -> str:
    """Return every fingerprint at depth 6 and the recorded numbers, one layer per line.

    Those of `alone` are of lone decoders, for which nothing is recorded.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["preset", "stack", "layer", "matrix", "ours", "low", "high", "recorded"])
    for preset, runs in prints.whole.items():
        record = RECORDS[preset]
        writer.writerow(
            [preset, "model", "", "loss", *_numbers_of([x.loss for x in runs]), f"{record.loss:g}"]
        )
        for stack in STACKS:
            for matrix in ("W1", "W2"):
                for layer, values in enumerate(by_layer(runs, stack, matrix)):
                    reference: float = getattr(record, stack)[layer] if matrix == "W2" else math.nan
                    recorded = "" if math.isnan(reference) else f"{reference:g}"
                    writer.writerow(
                        [preset, stack, layer + 1, matrix, *_numbers_of(values), recorded]
                    )
    for preset, runs in alone.whole.items():
        writer.writerow([preset, ALONE, "", "loss", *_numbers_of([x.loss for x in runs]), ""])
        for matrix in ("W1", "W2"):
            for layer, values in enumerate(by_layer(runs, "decoder", matrix), 1):
                writer.writerow([preset, ALONE, layer, matrix, *_numbers_of(values), ""])
    return text.getvalue()


def _numbers_of(draws: Sequence[float]) -> list[str]:
    measured, (low, high) = of_draws(draws)
    return _numbers((measured, low, high), ".6g")


def prints_table(prints: Prints) -> Table:
    """Return W2's expected gradients next to those recorded, with the deviation in percent."""
    layers = [str(layer) for layer in range(1, DEPTHS[0] + 1)]
    table = Table("preset", "stack", "", "loss", *layers, box=box.SIMPLE_HEAD, pad_edge=False)
    for preset, runs in prints.whole.items():
        table.add_section()
        record, loss = RECORDS[preset], mean([one.loss for one in runs])
        for stack in STACKS:
            ours = [mean(values) for values in by_layer(runs, stack, "W2")]
            reference: tuple[float, ...] = getattr(record, stack)
            apart = [100 * (a / b - 1) for a, b in zip(ours, reference, strict=True)]
            first = stack == STACKS[0]
            names = (preset if first else "", stack)
            table.add_row(*names, "ours", f"{loss:.1f}" if first else "", *_numbers(ours, ".2f"))
            losses = f"{record.loss:.1f}" if first else ""
            table.add_row("", "", "recorded", losses, *_numbers(reference, ".2f"))
            table.add_row("", "", "percent", "", *_numbers(apart, "+.0f"))
    return table


def _numbers(values: Iterable[float], style: str) -> list[str]:
    return ["" if math.isnan(value) else f"{value:{style}}" for value in values]


OURS = "ours: cross-attention returns no gradient to the stream it joins"


def without_mask(corpus: ZipfCorpus, seeds: int) -> list[Fingerprint]:
    """Return the fingerprints of lone Post-LN decoders in which a token sees all others.

    At initialisation the words to predict are independent of those seen, so this is a control.
    """
    runs: list[Fingerprint] = []
    for seed in range(1, seeds + 1):
        with seeded(seed):
            sizes = architecture("decoder", DEPTHS[0])
            runs.append(fingerprint(POST, sizes, corpus, causal=False))
    return runs


def decoder_alone(
    prints: Prints, alone: Prints, unmasked: Sequence[Fingerprint]
) -> Iterator[Statement]:
    """The factor of the gradient of W2 from a layer to the one below, and its power of the depth.

    Args:
        prints: The fingerprints of encoder-decoders.
        alone: Those of lone decoders with the same seeds.
        unmasked: Those of lone decoders without their mask, with the same seeds.
    """
    expected = math.sqrt(2 / 3)
    factors = layer_factors(alone.whole[POST], "decoder")
    claim = "post_ln, decoder only, 6 layers: the same, if the causal mask makes the growth"
    yield factor_statement(claim, XIONG_EXTENSION, expected, factors)
    claim = "post_ln, decoder only, 6 layers: the same, if cross-attention makes the growth"
    yield factor_statement(claim, OURS, 1.0, factors)
    crossed = layer_factors(prints.whole[POST], "decoder")
    claim = "post_ln: the factor in the decoder of 6-6 over that in a decoder-only model"
    yield factor_statement(claim, OURS, expected, _ratios(crossed, factors))
    claim = "post_ln: the factor in a decoder-only model over that without its mask"
    ratios = _ratios(factors, layer_factors(unmasked, "decoder"))
    yield factor_statement(claim, OURS, 1.0, ratios)
    yield from depth_exponents(alone, "decoder only, 6 to 14 layers")


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]
