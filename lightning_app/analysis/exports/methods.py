"""A method section of the runs, from their configs and results; nothing that is not recorded."""

import math
import re
from collections.abc import Iterable
from typing import Any

from lightning_app.analysis.exports.bibliography import cited, distinct, values_of
from lightning_app.analysis.facts import UNKNOWN, direction
from lightning_app.analysis.runs import PRESET, RATE, SEED, WARMUP, Grid, label, outcomes
from lightning_app.analysis.sensitivity import LEARNED
from lightning_app.analysis.statistics import FEW_SEEDS, LEVEL
from lightning_app.task_facts import STACKS, task_facts


def methods(grid: Grid) -> str:
    """`methods.md`: the runs as a paper would tell them; `[@key]` cites `references.bib`."""
    parts = [_section(part) for part in grid.parts or (grid,)]
    titles = [f"## {part.name}\n\n" if grid.parts else "" for part in grid.parts or (grid,)]
    body = "\n\n".join(title + text for title, text in zip(titles, parts, strict=True))
    return f"# Method\n\n{body}\n"


def _section(grid: Grid) -> str:
    paragraphs = [_design(grid), _model(grid), _data(grid), _training(grid), _schedule(grid)]
    paragraphs += [_outcome(grid), _statistics(grid), _machine(grid)]
    return "\n\n".join(text for text in paragraphs if text)


def _design(grid: Grid) -> str:
    presets = {name: name.partition("+")[0] for name in grid.variants}
    variants = _listed(f"`{name}`{_cite(f'preset/{presets[name]}')}" for name in presets)
    others = [key for key in grid.axes if key not in (SEED, WARMUP, RATE, PRESET)]
    crossed = [
        f"{len(grid.warmups)} warm-up length{_s(grid.warmups)} "
        f"({_listed(map('{:,}'.format, grid.warmups))} updates)",
        f"{len(grid.rates)} peak learning rate{_s(grid.rates)} ({_listed(map(label, grid.rates))})",
        *(f"{key} ({_listed(map(label, grid.axes[key]))})" for key in others),
        f"{len(grid.seeds)} seed{_s(grid.seeds)} ({_listed(map(str, grid.seeds))})",
    ]
    ends = f"{len(grid.finished)} of the {len(grid.cells)} planned runs finished"
    return (
        f"We train {len(grid.variants)} variant{_s(grid.variants)} of the Transformer"
        f"{_cite('method/transformer')}: {variants}. They are crossed with {_listed(crossed)}; "
        f"{ends}. A seed sets the initial values, the order of the batches and dropout, so that "
        "runs of one seed can be compared in pairs."
    )


def _model(grid: Grid) -> str:
    def value(key: str) -> str:
        return _values(grid, f"model.architecture.{key}")

    kinds = values_of(grid, "model.architecture.kind")
    stacks = dict.fromkeys(name for kind in kinds for name in STACKS.get(kind, ("encoder",)))
    depths = [value(f"{name}_depth") for name in stacks]
    if len(depths) > 1:
        depths = [f"{depth} {name}" for depth, name in zip(depths, stacks, strict=True)]
    layers = f"{' and '.join(depths)} layers"
    activation = "".join(
        _cite(f"activation/{each}") for each in values_of(grid, "model.architecture.activation")
    )
    positions = "".join(
        _cite(f"positions/{each}") for each in values_of(grid, "model.architecture.positions")
    )
    norms = values_of(grid, "model.architecture.embedding_norm")
    normed = f", norm of the embedding {_values_of(norms)}" if {*norms} - {"none"} else ""
    return (
        f"The model ({_values(grid, 'model.architecture.kind')}) has {layers}, width "
        f"{value('model_dim')}, feed-forward width {value('ff_dim')}, {value('num_heads')} "
        f"attention heads, activation {value('activation')}{activation}, positions "
        f"{value('positions')}{positions}{normed}, dropout {value('dropout')} (on attention maps "
        f"{value('attention_dropout')}), and {_numbers(grid, 'parameters')} trained parameters."
    )


def _data(grid: Grid) -> str:
    told = []
    for data in distinct(cell.data or None for cell in grid.finished):
        sizes = data.get("sizes") or {}
        counted = " / ".join(f"{count:,}" for count in sizes.values()) or UNKNOWN
        vocabulary = data.get("vocab_size")
        told.append(
            f"{data.get('name') or UNKNOWN}{_cite('data/' + str(data.get('name')))} "
            f"({data.get('protocol') or UNKNOWN}; {' / '.join(sizes) or 'sizes'}: {counted}), "
            f"with a vocabulary of {UNKNOWN if vocabulary is None else f'{vocabulary:,}'}"
        )
    known = _listed(told) or _values(grid, "data.name")
    tokenizers = values_of(grid, "data.tokenizer")
    cites = "".join(_cite(f"tokenizer/{name}") for name in tokenizers)
    if "bpe" in tokenizers:
        cites += _cite("library/sentencepiece")
    text = f"The data are {known}, tokenised by {_values(grid, 'data.tokenizer')}{cites}."
    for kind in values_of(grid, "model.objective.kind"):
        if method := task_facts(kind).method:
            text += " " + re.sub(r"\{([\w.]+)\}", lambda field: _values(grid, field[1]), method)
    return text


def _training(grid: Grid) -> str:
    kinds = values_of(grid, "model.objective.kind")
    smoothing = values_of(grid, "model.objective.label_smoothing")
    smoothed = ""
    if any(smoothing):
        shown = _listed(map(label, smoothing))
        smoothed = f", with label smoothing {shown}{_cite('method/label_smoothing')}"
    objective = _listed(f"{task_facts(kind).title}{_cite(f'objective/{kind}')}" for kind in kinds)
    kinds = values_of(grid, "model.optimizer.kind")
    optimizer = _listed(f"{_NAMES.get(kind, kind)}{_cite(f'optimizer/{kind}')}" for kind in kinds)
    used = [
        f"{name} {_values(grid, f'model.optimizer.{key}')}"
        for key, name in (("betas", "betas"), ("eps", "epsilon"), ("weight_decay", "weight decay"))
    ]
    clip = values_of(grid, "trainer.gradient_clip_val")
    clipped = _listed(map(label, clip)) if any(clip) else "no"
    limit = f"gradient clipping at norm {clipped}" if any(clip) else "no gradient clipping"
    return (
        f"The objective is {objective or UNKNOWN}{smoothed}. We train with {optimizer or UNKNOWN} "
        f"({'; '.join(used)}; {limit if clip else 'gradient clipping ' + UNKNOWN}) for "
        f"{_numbers(grid, 'steps')} updates of {_values(grid, 'data.tokens_per_batch')} tokens at "
        f"most, which are {_numbers(grid, 'tokens')} predicted tokens a run."
    )


def _schedule(grid: Grid) -> str:
    kinds = values_of(grid, "model.schedule.kind")
    couplings = values_of(grid, "model.schedule.coupling")
    told = []
    for kind in kinds:
        for coupling in couplings:
            cites = _cite(f"schedule/{kind}") + _cite(f"coupling/{coupling}")
            formula, meant = _FORMULAS.get((kind, coupling), (UNKNOWN, UNKNOWN))
            name = f"{_values_of([kind])} schedule, {_values_of([coupling])}{cites}"
            told.append(f"{name}: {formula}, {meant}")
    reference = _values(grid, "model.schedule.reference_steps")
    letters = [r"$t$ is the update from 1", "$T_w$ the warm-up", r"$\eta$ the peak"]
    letters += [f"$T_r$ = {reference}"] * any("T_r" in text for text in told)
    letters += ["$T$ the number of updates"] * any("T -" in text for text in told)
    told = _listed(told) or UNKNOWN
    return f"The learning rate follows the {told}. Here {_listed(letters)}."


_APART = "so that the warm-up changes its own updates and nothing after them"
_FORMULAS = {
    ("inverse_sqrt", "decoupled"): (
        r"$\eta \cdot \min(1, t / T_w) \cdot \min(1, \sqrt{T_r / t})$",
        f"{_APART}; warm-up 0 is the full rate at the first update",
    ),
    ("inverse_sqrt", "paper"): (
        r"$\eta \cdot \min(t / T_w, \sqrt{T_w / t})$",
        "in which a shorter warm-up also means a smaller rate for the rest of the run",
    ),
    ("linear", "decoupled"): (
        r"$\eta \cdot \min(1, t / T_w) \cdot \min(1, (T - t + 1) / (T - T_r + 1))$",
        f"{_APART}",
    ),
    ("linear", "paper"): (
        r"$\eta \cdot \min(1, t / T_w, (T - t + 1) / (T - T_w + 1))$",
        "in which the decay begins where the warm-up ends",
    ),
    ("constant", "decoupled"): (r"$\eta \cdot \min(1, t / T_w)$", "without decay"),
    ("constant", "paper"): (r"$\eta \cdot \min(1, t / T_w)$", "without decay"),
}


def _outcome(grid: Grid) -> str:
    entropies = sorted({cell.entropy for cell in grid.finished if math.isfinite(cell.entropy)})
    ends = [f"{value:.3f}" for value in (*entropies[:1], *entropies[-1:])]
    entropy = " to ".join(dict.fromkeys(ends)) or UNKNOWN
    text = (
        "The outcome of a run is its final validation loss in unsmoothed nats per predicted token. "
        "A run whose loss ends within 0.05 nats of the unigram entropy of the validation targets "
        f"({entropy} nats) or above and is not falling has stalled; one whose loss is not finite "
        "any more is non-finite. Both count as that entropy, the same for every variant. A run "
        "that was still learning above that bar has not yet learned; it is no failure, and its "
        f"loss is capped at the same entropy. Of {len(grid.finished)} finished runs: "
        f"{outcomes(grid.finished) or 'all trained'}. The grid is judged by {grid.metric}, "
        f"{direction(grid.mode)}."
    )
    if any("bleu" in name for cell in grid.finished for name in cell.metrics):
        signatures = distinct(cell.record.get("sacrebleu_signature") for cell in grid.finished)
        told = _listed(f"`{each}`" for each in signatures if each)
        signed = f", sacreBLEU with the signature {told}" if told else ""
        text += f" BLEU{_cite('metric/bleu')} is on the scale of 0 to 100{signed}."
    return text


def _statistics(grid: Grid) -> str:
    if grid.pruner is not None:
        return (
            f"Runs that did badly were ended early by the pruner `{grid.pruner}`, so that no score "
            "over all runs is reported."
        )
    if grid.reference_warmup is None:
        text = "No reference warm-up was named, so Δ is not defined."
    else:
        text = (
            "Δ is the loss without warm-up less the loss with the reference of "
            f"{grid.reference_warmup:,} updates, seed by seed, and relative Δ its share of what is "
            "learned with the reference, the unigram entropy less the loss; it is not defined "
            f"where that is under {LEARNED:g} nats."
        )
    if grid.baseline is not None:
        text += f" The interaction of a variant is its Δ less that of `{grid.baseline}`."
    return text + (
        f" Intervals are at {LEVEL:.0%}: Student's t over seeds{_cite('statistic/t')} for means "
        f"and differences, Fieller's{_cite('statistic/fieller')} for ratios, Wilson's"
        f"{_cite('statistic/wilson')} for shares of stalled runs, and from {FEW_SEEDS} seeds the "
        f"bootstrap-t{_cite('statistic/bootstrap')} besides. Where some seeds of an arm stalled "
        f"and others did not, no interval over seeds is given; from fewer than {FEW_SEEDS} seeds, "
        "no p value where the arms compared differ in stalls. p values are of the two-sided t test "
        "of the interaction, corrected over the variants of one rate and group by Holm"
        f"{_cite('statistic/holm')}."
    )


def _machine(grid: Grid) -> str:
    devices = _listed(distinct(cell.record.get("device") for cell in grid.finished)) or UNKNOWN
    counts = distinct(cell.record.get("devices") for cell in grid.finished)
    used = f", {_listed(map(str, counts))} for each run" if counts else ""
    precision = _listed(distinct(cell.record.get("precision") for cell in grid.finished))
    seconds = sorted(float(s) for c in grid.finished if (s := c.record.get("seconds")) is not None)
    took = f"{seconds[len(seconds) // 2]:,.0f} s (median)" if seconds else UNKNOWN
    versions: dict[str, list[str]] = {}
    for cell in grid.finished:
        for name, version in (cell.record.get("versions") or {}).items():
            known = versions.setdefault(name, [])
            known += [version] if version not in known else []
    software = _listed(
        f"{name} {' and '.join(each)}{_cite(f'library/{name}')}" for name, each in versions.items()
    )
    return (
        f"Runs used {devices}{used}, in precision {precision or UNKNOWN}, and took {took} of wall "
        f"time. Software: {software or UNKNOWN}."
    )


def _cite(topic: str) -> str:
    """` [@a; @b]`, nothing for a topic without entries."""
    keys = cited([topic])
    return f" [{'; '.join(f'@{key}' for key in keys)}]" if keys else ""


def _values(grid: Grid, key: str) -> str:
    return _values_of(values_of(grid, key))


def _values_of(values: Iterable[Any]) -> str:
    """Each value, a list of numbers in brackets, a word as it is written outside of a config."""
    shown = (_NAMES.get(label(value), label(value)).replace("_", " ") for value in values)
    listed = (text.replace("[", "(").replace("]", ")").replace(",", ", ") for text in shown)
    return _listed(listed) or UNKNOWN


_NAMES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "sgd": "SGD",
    "radam": "RAdam",
    "relu": "ReLU",
    "gelu": "GELU",
    "leaky_relu": "leaky ReLU",
    "geglu": "GEGLU",
    "rope": "rotary",
    "bpe": "byte-pair encoding",
    "word": "words",
    "encoder_decoder": "encoder-decoder",
    "inverse_sqrt": "inverse square root",
    "paper": "coupled",
}


def _numbers(grid: Grid, key: str) -> str:
    """The values of a field of the results, as one number or their range."""
    found = sorted({int(v) for c in grid.finished if (v := c.record.get(key)) is not None})
    ends = [f"{value:,}" for value in (*found[:1], *found[-1:])]
    return " to ".join(dict.fromkeys(ends)) or UNKNOWN


def _listed(parts: Iterable[str]) -> str:
    """`a, b and c`."""
    listed = list(parts)
    return " and ".join(filter(None, (", ".join(listed[:-1]), *listed[-1:])))


def _s(values: Iterable[Any]) -> str:
    return "" if len(list(values)) == 1 else "s"
