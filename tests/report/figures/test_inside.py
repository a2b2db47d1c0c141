"""What happened inside: the numbers of `probes.csv` and `metrics.csv`, of the runs they say."""

import pytest

from lightning_app.report.figures import write

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
SEED = "seed_everything"
AXES = {SEED: [1, 2], PRESET: ["post_ln", "sas"], WARMUP: [0, 60], RATE: [1e-3, 4e-3]}
STEPS = (1, 10, 100)
LAYERS, HEADS = (1, 2, 3), (0, 1)


def outcome(axes):
    """Post-LN stalls without warm-up at 4e-3; the higher rate is better for sas."""
    if axes[PRESET] == "post_ln" and axes[WARMUP] == 0 and axes[RATE] == 4e-3:
        return 4.5
    return 2.5 - 100 * axes[RATE] * (axes[PRESET] == "sas") + axes[SEED] / 100


def signal(number, step, layer, head=0):
    """A value that tells where it comes from."""
    return number + step / 1000 + layer / 10 + head / 100


def probe_rows(number):
    """Rows as the probe writes them, in another order, and with a value that is not finite."""
    for step in reversed(STEPS):
        for stack in ("encoder", "decoder"):
            for layer in (0, *LAYERS):
                value = signal(number, step, layer)
                row = {"step": step, "stack": stack, "layer": layer, "value": value}
                yield row | {"quantity": "token_cosine"}
                if not layer:
                    continue
                yield row | {"quantity": "w2_gradient"}
                yield row | {"quantity": "sum_norm", "value": 1e9}
                for name in ("attention_entropy", "attention_free_entropy"):
                    yield row | {"quantity": name}
                for head in HEADS:
                    value = signal(number, step, layer, head)
                    each = row | {"head": head, "value": value}
                    yield each | {"quantity": "attention_entropy_p50"}
                    if layer > 1:
                        yield each | {"quantity": "attention_distance"}
                if layer > 1:
                    yield row | {"quantity": "attention_distance"}
        model = {"step": step, "stack": "model", "quantity": "output_information"}
        yield model | {"value": signal(number, step, 0) if step > 1 else "nan"}


@pytest.fixture
def probed(make_grid, table):
    """A grid whose runs were probed: the number of a run is in each of its values."""
    fake = make_grid(outcome, AXES, curves=False)
    for number, cell in enumerate(fake.cells):
        rows = list(probe_rows(number))
        names = ("step", "stack", "layer", "quantity", "head", "value")
        table(fake.run(cell) / "probes.csv", [{n: row.get(n) for n in names} for row in rows])
        gains = {
            f"probe/{quantity}/encoder/{layer}": (quantity, layer)
            for quantity in ("alpha", "ff_branch")
            for layer in LAYERS
        }
        rows = [
            {"step": s, **{tag: signal(number, s, layer) for tag, (_, layer) in gains.items()}}
            | {"probe/token_cosine/encoder/1": 0.5}
            for s in STEPS
        ]
        if cell["axes"][PRESET] == "post_ln":
            rows = [{"step": s, "probe/w2_gradient/encoder/1": 1} for s in STEPS]
        table(fake.run(cell) / "metrics.csv", rows)
    return fake


def number_of(fake, name):
    return next(n for n, cell in enumerate(fake.cells) if cell["name"] == name)


def axes_of(fake, name):
    return fake.cells[number_of(fake, name)]["axes"]


def test_a_stalled_run_stands_beside_its_twin(probed, draw):
    drawn = draw(probed.folder)
    (drawing,) = [d for d in drawn.list if d.path.stem.startswith("probes")]
    stalled, twin = drawing.cells
    assert (stalled.state, twin.state) == ("diverged", "ok")
    assert (stalled.variant, stalled.lr, stalled.seed) == (twin.variant, twin.lr, twin.seed)
    assert (stalled.variant, stalled.warmup, twin.warmup) == ("post_ln", 0, 60)
    assert drawing.lr == 4e-3
    assert "warm-up 0, which ended stalled" in drawing.text
    table = drawn.table("probes")
    assert set(table["run"]) == {stalled.name, twin.name}
    for _, row in table.iterrows():
        layer = 0 if row["stack"] == "model" else row["layer"]
        number = number_of(probed, row["run"])
        assert row["value"] == pytest.approx(signal(number, row["step"], layer))
    # Two stacks of cosines (4 layers) and gradients (3), 3 steps; of the model, 2 are finite.
    assert len(table) == 2 * (2 * (4 + 3) * 3 + 2)


def test_gains_are_those_of_the_best_rate(probed, draw):
    """Of sas, which ends lowest at 4e-3; Post-LN has none. Means over seeds, by hand."""
    drawn = draw(probed.folder)
    (drawing,) = [d for d in drawn.list if d.path.stem.startswith("gains")]
    assert drawing.title == "Learned gains of sas during training"
    assert drawing.lr == 4e-3
    assert len(drawing.cells) == 4
    table = drawn.table("gains")
    assert set(table["quantity"]) == {"alpha", "ff_branch"}
    runs, means = table[table["mark"] == "run"], table[table["mark"] == "mean"]
    for _, row in runs.iterrows():
        number = number_of(probed, row["run"])
        assert row["value"] == pytest.approx(signal(number, row["step"], row["layer"]))
    assert len(runs) == 2 * 3 * 3 * 4  # quantities, layers, steps, runs
    for _, row in means.iterrows():
        own = [
            signal(n, row["step"], row["layer"])
            for n, cell in enumerate(probed.cells)
            if cell["axes"]
            == {PRESET: "sas", WARMUP: row["warmup"], RATE: 4e-3, SEED: cell["axes"][SEED]}
        ]
        assert row["value"] == pytest.approx(sum(own) / 2)
    assert len(means) == 2 * 3 * 3 * 2


def test_attention_is_of_the_last_step_and_the_reference_warmup(probed, draw):
    """At the rate that is best for all variants together: at 4e-3 one of them stalls."""
    drawn = draw(probed.folder)
    for name, layers in (("attention_entropy", LAYERS), ("attention_distance", LAYERS[1:])):
        drawing, table = drawn.by_name[name], drawn.table(name)
        assert drawing.lr == 1e-3
        assert {cell.warmup for cell in drawing.cells} == {60}
        assert {cell.variant for cell in drawing.cells} == {"post_ln", "sas"}
        heads = table[table["mark"] == "head"]
        assert len(heads) == 2 * 2 * 2 * len(layers) * 2  # variants, seeds, stacks, layers, heads
        for _, row in heads.iterrows():
            number = number_of(probed, row["run"])
            assert row["value"] == pytest.approx(signal(number, 100, row["layer"], row["head"]))
        for _, row in table[table["mark"] == "mean"].iterrows():
            own = [
                signal(n, 100, row["layer"])
                for n, cell in enumerate(probed.cells)
                if cell["axes"]
                == {PRESET: row["variant"], WARMUP: 60, RATE: 1e-3, SEED: cell["axes"][SEED]}
            ]
            assert row["value"] == pytest.approx(sum(own) / 2)
    assert set(drawn.table("attention_entropy")["mark"]) == {"head", "mean", "uniform"}


def test_runs_without_probes_have_no_such_figure(make_grid, draw):
    drawn = draw(make_grid(outcome, AXES).folder)
    assert not [d for d in drawn.list if d.question == "inside"]


def test_a_stall_without_a_twin_has_no_panels(make_grid, draw, table):
    """Neither where all stalled, nor where none did, nor where the twin was not probed."""
    for name, end, probed_warmups in (
        ("all", lambda a: 4.5, (0, 60)),
        ("none", lambda a: 2.0, (0, 60)),
        ("one", lambda a: 4.5 if a[WARMUP] == 0 else 2.0, (0,)),
    ):
        fake = make_grid(end, {SEED: [1], WARMUP: [0, 60]}, curves=False, name=name)
        for cell in fake.cells:
            if cell["axes"][WARMUP] in probed_warmups:
                table(fake.run(cell) / "probes.csv", probe_rows(0))
        drawn = draw(fake.folder)
        assert "probes" not in drawn.names
        assert "attention_entropy" in drawn.names
    assert "stalled" in drawn.by_name["attention_entropy"].text


def test_variants_that_are_not_drawn_are_named(make_grid, draw, table, monkeypatch):
    """Gains of three variants, room for two."""
    monkeypatch.setattr(write, "FIGURES", 2)
    fake = make_grid(lambda a: 2.0, {SEED: [1], PRESET: ["a", "b", "c"]}, curves=False)
    for cell in fake.cells:
        rows = [{"step": step, "probe/alpha/encoder/1": step} for step in STEPS]
        table(fake.run(cell) / "metrics.csv", rows)
    drawings = [d for d in draw(fake.folder).list if d.path.stem.startswith("gains")]
    assert [d.path.stem for d in drawings] == ["gains-1", "gains-2"]
    assert "Not drawn" not in drawings[0].text
    assert drawings[1].text.endswith("Not drawn, to keep the report short: c.")
