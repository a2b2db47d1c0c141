"""The drawing in plain characters: its lines meet, and it fits a terminal."""

import json
import re
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest

from lightning_app.blocks.presets import PRESETS
from lightning_app.catalogue.parts import stack_drawing
from lightning_app.catalogue.svg import text_lines
from tests.catalogue.variants import CASES, VECTOR, drawn, stacks, with_blocks
from tests.noted import noted

WIRES = "-|'+.<>"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "parallel",
            """\
x --+-- LN --+-- SA --(+)--> x'
    |        '-- FF ---|
    '------------------'""",
        ),
        (
            "dual_stream",
            """\
r ----------(+)--------------------(+)--------------> r'
x --+-- SA --+--(+)-- LN --+-- FF --+--(+)-- LN --> x'
    '------------'         '------------'""",
        ),
        (
            "b2t",
            """\
x_0 --+-- SA --(+)-- LN --+-- FF --(+)-- LN --> x'
      '---------'         '---------|
                          x_0 ------'
start: Xavier uniform; gain 0.2887 of q, k, V; gain 0.4082 of P, FF""",
        ),
        (
            "realformer",
            """\
       Z -.  .-> Z
x --+----- SA ------(+)-- LN --+-- FF --(+)-- LN --> x'
    '----------------'         '---------'
SA: Z_n = S_n + Z_(n-1) (S = q k^T / sqrt(d_k))
SA: A = softmax(Z_n / n)""",
        ),
    ],
)
def test_a_known_block(name: str, expected: str) -> None:
    lines = text_lines([stack_drawing(stacks(name)["encoder"], "encoder")])
    start = lines.index("  layers 1-6:") + 1
    first_run = lines[start : lines.index("", start)]
    assert "\n".join(line[4:] for line in first_run) == expected


def test_it_fits_a_terminal_at_every_depth_and_lines_meet() -> None:
    for name, specs in CASES.items():
        with noted(name):
            lines = text_lines(drawn(specs))
            for line in lines:
                assert len(line) <= 80
                assert line.isascii()
                assert line == line.rstrip()
            lines_meet(lines)
    for name in PRESETS:
        for depth in (1, 2, 24):
            with noted(name, depth):
                lines = text_lines(drawn(stacks(name, depth)))
                assert max(map(len, lines)) <= 80
                assert [line for line in lines if re.match(rf"  layers? (\d+-)?{depth}:", line)]


def lines_meet(lines: list[str]) -> None:
    """Every corner, and every end of a line that goes up, meets something above it."""
    for above, line in pairwise(lines):
        if not set(line.strip()[:1]) <= set("|'x"):
            continue
        for column, sign in enumerate(line):
            joint = sign == "|" or (sign == "'" and "-" in line[max(column - 1, 0) : column + 2])
            if joint and not line[: column + 1].endswith(" x'"):
                met = above[column : column + 1]  # a wire, a sum, or the name of a rule
                assert met.isalpha() or met in {*WIRES, ")", "_"} - {"-"}, f"{above}\n{line}"


def test_the_stack_its_gains_and_what_stands_around_it_with_its_letters() -> None:
    spec = with_blocks(
        stacks("pre_ln")["encoder"],
        around_self={"skip": VECTOR},
        around_ff={"branch": replace(VECTOR, profiled=False)},
    )
    text = "\n".join(text_lines([stack_drawing(spec, "encoder")]))
    assert "'--- * 0.5 (learned vector, profiled) ---'" in text
    assert "-- FF -- * 0.5 (learned vector) --(+)--" in text

    own: dict[str, Any] = {"input_norm": "rms_norm", "embedding_gain": 0.5, "final_norm": "none"}
    spec = replace(stacks("pre_ln")["encoder"], **own)
    lines = text_lines([stack_drawing(spec, "encoder")])
    assert "  embedding -- RMS -- [layers 1-6] --> output" in lines
    assert "    start: token embeddings * 0.5" in lines
    dual = replace(stacks("post_ln")["encoder"], dual_stream=True, final_norm="layer_norm")
    lines = text_lines([stack_drawing(dual, "encoder")])
    assert "  embedding --+-- [layers 1-6] ----------------------(+)--> output" in lines
    assert "              '-- r, the sum of all branches -- LN ---'" in lines
    last = text_lines(drawn(stacks("post_ln")))[-1]
    assert last == "LN LayerNorm, SA self-attention, CA cross-attention, FF feed-forward"
    assert "x_0 the layer's input" in " ".join(text_lines(drawn(stacks("b2t"))))


def test_every_preset_has_its_words() -> None:
    words = json.loads(files("lightning_app.catalogue").joinpath("presets.json").read_text("utf-8"))
    assert set(words) == set(PRESETS)
    assert len(set(words.values())) == len(words)
    assert max(map(len, words.values())) < 80
