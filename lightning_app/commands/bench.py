"""`ablate bench`: only its arguments, because `lab.bench.run` imports torch."""

from pathlib import Path
from typing import Any

from lightning_app.commands.options import Parser
from lightning_app.grids.display import plain_console


def add_bench(parser: Parser) -> None:
    text = "compare these or all presets with pre_ln: a training step, then forward and backward"
    parser.add("--presets NAME", text, nargs="*")
    parser.add("--attention", "compare the forms of attention without a model")
    parser.add("--peers", "compare with the same models of other libraries")
    parser.add("--growth", "also measure growth with length, depth and width, as a figure")
    parser.add("--explain", "only show which form of attention is chosen, and why")
    parser.add("--quick", "tiny sizes, to check in seconds that it works")
    parser.add("--rounds N", "interleaved rounds (default: 5)")
    parser.add("--threads N", "torch threads (default: 1)", default=1)
    text = "where to measure (default: a GPU if there is one)"
    parser.add("--device", text, choices=("cpu", "cuda"))
    text = "bf16: autocast (default: 32)"
    parser.add("--precision", text, choices=("32", "bf16"), default="32")
    parser.add("--length N", "tokens per row (default: 128)")
    parser.add("--tokens N", "tokens per batch (default: 1024, GPU: 4096)")
    parser.add("--depth N", "blocks per stack (default: 6)")
    parser.add("--width N", "size of the stream (default: 256, GPU: 512)")
    parser.add("--resident", "also measure the peak memory of each in a separate process")
    parser.add("--json FILE", "write the numbers")
    text = "file for the figure of --growth (default: bench-growth.svg)"
    parser.add("--figure FILE", text, default=Path("bench-growth.svg"))
    parser.set_defaults(call=bench_command)


def bench_command(**options: Any) -> int:
    """Print and write the comparisons; `options` are the fields of `BenchOptions`."""
    from lightning_app.lab.bench.run import BenchOptions, run_bench

    run_bench(BenchOptions(**options), plain_console())
    return 0
