"""Learned spans and halting steps: the numbers of `metrics.csv`, of the runs that have them."""

import statistics

import pytest

from lightning_app.report.figures.sheet import FigureFiles

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
SEED = "seed_everything"
SPAN = "model.block.adaptive_span"
AXES = {SEED: [1, 2], SPAN: [None, {"longest": 64}], WARMUP: [0, 60], RATE: [1e-3, 4e-3]}
STEPS, LAYERS, HEADS = (1, 10, 100), (1, 2, 3), (0, 1)


def outcome(axes):
    """4e-3 is the better rate with spans, 1e-3 without."""
    better = (axes[RATE] == 4e-3) == (axes[SPAN] is not None)
    return 2.0 - 0.2 * better + axes[SEED] / 100


def span_of(number, step, stack, layer, head):
    return number + step / 100 + layer / 10 + head / 1000 + 50 * (stack == "decoder")


def columns(number, step):
    """What a run logs at a step; another value of the last step is not finite."""
    row = {"step": step, "probe/alpha/encoder/1": 0.5}
    for stack in ("encoder", "decoder"):
        for layer in LAYERS:
            spans = [span_of(number, step, stack, layer, head) for head in HEADS]
            row[f"probe/span/{stack}/{layer}"] = statistics.mean(spans)
            row |= {f"probe/span/{stack}/{layer}/{head}": spans[head] for head in HEADS}
    if step == max(STEPS) and number == 7:
        row["probe/span/decoder/3/1"] = "nan"
    return row


@pytest.fixture
def spanned(make_grid, table):
    """A grid of which half of the runs learn spans; the number of a run is in each of them."""
    fake = make_grid(outcome, AXES, curves=False)
    for number, cell in enumerate(fake.cells):
        rows = [{"step": step, "train/nll": 3.0} for step in STEPS]
        if cell["axes"][SPAN] is not None:
            rows = [columns(number, step) for step in STEPS]
        table(fake.run(cell) / "metrics.csv", rows)
    return fake


def number_of(fake, name):
    return next(n for n, cell in enumerate(fake.cells) if cell["name"] == name)


def test_spans_are_those_of_every_head_at_the_end(spanned, draw):
    """Of the runs that learn them, at their best rate and the reference warm-up."""
    drawn = draw(spanned.folder)
    drawing, table = drawn.by_name["spans"], drawn.table("spans")
    assert {(cell.warmup, cell.lr) for cell in drawing.cells} == {(60, 4e-3)}
    assert {cell.axes[SPAN] is None for cell in drawing.cells} == {False}
    numbers = {number_of(spanned, cell.name) for cell in drawing.cells}
    heads = table[table["mark"] == "head"]
    assert len(heads) == 2 * 2 * len(LAYERS) * len(HEADS) - (7 in numbers)
    for _, row in heads.iterrows():
        number = number_of(spanned, row["run"])
        place = (row["stack"], row["layer"], row["head"])
        assert row["value"] == pytest.approx(span_of(number, 100, *place))
    for _, row in table[table["mark"] == "mean"].iterrows():
        place = (row["stack"], row["layer"])
        own = [span_of(n, 100, *place, head) for n in numbers for head in HEADS]
        assert row["value"] == pytest.approx(statistics.mean(own))
    assert set(table["mark"]) == {"head", "mean"}


def test_the_caption_of_spans_has_their_numbers(spanned, draw):
    drawn = draw(spanned.folder)
    table, text = drawn.table("spans"), drawn.by_name["spans"].text
    values = table.loc[table["mark"] == "head", "value"]
    low, high, middle = values.min(), values.max(), values.median()
    said = f"The {len(values)} spans drawn lie between {low:.1f} and {high:.1f} tokens"
    assert f"{said}, their median is {middle:.1f}." in text
    assert "Not drawn" not in text
    assert len(drawn.svg("spans")) > 1000


def steps_of(number, step, stack):
    return 1 + number / 10 + 1 / step + (stack == "decoder")


HALTING = {SEED: [1, 2], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}


@pytest.fixture
def halting(make_grid, table):
    """A grid whose Post-LN runs halt."""
    fake = make_grid(lambda axes: 2.0 + axes[SEED] / 100, HALTING, curves=False)
    for number, cell in enumerate(fake.cells):
        rows = [{"step": step, "train/nll": 3.0} for step in STEPS]
        if cell["axes"][PRESET] == "post_ln":
            for row in rows:
                for stack in ("encoder", "decoder"):
                    row[f"train/steps/{stack}"] = steps_of(number, row["step"], stack)
                    row[f"train/steps_at_limit/{stack}"] = (number + 1) / 100
        table(fake.run(cell) / "metrics.csv", rows)
    return fake


def test_halting_steps_are_drawn_over_the_steps_of_training(halting, draw):
    drawn = draw(halting.folder)
    drawing, table = drawn.by_name["halting"], drawn.table("halting")
    assert {cell.variant for cell in drawing.cells} == {"post_ln"}
    assert len(drawing.cells) == 4
    runs, means = table[table["mark"] == "run"], table[table["mark"] == "mean"]
    assert len(runs) == 4 * 2 * len(STEPS)
    for _, row in runs.iterrows():
        number = number_of(halting, row["run"])
        assert row["value"] == pytest.approx(steps_of(number, row["step"], row["stack"]))
    assert len(means) == 2 * 2 * len(STEPS)
    for _, row in means.iterrows():
        own = [
            steps_of(n, row["step"], row["stack"])
            for n, cell in enumerate(halting.cells)
            if (cell["axes"][PRESET], cell["axes"][WARMUP]) == ("post_ln", row["warmup"])
        ]
        assert row["value"] == pytest.approx(sum(own) / 2)


def test_the_caption_of_halting_has_its_numbers(halting, draw):
    text = draw(halting.folder).by_name["halting"].text
    numbers = [n for n, cell in enumerate(halting.cells) if cell["axes"][PRESET] == "post_ln"]
    last = [steps_of(n, 100, stack) for n in numbers for stack in ("encoder", "decoder")]
    said = f"the mean of a run is {min(last):.1f} to {max(last):.1f} steps, and "
    assert (
        f"{said}{min(numbers) + 1} to {max(numbers) + 1} % of its tokens take as many as there are."
        in text
    )


def test_other_grids_have_neither(make_grid, draw):
    names = draw(make_grid(lambda axes: 2.0, {SEED: [1, 2], WARMUP: [0, 60]}).folder).names
    assert not {"spans", "halting"} & {*names}


def test_maps_give_way_to_them_and_that_is_said(halting, draw, table):
    """The figures of a probed grid are no more with spans and steps than without."""

    def texts(drawn) -> dict[str, FigureFiles]:
        return {name: drawn.by_name[name] for name in drawn.names}

    for cell in halting.cells:
        rows = [
            {"step": 1, "stack": "decoder", "layer": layer, "quantity": quantity, "value": 1.0}
            | {"head": 0}
            for layer in LAYERS
            for quantity in ("attention_entropy_p50", "attention_distance")
        ]
        table(halting.run(cell) / "probes.csv", rows)
    one = texts(draw(halting.folder))
    assert {"halting", "attention_entropy"} <= {*one}
    assert "attention_distance" not in one
    assert one["halting"].text.endswith(
        "Not drawn, to keep the report short: distances of attention maps to the layer below."
    )
    for cell in halting.cells:
        table(halting.run(cell) / "metrics.csv", [columns(0, step) for step in STEPS])
    other = texts(draw(halting.folder, "other"))
    assert {"spans", "attention_entropy"} <= {*other}
    assert "halting" not in other
    for number, cell in enumerate(halting.cells):
        rows = [columns(0, step) | {"train/steps/encoder": number + step} for step in STEPS]
        table(halting.run(cell) / "metrics.csv", rows)
    both = texts(draw(halting.folder, "both"))
    assert {"spans", "halting"} <= {*both}
    assert not {"attention_distance", "attention_entropy"} & {*both}
    assert both["halting"].text.endswith("short: entropies of attention maps.")
