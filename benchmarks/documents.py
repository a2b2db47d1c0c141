"""A training step with `data.intra_document_masking` against one whose documents are joined.

    python benchmarks/documents.py
    python benchmarks/documents.py --presets pre_ln sas --rounds 9 --json documents.json

Each row is a decoder-only model of width 256 on 1,024 tokens in windows of one length, with three
documents in each window: a step without and one with their boundaries run in interleaved rounds of
processor time. The figure is the time with boundaries divided by that without: the median over
rounds and its quartiles.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from lightning_app.blocks.config import BlockConfig
from lightning_app.lab.bench.measure import Clock, Spread, ratios, rounds
from lightning_app.lab.bench.peers import Setting, batch_of, causal, learner, work
from lightning_app.training.hardware import keep_freed_blocks

LENGTHS = (128, 256, 1024)
DOCUMENTS = 3


def numbers(rows: int, length: int) -> Tensor:
    """Return the number of the document of each token; documents end at random places."""
    ends = torch.stack([torch.randperm(length - 1)[: DOCUMENTS - 1] for _ in range(rows)])
    return (torch.arange(length)[None, :, None] > ends[:, None]).sum(dim=-1)


def measure(preset: str, length: int, depth: int, count: int) -> Spread:
    """Return the time of a step with boundaries divided by that of one without."""
    setting = causal(Setting(depth=depth, width=256, tokens=1024, length=length))
    torch.manual_seed(1)
    batch = batch_of(setting)
    masked = batch._replace(documents=numbers(setting.rows, length))
    block = BlockConfig(preset=preset)
    runs = [work(learner(setting, block, each), setting).run for each in (masked, batch)]
    return ratios(*rounds(runs, count, Clock(torch.device("cpu")), warm=2))


def main() -> None:
    """Print the table, and write it to the given file."""
    parser = argparse.ArgumentParser(description="The cost of intra-document masking.")
    parser.add_argument("--presets", nargs="+", default=["pre_ln", "realformer", "sas"])
    parser.add_argument("--depth", type=int, default=12, help="blocks (default: 12)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of a row (default: 7)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_blocks()  # as `ablate fit` does on a CPU
    rows = []
    for preset in args.presets:
        for length in LENGTHS:
            found = measure(preset, length, args.depth, args.rounds)
            rows.append({"preset": preset, "length": length, "time": found._asdict()})
            print(
                f"{preset:<14} T={length:<6}{found.median:>6.2f}  "
                f"{found.low:.2f} to {found.high:.2f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
