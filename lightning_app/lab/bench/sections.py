"""The sections of `ablate bench`.

Comparisons of presets, attention maps and peers; the growth of an encoder's time and memory with
length, depth and width; and `--explain`: the chosen form of attention, and why.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich import box
from rich.table import Table

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import Form, choose
from lightning_app.blocks.linear import prefers_onednn
from lightning_app.lab.bench.attention import Maps, chain_forms, single_forms
from lightning_app.lab.bench.compare import MEGA, Comparison, Contender, How, compare
from lightning_app.lab.bench.learners import Setting, masked, preset_work
from lightning_app.lab.bench.peers import (
    TorchTranslator,
    XTranslator,
    bert_peer,
    residual_encoder,
    translation_peer,
)
from lightning_app.lab.bench.rates import Rates, rate_in_force, same_library
from lightning_app.probes.figures import legend, looks, panel_grid
from lightning_app.report.figures.sheet import save, styled

LENGTHS = (64, 128, 256, 512, 1024, 2048, 8192, 32768)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TOKENS, HEADS = 4096, 4


def explained(devices: list[torch.device]) -> Table:
    """Return the choice of the policy for a few shapes, types and devices."""
    shown = Table(title="Residual attention (scores)", title_justify="left", box=box.SIMPLE)
    for column in ("device", "type", "maps: batch x heads x T x T", "form", "why"):
        shown.add_column(column)
    for device in devices:
        for dtype in DTYPES:
            # Scores have at least float32, for every type of queries and keys.
            itemsize = torch.promote_types(dtype, torch.float32).itemsize
            for length in LENGTHS:
                shape = (max(1, TOKENS // length), HEADS, length, length)
                form, reason = choose(shape, device, itemsize)
                name, size = str(dtype).removeprefix("torch."), " x ".join(map(str, shape))
                shown.add_row(device.type, name, size, form, reason)
    shown.caption_justify = "left"
    products = (
        "oneDNN, as MKL leaves AVX-512 of AMD unused" if prefers_onednn() else "PyTorch's own"
    )
    shown.caption = (
        "Everything else uses SDPA with its fastest kernel; a shaped map adds the mean of the "
        "values that a query sees; sums of Q and K are inputs of SDPA. Large products of "
        f"float32 on this CPU: {products}."
    )
    return shown


Axis = Literal["length", "depth", "width"]
LABELS: dict[Axis, str] = {
    "length": "tokens of a row (T)",
    "depth": "blocks",
    "width": "width",
}
SERIES: dict[str, tuple[str, Form | None]] = {
    "post_ln": ("post_ln", None),
    "sas": ("sas", None),
    "realformer": ("realformer", None),
    "realformer, plain": ("realformer", "plain"),
    "realformer, reversible": ("realformer", "reversible"),
}
"""The series: a preset, and the form of its attention; None lets the policy choose."""


class Point(NamedTuple):
    """All series at one value of one axis."""

    axis: Axis
    value: int
    comparison: Comparison


def measure_growth(
    setting: Setting, values: Mapping[Axis, Sequence[int]], how: How
) -> Iterator[Point]:
    """Measure every series along each axis, with the other sizes as in `setting`.

    The number of tokens is constant, so longer rows mean fewer rows; ff grows with the width.
    """
    base = replace(masked(setting), step=False)
    for axis, places in values.items():
        for value in places:
            mine = replace(base, **{axis: value})
            if axis == "width":
                mine = sized(mine)
            contenders = [
                Contender(name, partial(preset_work, mine, preset, form))
                for name, (preset, form) in SERIES.items()
            ]
            title = f"Growth, {LABELS[axis]}: {value}"
            yield Point(axis, value, compare(title, contenders, how))


def sized(setting: Setting) -> Setting:
    """Return `setting` with the feed-forward size and the heads for its width."""
    heads = max(2, setting.width // 64)
    return replace(setting, ff_dim=2 * setting.width, heads=heads)


def draw(points: Sequence[Point], path: Path) -> Path:
    """Write the figure: time above, memory below, one column per axis, both scales logarithmic."""
    from matplotlib.lines import Line2D

    axes_named: list[Axis] = list(dict.fromkeys(point.axis for point in points))
    style = looks(SERIES)
    with styled():
        figure, panels = panel_grid(2, len(axes_named))
        for column, axis in enumerate(axes_named):
            mine = [point for point in points if point.axis == axis]
            for name in SERIES:
                for row, height in enumerate(("seconds", "bytes")):
                    _line(panels[row][column], mine, name, height, style[name])
            panels[1][column].set_xlabel(LABELS[axis])
        panels[0][0].set_ylabel("ms")
        panels[1][0].set_ylabel("MB at once")
        lines = [Line2D([], [], label=name, marker="o", **style[name]) for name in SERIES]
        legend(figure, lines)
        return save(figure, path)


def _line(axes: Any, points: Sequence[Point], name: str, height: str, look: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    places, heights = [], []
    for point in points:
        result = next(r for r in point.comparison.results if r.name == name)
        assert result.seconds is not None
        assert result.peak_bytes is not None
        places.append(point.value)
        seconds = height == "seconds"
        heights.append(1e3 * result.seconds.median if seconds else result.peak_bytes / MEGA)
    axes.plot(places, heights, marker="o", markersize=3.0, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    # Axes that span less than one power of ten also need tick labels.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()


BASELINE = "pre_ln"
WORK = {True: "training step", False: "forward and backward"}


def sizes_of(setting: Setting) -> str:
    """Return the sizes of `setting` as text."""
    stacks = setting.architecture().stacks(BlockConfig())
    depth = "+".join([str(setting.depth)] * len(stacks))
    return (
        f"{depth} blocks of width {setting.width}, ff {setting.ff_dim}, {setting.heads} heads, "
        f"{setting.rows} x {setting.length} tokens"
    )


def presets(setting: Setting, names: Sequence[str], how: How) -> Iterator[Comparison]:
    """Compare presets with the baseline: a training step, then only its passes."""
    others = [name for name in names if name != BASELINE]
    for step in (True, False):
        mine = replace(setting, step=step)
        contenders = [
            Contender(name, partial(preset_work, mine, name)) for name in (BASELINE, *others)
        ]
        yield compare(f"Presets, {WORK[step]}: {sizes_of(mine)}", contenders, how)


def attention(maps: Maps, how: How) -> Iterator[Comparison]:
    """Compare the forms of a single map, causal and not, and of a chain of maps."""
    sizes = f"{maps.rows} x {maps.length} tokens, {maps.heads} heads of {maps.head_dim}"
    for causal in (True, False):
        mine = replace(maps, depth=1, causal=causal)
        seen = "causal" if causal else "all keys"
        yield compare(f"One attention map, {seen}: {sizes}", single_forms(mine), how)
    chain = chain_forms(replace(maps, causal=False))
    yield compare(f"A chain of {maps.depth} maps, all keys: {sizes}", chain, how)


def peers(setting: Setting, how: How, rates: Rates) -> Iterator[Comparison]:
    """Compare our models with the same models of other libraries, each with our weights.

    If our products use a different matrix library than theirs, everything is compared
    again with both models' linear maps on each library: the first ratio is what a user gets, the
    others show the effect of the model's form.
    """
    yield from _peers(setting, how)
    if setting.device != "cpu" or setting.precision != "32":
        return
    for library, context in same_library().items():
        with context():
            rate = rate_in_force(rates, setting.device, bf16=False)
            # The process that measures resident memory would use the libraries unpatched.
            for comparison in _peers(setting, replace(how, rate=rate, resident=False)):
                title = f"{comparison.title}; linear maps of both by {library}"
                yield replace(comparison, title=title)


def _peers(setting: Setting, how: How) -> Iterator[Comparison]:
    for step in (True, False):
        mine = replace(setting, step=step)
        contenders = [
            Contender("ours, post_ln", partial(preset_work, mine, "post_ln")),
            Contender("torch.nn.Transformer", partial(translation_peer, mine, TorchTranslator)),
            Contender("x-transformers", partial(translation_peer, mine, XTranslator)),
        ]
        yield compare(f"Translation, {WORK[step]}: {sizes_of(mine)}", contenders, how)
    for step in (True, False):
        mine = replace(masked(setting), step=step)
        body = partial(bert_peer, mine, predicted_only=True)
        contenders = [
            Contender("ours, post_ln", partial(preset_work, mine, "post_ln")),
            Contender("Hugging Face BERT", partial(bert_peer, mine, predicted_only=False)),
            Contender("the same, predicted places alone", body),
        ]
        yield compare(f"Masked tokens, {WORK[step]}: {sizes_of(mine)}", contenders, how)
    mine = replace(masked(setting), step=False)
    contenders = [
        Contender("ours, realformer", partial(residual_encoder, mine, ours=True)),
        Contender("x-transformers, residual_attn", partial(residual_encoder, mine, ours=False)),
    ]
    yield compare(
        f"Residual attention, {WORK[False]}: encoder of {sizes_of(mine)}", contenders, how
    )
