"""Make the drawing of a stack from its specification.

Everything is read from the specification; nothing here knows the name of a preset. Fields that have
no place in a drawing are listed by name and value below it, so that nothing is left out silently.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

from lightning_app.blocks.attention import AttentionSpec
from lightning_app.blocks.block import BlockSpec, InitSpec
from lightning_app.blocks.norm import Norm
from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import StackSpec
from lightning_app.catalogue.draw_attention import attention_parts
from lightning_app.catalogue.drawing import (
    Branch,
    Drawing,
    Factor,
    Inside,
    LayerRun,
    NormPart,
    Part,
    SubLayer,
    Sum,
    norm_name,
)
from lightning_app.catalogue.folding import Side, changed_fields, number, runs_of

_STACK = (
    *("blocks", "final_norm", "input_norm", "dual_stream", "embedding_gain"),
    *("share", "step_signal", "halting", "memory"),
)
_BLOCK = (
    *("around_self", "around_cross", "around_ff", "self_attention", "cross_attention", "ff_norm"),
    *("layout", "bottom_to_top", "share_branch_gain", "init"),
)
_RESIDUAL = ("norm_input", "input_scale", "norm_branch", "norm_sum", "skip", "branch", "rule")
_GAIN = ("value", "learned", "vector", "profiled")
_INIT = {"query_key": "q, k", "value": "V", "output": "P", "ff": "FF"}
# The fields that have a place in the drawing; other fields are listed by name.


def stack_drawing(spec: StackSpec, side: Side) -> Drawing:
    """Return the drawing of a stack; consecutive layers of one form are one run."""
    runs = [_run(blocks, layers, side) for layers, blocks in runs_of(spec.blocks, side)]
    gain = number([spec.embedding_gain], range(1))
    return Drawing(
        side=side,
        entry=norm(spec.input_norm),
        runs=tuple(_merged(list(equal)) for _, equal in groupby(runs, key=_outside)),
        exit=norm(spec.final_norm),
        dual=spec.dual_stream,
        notes=(
            *(f"start: token embeddings * {gain}",) * (gain != "1"),
            *_step_notes(spec),
            *_memory_notes(spec),
            *changed_fields([spec], range(1), known=_STACK),
        ),
    )


def _step_notes(spec: StackSpec) -> list[str]:
    """Return what the layers share, and what happens between them."""
    notes = ["one block for all layers"] * (spec.share == "all")
    if spec.step_signal != "none":
        signal = f"a {spec.step_signal} signal of the layer"
        notes.append(
            f"before each layer: + {signal}, and the table of positions where they have one"
        )
    if spec.halting is not None:
        names = (field.name for field in fields(spec.halting))
        shown = [f"{name} {getattr(spec.halting, name):.4g}" for name in names]
        notes.append(f"each token halts; the average of its states goes on; {', '.join(shown)}")
    return notes


def _memory_notes(spec: StackSpec) -> list[str]:
    """Return what the layers read of the segments before."""
    if spec.memory is None:
        return []
    length, evaluation = spec.memory.lengths
    note = f"keys and values also of the last {length} inputs before a segment"
    if evaluation != length:
        note += f", {evaluation} in evaluation"
    return [note + ", the same number for each token" * spec.memory.same_length]


def norm(kind: Norm) -> tuple[Part, ...]:
    return () if kind == "none" else (NormPart(kind=kind),)


def _factor(gains: Iterable[Gain], layers: range, *, shared: bool = False) -> tuple[Part, ...]:
    gains = list(gains)
    first = gains[0]
    if all(gain == Gain() for gain in gains):
        return ()
    notes = ["learned vector" if first.vector else "learned"] if first.learned else []
    notes += ["profiled"] * first.profiled + ["shared in the layer"] * shared
    notes += changed_fields(gains, layers, known=_GAIN)
    return (Factor(value=number([g.value for g in gains], layers), notes=tuple(notes)),)


def _run(blocks: list[BlockSpec], layers: range, side: Side) -> LayerRun:
    def each(of: Callable[[BlockSpec], Any]) -> list[Any]:
        return [of(block) for block in blocks]

    def before(of: Callable[[BlockSpec], ResidualSpec]) -> tuple[Part, ...]:
        scales = each(lambda block: of(block).input_scale)
        scale = (Factor(value=number(scales, layers)),) * any(one != 1.0 for one in scales)
        return norm(of(block).norm_input) + scale

    def after(of: Callable[[BlockSpec], ResidualSpec]) -> tuple[Part, ...]:
        gains = each(lambda block: of(block).branch)
        factor = _factor(gains, layers, shared=block.share_branch_gain)
        return norm(of(block).norm_branch) + factor

    def skip(of: Callable[[BlockSpec], ResidualSpec]) -> tuple[Part, ...] | None:
        gains = each(lambda block: of(block).skip)
        return None if gains[0].absent else _factor(gains, layers)

    def attention(kind: SubLayer, of: Callable[[BlockSpec], AttentionSpec]) -> Branch:
        specs = each(of)
        return Branch(kind=kind, inside=attention_parts(specs, layers), carry=specs[0].carry)

    def around(branch: Branch, of: Callable[[BlockSpec], ResidualSpec], bottom: bool) -> Sum:
        whole = replace(branch, before=before(of), after=after(of))
        over = skip(of)
        return Sum(
            branches=(whole,),
            skip=over,
            bottom=bottom and over is not None,
            norm=norm(of(block).norm_sum),
            rule=of(block).rule,
        )

    block = blocks[0]
    own = attention("SA", lambda block: block.self_attention)
    cross = attention("CA", lambda block: block.cross_attention)
    inner = () if block.ff_norm == "none" else (Inside(label=f"{norm_name(block.ff_norm)} inside"),)
    feed = Branch(kind="FF", inside=inner)
    crossed = around(cross, lambda block: block.around_cross, False)
    if block.layout == "parallel":
        joined = Sum(
            branches=(
                replace(own, after=after(lambda block: block.around_self)),
                replace(feed, after=after(lambda block: block.around_ff)),
            ),
            shared=before(lambda block: block.around_self),
            skip=skip(lambda block: block.around_ff),
        )
        sums = [joined, crossed]
    else:
        sums = [
            around(own, lambda block: block.around_self, False),
            crossed,
            around(feed, lambda block: block.around_ff, block.bottom_to_top),
        ]
    if side != "decoder":
        sums.remove(crossed)
    notes = [*_starts(each(lambda block: block.init), layers), *_unknown(blocks, layers, side)]
    return LayerRun(first=layers[0], last=layers[-1], sums=tuple(sums), notes=tuple(notes))


def _unknown(blocks: Sequence[BlockSpec], layers: range, side: Side) -> list[str]:
    """Return name and value of fields without a place in the drawing."""
    shown = changed_fields(blocks, layers, known=_BLOCK)
    if blocks[0].layout not in ("sequential", "parallel"):
        shown.append(f"layout {blocks[0].layout}")
    for name in ("around_self", "around_cross", "around_ff"):
        if side == "decoder" or name != "around_cross":
            around = [getattr(block, name) for block in blocks]
            shown += [f"{name} {each}" for each in changed_fields(around, layers, known=_RESIDUAL)]
    return shown


def _outside(run: LayerRun) -> tuple[Any, ...]:
    """Return the parts on the stream of a run, without the parts inside its sub-layers."""
    bare = [
        replace(one, branches=tuple(replace(branch, inside=()) for branch in one.branches))
        for one in run.sums
    ]
    return *bare, run.notes


def _merged(runs: list[LayerRun]) -> LayerRun:
    """Merge runs with equal parts on the stream into one, which names the layers of other parts."""
    sums = []
    for same in zip(*(run.sums for run in runs), strict=True):
        branches = [
            replace(versions[0], inside=_united(runs, [version.inside for version in versions]))
            for versions in zip(*(one.branches for one in same), strict=True)
        ]
        sums.append(replace(same[0], branches=tuple(branches)))
    return replace(runs[0], last=runs[-1].last, sums=tuple(sums))


def _united(runs: list[LayerRun], insides: list[tuple[Inside, ...]]) -> tuple[Inside, ...]:
    """Return the lines of all runs in order, with their layers if some runs do not have them."""
    order: list[Inside] = []
    for lines in insides:
        place = 0
        for line in lines:
            if line not in order:
                while place < len(order) and order[place] not in lines:
                    place += 1
                order.insert(place, line)
            place = order.index(line) + 1
    united = []
    for line in order:
        where = [run.label for run, lines in zip(runs, insides, strict=True) if line in lines]
        place = "" if len(where) == len(runs) else f" in {' and '.join(where)}"
        united.append(replace(line, label=line.label + place))
    return tuple(united)


def _starts(inits: Sequence[InitSpec], layers: range) -> list[str]:
    """Return the initial distribution of the matrices if it is not the default one."""
    usual, first = InitSpec(), inits[0]
    factors: dict[str, list[str]] = {}
    for name, matrix in _INIT.items():
        values = [getattr(init, name) for init in inits]
        if any(value != getattr(usual, name) for value in values):
            factors.setdefault(number(values, layers), []).append(matrix)
    shown = [f"gain {gain} of {', '.join(names)}" for gain, names in factors.items()]
    shown += changed_fields(inits, layers, known=("distribution", *_INIT))
    if not shown and first.distribution == usual.distribution:
        return []
    return ["; ".join([f"start: Xavier {first.distribution}", *shown])]
