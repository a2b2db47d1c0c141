"""The rows of `speed_goals.py` about fine-tuning, on real rows of RTE and CoLA from GLUE.

All contenders train on the same rows. The batches are those of an epoch with at most 1,024 tokens,
made of rows of similar length, as `LabelledRows` makes them; a pass takes some of them, evenly
spread over the lengths, so that its rows are a sample of the corpus. "Padded" are the same batches,
and so as many updates, with padding up to 128 tokens, as in Hugging Face's example `run_glue.py`.
A step is forward and backward pass and AdamW. Without dropout all contenders have the same loss on
every batch, which is checked before anything is timed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import Clock, Spread, Work, ratios, rounds, same_library
from benchmarks.peers import bert_classifier
from benchmarks.speed_rows import Figure, Row, at_least
from lightning_app.blocks.config import BlockConfig
from lightning_app.commands.run import shipped_data
from lightning_app.data.prepare import global_batches, prepare
from lightning_app.data.tokenizer import PAD
from lightning_app.models.encoder_heads import TextClassifier
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.tasks.base import Task, build_task
from lightning_app.tasks.labelled import LabelledBatch, LabelledRows

WINDOW = 128
VOCABULARY = 8000
TOKENS = 1024
ROWS = 32  # of a batch in Hugging Face's example
PASSES = 4  # batches of a pass
ROUNDS = 5
FORMS = ("bucketed", "padded", "at_random")

Losses = Callable[[LabelledBatch], Tensor]
Build = Callable[[], Work]


@dataclass(frozen=True)
class Size:
    """The sizes of an encoder; the first is that of `pretrain_small.yaml`."""

    depth: int
    width: int


SIZES = (Size(4, 128), Size(6, 256))


@cache
def texts(names: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
    """Return tokens and segments (row, 128), labels and lengths of the rows of all corpora."""
    parts = []
    for name in names:
        rows = LabelledRows(prepare(shipped_data(name)), "train", window=WINDOW, seed=None)
        whole = rows[0, np.arange(len(rows))]
        tokens, segments = whole.tokens, whole.segments
        missing = (0, WINDOW - tokens.shape[1])
        wide = F.pad(tokens, missing, value=PAD), F.pad(segments, missing)
        parts.append((*wide, torch.tensor(rows.labels), rows.lengths))
    *tensors, lengths = zip(*parts, strict=True)
    tokens, segments, labels = map(torch.cat, tensors)
    return tokens, segments, labels, np.concatenate(lengths)


def batch_of(names: tuple[str, ...], rows: np.ndarray, width: int) -> LabelledBatch:
    tokens, segments, labels, _ = texts(names)
    return LabelledBatch(
        tokens[rows, :width].contiguous(),
        segments[rows, :width].contiguous(),
        labels[rows],
        torch.from_numpy(rows),
        torch.tensor(len(rows)),
    )


@dataclass(frozen=True)
class Passes:
    """The batches of a pass: of similar lengths, the same padded, the same rows at random."""

    bucketed: list[LabelledBatch]
    padded: list[LabelledBatch]
    at_random: list[LabelledBatch]


@cache
def passes(names: tuple[str, ...]) -> Passes:
    """Return the batches of a pass over a sample of the corpora."""
    lengths = texts(names)[-1]
    every = global_batches(lengths, lengths, TOKENS)
    places = (np.arange(PASSES) + 0.5) * len(every) / PASSES
    chosen = [every[int(place)] for place in places]
    mixed = np.random.default_rng(1).permutation(np.concatenate(chosen))
    return Passes(
        [batch_of(names, rows, int(lengths[rows].max())) for rows in chosen],
        [batch_of(names, rows, WINDOW) for rows in chosen],
        [batch_of(names, mixed[at : at + ROWS], WINDOW) for at in range(0, len(mixed), ROWS)],
    )


def task() -> Task:
    return build_task(ObjectiveConfig(kind="glue", glue="RTE"))  # CoLA has two classes, too


def model_of(size: Size, dropout: float) -> TextClassifier:
    """Return BERT with the sizes of `size`, our `post_ln`, from its first values."""
    architecture = ArchitectureConfig(
        kind="encoder",
        encoder_depth=size.depth,
        model_dim=size.width,
        ff_dim=4 * size.width,
        num_heads=4,
        dropout=dropout,
        attention_dropout=dropout,
        activation="gelu",
        positions="learned",
        max_positions=WINDOW,
        embedding_norm="layer_norm",
    )
    torch.manual_seed(1)
    model = task().build_model(architecture, BlockConfig(preset="post_ln"), VOCABULARY)
    assert isinstance(model, TextClassifier)
    return model


def our_loss(model: TextClassifier, batch: LabelledBatch) -> Tensor:
    return task().sums(model, batch).loss / batch.predicted_tokens


def bert_loss(model: nn.Module, batch: LabelledBatch) -> Tensor:
    return model(
        input_ids=batch.tokens,
        attention_mask=(batch.tokens != PAD).long(),
        token_type_ids=batch.segments,
        labels=batch.labels.long(),
    ).loss


def same_losses(ours: Losses, theirs: Losses, pairs: Sequence[tuple[LabelledBatch, ...]]) -> None:
    """Check that both compute the same loss on every pair of batches."""
    with torch.no_grad():
        for mine, other in pairs:
            one, two = float(ours(mine)), float(theirs(other))
            assert abs(one - two) < 1e-5 * one, f"losses {one} and {two}: not the same model"


def trained(model: nn.Module, loss: Losses, batches: Sequence[LabelledBatch]) -> Work:
    """Return a step on each of the batches."""
    parameters = list(model.train().parameters())
    optimizer = torch.optim.AdamW(parameters, lr=4e-5, betas=(0.9, 0.98), eps=1e-6, fused=True)

    def run() -> None:
        for batch in batches:
            loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return Work(run, sum(parameter.numel() for parameter in parameters))


def ours(size: Size, dropout: float, names: tuple[str, ...], form: str) -> Work:
    """Return our steps on the batches of a form."""
    model, batches = model_of(size, dropout).eval(), passes(names)
    loss = partial(our_loss, model)
    same_losses(loss, loss, list(zip(batches.bucketed, batches.padded, strict=True)))
    return trained(model, loss, getattr(batches, form))


def bert(size: Size, names: tuple[str, ...], form: str) -> Work:
    """Return the steps of Hugging Face's classifier on the batches of a form, with our weights."""
    model, batches = model_of(size, 0.0).eval(), passes(names)
    theirs = bert_classifier(model)
    loss, chosen = partial(bert_loss, theirs.eval()), getattr(batches, form)
    same_losses(partial(our_loss, model), loss, list(zip(batches.bucketed, chosen, strict=True)))
    return trained(theirs, loss, chosen)


def interleaved(first: Build, *others: Build) -> list[Spread]:
    """Return the time of each of the others over that of the first, in rounds of all of them."""
    runs = [build().run for build in (first, *others)]
    base, *seconds = rounds(runs, ROUNDS, Clock(torch.device("cpu")), warm=1)
    return [ratios(of, base) for of in seconds]


def bucketing(size: Size) -> Iterator[Figure]:
    """Fine-tuning on rows of similar length against padding to 128 tokens, RTE and CoLA."""
    for said, names in {"RTE": ("rte",), "RTE and CoLA": ("rte", "cola")}.items():
        builds = (partial(ours, size, 0.1, names, form) for form in FORMS)
        same, at_random = interleaved(*builds)
        yield at_least(f"{said}, the same steps", 1.8, same)
        yield at_least(f"{said}, {ROWS} rows a step", 1.8, at_random)


def fine_tuning(size: Size) -> Iterator[Figure]:
    """Fine-tuning on RTE against Hugging Face's classifier, padded alike and to 128 tokens."""
    names = ("rte",)
    peers = (partial(bert, size, names, form) for form in ("bucketed", "padded"))
    builds = (partial(ours, size, 0.0, names, "bucketed"), *peers)
    for library, context in {"as it is": nullcontext, **same_library()}.items():
        with context():
            alike, to_128 = interleaved(*builds)
        yield at_least(f"BERT, {library}", 1.5, alike)
        yield at_least(f"BERT to 128, {library}", 1.5, to_128)


def named(row: Callable[[Size], Iterator[Figure]], size: Size) -> Row:
    """Return a row of `speed_goals.py` for one size."""

    def of_size() -> Iterator[Figure]:
        yield from row(size)

    of_size.__doc__ = f"{(row.__doc__ or '').rstrip('.')}; {size.depth} blocks of {size.width}."
    return of_size


OWN_FINE_TUNING = {f"bucketing_{size.width}": named(bucketing, size) for size in SIZES}
PEER_FINE_TUNING = {f"fine_tuning_{size.width}": named(fine_tuning, size) for size in SIZES}
