"""What was run, in sentences, and the format of numbers."""

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from lightning_app.config.identity import leaves, unusual
from lightning_app.config.tree import PRESET, label
from lightning_app.report.results import OTHER_DATA, CellResult, GridResults, outcomes, read_mapping
from lightning_app.runs.folder import BLOCK, STORE, GridFolder
from lightning_app.runs.mixtures import UNKNOWN, counted, groups
from lightning_app.runs.store import superseded
from lightning_app.scores.task_facts import STACKS, glue_task_of, task_facts

if TYPE_CHECKING:
    from lightning_app.report.pairs import Score


DASH = "–"


def nats(value: float) -> str:
    """Three digits and a true minus sign; no "−0.000"."""
    return f"{value:.3f}".replace("-", "−").replace("−0.000", "0.000")


def measured(value: float) -> str:
    """A value of any metric: three digits, with a power of ten for huge numbers."""
    return f"{value:,.3f}".replace("-", "−") if abs(value) < 1e9 else f"{value:.3e}"


def bounded(score: "Score", shown: Callable[[float], str] = nats) -> str:
    """The estimate of a score, in nats by default, with the sign of its bound: `≥ 2.300`."""
    sign = {">=": "≥ ", "<=": "≤ "}.get(score.bound, "")
    return f"{sign}{shown(score.estimate)}{' (?)' if score.bound == '?' else ''}"


def interval(low: float, high: float, shown: Callable[[float], str] = nats) -> str:
    """`[low, high]`, in nats by default; empty without one."""
    return "" if math.isnan(low) else f"[{shown(low)}, {shown(high)}]"


def in_group(name: str, group: str) -> str:
    """A name with the values of the other axes, if any vary: `pre_ln, data wikitext2`."""
    return name if group == "all" else f"{name}, {group}"


def p_value(value: float) -> str:
    """Three digits, more where these would not show the side of 0.05; a dash for NaN."""
    if math.isnan(value):
        return DASH
    if value < 0.001:
        return "< 0.001"
    digits = next((n for n in range(3, 9) if float(f"{value:.{n}f}") != 0.05), 3)
    return f"{value:.{digits}f}"


def state_counts(grid: GridResults) -> str:
    """The number of cells per state."""
    states = [cell.state for cell in grid.cells]
    ended, waiting = outcomes(grid.cells), len(grid.without_parent)
    parts = [f"of them {ended}" if ended else "none of them stalled"]
    parts += [f"{states.count(state)} {text}" for state, text in _STATES.items() if state in states]
    parts += [f"{waiting} waiting for the runs that they start from"] * bool(waiting)
    parts += [f"at most {grid.more} more that their results may ask for"] * bool(grid.more)
    planned = len(states) + waiting
    return f"{len(grid.finished)} of {planned} planned cells finished: {', '.join(parts)}."


_STATES = {
    "pruned": "pruned",
    "failed": "crashed",
    "unfinished": "unfinished",
    "waiting": "not started",
    OTHER_DATA: "left out, with other data",
    "damaged": "with a damaged result",
}


def facts(grid: GridResults) -> dict[str, str]:
    """The settings needed to repeat the runs, by name."""
    others = dict.fromkeys(cell.group for cell in grid.cells)
    versions = groups(records_of(grid))["code"]
    rows = {
        "Variants": ", ".join(grid.variants),
        "Compared with": grid.baseline or DASH,
        "Warm-up": _warmups(grid),
        "Learning rate": ", ".join(label(lr) for lr in grid.rates) or DASH,
        "Seeds": f"{len(grid.seeds)} ({', '.join(map(str, grid.seeds))})" if grid.seeds else DASH,
        "Other axes": "" if list(others) == ["all"] else "; ".join(others),
        "Budget per run": _budget(grid),
        "Data": _data(grid),
        "Task": _task(grid),
        "Model": _model(grid),
        "Optimizer": _optimizer(grid),
        "Schedule": _schedule(grid),
        # Of all runs, if it can change a result, is not the default, and is in no other row:
        # callbacks, axes of the block that the base sets, how data are read.
        "Other settings": "; ".join(
            f"{key} {label(value)}"
            for key, value in unusual(grid.config).items()
            if value not in (None, {})
            if not any(f"{key}.".startswith(f"{said}.") for said in (*_ROWS, *grid.axes))
        ),
        "Device": ", ".join(_distinct(grid, "device")) or DASH,
        "Precision": ", ".join(_distinct(grid, "precision")) or DASH,
        "Code": counted(versions) if len(versions) > 1 else next(iter(versions), ""),
        "Metric of the grid": _metric(grid),
        "Versions": _versions(grid),
        "Superseded": earlier_runs(grid),
    }
    return {name: value for name, value in rows.items() if value}


_SPLITS = {"train": "training", "valid": "validation"}


def direction(mode: str) -> str:
    """The metric and its direction, in words."""
    return "lower is better" if mode == "min" else "higher is better"


def _metric(grid: GridResults) -> str:
    return f"{grid.metric}, {direction(grid.mode)}; the objective of the queue's study"


def _warmups(grid: GridResults) -> str:
    if not grid.warmups:
        return ""
    listed = ", ".join(f"{warmup:,}" for warmup in grid.warmups) + " updates"
    if grid.reference_warmup is None:
        return f"{listed}; no reference named"
    return f"{listed}; reference {grid.reference_warmup:,}, fixed in the grid file"


def _budget(grid: GridResults) -> str:
    steps, tokens = range_of(grid, "steps"), range_of(grid, "tokens")
    if not steps:
        planned = grid.setting("trainer.max_steps")
        return f"{planned:,} steps planned" if planned else DASH
    recorded = (cell.record.get("seconds") for cell in grid.finished)
    seconds = sorted(float(value) for value in recorded if value is not None)
    size = _tried(grid, "data.tokens_per_batch")
    batches = f" in batches of at most {size}" if size else ""
    middle = f", {seconds[len(seconds) // 2]:,.1f} s of wall time (median)" if seconds else ""
    return f"{steps} optimizer steps, {tokens} tokens{batches}{middle}"


def _data(grid: GridResults) -> str:
    texts = {}
    for cell in grid.finished:
        data = cell.data
        sizes = data.get("sizes") or {}
        listed = ", ".join(f"{split} {count:,}" for split, count in sizes.items())
        vocabulary = data.get("vocab_size")
        text = f"{_corpus_name(grid, cell)}: {data.get('protocol') or UNKNOWN}; {listed or UNKNOWN}"
        texts[f"{text}; vocabulary {vocabulary:,}" if vocabulary else text] = None
    entropies = sorted({round(cell.entropy, 3) for cell in grid.finished})
    unigram = " to ".join(f"{value:.3f}" for value in dict.fromkeys(entropies[:1] + entropies[-1:]))
    if not texts:
        return str(grid.setting("data.name") or DASH)
    return f"{' | '.join(texts)}; {grid.monitored.floor} of the validation targets {unigram} nats"


def _task(grid: GridResults) -> str:
    kind = task_facts(grid.setting("model.objective.kind") or DASH).title
    smooth = any(grid.tried("model.objective.label_smoothing"))
    amount = _tried(grid, "model.objective.label_smoothing")
    trained = f", trained with label smoothing {amount}" if smooth else ""
    others = "".join(f"; {each}" for each in _other_settings(grid, "model.objective"))
    return f"{kind}{trained}; {grid.monitored.loss} is in unsmoothed {grid.unit}{others}"


def _model(grid: GridResults) -> str:
    def value(key: str) -> str:
        setting = grid.setting(f"model.architecture.{key}")
        return "several" if setting is None else label(setting)

    kind = grid.setting("model.architecture.kind")
    if kind is None:
        return DASH
    depth = " + ".join(value(f"{name}_depth") for name in STACKS.get(kind, ("encoder",)))
    parts = [
        f"{kind.replace('_', '-')}, {depth} layers",
        f"width {value('model_dim')}, feed-forward {value('ff_dim')}, {value('num_heads')} heads",
        f"dropout {value('dropout')}",
    ]
    parts += _other_settings(grid, "model.architecture")
    parameters = range_of(grid, "parameters")
    return "; ".join([*parts, f"{parameters} parameters"] if parameters else parts)


_SAID = {
    "model.architecture": (
        *("kind", "encoder_depth", "decoder_depth", "model_dim", "ff_dim", "num_heads", "dropout"),
    ),
    "model.objective": ("kind", "label_smoothing"),
    "model.schedule": ("kind", "warmup_steps", "coupling", "reference_steps"),
}
_USUAL = {
    "activation": "relu",
    "activation_slope": 0.01,
    "positions": "sinusoidal",
    "max_positions": 1024,
    "beam": 1,
    "auxiliary_tables": "tied",
    "length_penalty": 1.0,
    "warmup_of": "all",
    "power": 1.0,
}


def _other_settings(grid: GridResults, section: str) -> list[str]:
    """Name and value of each setting that no sentence mentions, unless it is the default or off."""
    section_settings = grid.setting(section)
    settings = section_settings.items() if isinstance(section_settings, Mapping) else ()
    return [
        f"{name} {label(value)}"
        for name, value in settings
        if name not in _SAID[section] and f"{section}.{name}" not in grid.axes
        if value != _USUAL.get(name) and value not in (None, False, 0, "none")
    ]


_ROWS = (
    *("seed_everything", "model.architecture", "model.objective", "model.optimizer"),
    *("model.schedule", "trainer.max_steps", "trainer.precision", "trainer.gradient_clip_val"),
    *(PRESET, "data.name", "data.vocab_size", "data.tokens_per_batch"),
    *("data.seed", "data.task", "data.next_sentence", "data.init_from"),  # derived from others
)
"""The sections and fields of which other rows tell."""


UNCORRECTED = "no bias correction"
_AVERAGING = "schedule_free"
_IN_WORDS = ("bias_correction", "second_moment_start", "matrix_rate", "block_rate")


def _optimizer(grid: GridResults) -> str:
    fields = grid.setting("model.optimizer") or {}
    shown = [
        f"{key} {_tried(grid, f'model.optimizer.{key}')}"
        for key in fields
        if key not in (*_IN_WORDS, "kind", "lr") and any(grid.tried(f"model.optimizer.{key}"))
    ]
    corrected = grid.tried("model.optimizer.bias_correction")
    if False in corrected:
        shown.append("with and without bias correction" if True in corrected else UNCORRECTED)
    if "second" in corrected:
        shown.append("bias correction of the second moment only")
    if "gradient" in grid.tried("model.optimizer.second_moment_start"):
        shown.append("second moment from the first gradient")
    if "spectral" in grid.tried("model.optimizer.matrix_rate"):
        shown.append("rates of matrices times sqrt(max(1, rows / columns))")
    if any(factor not in (None, 1.0) for factor in grid.tried("model.optimizer.block_rate")):
        factors = _tried(grid, "model.optimizer.block_rate")
        shown.append(f"rates of the parameters of blocks times {factors}")
    if _AVERAGING in grid.tried("model.optimizer.kind"):
        shown.append(f"{_AVERAGING} validated and tested with its averaged weights")
    clipped = any(grid.tried("trainer.gradient_clip_val"))
    limits = _tried(grid, "trainer.gradient_clip_val")
    shown.append(f"gradients clipped at {limits}" if clipped else "no gradient clipping")
    return "; ".join([_tried(grid, "model.optimizer.kind") or DASH, *shown])


def _schedule(grid: GridResults) -> str:
    reference = _tried(grid, "model.schedule.reference_steps")
    later = "after a linear warm-up, down from"
    shapes = {"linear": "linear", "cosine": "half a cosine", "sqrt": "1 - sqrt"}
    forms = {
        **{(kind, "paper"): f"{shape} {later} its end" for kind, shape in shapes.items()},
        **{(kind, "decoupled"): f"{of} {later} step {reference}" for kind, of in shapes.items()},
        ("inverse_sqrt", "paper"): "inverse sqrt, coupled as in Xiong et al. 2020: "
        "lr · min(t / T_w, √(T_w / t))",
        ("inverse_sqrt", "decoupled"): "inverse sqrt, decoupled: "
        f"lr · min(1, t / T_w) · min(1, √(T_ref / t)), T_ref = {reference}",
        ("bert", ""): (
            "as in BERT's code: lr · (t-1) / T_w up to step T_w, then lr · (1 - (t-1) / T)"
        ),
    }
    formulas = [forms.get(each, f"{each[0]} after a linear warm-up") for each in schedules(grid)]
    if not formulas:
        return DASH
    return "; ".join(
        [" / ".join(dict.fromkeys(formulas)), *_other_settings(grid, "model.schedule")]
    )


def schedules(grid: GridResults) -> list[tuple[str, str]]:
    """The kinds of schedule, each with each coupling of warm-up and decay, `paper` or `decoupled`.

    The coupling of a constant rate and of BERT's schedule is empty: no warm-up moves their decay.
    """
    names = ("model.schedule.kind", "model.schedule.coupling")
    pairs = dict.fromkeys(tuple(map(cell.setting, names)) for cell in grid.cells)
    free = ("constant", "bert")
    return [*dict.fromkeys((kind, "" if kind in free else one) for kind, one in pairs if kind)]


def _tried(grid: GridResults, key: str) -> str:
    return " / ".join(map(label, grid.tried(key)))


def records_of(grid: GridResults) -> dict[str, Any]:
    return {cell.name: cell.record for cell in grid.finished}


def earlier_runs(grid: GridResults) -> str:
    """The number of earlier runs that were repeated and no longer count."""
    ids = {cell.id for cell in grid.cells}
    count = len(superseded(GridFolder(grid.folder).experiments, ids))
    return f"{count} earlier runs, kept as {STORE}/ID@superseded-N; not counted" if count else ""


def _versions(grid: GridResults) -> str:
    every = (cell.record.get("versions") or {} for cell in grid.finished)
    texts = (", ".join(f"{n} {of[n]}" for n in ("torch", "lightning") if n in of) for of in every)
    return " | ".join(filter(None, dict.fromkeys(texts)))


def in_short(grid: GridResults) -> str:
    """Data and budget, short, for a caption."""
    steps, tokens = range_of(grid, "steps"), range_of(grid, "tokens")
    return f"Data: {trained_on(grid)}. {steps} steps, {tokens} tokens per run."


def setting_of(grid: GridResults) -> str:
    """Data, model, budget and devices of all runs, stated once for all tables and figures."""
    devices = ", ".join(_distinct(grid, "device")).replace(" 1 threads", " 1 thread")
    return f"{in_short(grid)} {_size(grid)}Device: {devices}." if grid.finished else ""


def _size(grid: GridResults) -> str:
    """Layers and width if they are the same in all runs, else nothing."""
    stacks = STACKS.get(str(grid.setting("model.architecture.kind")), ())
    depths = [grid.setting(f"model.architecture.{name}_depth") for name in stacks]
    width = grid.setting("model.architecture.model_dim")
    if not depths or None in (*depths, width):
        return ""
    return f"Model: {' + '.join(map(str, depths))} layers of width {width}. "


def preset_words(grid: GridResults) -> list[str]:
    """What each preset of the grid is, in a few words.

    A preset of a plug-in has the fields of its first layer, and a class of the user its name.
    """
    file = files("lightning_app.catalogue").joinpath("presets.json")
    words: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    for cell in grid.finished:
        name, block = cell.setting(PRESET), cell.run.file(BLOCK)
        if isinstance(name, str) and name not in words and block is not None:
            layer = next(iter(read_mapping(block).values()))["blocks"][0]["around_self"]
            parts = [f"{key} {label(value)}" for key, value in leaves(layer)]
            shown = [part for part in parts if not part.endswith(_PLAIN)]
            source = ", ".join((cell.record.get("provenance") or {}).get("plugins_used") or ())
            words[name] = (
                f"preset of the plug-in {source or UNKNOWN}; around self-attention in the first "
                f"layer: {', '.join(shown) or 'a plain sum'}"
            )
    used = dict.fromkeys(map(str, grid.tried(PRESET)))
    classes = dict.fromkeys(filter(None, grid.tried("model.class_path")))
    texts = [f"{name}: {words[name]}" for name in used if name in words]
    return [*texts, *(f"{name}: a class of yours that trains the model" for name in classes)]


_PLAIN = (" none", " sum", " false", " 1", "ramp 0", "drop 0")  # change nothing in the formula


def trained_on(grid: GridResults) -> str:
    texts = {}
    for cell in grid.finished:
        sizes = cell.data.get("sizes") or {}
        listed = "".join(f", {count:,} {_SPLITS.get(of, of)}" for of, count in sizes.items())
        texts[_corpus_name(grid, cell) + listed + " examples" * bool(sizes)] = None
    return " and ".join(texts) or str(grid.setting("data.name") or "not known")


def _corpus_name(grid: GridResults, cell: CellResult) -> str:
    name = str(cell.data.get("name") or grid.setting("data.name") or UNKNOWN)
    return glue_task_of(name) or name


def _distinct(grid: GridResults, key: str) -> list[str]:
    return list(dict.fromkeys(str(cell.record.get(key) or UNKNOWN) for cell in grid.finished))


def range_of(grid: GridResults, key: str) -> str:
    recorded = [cell.record.get(key) for cell in grid.finished]
    values = [int(value) for value in recorded if value is not None]
    if not values:
        return "an unknown number of" if recorded else ""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


class Message(str):
    """A sentence with its name and its values, by which programs and tests know it.

    Of a sentence that is made from others, the value `of` holds these.
    """

    __slots__ = ("name", "values")

    def __new__(cls, name: str, values: Mapping[str, Any]) -> "Message":
        """Raises `KeyError` for an unknown name, and for a value that is not passed."""
        message = super().__new__(cls, texts()[name].format_map(values))
        message.name, message.values = name, values
        return message


def say(name: str, /, **values: Any) -> Message:
    """The sentence of this name, as `limits.budget`."""
    return Message(name, values)


@cache
def texts() -> dict[str, str]:
    """Every text by its dotted name."""
    file = files("lightning_app.report") / "messages.toml"
    return dict(leaves(tomllib.loads(file.read_text(encoding="utf-8"))))
