"""What a drawing holds: everything that the specification says, folded where layers agree."""

import re
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from lightning_app.blocks.attention import AttentionSpec
from lightning_app.blocks.block import BlockSpec
from lightning_app.blocks.residual import ResidualSpec
from lightning_app.blocks.stack import StackSpec
from lightning_app.catalogue import drawing as module
from lightning_app.catalogue.drawing import Factor, Inside, description, draw
from lightning_app.catalogue.folding import Side, number
from lightning_app.catalogue.specification import specification_lines
from lightning_app.catalogue.svg import picture
from lightning_app.catalogue.text import text_lines
from tests.catalogue.variants import CASES, drawn, stacks, with_blocks

WAYS = ("text", "picture", "sentences", "specification")


@pytest.mark.parametrize(
    ("values", "first", "shown"),
    [
        ([1.41787], 3, "1.418"),
        ([2.0, 2.0, 2.0], 1, "2"),
        ([1.0, 2.0, 3.0], 1, "n"),
        ([3.0, 4.0], 3, "n"),
        ([1.0, 2.0, 3.0], 2, "1, 2, 3"),
        ([1.0, 2**-0.5, 3**-0.5, 0.5], 1, "1/sqrt(n)"),
        ([0.1, 0.2, 0.3, 0.4], 1, "0.1, ..., 0.4"),
        ([1e-5, 1e-6], 1, "1e-05, 1e-06"),
    ],
)
def test_a_number_may_depend_on_the_layer(values, first: int, shown: str) -> None:
    assert number(values, range(first, first + len(values))) == shown


def test_layers_of_one_form_are_one_run() -> None:
    """Numbers may differ in a run; what stands on the stream may not."""
    one, two = stacks("pre_ln")["encoder"], stacks("post_ln")["encoder"]
    mixed = replace(one, blocks=(*one.blocks[:1], *two.blocks[:2], *one.blocks[:3]))
    runs = draw(mixed, "encoder").runs
    assert [run.label for run in runs] == ["layer 1", "layers 2-3", "layers 4-6"]

    scaled = replace(
        one,
        blocks=tuple(
            replace(block, around_ff=replace(block.around_ff, input_scale=1 / layer))
            for layer, block in enumerate(one.blocks, start=1)
        ),
    )
    (run,) = draw(scaled, "encoder").runs
    assert run.label == "layers 1-6"
    assert run.sums[1].branches[0].before[1] == Factor(value="1, ..., 0.1667")


def test_insides_that_differ_stand_in_one_sub_layer() -> None:
    spec = stacks("sas_p")["encoder"]
    (run,) = draw(spec, "encoder").runs
    labels = [part.label for part in run.sums[0].branches[0].inside]
    assert labels[-3:] == ["V = I + dW in layer 1", "V = I in layers 2-6", "P = I"]

    first, second = spec.blocks[:2]
    (run,) = draw(replace(spec, blocks=(first, second, first)), "encoder").runs
    labels = [part.label for part in run.sums[0].branches[0].inside]
    assert labels[-3:] == ["V = I + dW in layer 1 and layer 3", "V = I in layer 2", "P = I"]


def test_an_encoder_has_no_cross_attention() -> None:
    spec = with_blocks(
        stacks("pre_ln")["encoder"],
        cross_attention=lambda attention: replace(attention, head_gain=True),
        around_cross=lambda around: replace(around, norm_branch="rms_norm"),
    )
    assert draw(spec, "encoder") == draw(stacks("pre_ln")["encoder"], "encoder")
    assert draw(spec, "decoder") != draw(stacks("pre_ln")["encoder"], "decoder")


def test_a_field_without_words_of_its_own_is_shown_by_its_name(monkeypatch) -> None:
    spec = with_blocks(
        stacks("pre_ln")["encoder"],
        self_attention=lambda attention: replace(attention, qk_norm="rms_norm"),
    )
    inside = draw(spec, "encoder").runs[0].sums[0].branches[0].inside
    assert inside == (Inside(label="RMSNorm of q, k", notes=("over each head",)),)
    monkeypatch.setattr(module, "DRAWN", module.DRAWN - {"qk_norm"})
    inside = draw(spec, "encoder").runs[0].sums[0].branches[0].inside
    assert inside[0] == Inside(label="qk_norm rms_norm")


def test_every_field_of_an_attention_has_words_of_its_own() -> None:
    assert {field.name for field in fields(AttentionSpec)} == module.DRAWN


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
    spec = with_blocks(
        stacks("pre_ln")["encoder"], self_attention=lambda attention: replace(attention, **parts)
    )
    inside = draw(spec, "encoder").runs[0].sums[0].branches[0].inside
    assert [part.label for part in inside] == labels
    assert {part.notes for part in inside if "Norm" in part.label} == {("over each head",)}


def alternatives(hint: Any, value: Any) -> list[Any]:
    """Return other values of a field, by its type."""
    hint = getattr(hint, "__value__", hint)
    if get_origin(hint) in (UnionType, typing.Union):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return [None] if value is not None else [kinds[0]()]
    if get_origin(hint) is Literal:
        return [choice for choice in get_args(hint) if choice != value]
    return [not value] if hint is bool else [value * 0.37 + 0.01] if hint is float else []


def changes(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield `part` with one field changed, at any depth, and the name of the field."""
    hints = get_type_hints(type(part))
    for field in fields(part):
        value = getattr(part, field.name)
        if is_dataclass(value):
            others = changes(value)
        elif isinstance(value, tuple):  # blocks: all alike
            others = ((name, (other,) * len(value)) for name, other in changes(value[0]))
        else:
            others = (("", other) for other in alternatives(hints[field.name], value))
        for name, other in others:
            try:
                changed = replace(part, **{field.name: other})
            except ValueError:  # a combination without meaning
                continue
            yield f"{field.name}.{name}".rstrip("."), changed


def shown(spec: StackSpec, side: Side) -> list[str]:
    """Return what is shown of a stack in each of `WAYS`."""
    drawing = draw(spec, side)
    return [
        "\n".join(text_lines([drawing])),
        re.sub(r"<desc.*?</desc>", "", picture("stack", [drawing])),
        description([drawing]),
        str(specification_lines({side: spec})),
    ]


@pytest.fixture(scope="module")
def seen() -> dict[str, list[set[str]]]:
    """For each field that can be changed in a decoder: the ways in which each change shows."""
    found: dict[str, list[set[str]]] = {}
    for specs in CASES.values():
        spec = replace(specs["decoder"], blocks=specs["decoder"].blocks[-1:] * 2)
        before = shown(spec, "decoder")
        for name, other in changes(spec):
            pairs = zip(WAYS, before, shown(other, "decoder"), strict=True)
            found.setdefault(name, []).append({way for way, one, two in pairs if one != two})
    return found


def test_whatever_can_be_changed_is_shown(seen) -> None:
    # Only full projections may stand in cross-attention, and those have no gains.
    never_built = re.compile(r"blocks\.cross_attention\.(value|output)_gains")
    for name, ways in seen.items():
        assert all("specification" in way for way in ways), name
        assert set(WAYS) in ways or never_built.match(name), name


def test_every_field_was_changed(seen) -> None:
    names = {f"blocks.{field.name}" for field in fields(BlockSpec)}
    names |= {f"blocks.self_attention.{field.name}" for field in fields(AttentionSpec)}
    names |= {f"blocks.around_ff.{field.name}" for field in fields(ResidualSpec)}
    names |= {field.name for field in fields(StackSpec)}
    assert [name for name in names if not any(one.startswith(name) for one in seen)] == []


def test_drawings_know_no_preset() -> None:
    for name in ("drawing", "folding", "text", "svg", "sheet", "specification"):
        source = Path(f"lightning_app/catalogue/{name}.py").read_text(encoding="utf-8")
        assert not re.search(r"import.*PRESETS|\.presets import", source), name


def test_what_is_said_of_a_picture() -> None:
    said = description(drawn(stacks("keel")))
    assert "encoder, layers 1-6" in said
    formula = "x becomes LayerNorm(gain 18 times x + feed-forward of LayerNorm(x))"
    assert formula in said
