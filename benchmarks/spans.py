"""Time and memory of attention that sees a part of the text, compared with all of it.

    python benchmarks/spans.py
    python benchmarks/spans.py --rounds 9 --length 4096 --json spans.json

Each row is the map of self-attention in a causal stack, from queries, keys and values to outputs
and gradients, without projections: a pair runs in interleaved rounds. Speed is the time of the
first form divided by that of the second: the median over rounds and its quartiles. Memory is the
peak of live tensors beyond the inputs, in MB, and the same of the resident process with
`--resident`. Rows have four layers, which share a mask, as those of a stack do.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_app.blocks.attention import Attention, AttentionSpec, CarryKind, ShapingSpec
from lightning_app.blocks.masks import causal_mask
from lightning_app.blocks.spans import AdaptiveSpan, SpanMask
from lightning_app.blocks.windows import LocalisedSpan, WindowMasks
from lightning_app.lab.bench.measure import Clock, Work, peak_memory, ratios, resident, rounds
from lightning_app.training.hardware import keep_freed_blocks

HEADS, HEAD_DIM = 4, 64
LOCAL = LocalisedSpan(query_block=128, memory=128)
SLIDING = LocalisedSpan(query_block=1, memory=255)


class Row(NamedTuple):
    """Two specifications that are compared, and the number of layers in a chain."""

    name: str
    first: AttentionSpec
    second: AttentionSpec
    depth: int


def localised(name: str, depth: int = 4, span: LocalisedSpan = LOCAL, **spec) -> Row:
    """Return full attention against the same with `span`."""
    given = {"value": "identity", "output": "identity", **spec}
    return Row(name, AttentionSpec(**given), AttentionSpec(**given, localised_span=span), depth)


CARRIES: CarryKind = "scores"
LONGEST = 1024


def trimmed(name: str) -> Row:
    """Return an adaptive span with and without keys that no head sees, spans of S/8."""
    given = {"value": "identity", "output": "identity"}
    spans = (AdaptiveSpan(longest=LONGEST, start=1 / 8, trim=trim) for trim in (False, True))
    return Row(name, *(AttentionSpec(**given, adaptive_span=span) for span in spans), depth=4)  # pyright: ignore[reportArgumentType, reportCallIssue]


ROWS = (
    localised("localised, plain"),
    localised("sliding, plain", span=SLIDING),
    localised("localised, shaped", shaping=ShapingSpec()),
    localised("localised, residual", carry=CARRIES),
    trimmed("adaptive, trimmed"),
)


def work(spec: AttentionSpec, depth: int, length: int) -> Work:
    """Return a forward and backward pass of `depth` layers over one text of random tokens."""
    torch.manual_seed(1)
    spread = torch.linspace(0.0, 2.0, HEADS)[:, None, None]
    width = HEADS * HEAD_DIM
    layers = [Attention(spec, width, HEADS, 0.0) for _ in range(depth)]
    for layer in layers:
        if isinstance(layer.span, SpanMask):  # spans of 0 to 2 times their mean
            layer.span.fraction.data.mul_(spread)
    inputs = [
        [split(torch.randn(1, length, width)).requires_grad_() for _ in range(3)] for _ in layers
    ]
    upstream = torch.randn(1, length, width)

    def run() -> None:
        masks = WindowMasks(causal_mask(length, upstream.device), 1, None)
        carry, outputs = None, []
        for layer, (query, keys, values) in zip(layers, inputs, strict=True):
            mask = masks.within(layer.window)
            spans = None if layer.span is None else layer.span(upstream)
            output, carry = layer(query, keys, values, mask, carry, spans=spans)
            outputs.append(output)
        torch.autograd.backward(outputs, [upstream] * depth)
        for leaf in (leaf for layer in inputs for leaf in layer):
            leaf.grad = None

    return Work(run)


def split(x: Tensor) -> Tensor:
    """Return ``(batch, head, token, dim)`` of a leaf ``(batch, token, head * dim)``."""
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2).detach()


def measure(row: Row, length: int, count: int, *, residents: bool) -> dict[str, object]:
    """Return the figures of one row."""
    builds = [partial(work, spec, row.depth, length) for spec in (row.first, row.second)]
    runs = [build().run for build in builds]
    cpu = torch.device("cpu")
    speed = ratios(*rounds(runs, count, Clock(cpu), warm=1))
    found: dict[str, object] = {
        "name": row.name,
        "length": length,
        "speed": speed._asdict(),
        "megabytes": [peak_memory(run, cpu) / 1e6 for run in runs],
    }
    if residents:
        found["resident"] = [resident(build, torch.get_num_threads()) / 1e6 for build in builds]
    return found


def main() -> None:
    """Print the table, and write it to the given file."""
    parser = argparse.ArgumentParser(description="Spans of attention against whole texts.")
    parser.add_argument("words", nargs="*", help="parts of names of rows; all rows without any")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of a row (default: 7)")
    parser.add_argument("--length", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--resident", action="store_true", help="peak of a process as well")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_blocks()  # as `ablate fit` does on a CPU
    print(f"torch {torch.__version__}, {args.threads} thread(s), float32, {args.rounds} rounds")
    print(f"{'row':<24}{'speed':>8}{'quartiles':>15}{'MB first':>10}{'second':>9}{'ratio':>7}")
    rows = []
    for row in ROWS:
        if args.words and not any(word in row.name for word in args.words):
            continue
        found = measure(row, args.length, args.rounds, residents=args.resident)
        rows.append(found)
        speed, (first, second) = found["speed"], found["megabytes"]  # pyright: ignore[reportGeneralTypeIssues]
        print(
            f"{row.name:<24}{speed['median']:>8.2f}{speed['low']:>9.2f}-{speed['high']:.2f}"  # pyright: ignore[reportIndexIssue]
            f"{first:>11.1f}{second:>9.1f}{second / first:>7.2f}",
            *(f"resident {number:.0f}" for number in found.get("resident", ())),  # pyright: ignore[reportGeneralTypeIssues]
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
