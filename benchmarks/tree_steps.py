"""Is a training step of a preset slower than in another version of the repository?

    python benchmarks/tree_steps.py OLD_TREE NEW_TREE --presets post_ln pre_ln

One process for each tree trains a small encoder-decoder on random tokens, blocks of steps in turn.
Each line has the processor time of a step of the old tree, and the median and the quartiles of the
ratios of neighbouring blocks, new over old; without `--presets` of those that the old tree has.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SIZES = {"encoder_depth": 3, "decoder_depth": 3, "model_dim": 64, "ff_dim": 256, "num_heads": 4}
ROWS, TOKENS, VOCABULARY = 16, 24, 200


def step_of(preset: str) -> Callable[[], None]:
    """Return a training step, after three of them."""
    import torch

    from lightning_app.blocks.config import BlockConfig
    from lightning_app.models.heads import ArchitectureConfig, build_model
    from lightning_app.models.initialization import initialize
    from lightning_app.models.optim import OptimizerConfig, build_optimizer

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = build_model(ArchitectureConfig(**SIZES), BlockConfig(preset=preset), VOCABULARY, pad=0)  # pyright: ignore[reportArgumentType]
    initialize(model)
    optimizer = build_optimizer(OptimizerConfig(), model.train(), fused=True)
    source, target = torch.randint(4, VOCABULARY, (2, ROWS, TOKENS))

    def step() -> None:
        optimizer.zero_grad()
        logits = model(source, target)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


def serve() -> None:
    """Answer the requests of the other process: presets, and numbers of steps to time."""
    from lightning_app.blocks.presets import PRESETS

    print(*PRESETS, flush=True)
    step: Callable[[], None] | None = None
    for line in sys.stdin:
        word = line.strip()
        if not word.isdigit():
            step = step_of(word)
            print(word, flush=True)
            continue
        assert step is not None, "a number before a preset"
        before = time.process_time()
        for _ in range(int(word)):
            step()
        print((time.process_time() - before) / int(word), flush=True)


class Tree:
    """A process that trains with the package of a tree."""

    def __init__(self, path: Path) -> None:
        own = {"PYTHONPATH": str(path.resolve()), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        self.process = subprocess.Popen(
            words,
            cwd=path,
            env=os.environ | own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.presets = self._answer().split()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        if not (answer := self.process.stdout.readline().strip()):
            raise SystemExit(f"{self.process.args}: ended")
        return answer

    def ask(self, word: object) -> str:
        print(word, file=self.process.stdin, flush=True)
        return self._answer()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trees", type=Path, nargs="*", metavar="TREE", help="the old and the new")
    parser.add_argument("--presets", nargs="*")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=3, help="steps of a block")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    if len(args.trees) != 2:
        parser.error("two trees are needed")
    old, new = map(Tree, args.trees)
    for preset in args.presets or old.presets:
        for tree in (old, new):
            tree.ask(preset)
        pairs: list[tuple[float, float]] = []
        for turn in range(args.rounds):
            order = (old, new) if turn % 2 == 0 else (new, old)
            taken = {tree: float(tree.ask(args.steps)) for tree in order}
            pairs.append((taken[old], taken[new]))
        low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
        before = 1000 * statistics.median(a for a, _ in pairs)
        print(f"{preset:20} {before:7.2f} ms  {middle:.3f} [{low:.3f}, {high:.3f}]", flush=True)


if __name__ == "__main__":
    main()
