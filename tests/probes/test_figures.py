"""Figures hold the numbers that they are given, a panel a quantity and a curve a variant."""

import math
from pathlib import Path
from typing import Any

from lightning_app.blocks.presets import PRESETS
from lightning_app.probes.figures import (
    BANDS,
    LINES,
    Lines,
    band,
    curve_style,
    entropy_figure,
    gains_of,
    line_figure,
    looks,
    undrawn_curves,
    write_probe_figures,
)
from lightning_app.probes.hooks import Probed, Row

SINGLE = Lines("x", {"a": "A"})
"""A figure with one panel a stack."""


def curve(quantity: str, stack: str, *values: float, head: int | None = None) -> list[Row]:
    return [Row(0, stack, n, quantity, head, value) for n, value in enumerate(values, start=1)]


def heads(stack: str, prefix: str, layers: int, count: int, median: float = 2.0) -> list[Row]:
    rows = curve(f"{prefix}attention_entropy", stack, *[median] * layers)
    rows += curve(f"{prefix}attention_free_entropy", stack, *[3.0] * layers)
    for head in range(count):
        for name, shift in (("p5", -0.2), ("p25", -0.1), ("p50", 0.0), ("p75", 0.1), ("p95", 0.2)):
            quantity = f"{prefix}attention_entropy_{name}"
            rows += curve(quantity, stack, *[median + shift] * layers, head=head)
    return rows


def panels(figure: Any) -> list[list[tuple[list[float], list[float]]]]:
    """The curves of each panel, lines across it left out."""
    return [
        [(list(a.get_xdata()), list(a.get_ydata())) for a in axes.lines if a.get_marker() == "o"]
        for axes in figure.axes
    ]


def test_a_panel_shows_every_variant_and_every_layer() -> None:
    lines = Lines("x", {"a": "A", "b": "B"})
    first = Probed("first", curve("a", "encoder", 1.0, 2.0) + curve("b", "decoder", 5.0))
    second = Probed("second", curve("a", "encoder", 3.0, 4.0) + curve("cross_a", "decoder", 7.0))
    figure: Any = line_figure(lines, [first, second])
    found = panels(figure)
    assert len(found) == 6
    a_encoder, a_decoder, a_cross, b_encoder, b_decoder, b_cross = found
    assert a_encoder == [([1, 2], [1.0, 2.0]), ([1, 2], [3.0, 4.0])]
    assert a_cross == [([], []), ([1], [7.0])]
    assert b_decoder == [([1], [5.0]), ([], [])]
    assert a_decoder == b_encoder == b_cross == [([], []), ([], [])]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["first", "second"]
    titles = [axes.get_title() for axes in figure.axes[:3]]
    assert titles == ["encoder", "decoder", "decoder, cross-attention"]


def test_an_axis_is_logarithmic_for_a_wide_spread_and_then_without_zero_and_nan() -> None:
    variant = Probed("rezero", curve("w2_expected_gradient", "encoder", 0.0, math.nan, 2.0))
    gradients = next(lines for lines in LINES if lines.log)
    figure: Any = line_figure(gradients, [variant])
    assert panels(figure) == [[([3], [2.0])]]
    assert figure.axes[0].get_yscale() == "log"
    only = Probed("rezero", curve("w2_expected_gradient", "encoder", 0.0, 0.0))
    assert line_figure(gradients, [only]) is None
    for top, scale in ((20.0, "linear"), (40.0, "log")):
        figure = line_figure(SINGLE, [Probed("x", curve("a", "encoder", 1.0, top))])
        assert figure.axes[0].get_yscale() == scale


def test_there_is_a_box_for_each_head_of_each_layer_coloured_by_its_median() -> None:
    rows = heads("encoder", "", 3, 4) + heads("decoder", "cross_", 2, 4, median=1.0)
    figure: Any = entropy_figure([Probed("x", rows)])
    encoder, cross = figure.axes
    assert len(encoder.patches) == 12
    assert len(cross.patches) == 8
    assert {round(box.get_height(), 9) for box in encoder.patches} == {0.2}
    assert {round(box.get_y(), 9) for box in cross.patches} == {0.9}
    assert cross.get_title() == "decoder, cross-attention"
    assert entropy_figure([Probed("x", [])]) is None
    low, middle, high = BANDS
    assert [band(median) for median in (0.3, 1.5, 2.0, 4.6)] == [low, low, middle, high]


def test_gains_have_a_panel_each() -> None:
    rows = [
        *curve("alpha", "encoder", 1.0),
        *curve("ff_branch", "encoder", 0.1),
        *curve("head_gain", "encoder", 1.0),
        *curve("cross_head_gain", "decoder", 1.0),
        *curve("cross_branch", "decoder", 1.0),
        *curve("value_change", "encoder", 0.2),
        *curve("token_cosine", "encoder", 0.2),
    ]
    expected = {"alpha", "ff_branch", "head_gain", "cross_branch", "value_change"}
    assert set(gains_of([Probed("x", rows)]).quantities) == expected


def test_a_preset_looks_the_same_whatever_is_beside_it_and_others_take_what_is_left() -> None:
    """The curves of a figure and its legend are in these looks."""
    every = looks(PRESETS)
    assert len({str(style) for style in every.values()}) == len(PRESETS)
    for name in PRESETS:
        assert looks(["a file", name, "another"])[name] == looks([name])[name] == every[name]
    assert looks(["pre_ln", "post_ln"]) == looks(["post_ln", "pre_ln"])
    mixed = looks(["first", "post_ln", "second", "first"])
    assert mixed == {"post_ln": curve_style(0), "first": curve_style(1), "second": curve_style(2)}
    assert looks(["first", "second"]) == {"first": curve_style(0), "second": curve_style(1)}

    probed = [Probed(name, curve("a", "encoder", 1.0, 2.0)) for name in ("sas", "post_ln", "x")]
    figure: Any = line_figure(SINGLE, probed)
    expected = [style["color"] for style in looks(["sas", "post_ln", "x"]).values()]
    own = [curve_style(place)["color"] for place in (list(PRESETS).index("sas"), 0)]
    assert expected == [*own, "#D55E00"]
    assert [line.get_color() for line in figure.axes[0].lines] == expected
    assert [line.get_color() for line in figure.legends[0].get_lines()] == expected


def test_a_figure_that_is_left_out_is_named_with_its_reason(tmp_path: Path) -> None:
    quantities = ("w1_expected_gradient", "w2_expected_gradient")
    zero = [row for name in quantities for row in curve(name, "encoder", 0.0, 0.0)]
    rezero = Probed("rezero", zero)
    post = Probed("post_ln", curve("w1_expected_gradient", "encoder", 1.0))
    said = "w1_expected_gradient, w2_expected_gradient of rezero: 0 in every layer"
    (left,) = undrawn_curves([rezero])
    assert left.startswith(f"gradient_norm.svg is not written: no {said}")
    assert write_probe_figures([rezero], tmp_path) == []
    # Beside another variant the figure is written, without a curve that is missed as much.
    (left,) = undrawn_curves([rezero, post])
    assert left.startswith(f"gradient_norm.svg: no {said}")
    (path,) = write_probe_figures([rezero, post], tmp_path)
    assert (path.name, undrawn_curves([post])) == ("gradient_norm.svg", [])
    broken = Probed("x", curve("sum_norm", "decoder", math.nan))
    said = "hidden_norm.svg is not written: no sum_norm of x: no finite value"
    assert undrawn_curves([broken]) == [said]


def test_what_rows_do_not_allow_is_not_left_from_before(tmp_path: Path) -> None:
    full = Probed("x", curve("token_cosine", "encoder", 0.1) + heads("encoder", "", 1, 1))
    names = [path.name for path in write_probe_figures([full], tmp_path)]
    assert names == ["token_cosine.svg", "attention_entropy.svg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    (tmp_path / "own.txt").write_text("kept")
    assert write_probe_figures([Probed("x", curve("sum_norm", "encoder", 1.0))], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hidden_norm.svg", "own.txt"]
    # A name is no formula.
    paths = write_probe_figures([Probed("a $x_", curve("sum_norm", "encoder", 1.0))], tmp_path)
    assert [path.read_text().startswith("<?xml") for path in paths] == [True]
