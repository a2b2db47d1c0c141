"""The work of `ablate bench`: its options and the comparisons that they select."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from lightning_app.blocks.presets import PRESETS
from lightning_app.core.errors import UserError, nearest
from lightning_app.lab.bench import sections
from lightning_app.lab.bench.attention import Maps
from lightning_app.lab.bench.compare import Comparison, How, machine, rates_line, table, write_json
from lightning_app.lab.bench.learners import Precision, Setting
from lightning_app.lab.bench.rates import matmul_rates, rate_in_force
from lightning_app.lab.bench.sections import Axis, draw, explained, measure_growth, sized

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
    figure: Path = Path("bench-growth.svg")

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
        for comparison in sections.presets(setting, names, how):
            show(comparison)
    if everything or options.attention:
        for comparison in sections.attention(options.maps(), how):
            show(comparison)
    if everything or options.peers:
        for comparison in sections.peers(setting, how, rates):
            show(comparison)
    if options.growth:
        points = []
        for point in measure_growth(setting, QUICK_GROWTH if options.quick else GROWTH, how):
            points.append(point)
            show(point.comparison)
        console.print(f"figure: {draw(points, options.figure)}")
    if options.json is not None:
        settings = {**asdict(setting), "rounds": how.rounds}
        write_json(options.json, settings, rates, comparisons)
        console.print(f"numbers: {options.json}")
