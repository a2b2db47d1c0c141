"""The comparisons of `ablate bench`: each answers with a table, for people and as JSON."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import (
    Form,
    attend,
    attend_with_carry,
    attend_with_sums,
    attention_form,
    choose,
)
from lightning_app.blocks.kernels.stored import MapGains
from lightning_app.blocks.linear import prefers_onednn
from lightning_app.blocks.masks import Mask, causal_mask, full_mask
from lightning_app.blocks.presets import PRESETS
from lightning_app.core.errors import UserError, nearest
from lightning_app.core.files import output_folder
from lightning_app.lab.bench.measure import (
    MEGA,
    Comparison,
    Contender,
    How,
    Rates,
    Work,
    compare,
    machine,
    matmul_rates,
    rate_in_force,
    rates_line,
    same_library,
    table,
    write_json,
)
from lightning_app.lab.bench.peers import (
    Precision,
    Setting,
    TorchTranslator,
    XTranslator,
    bert_peer,
    masked,
    preset_work,
    residual_encoder,
    translation_peer,
)
from lightning_app.probes.figures import legend, looks, panel_grid
from lightning_app.report.figures.sheet import save, styled


@dataclass(frozen=True, kw_only=True)
class Maps:
    """Sizes of a chain of attention maps; `tokens` counts those of a batch."""

    length: int = 512
    tokens: int = 4096
    heads: int = 4
    head_dim: int = 64
    depth: int = 1
    causal: bool = True
    device: str = "cpu"
    precision: str = "32"

    @property
    def rows(self) -> int:
        return max(1, self.tokens // self.length)


class AttentionInputs(NamedTuple):
    """Leaf tensors of one layer, ``(batch, token, head * dim)`` like the outputs of projections."""

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor
    """The gradient of the layer's output, ``(batch, head, token, dim)``."""


FORMS: tuple[Form, ...] = ("plain", "stored", "reversible", "blocked")
Forward = Callable[[list[AttentionInputs], Maps, Mask], list[Tensor]]


def attention_work(maps: Maps, forward: Forward) -> Work:
    """Return one forward and backward pass of `forward` over random queries, keys and values."""
    torch.manual_seed(1)
    dtype = torch.bfloat16 if maps.precision == "bf16" else torch.float32
    shape = (maps.rows, maps.length, maps.heads * maps.head_dim)
    layers = []
    for _ in range(maps.depth):
        query, key, value, upstream = torch.randn((4, *shape), device=maps.device, dtype=dtype)
        for leaf in (query, key, value):
            leaf.requires_grad_().register_post_accumulate_grad_hook(drop)
        layers.append(AttentionInputs(query, key, value, split(upstream, maps)))
    make_mask = causal_mask if maps.causal else full_mask
    mask = make_mask(maps.length, torch.device(maps.device))

    def run() -> None:
        outputs = forward(layers, maps, mask)
        torch.autograd.backward(outputs, [layer.upstream for layer in layers])

    return Work(run)


def drop(leaf: Tensor) -> None:
    """Free a gradient at once: in a model the projection below would consume it."""
    leaf.grad = None


def split(x: Tensor, maps: Maps) -> Tensor:
    """View ``(batch, token, head * dim)`` as ``(batch, head, token, dim)``."""
    return x.unflatten(-1, (maps.heads, -1)).transpose(1, 2)


def heads(layer: AttentionInputs, maps: Maps) -> tuple[Tensor, Tensor, Tensor]:
    return split(layer.query, maps), split(layer.key, maps), split(layer.value, maps)


def unit_gains(maps: Maps, value: Tensor) -> list[Tensor]:
    shape, how = (maps.heads, 1, 1), {"device": value.device, "dtype": value.dtype}
    return [torch.ones(shape, **how, requires_grad=True) for _ in range(3)]


def plain(layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
    """``softmax(Q K^T / sqrt(d_k) + mask) V``."""
    return [attend(*heads(layer, maps), mask, 0.0) for layer in layers]


def shaped(layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
    """``(alpha I + beta A - gamma C) V`` as the package computes it."""
    outputs = []
    for layer in layers:
        query, key, value = heads(layer, maps)
        outputs.append(attend(query, key, value, mask, 0.0, MapGains(*unit_gains(maps, value))))
    return outputs


def shaped_literally(layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
    """The same, but with the whole shaped map in memory, as in the authors' code."""
    outputs = []
    for layer in layers:
        query, key, value = heads(layer, maps)
        scores = query @ key.transpose(-2, -1) * maps.head_dim**-0.5
        scores = scores.masked_fill(~mask.allowed, torch.finfo(scores.dtype).min)
        alpha, beta, gamma = unit_gains(maps, value)
        identity = torch.eye(maps.length, device=value.device, dtype=value.dtype)
        centre = mask.centre.to(value.dtype)
        shaped_map = alpha * identity + beta * scores.softmax(-1) - gamma * centre
        outputs.append(shaped_map @ value)
    return outputs


def _chained(
    attend_to: Callable[..., tuple[Tensor, Any]],
    layers: list[AttentionInputs],
    maps: Maps,
    mask: Mask,
) -> list[Tensor]:
    outputs, carry = [], None
    for layer in layers:
        output, carry = attend_to(*heads(layer, maps), mask, 0.0, carry, 1.0)
        outputs.append(output)
    return outputs


residual: Forward = partial(_chained, attend_with_carry)
"""``softmax(Z_n) V``, ``Z_n = Q K^T / sqrt(d_k) + Z_{n-1}``, as the package computes it."""
residual_sums: Forward = partial(_chained, attend_with_sums)
"""Residual attention through sums of queries and of keys."""


def residual_literally(layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
    """The same formula, taken literally: autograd keeps every map."""
    outputs, total = [], None
    for layer in layers:
        query, key, value = heads(layer, maps)
        scores = (query @ key.transpose(-2, -1)).float() * maps.head_dim**-0.5
        total = scores if total is None else total + scores
        logits = total.masked_fill(~mask.allowed, torch.finfo(total.dtype).min)
        outputs.append(logits.softmax(-1).to(value.dtype) @ value)
    return outputs


def in_form(form: Form) -> Forward:
    """Return residual attention in `form`, independent of the policy; it can be pickled."""
    return partial(_forced, form)


def _forced(form: Form, layers: list[AttentionInputs], maps: Maps, mask: Mask) -> list[Tensor]:
    with attention_form(form):
        return residual(layers, maps, mask)


def contender(name: str, maps: Maps, forward: Forward) -> Contender:
    return Contender(name, partial(attention_work, maps, forward))


def single_forms(maps: Maps) -> list[Contender]:
    """Return the maps of one layer, SDPA first."""
    return [
        contender("plain (SDPA)", maps, plain),
        contender("shaped", maps, shaped),
        contender("shaped, literal", maps, shaped_literally),
    ]


def chain_forms(maps: Maps) -> list[Contender]:
    """Return the chains of `maps.depth` layers, SDPA without a chain first."""
    return [
        contender("plain (SDPA)", maps, plain),
        contender("residual scores, literal", maps, residual_literally),
        contender("residual scores, as chosen", maps, residual),
        *(contender(f"residual scores, {form}", maps, in_form(form)) for form in FORMS),
        contender("residual, sums of Q and K", maps, residual_sums),
    ]


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


GROWTH: dict[Axis, Sequence[int]] = {
    "length": (64, 128, 256, 512, 1024, 2048),
    "depth": (3, 6, 12, 24),
    "width": (128, 256, 512),
}
QUICK_GROWTH: dict[Axis, Sequence[int]] = {"length": (8, 16), "depth": (1, 2), "width": (16, 32)}


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of the command line; None selects the default for the device."""

    presets: list[str] | None = None
    attention: bool = False
    peers: bool = False
    growth: bool = False
    explain: bool = False
    quick: bool = False
    resident: bool = False
    rounds: int | None = None
    threads: int = 1
    device: str | None = None
    precision: Precision = "32"
    length: int | None = None
    tokens: int | None = None
    depth: int | None = None
    width: int | None = None
    json: Path | None = None
    figure: Path | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "threads", "length", "tokens", "depth", "width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"bench: --{name} {value}: expected at least 1")
        for preset in self.presets or ():
            if preset not in PRESETS:
                raise UserError(f"bench: unknown preset '{preset}'{nearest(preset, PRESETS)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("bench: --device cuda: torch finds no GPU; use --device cpu")
        if self.width is not None and self.width > 64 and self.width % 64:
            raise UserError(
                f"bench: --width {self.width}: expected a multiple of 64, the head size"
            )
        if self.width is not None and self.width % 2:
            raise UserError(
                f"bench: --width {self.width}: expected an even number, for the positions"
            )
        if self.resident and self.device == "cuda":
            raise UserError("bench: --resident: on a GPU the allocator's peak is shown instead")
        given = {each.name for each in fields(self) if getattr(self, each.name) != each.default}
        if self.explain and given - {"explain", "threads", "device"}:
            raise UserError("bench: --explain only lists the forms; leave out the other options")
        if self.figure is not None and not self.growth:
            raise UserError(f"bench: --figure {self.figure}: is that of --growth; add it")
        if self.tokens is not None and self.tokens < (length := self.setting().length):
            raise UserError(
                f"bench: --tokens {self.tokens}: expected at least one text of {length}"
            )

    @property
    def where(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def setting(self) -> Setting:
        """Return the sizes: by default for minutes of work, or for seconds with `quick`."""
        if self.quick:
            usual = Setting(depth=1, width=32, length=16, tokens=64, vocabulary=100)
        elif self.where == "cuda":
            usual = Setting()
        else:
            usual = Setting(width=256, length=128, tokens=1024)
        chosen = {
            name: getattr(self, name)
            for name in ("length", "tokens", "depth", "width")
            if getattr(self, name) is not None
        }
        mine = replace(usual, **chosen)
        if mine.tokens < mine.length:
            mine = replace(mine, tokens=mine.length)
        return replace(sized(mine), device=self.where, precision=self.precision)

    def maps(self) -> Maps:
        """Return the sizes for attention maps without a model."""
        mine = self.setting()
        return Maps(
            length=mine.length,
            tokens=mine.tokens,
            heads=mine.heads,
            head_dim=mine.width // mine.heads,
            depth=mine.depth,
            device=mine.device,
            precision=mine.precision,
        )

    def how(self) -> How:
        rounds = self.rounds or (2 if self.quick else 5)
        return How(rounds=rounds, device=self.where, resident=self.resident)


def run_bench(options: BenchOptions, console: Console) -> None:
    """Run the requested comparisons, by default all except the growth; print and write them."""
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    gc.collect()
    gc.freeze()  # a collection before each measurement then skips the imported modules
    try:
        _bench(options, console)
    finally:
        gc.unfreeze()
        torch.set_num_threads(before)


def _bench(options: BenchOptions, console: Console) -> None:
    if options.explain:
        devices = [torch.device("cpu")]
        if torch.cuda.is_available():
            devices.append(torch.device("cuda", 0))
        console.print(explained(devices))
        return
    for path in filter(None, (options.json, options.figure)):  # before anything is measured
        with output_folder(path.parent):
            pass
    setting, how = options.setting(), options.how()
    everything = not (
        options.attention or options.peers or options.growth or options.presets is not None
    )
    comparisons: list[Comparison] = []

    def show(comparison: Comparison) -> None:
        comparisons.append(comparison)
        console.print(f"\n{comparison.title}", table(comparison))

    here = machine(setting.device)
    rates = matmul_rates(torch.device(setting.device))
    rate = rate_in_force(rates, setting.device, bf16=setting.precision == "bf16")
    how = replace(how, rate=rate)
    console.print(f"{here['processor']}, {here['device']}, {here['threads']} thread(s)")
    console.print(rates_line(rates))
    console.print(
        "time and memory: ratios to the first row, under 1 is better; ms of the "
        f"{'GPU' if setting.device == 'cuda' else 'processor'}; peak MB beyond the model; share: "
        "the part of the time that the products take at the rate above"
    )
    if everything or options.presets is not None:
        names = options.presets or list(PRESETS)
        for comparison in presets(setting, names, how):
            show(comparison)
    if everything or options.attention:
        for comparison in attention(options.maps(), how):
            show(comparison)
    if everything or options.peers:
        for comparison in peers(setting, how, rates):
            show(comparison)
    if options.growth:
        points = []
        for point in measure_growth(setting, QUICK_GROWTH if options.quick else GROWTH, how):
            points.append(point)
            show(point.comparison)
        console.print(f"figure: {draw(points, options.figure or Path('bench-growth.svg'))}")
    if options.json is not None:
        settings = {**asdict(setting), "rounds": how.rounds}
        write_json(options.json, settings, rates, comparisons)
        console.print(f"numbers: {options.json}")
