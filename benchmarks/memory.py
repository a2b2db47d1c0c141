"""Time of an evaluation with memory against windows that compute their context again.

    python benchmarks/memory.py
    python benchmarks/memory.py --rounds 9 --window 64 --memory 256

Each row predicts the same tokens of one text from at least M tokens before each, with the states of
the same model, without gradients and without the output layer:

- with memory: segments of T tokens after one another, each with the M inputs of every layer before
  it;
- windows of T + M tokens that begin every T tokens: the last T of each count;
- windows of M + 1 tokens that begin every token: the last of each counts, as Dai et al. 2019
  compare (1901.02860, section 4.6); a few of them, at the time of one token.

The ratio is time per token of the second or third form, divided by that of the first.
The last row is a training step of one block that serves six layers against six blocks.
"""

import argparse

import torch
from torch import Tensor

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.memory import MemorySpec
from lightning_app.lab.bench.measure import Clock, ratios, rounds
from lightning_app.models.heads import ArchitectureConfig, CausalLanguageModel, build_model
from lightning_app.training.hardware import keep_freed_blocks

VOCABULARY = 2000
FEW = 32
"""The windows that the third form computes: one for each token."""


def build(preset: str, memory: int, **axes: str) -> CausalLanguageModel:
    """Return a model of six blocks of width 256."""
    architecture = ArchitectureConfig(
        kind="decoder",
        decoder_depth=6,
        model_dim=256,
        ff_dim=1024,
        num_heads=4,
        dropout=0.0,
        activation="gelu",
        positions="relative",
    )
    block = BlockConfig(preset=preset, memory=MemorySpec(length=memory), **axes)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(1)
    model = build_model(architecture, block, VOCABULARY, pad=0)
    assert isinstance(model, CausalLanguageModel)
    return model


@torch.no_grad()
def in_segments(model: CausalLanguageModel, text: Tensor, window: int) -> Tensor:
    """Return the states of a text, segment by segment."""
    memory, found = None, []
    for segment in text.split(window, dim=1):
        states, memory = model.states_after(memory, segment)
        found.append(states)
    return torch.cat(found, dim=1)


@torch.no_grad()
def in_windows(model: CausalLanguageModel, text: Tensor, memory: int, stride: int) -> None:
    """Compute the states of the tokens after the first `memory`, in windows of their own."""
    for end in range(memory + stride, text.shape[1] + 1, stride):
        model.states(text[:, end - memory - stride : end])


def step(model: CausalLanguageModel, tokens: Tensor) -> None:
    """Run one training step without an optimizer."""
    model.states(tokens).square().mean().backward()
    model.zero_grad()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Evaluation with memory against windows.")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of a row (default: 7)")
    parser.add_argument("--window", type=int, default=64, help="T (default: 64)")
    parser.add_argument("--memory", type=int, default=256, help="M (default: 256)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_blocks()
    clock = Clock(torch.device("cpu"))
    print(f"torch {torch.__version__}, {args.threads} thread(s), float32, {args.rounds} rounds")
    print(f"T = {args.window}, M = {args.memory}")
    text: Tensor = torch.randint(5, VOCABULARY, (1, args.memory + 8 * args.window))
    for preset in ("pre_ln", "realformer", "sas"):
        model = build(preset, args.memory).eval()
        tokens = text.shape[1]
        memory_form = lambda: in_segments(model, text, args.window)  # noqa: B023, E731
        forms = {
            f"windows every {args.window} tokens": (
                lambda: in_windows(model, text, args.memory, args.window),  # noqa: B023
                tokens - args.memory,
            ),
            "windows every token": (
                lambda: in_windows(model, text[:, : args.memory + FEW], args.memory, 1),  # noqa: B023
                FEW,
            ),
        }
        for name, (form, counted) in forms.items():
            found = ratios(*rounds([form, memory_form], args.rounds, clock, warm=1))
            scale = tokens / counted
            low, middle, high = (scale * ratio for ratio in (found.low, found.median, found.high))
            print(f"{preset:<12}{name:<26}{middle:>8.1f}{low:>9.1f}-{high:.1f}", flush=True)
    batch: Tensor = torch.randint(5, VOCABULARY, (8, 128))
    models = [build("pre_ln", 0, share=share) for share in ("all", "none")]
    runs = [lambda model=model: step(model, batch) for model in models]
    found = ratios(*rounds(runs, args.rounds, clock, warm=1))
    print(
        f"one shared block, its step / six blocks: {found.median:.3f}"
        f"  {found.low:.3f}-{found.high:.3f}"
    )


if __name__ == "__main__":
    main()
