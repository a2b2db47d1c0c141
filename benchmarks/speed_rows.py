"""The rows of `speed_goals.py`: each measures one goal on a CPU, with one thread."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
import yaml
from torch import Tensor

from benchmarks import bench as attention
from benchmarks.bench import AttentionInputs, Maps
from benchmarks.measure import Contender, How, Missing, Result, Spread, Work, compare
from benchmarks.peers import (
    Setting,
    TorchTranslator,
    XTranslator,
    preset_work,
    translation_peer,
)
from lightning_app.blocks.block import Block, Call, Carries, Sizes
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.masks import Mask, causal_mask, full_mask
from lightning_app.blocks.stack import Stack
from lightning_app.blocks.streams import Stream
from lightning_app.commands.run import shipped_data
from lightning_app.data.prepare import PreparedCorpus, global_batches, prepare
from lightning_app.tasks.translation import TranslationRows

HERE = Path(__file__).parent
ROUNDS = 7
PAIRS = 160_000  # pairs of an epoch, to which times are scaled


@dataclass(frozen=True)
class Figure:
    """One goal and the measured value; `least`: whether the goal is a lower limit."""

    name: str
    goal: float
    least: bool
    reached: Spread

    @property
    def met(self) -> bool:
        value = self.reached.median
        return value >= self.goal if self.least else value <= self.goal


Row = Callable[[], Iterator[Figure]]


def exactly(value: float) -> Spread:
    return Spread(value, value, value)


def at_least(name: str, goal: float, reached: Spread) -> Figure:
    return Figure(name, goal, True, reached)


def at_most(name: str, goal: float, reached: Spread) -> Figure:
    return Figure(name, goal, False, reached)


def against(ours: Callable[[], Work], theirs: Callable[[], Work]) -> tuple[Result, Result]:
    """Return our result, then those of the others with ratios to ours."""
    contenders = [Contender("ours", ours), Contender("theirs", theirs)]
    first, second = compare("", contenders, How(rounds=ROUNDS)).results
    if second.missing is not None:
        raise Missing(second.missing)
    return first, second


def ratio_of(ours: Callable[[], Work], theirs: Callable[[], Work]) -> Spread:
    """Return the ratio of the others' time to ours."""
    time_ratio = against(ours, theirs)[1].time
    assert time_ratio is not None
    return time_ratio


def memory_of(result: Result) -> float:
    assert result.peak_bytes is not None
    return result.peak_bytes


def shaped_literal() -> Iterator[Figure]:
    """Shaped attention against the explicit map, causal, 4096 tokens, 4 heads of 64."""
    for length, goal in ((512, 2.9), (1024, 4.5), (2048, 6.7)):
        maps = Maps(length=length)
        ours = partial(attention.attention_work, maps, attention.shaped)
        theirs = partial(attention.attention_work, maps, attention.shaped_literally)
        yield at_least(f"T={length}, time", goal, ratio_of(ours, theirs))
    short, long = (
        attention.contender("", Maps(length=length), attention.shaped) for length in (512, 2048)
    )
    peaks = [
        memory_of(compare("", [contender], How(rounds=1)).results[0]) for contender in (short, long)
    ]
    yield at_most("memory, T=2048 over T=512", 1.05, exactly(peaks[1] / peaks[0]))


def shaped_sdpa() -> Iterator[Figure]:
    """Shaped attention against plain SDPA, causal, 4096 tokens, 4 heads of 64."""
    for length, goal in ((128, 1.25), (512, 1.12), (1024, 1.07)):
        maps = Maps(length=length)
        ours = partial(attention.attention_work, maps, attention.plain)
        theirs = partial(attention.attention_work, maps, attention.shaped)
        yield at_most(f"T={length}, time", goal, ratio_of(ours, theirs))


def residual_plain() -> Iterator[Figure]:
    """A chain of 12 residual maps as chosen against plain autograd, 2048 tokens, 4 heads of 64."""
    goals = ((128, 0.98, 0.9), (512, 0.98, 0.3), (1024, 1.4, 0.25))
    for length, speed, memory in goals:
        maps = Maps(length=length, tokens=2048, depth=12, causal=False)
        chosen = partial(attention.attention_work, maps, attention.residual)
        plain = partial(attention.attention_work, maps, attention.residual_literally)
        ours, theirs = against(chosen, plain)
        assert theirs.time is not None
        yield at_least(f"T={length}, speed", speed, theirs.time)
        share = memory_of(ours) / memory_of(theirs)
        yield at_most(f"T={length}, live memory", memory, exactly(share))


def residual_depth() -> Iterator[Figure]:
    """Peak memory of a residual chain at T=2048, 24 layers against 12, but for Q, K, V and O."""
    peaks, own = [], []
    for depth in (12, 24):
        maps = Maps(length=2048, tokens=2048, depth=depth, causal=False)
        chain = attention.contender("", maps, attention.residual)
        peaks.append(memory_of(compare("", [chain], How(rounds=1)).results[0]))
        # The outputs, in float32; queries, keys and values existed before the passes.
        own.append(4 * depth * maps.tokens * maps.heads * maps.head_dim)
    grown = peaks[1] - peaks[0] - (own[1] - own[0])
    yield at_most("growth over the peak of 12", 0.05, exactly(grown / peaks[0]))


def bf16_error() -> Iterator[Figure]:
    """Worst gradient error of 12 residual maps in bf16 over that of a sum kept in bf16."""
    maps = Maps(length=512, tokens=2048, depth=12, causal=False)
    torch.manual_seed(1)
    shape = (maps.rows, maps.length, maps.heads * maps.head_dim)
    # Rounded once: the error is that of the arithmetic.
    values = [torch.randn(4, *shape).bfloat16() for _ in range(maps.depth)]

    def gradients(forward: attention.Forward, dtype: torch.dtype) -> list[Tensor]:
        layers = []
        for made in values:
            query, key, value, upstream = (part.to(dtype) for part in made)
            for leaf in (query, key, value):
                leaf.requires_grad_()
            layers.append(AttentionInputs(query, key, value, attention.split(upstream, maps)))
        mask = full_mask(maps.length, torch.device("cpu"))
        outputs = forward(layers, maps, mask)
        torch.autograd.backward(outputs, [layer.upstream for layer in layers])
        leaves = (leaf for layer in layers for leaf in layer[:3])
        return [leaf.grad.double() for leaf in leaves if leaf.grad is not None]

    def in_one_type(layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
        outputs, total = [], None
        for layer in layers:
            query, key, value = attention.heads(layer, maps)
            scores = query @ key.transpose(-2, -1) * maps.head_dim**-0.5
            total = scores if total is None else total + scores
            outputs.append(total.softmax(-1) @ value)
        return outputs

    exact = gradients(in_one_type, torch.float64)

    def worst(found: list[Tensor]) -> float:
        pairs = zip(found, exact, strict=True)
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)

    ours = worst(gradients(attention.residual, torch.bfloat16))
    theirs = worst(gradients(in_one_type, torch.bfloat16))
    yield at_most(f"error {ours:.2%} over {theirs:.2%}", 0.35, exactly(ours / theirs))


def step(setting: Setting) -> dict[str, Callable[[], Work]]:
    """Return the training step of 6+6 blocks by contender."""
    return {
        "ours": partial(preset_work, setting, "post_ln"),
        "torch.nn.Transformer": partial(translation_peer, setting, TorchTranslator),
        "x-transformers": partial(translation_peer, setting, XTranslator),
    }


def calls() -> Iterator[Figure]:
    """ATen calls of that step; they do not depend on the sizes, so the sizes are small."""
    tiny = Setting(width=64, ff_dim=128, length=16, tokens=64, vocabulary=1000)
    for precision, goal in (("32", 0.68), ("bf16", 0.6)):
        works = step(replace(tiny, precision=precision))
        contenders = [Contender(name, works[name]) for name in ("ours", "torch.nn.Transformer")]
        ours, theirs = compare("", contenders, How(rounds=1)).results
        assert ours.calls is not None
        assert theirs.calls is not None
        name = f"{precision}: {ours.calls} over {theirs.calls}"
        yield at_most(name, goal, exactly(ours.calls / theirs.calls))


def block(preset: str, width: int) -> Work:
    """Return the passes of one causal encoder block, not the first, ff four times the width."""
    torch.manual_seed(1)
    spec = BlockConfig(preset=preset).resolve(Stack(depth=4)).blocks[1]
    sizes = Sizes(model_dim=width, ff_dim=4 * width, num_heads=width // 64)
    module = Block(spec, sizes)
    x, upstream = torch.randn(2, 8, 128, width)
    x.requires_grad_()
    mask = causal_mask(128, x.device)

    def run() -> None:
        stream, _ = module(Stream(x), Carries(), Call(layer=1, mask=mask))
        stream.x.backward(upstream)
        x.grad = None
        module.zero_grad()

    return Work(run, sum(parameter.numel() for parameter in module.parameters()))


def simplified() -> Iterator[Figure]:
    """SAS and SAS-P blocks against our own Pre-LN block, width 512 and 768, T=128, 1024 tokens."""
    for preset in ("sas", "sas_p"):
        for width in (512, 768):
            ours, theirs = against(partial(block, preset, width), partial(block, "pre_ln", width))
            assert theirs.time is not None
            yield at_least(f"{preset}, width {width}", 1.14, theirs.time)
            share = ours.parameters / theirs.parameters
            # 5/6 of the matrices; gains and norms are the rest.
            yield at_most(f"{preset}, width {width}, parameters", 0.8335, exactly(share))


def harness() -> Iterator[Figure]:
    """Lightning, callbacks, logging and loader over a bare loop, CPU ms a step."""
    output = called(HERE / "harness_overhead.py", "--rounds", "3")
    added = [float(value) for value in re.findall(r"added (-?[\d.]+) ms", output)]
    yield at_most("ms a step", 0.7, Spread.of(added))


def corpus() -> PreparedCorpus:
    return prepare(shipped_data("iwslt14"))


def padding() -> Iterator[Figure]:
    """Padding among all places of IWSLT14's batches."""
    for budget, goal in ((4096, 0.04), (32768, 0.08)):
        yield at_most(f"{budget} tokens", goal, exactly(corpus().padding_share(budget)))


def batches() -> Iterator[Figure]:
    """CPU seconds of building the batches of an epoch and collating them, for 160k pairs."""
    prepared = corpus()
    rows = TranslationRows(prepared, "train")
    source, target = (prepared.lengths("train", side) for side in ("source", "target"))
    seconds = []
    for epoch in range(1, 6):
        start = time.process_time()
        for cut in global_batches(source, target, 4096, (1, epoch)):
            rows[epoch, cut]
        seconds.append((time.process_time() - start) * PAIRS / len(rows))
    yield at_most("seconds", 0.3, Spread.of(seconds))


def preparing() -> Iterator[Figure]:
    """Seconds on the wall in which IWSLT14 is prepared, and found again."""
    with tempfile.TemporaryDirectory() as folder:
        config = replace(shipped_data("iwslt14"), cache=folder)
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            prepare(config)
            seconds.append(time.perf_counter() - start)
    yield at_most("first, seconds", 40.0, exactly(seconds[0]))
    yield at_most("second, seconds", 1.0, exactly(seconds[1]))


def decoding() -> Iterator[Figure]:
    """Beam-5 search over the IWSLT14 test split against the same without a cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decoding.json"
        called(HERE / "decoding.py", "--json", str(path))
        forms = json.loads(path.read_text(encoding="utf-8"))["forms"]
    ratio = forms[1]  # the first is ours
    yield at_least("speed", 5.0, Spread(ratio["over_ours"], ratio["lowest"], ratio["highest"]))


def two_workers() -> Iterator[Figure]:
    """A grid of 8 cells with 2 workers against one of one thread, on the wall: needs 2 free cores.

    The cells run from the start of the first to the end of the last; what a supervisor does before
    and after them does not depend on the number of workers.
    """
    base = HERE.parent / "ablations" / "base" / "synthetic.yaml"
    metric = {"name": "val/nll", "mode": "min"}
    axes = {"seed_everything": list(range(1, 9))}
    spec = {"base": str(base), "axes": axes, "metric": metric}
    with tempfile.TemporaryDirectory() as folder:
        whole, cells = [], []
        for workers in (1, 2):
            # Folders of their own: a grid takes over equal cells that are finished beside it.
            name, place = f"grid{workers}", Path(folder) / str(workers)
            place.mkdir()
            grid = place / f"{name}.yaml"
            grid.write_text(yaml.safe_dump({"name": name, **spec}), encoding="utf-8")
            start = time.perf_counter()
            called("-c", GRID.format(grid=str(grid), folder=str(place), workers=workers))
            whole.append(time.perf_counter() - start)
            runs = (place / name / "runs").glob("*/result.json")
            results = [json.loads(path.read_text(encoding="utf-8")) for path in runs]
            first, last = (
                pick(datetime.fromisoformat(result[end]) for result in results)
                for pick, end in ((min, "started"), (max, "finished"))
            )
            cells.append((last - first).total_seconds())
    yield at_least("speed", 1.85, exactly(cells[0] / cells[1]))
    print(f"two_workers: with start and report {whole[0] / whole[1]:.2f}, of 8 cells", flush=True)


# By default one worker would have all cores for its threads.
GRID = """
from pathlib import Path
from lightning_app.commands.grid import run_command
from lightning_app.grids import supervisor
supervisor.default_workers = lambda: {workers}
raise SystemExit(run_command({grid!r}, Path({folder!r}), workers={workers}))
"""


def called(*words: object) -> str:
    """Run Python with `words` from the folder above and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, env=environment, cwd=HERE.parent, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr[-2000:]}")
    return done.stdout


OWN_ROWS: dict[str, Row] = {
    "shaped_literal": shaped_literal,
    "shaped_sdpa": shaped_sdpa,
    "residual_plain": residual_plain,
    "residual_depth": residual_depth,
    "bf16_error": bf16_error,
    "calls": calls,
    "simplified": simplified,
    "harness": harness,
    "padding": padding,
    "batches": batches,
    "preparing": preparing,
    "decoding": decoding,
    "two_workers": two_workers,
}
