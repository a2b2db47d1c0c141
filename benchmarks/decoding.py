"""The speed-up by cached decoding: beam search over sentences of the IWSLT14 test split.

    python benchmarks/decoding.py
    python benchmarks/decoding.py --depth 6 --width 512 --sentences 50 --json decoding.json

The same search is run with the model's caches and with a model that keeps no keys and values: it
has the keys and values of the encoder's output, and computes every prefix again at each step. The
model is not trained, so hypotheses end at the length of their source, which in this corpus is the
mean length of a target.

Rounds are interleaved, seconds are processor time, and a ratio is the median of the ratios of the
rounds. The number of equal hypotheses is also counted.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import causal_mask
from lightning_app.data.prepare import global_batches
from lightning_app.data.tokenizer import PAD
from lightning_app.models import heads, search
from lightning_app.models.stack import Memory
from lightning_app.tasks.translation import MARKS, TranslationRows
from lightning_app.training.datamodule import TextDataModule

GOAL = 5.0


class Prefixes(NamedTuple):
    """The state of a search that keeps only the tokens of its prefixes."""

    tokens: Tensor  # (sentence, beam, token)
    memory: Memory

    def select(self, rows: Tensor) -> "Prefixes":
        return Prefixes(self.tokens.index_select(0, rows), self.memory.select(rows))

    def reorder(self, beams: Tensor) -> "Prefixes":
        every = beams[:, :, None].expand(-1, -1, self.tokens.shape[2])
        return self._replace(tokens=self.tokens.gather(1, every))


class Uncached:
    """The interface of an encoder-decoder to a search, which runs the whole prefix at each step."""

    def __init__(self, model: heads.EncoderDecoder) -> None:
        self.model = model
        self.pad = model.pad
        self.longest = model.longest

    def start(self, source: Tensor, beams: int) -> Prefixes:
        memory = self.model.start(source).memory
        assert memory is not None
        return Prefixes(source.new_empty(len(source), beams, 0), memory)

    def step(self, tokens: Tensor, state: Prefixes) -> tuple[Tensor, Prefixes]:
        state = state._replace(tokens=torch.cat([state.tokens, tokens[:, :, None]], dim=2))
        x = self.model.embedding(state.tokens.flatten(0, 1))
        rows = torch.arange(len(tokens)).repeat_interleave(tokens.shape[1])
        states = self.model.decoder(x, causal_mask(x.shape[1], x.device), state.memory.select(rows))
        return self.model.embedding.logits(states[:, -1]), state


def sample(sentences: int, tokens: int, vocab_size: int) -> tuple[list[Tensor], int]:
    """Return `sentences` sources of the test split, evenly spaced, as batches; and the ids."""
    data = TextDataModule(
        name="iwslt14", tokenizer="bpe", vocab_size=vocab_size, tokens_per_batch=tokens
    )
    data.prepare_data()
    data.setup()
    source, target = (data.corpus.lengths("test", side) for side in ("source", "target"))
    chosen = np.linspace(0, len(source) - 1, sentences).astype(np.int64)
    split = TranslationRows(data.corpus, "test")
    batches = global_batches(source[chosen], target[chosen], tokens)
    return [split[0, chosen[rows]].source for rows in batches], data.vocab_size


def main() -> None:
    """Print and write the seconds of each form and the ratios to ours."""
    parser = argparse.ArgumentParser(description="The speed-up by cached decoding.")
    parser.add_argument("--depth", type=int, default=3, help="blocks a stack (default: 3)")
    parser.add_argument("--width", type=int, default=256, help="of the stream (default: 256)")
    parser.add_argument("--preset", default="pre_ln", help="wiring of the blocks (pre_ln)")
    parser.add_argument("--vocabulary", type=int, default=10000, help="pieces (default: 10000)")
    parser.add_argument("--sentences", type=int, default=128, help="of the test split (128)")
    parser.add_argument("--tokens", type=int, default=1024, help="a batch (default: 1024)")
    parser.add_argument("--beam", type=int, default=5, help="1 is greedy search (default: 5)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batches, ids = sample(args.sentences, args.tokens, args.vocabulary)
    sizes = {
        "encoder_depth": args.depth,
        "decoder_depth": args.depth,
        "model_dim": args.width,
        "ff_dim": 2 * args.width,
    }
    torch.manual_seed(1)
    architecture = heads.ArchitectureConfig(**sizes)
    model = heads.build_model(architecture, BlockConfig(preset=args.preset), ids, PAD).eval()
    assert isinstance(model, heads.EncoderDecoder)
    forms: dict[str, Any] = {"ours": model, "without cache": Uncached(model)}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    found: dict[str, list[list[int]]] = {}
    for _ in range(args.rounds):
        for name, net in forms.items():
            how = search.SearchConfig(beam=args.beam, length_ratio=1.0, length_extra=0)
            begin = time.process_time()
            parts = [search.search(net, batch, MARKS, how) for batch in batches]
            seconds[name].append(time.process_time() - begin)
            found[name] = [hypothesis.tokens for part in parts for hypothesis in part]

    rows = []
    for name, spent in seconds.items():
        ratios = [s / ours for s, ours in zip(spent, seconds["ours"], strict=True)]
        same = sum(a == b for a, b in zip(found[name], found["ours"], strict=True))
        rows.append(
            {
                "form": name,
                "core_seconds": statistics.median(spent),
                "over_ours": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
                "same_hypotheses": same,
            }
        )
    tokens = sum(len(hypothesis) + 1 for hypothesis in found["ours"])
    print(
        f"{args.sentences} sentences in {len(batches)} batches, {tokens} target tokens, beam "
        f"{args.beam}, {args.preset} {args.depth}+{args.depth} of width {args.width}, {ids} ids, "
        f"{args.rounds} rounds"
    )
    print(f"{'form':<20}{'core s':>9}{'over ours':>11}{'range':>16}{'same':>7}")
    for row in rows:
        spread = f"{row['lowest']:.2f} to {row['highest']:.2f}"
        print(
            f"{row['form']:<20}{row['core_seconds']:>9.2f}{row['over_ours']:>11.2f}{spread:>16}"
            f"{row['same_hypotheses']:>7}"
        )
    reached = rows[1]["over_ours"]
    print(f"goal: {GOAL:g} times without cache; {'met' if reached >= GOAL else 'missed'}")
    if args.json is not None:
        settings = {k: v for k, v in vars(args).items() if k != "json"}
        settings["torch"] = torch.__version__
        args.json.write_text(json.dumps({**settings, "forms": rows}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
