"""What a drawing holds: everything that the specification says, folded where layers agree."""

import dataclasses
import re
import typing
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from lightning_app.blocks.attention import OUTPUT_GATES, VALUE_CARRIES, AttentionSpec
from lightning_app.blocks.block import BlockSpec
from lightning_app.blocks.memory import MemorySpec
from lightning_app.blocks.norm import NORM_KINDS
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import RESIDUAL_RULES, PlainSum, ResidualSpec
from lightning_app.blocks.spans import AdaptiveSpan
from lightning_app.blocks.stack import StackSpec
from lightning_app.blocks.streams import STREAM_RULES
from lightning_app.blocks.windows import LocalisedSpan
from lightning_app.catalogue.parts import Factor, Inside, Side, description, number, stack_drawing
from lightning_app.catalogue.svg import picture, specification_lines, text_lines
from lightning_app.core.errors import UserError
from lightning_app.core.registry import registering, remove_parts
from tests.catalogue.variants import CASES, stacks, with_blocks
from tests.representatives import REPRESENTATIVES

WAYS = ("text", "picture", "sentences", "specification")


@pytest.mark.parametrize(
    ("values", "first", "shown"),
    [
        *(([1.41787], 3, "1.418"), ([2.0, 2.0, 2.0], 1, "2"), ([1.0, 2.0, 3.0], 1, "n")),
        *(([3.0, 4.0], 3, "n"), ([1.0, 2.0, 3.0], 2, "1, 2, 3")),
        ([1.0, 2**-0.5, 3**-0.5, 0.5], 1, "1/sqrt(n)"),
        *(([0.1, 0.2, 0.3, 0.4], 1, "0.1, ..., 0.4"), ([1e-5, 1e-6], 1, "1e-05, 1e-06")),
    ],
)
def test_a_number_may_depend_on_the_layer(values, first: int, shown: str) -> None:
    assert number(values, range(first, first + len(values))) == shown


def test_layers_of_one_form_are_one_run() -> None:
    """Numbers may differ in a run of layers; parts on the stream and unknown fields may not."""
    one, two = stacks("pre_ln")["encoder"], stacks("post_ln")["encoder"]
    mixed = replace(one, blocks=(*one.blocks[:1], *two.blocks[:2], *one.blocks[:3]))
    runs = stack_drawing(mixed, "encoder").runs
    assert [run.label for run in runs] == ["layer 1", "layers 2-3", "layers 4-6"]

    scaled = (
        replace(block, around_ff=replace(block.around_ff, input_scale=1 / layer))
        for layer, block in enumerate(one.blocks, start=1)
    )
    (run,) = stack_drawing(replace(one, blocks=tuple(scaled)), "encoder").runs
    assert run.label == "layers 1-6"
    assert run.sums[1].branches[0].before[1] == Factor(value="1, ..., 0.1667")

    first, second = (extended(one.blocks[0], mystery=value) for value in "ab")
    runs = stack_drawing(replace(one, blocks=(first, second, second)), "encoder").runs
    found = [(run.label, run.notes) for run in runs]
    assert found == [("layer 1", ("mystery a",)), ("layers 2-3", ("mystery b",))]


def inside(spec: StackSpec) -> tuple[Inside, ...]:
    """The parts inside the self-attention of an encoder whose layers are one run."""
    (run,) = stack_drawing(spec, "encoder").runs
    return run.sums[0].branches[0].inside


def test_insides_that_differ_stand_in_one_sub_layer_and_an_encoder_has_no_cross() -> None:
    spec = stacks("sas_p")["encoder"]
    labels = [part.label for part in inside(spec)]
    assert labels[-3:] == ["V = I + dW in layer 1", "V = I in layers 2-6", "P = I"]

    first, second = spec.blocks[:2]
    labels = [part.label for part in inside(replace(spec, blocks=(first, second, first)))]
    assert labels[-3:] == ["V = I + dW in layer 1 and layer 3", "V = I in layer 2", "P = I"]
    spec = with_blocks(
        stacks("pre_ln")["encoder"],
        cross_attention={"head_gain": True},
        around_cross={"norm_branch": "rms_norm"},
    )
    assert stack_drawing(spec, "encoder") == stack_drawing(stacks("pre_ln")["encoder"], "encoder")
    assert stack_drawing(spec, "decoder") != stack_drawing(stacks("pre_ln")["encoder"], "decoder")


def extended(part: Any, **more: Any) -> Any:
    ((name, value),) = more.items()
    kind = type(part)
    fresh = [(name, type(value), dataclasses.field(default=type(value)()))]
    made = make_dataclass(f"New{kind.__name__}", fresh, bases=(kind,), frozen=True, kw_only=True)
    return made(**{field.name: getattr(part, field.name) for field in fields(part)}, **more)


def mysteries(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield `part` where each specification inside it, one at a time, has a field more."""
    yield type(part).__name__, extended(part, mystery=0.75)
    for field in fields(part):
        value = getattr(part, field.name)
        one = value[0] if isinstance(value, tuple) else value
        for name, other in mysteries(one) if is_dataclass(one) else ():
            all_of = (other,) * len(value) if isinstance(value, tuple) else other
            try:
                yield f"{field.name}.{name}", replace(part, **{field.name: all_of})
            except ValueError:  # a combination without meaning
                continue


def test_a_field_that_no_drawing_knows_is_shown_by_name_and_value() -> None:
    """What a block of SAS-P does not have is in its specification alone."""
    spec = stacks("sas_p")["decoder"]
    absent = re.compile(r"around_(self|ff)\.skip|output_gains|cross_attention\.value_gains")
    for case, changed in mysteries(replace(spec, blocks=spec.blocks[:1] * 2)):
        for way, text in zip(WAYS, shown(changed, "decoder"), strict=True):
            known = way == "specification" or not absent.search(case)
            assert "mystery 0.75" in plain(text) or not known, (case, way)


def plain(text: str) -> str:
    """Return text without elements of SVG, line breaks and the colon after a field of a block."""
    return " ".join(re.sub(r"<[^>]*>", " ", text).replace(":", "").split())


@pytest.mark.parametrize(
    ("part", "field", "words"),
    [
        ("self_attention", "carry", "carry novel"),
        ("self_attention", "query_init", "query_init novel"),
        ("self_attention", "qk_norm", "novel of q, k"),
        ("self_attention", "value", "V = novel"),
        ("around_ff", "norm_sum", "novel"),
        ("around_ff", "rule", "novel"),
        ("", "ff_norm", "novel inside"),
        ("", "layout", "layout novel"),
    ],
)
def test_an_unknown_choice_is_shown_by_its_name(part: str, field: str, words: str) -> None:
    spec = stacks("pre_ln")["encoder"]
    block = deepcopy(spec.blocks[0])
    object.__setattr__(getattr(block, part) if part else block, field, "novel")
    novel = replace(spec, blocks=spec.blocks[:1])
    object.__setattr__(novel, "blocks", (block,))
    for way, text in zip(WAYS[:3], shown(novel, "encoder")[:3], strict=True):
        assert words in plain(text), way
    assert "novel" in str(specification_lines({"encoder": novel}))


@pytest.mark.parametrize(
    ("parts", "labels"),
    [
        ({"qk_norm": "layer_norm", "value_norm": "layer_norm"}, ["LayerNorm of q, k, v"]),
        ({"value_norm": "layer_norm"}, ["LayerNorm of v"]),
        (
            {"qk_norm": "layer_norm", "value_norm": "rms_norm"},
            ["LayerNorm of q, k", "RMSNorm of v"],
        ),
        (
            {"qk_norm": "rms_norm", "value_norm": "rms_norm", "value": "identity"},
            ["RMSNorm of q, k", "V = I", "RMSNorm of v"],
        ),
    ],
)
def test_norms_inside_an_attention(parts: dict[str, Any], labels: list[str]) -> None:
    spec = with_blocks(stacks("pre_ln")["encoder"], self_attention=parts)
    assert [part.label for part in inside(spec)] == labels
    assert {part.notes for part in inside(spec) if "Norm" in part.label} == {("over each head",)}


SPANS: dict[type, Any] = {
    LocalisedSpan: LocalisedSpan(query_block=4, memory=6),
    AdaptiveSpan: AdaptiveSpan(longest=9),
    MemorySpec: MemorySpec(length=9, evaluation_length=11),
    float: 5.0,
}
"""Values of parts that have no default."""


def alternatives(hint: Any, value: Any) -> list[Any]:
    hint = getattr(hint, "__value__", hint)
    if get_origin(hint) in (UnionType, typing.Union):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return [None] if value is not None else [SPANS.get(kinds[0]) or kinds[0]()]
    if get_origin(hint) is Literal:
        return [choice for choice in get_args(hint) if choice != value]
    if hint is str:
        tables = (NORM_KINDS, RESIDUAL_RULES, STREAM_RULES, OUTPUT_GATES, VALUE_CARRIES)
        return [name for table in tables if value in table for name in table if name != value]
    if hint is int:
        return [value + 1]
    return [not value] if hint is bool else [value * 0.37 + 0.01] if hint is float else []


def changes(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield `part` with one field changed, at any depth, and the name of the field."""
    hints = get_type_hints(type(part))
    for field in fields(part):
        value = getattr(part, field.name)
        if is_dataclass(value):
            others = changes(value)
        elif isinstance(value, tuple):  # blocks: all alike
            others = [(name, (other,) * len(value)) for name, other in changes(value[0])]
            # What reads the first layer has no meaning in that one.
            carries = (each for each in changes(value[1]) if "carry" in each[0])
            others += [(name, (value[0], other)) for name, other in carries]
        else:
            others = (("", other) for other in alternatives(hints[field.name], value))
        for name, other in others:
            try:
                changed = replace(part, **{field.name: other})
            except (ValueError, UserError):  # a combination without meaning
                continue
            yield f"{field.name}.{name}".rstrip("."), changed


def shown(spec: StackSpec, side: Side) -> list[str]:
    """Return what is shown of a stack in each of `WAYS`."""
    drawing = stack_drawing(spec, side)
    return [
        "\n".join(text_lines([drawing])),
        re.sub(r"<desc.*?</desc>", "", picture("stack", [drawing])),
        description([drawing]),
        str(specification_lines({side: spec})),
    ]


@pytest.fixture
def another_rule() -> Iterator[None]:
    """The package has one residual rule; a plug-in may register others."""
    with registering("a test"):
        RESIDUAL_RULES.add("another", PlainSum)
    yield
    remove_parts("a test")


@pytest.mark.slow
def test_whatever_can_be_changed_is_shown(another_rule: None) -> None:
    seen: dict[str, list[set[str]]] = {}
    for name, specs in CASES.items():
        if name in PRESETS.keys() - REPRESENTATIVES:
            continue
        first, last = specs["decoder"].blocks[0], specs["decoder"].blocks[-1]
        reads_first = last.self_attention.value_carry != "none"
        spec = replace(specs["decoder"], blocks=(first if reads_first else last, last))
        before = shown(spec, "decoder")
        for name, other in changes(spec):
            pairs = zip(WAYS, before, shown(other, "decoder"), strict=True)
            seen.setdefault(name, []).append({way for way, one, two in pairs if one != two})
    # Only full projections may stand in cross-attention, and those have no gains.
    never_built = re.compile(r"blocks\.cross_attention\.(value|output)_gains")
    for name, ways in seen.items():
        assert all("specification" in way for way in ways), name
        assert set(WAYS) in ways or never_built.match(name), name
    # Every field was changed.
    names = {f"blocks.{field.name}" for field in fields(BlockSpec)}
    names |= {f"blocks.self_attention.{field.name}" for field in fields(AttentionSpec)}
    names |= {f"blocks.around_ff.{field.name}" for field in fields(ResidualSpec)}
    names |= {field.name for field in fields(StackSpec)}
    names -= {"blocks.self_attention.attention"}  # the package has one; others are plug-ins'
    assert [name for name in names if not any(one.startswith(name) for one in seen)] == []


def test_drawings_know_no_preset() -> None:
    for name in ("parts", "svg"):
        source = Path(f"lightning_app/catalogue/{name}.py").read_text(encoding="utf-8")
        assert not re.search(r"import.*PRESETS|\.presets import", source), name
