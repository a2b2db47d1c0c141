"""Time and memory of the output layer and its loss in chunks, compared with all logits at once.

    python benchmarks/output_loss.py
    python benchmarks/output_loss.py --rounds 9 --threads 1 --json output_loss.json

One row for each shape; each pair of forms runs in interleaved rounds. Speed is the time of the
plain form divided by that of the chunked one, forward and backward: the median over rounds and its
quartiles. Memory is the peak of live tensors beyond the inputs, in MB. `evaluation` is only the
forward pass, without gradients.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_app.lab.bench.measure import Clock, count_calls, peak_memory, ratios, rounds
from lightning_app.models.loss import output_sums, token_sums

SMOOTHING = 0.1


class Shape(NamedTuple):
    """Tokens of a step, width, vocabulary, and whether there is a bias."""

    tokens: int
    width: int
    vocabulary: int
    bias: bool = False


SHAPES = {
    "the demo": Shape(955, 64, 2716),
    "width 256": Shape(4096, 256, 10000),
    "width 512": Shape(4096, 512, 10000),
    "masked tokens": Shape(600, 256, 10000, bias=True),
}


class Inputs(NamedTuple):
    states: Tensor
    table: Tensor
    bias: Tensor | None
    labels: Tensor
    counted: Tensor


def inputs(shape: Shape) -> Inputs:
    """Return tokens of which 4 % are padding and do not count."""
    tokens, width, vocabulary, bias = shape
    torch.manual_seed(1)
    return Inputs(
        torch.randn(tokens, width, requires_grad=True),
        (torch.randn(vocabulary, width) * width**-0.5).requires_grad_(),
        torch.zeros(vocabulary, requires_grad=True) if bias else None,
        torch.randint(0, vocabulary, (tokens,)),
        torch.rand(tokens) >= 0.04,
    )


def plain(given: Inputs) -> Tensor:
    """Return the loss from all logits at once."""
    logits = F.linear(given.states, given.table)
    logits = logits if given.bias is None else logits + given.bias
    return token_sums(logits, given.labels, given.counted, SMOOTHING).loss


def chunked(given: Inputs) -> Tensor:
    """Return the same loss, computed in chunks."""
    states, table, bias, labels, counted = given
    return output_sums(states, table, labels, counted, SMOOTHING, bias=bias).loss


def train(form, given: Inputs) -> None:
    for leaf in given[:3]:
        if leaf is not None:
            leaf.grad = None
    (form(given) / len(given.labels)).backward()


@torch.no_grad()
def evaluate(form, given: Inputs) -> None:
    form(given)


def measure(name: str, shape: Shape, count: int) -> dict[str, Any]:
    """Return the row of one shape."""
    given, cpu = inputs(shape), torch.device("cpu")
    forms = [partial(train, form, given) for form in (plain, chunked)]
    speed = ratios(*rounds(forms, count, Clock(cpu)))
    looks = [partial(evaluate, form, given) for form in (plain, chunked)]
    evaluation = ratios(*rounds(looks, count, Clock(cpu)))
    return {
        "name": name,
        **shape._asdict(),
        "speed": speed._asdict(),
        "evaluation": evaluation._asdict(),
        "megabytes": [peak_memory(form, cpu) / 1e6 for form in forms],
        "calls": [count_calls(form).total for form in forms],
    }


def main() -> None:
    """Print the table, and write it to the given file."""
    parser = argparse.ArgumentParser(description="The output layer and its loss in chunks.")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of a shape (default: 9)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} thread(s), float32, {args.rounds} rounds")
    head = f"{'shape':<14}{'tokens':>7}{'width':>6}{'words':>7}{'speed':>8}{'quartiles':>13}"
    print(f"{head}{'evaluation':>12}{'MB plain':>10}{'chunks':>8}{'calls':>6}{'chunks':>8}")
    rows = []
    for name, shape in SHAPES.items():
        row = measure(name, shape, args.rounds)
        rows.append(row)
        speed, (mb, mb_chunks), (calls, calls_chunks) = row["speed"], row["megabytes"], row["calls"]
        print(
            f"{name:<14}{shape.tokens:>7}{shape.width:>6}{shape.vocabulary:>7}"
            f"{speed['median']:>8.2f}{speed['low']:>7.2f}-{speed['high']:.2f} "
            f"{row['evaluation']['median']:>11.2f}{mb:>10.1f}{mb_chunks:>8.1f}"
            f"{calls:>6}{calls_chunks:>8}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
