"""Results of grids as tables, comparisons over any axis, and grids that run from Python."""

import io
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from filelock import FileLock
from scipy import stats

from lightning_app import UserError, compare, plugins, results, run_grid
from lightning_app.cli import main
from lightning_app.config.grid import read_spec
from lightning_app.report.results import read_results
from lightning_app.report.write import publish
from tests.report.conftest import BASE, PRESET, SEED, WARMUP, FakeGrid, Outcome, typical
from tests.report.glue_grid import Scores, glue_grid, learned
from tests.told import told

AXES = {SEED: [1, 2, 3, 4, 5, 6], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}


def ended(axes: Mapping[str, Any]) -> Outcome:
    """Each way in which a run can be, at one of the cells; the rest has a loss."""
    at = {1: "failed", 2: "unfinished", 3: "waiting", 4: None}
    if axes[PRESET] == "post_ln" and axes[WARMUP] == 0:
        return at.get(axes[SEED], typical(axes))
    return typical(axes)


@pytest.fixture
def grid(tmp_path: Path) -> FakeGrid:
    return FakeGrid(tmp_path / "experiments" / "mine", ended, AXES)


def cell_of(grid: FakeGrid, **axes: Any) -> dict[str, Any]:
    return next(cell for cell in grid.cells if axes.items() <= cell["axes"].items())


def test_every_planned_run_is_a_row_with_its_state(grid: FakeGrid, capsys) -> None:
    broken = cell_of(grid, **{SEED: 6, PRESET: "pre_ln", WARMUP: 0})
    (grid.run(broken) / "result.json").write_text("{")
    out, err = shown(capsys, 1, str(grid.folder))
    assert "damaged" in out
    assert "result.json" in err
    frame: Any = results(grid.folder)
    assert list(frame["name"]) == [cell["name"] for cell in grid.cells]
    assert frame["status"].value_counts().to_dict() == {
        **{"ok": 17, "diverged": 3, "failed": 1, "unfinished": 1, "waiting": 1, "damaged": 1}
    }
    rows = frame.set_index("name")
    for cell in grid.cells:
        row = rows.loc[cell["name"]]
        assert {key: row[key] for key in AXES} == cell["axes"]
        axes = [cell["axes"][key] for key in (PRESET, WARMUP, SEED)]
        assert [row["variant"], row["warmup"], row["seed"]] == axes
        assert Path(row["folder"]) == grid.run(cell)
        found = ended(cell["axes"])
        if isinstance(found, float) and cell is not broken:
            assert row["val/nll"] == pytest.approx(found)
        else:
            assert np.isnan(row["val/nll"])
    first = cell_of(grid, **{SEED: 1, PRESET: "post_ln", WARMUP: 0})
    assert rows.loc[first["name"], "error"] == "RuntimeError: <b>out of</b> memory"
    assert "result.json" in rows.loc[broken["name"], "error"]
    trained = cell_of(grid, **{SEED: 2, PRESET: "post_ln", WARMUP: 0})
    with FileLock(grid.run(trained) / ".lock"):
        frame = results(grid.folder)
    assert list(frame.loc[frame["status"] == "running", "name"]) == [trained["name"]]


def test_a_grid_is_found_by_name_path_and_publication(grid, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = results("mine")
    where = whole.assign(folder=[f"experiments/mine/runs/{name}" for name in whole["name"]])
    pd.testing.assert_frame_equal(results("experiments/mine"), where)
    publish(read_results(grid.folder), tmp_path / "published")
    grid.folder.rename(tmp_path / "away")
    found = results(tmp_path / "published")
    assert list(found["id"]) == list(whole["id"])
    assert found["val/nll"].equals(whole["val/nll"])
    assert set(found["folder"]) == {None}  # they were restored for a moment only
    assert not (tmp_path / "experiments" / "mine").exists()
    with pytest.raises(UserError, match=r"mine:.*YAML"):
        results("mine")


def test_a_file_whose_cells_are_not_planned_is_refused(tmp_path: Path) -> None:
    FakeGrid(tmp_path / "demo", ended, AXES)
    with pytest.raises(UserError, match=r"demo\.yaml"):
        results("demo", experiments=tmp_path)
    with pytest.raises(UserError, match="holds no plan"):
        results("demo", experiments=tmp_path / "other")
    assert len(results(tmp_path / "demo")) == 24


PARENT = {"name": "parent", "base_config": BASE, "axes": {PRESET: AXES[PRESET], SEED: [1, 2]}}
KNOWN = {"grid": PARENT, "match": [PRESET, SEED]}


def parent(**changes: Any) -> dict[str, Any]:
    return {"init_from": {**KNOWN, "grid": {**PARENT, **changes}}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_config": {**BASE, "trainer": {"max_steps": 400}}}, "its base configs"),
        ({"exclude": [{PRESET: "post_ln", WARMUP: 0}]}, "its exclusions differ"),
        ({"metric": {"name": "val/accuracy", "mode": "max"}}, "its metrics differ"),
        ({"init_from": {**KNOWN, "match": [PRESET]}}, "its parents differ"),
        (parent(base_config={"trainer": {"max_steps": 9}}), "its parents'"),
        (parent(axes={PRESET: AXES[PRESET], SEED: [1, 2, 3]}), "its parents' axes differ"),
        (parent(question="Which one?"), ""),  # what the parent grid only says
    ],
)
def test_a_file_of_another_experiment_is_refused(grid, tmp_path, change, said: str) -> None:
    tree = yaml.safe_load((grid.folder / "grid.yaml").read_text())
    file, where = tmp_path / "mine.yaml", grid.folder.parent
    file.write_text(yaml.safe_dump({**tree, "init_from": KNOWN}, sort_keys=False))
    (grid.folder / "grid.yaml").write_text(yaml.safe_dump(read_spec(file).tree()))
    assert len(results(file, experiments=where)) == 24
    file.write_text(yaml.safe_dump({**tree, "init_from": KNOWN, **change}, sort_keys=False))
    if not said:
        assert len(results(file, experiments=where)) == 24
        return
    with pytest.raises(UserError, match=said):
        results(file, experiments=where)
    assert len(results(grid.folder)) == 24


def test_any_axis_is_compared_seed_by_seed(grid: FakeGrid) -> None:
    found = compare(grid.folder, axis=WARMUP, baseline=60, metric="val/perplexity")
    assert list(found["value"]) == ["0", "0"]
    assert set(found["metric"]) == {"val/perplexity"}
    assert set(found["mode"]) == {"min"}
    pre = found[found["where"].str.contains("pre_ln")].iloc[0]
    cells = [{PRESET: "pre_ln", SEED: seed} for seed in AXES[SEED]]
    differences = [
        2.718281828 ** typical({**cell, WARMUP: 0}) - 2.718281828 ** typical({**cell, WARMUP: 60})
        for cell in cells
    ]
    assert [pre[f"seed {seed}"] for seed in AXES[SEED]] == pytest.approx(differences)
    interval = stats.ttest_1samp(differences, 0.0).confidence_interval()
    expected = [np.mean(differences), interval.low, interval.high]
    assert pre[["estimate", "low", "high"]].tolist() == pytest.approx(expected)
    # Of Post-LN without warm-up only two seeds have a finite result, and they stalled.
    post = found[found["where"].str.contains("post_ln")].iloc[0]
    assert post["seeds"] == 2
    assert told("1 of 3 … val/perplexity").search(post["note"])
    assert np.isnan(post["seed 1"])
    assert not np.isnan(post["seed 5"])


def test_the_metric_that_is_asked_for_is_compared(tmp_path: Path) -> None:
    """The loss of a grid of fine-tuning falls with warm-up, and so does the accuracy."""

    def scores(axes: Mapping[str, Any]) -> Scores:
        better = (0.1 + 0.01 * axes[SEED]) * (axes[WARMUP] > 0)
        return {**learned("rte", 0.8 - better, 0.5 - better), "val/f1": 0.5}

    grid = glue_grid(tmp_path / "tuned", scores, {**AXES, "data.name": ["rte"]})
    by_score = compare(grid, axis=WARMUP, baseline=0)
    assert set(by_score["metric"]) == {"val/accuracy"}
    assert set(by_score["reading"]) == {"worse"}
    by_loss = compare(grid, axis=WARMUP, baseline=0, metric="val/nll")
    assert set(by_loss["metric"]) == {"val/nll"}
    assert by_loss["estimate"].tolist() == pytest.approx([-0.135, -0.135])
    with pytest.raises(UserError, match="needs a metric"):
        compare(grid, axis=WARMUP, baseline=0, mode="min")
    # The report of a task with scores compares the warm-up besides; Holm counts its rows too.
    assert set(compare(grid, axis=PRESET, baseline="pre_ln")["axis"]) == {PRESET}


def test_the_metric_decides_which_is_better(grid: FakeGrid) -> None:
    given = {"axis": WARMUP, "baseline": 60, "metric": "val/nll"}
    axes = {**AXES, SEED: list(range(1, 13)), PRESET: ["pre_ln"]}  # one comparison needs many seeds
    many = FakeGrid(grid.folder.parent / "many", typical, axes)
    for mode in (None, "min"):
        assert compare(many.folder, **given, mode=mode)["reading"].tolist()[0] == "worse"
    with pytest.raises(UserError, match=r"metric\.mode: max; expected min, .* val/nll"):
        compare(many.folder, **given, mode="max")
    assert compare(grid.folder, axis=PRESET, baseline="pre_ln")["metric"].unique() == ["val/nll"]
    accuracy = compare(grid.folder, axis=PRESET, baseline="pre_ln", metric="val/accuracy")
    assert set(accuracy["mode"]) == {"max"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"axis": "model.block.preset2", "baseline": 1}, "no axis"),
        ({"axis": SEED, "baseline": 1}, "compare: seed_everything:"),
        ({"axis": PRESET, "baseline": "sas"}, r"\(post_ln, pre_ln\)"),
        ({"axis": PRESET, "baseline": "pre_ln", "metric": "val/acuracy"}, "did you mean"),
        ({"axis": PRESET, "baseline": "pre_ln", "metric": "test/bleu"}, "no run of"),
        ({"axis": PRESET, "baseline": "pre_ln", "mode": "least"}, "expected 'min' or 'max'"),
    ],
)
def test_a_wrong_comparison_is_one_line(grid: FakeGrid, given: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as found:
        compare(grid.folder, **given)
    assert "\n" not in str(found.value)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    single = FakeGrid(tmp_path / "one", typical, {**AXES, PRESET: ["pre_ln"]}).folder
    with pytest.raises(UserError, match="has one value"):
        compare(single, axis=PRESET, baseline="pre_ln")
    pruned = FakeGrid(tmp_path / "pruned", typical, AXES)
    pruned.prune(0)
    with pytest.raises(UserError, match="pruner: median"):
        compare(pruned.folder, axis=PRESET, baseline="pre_ln")


def shown(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> tuple[str, str]:
    assert main(["results", *words]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_the_command_prints_the_same_tables(grid: FakeGrid, capsys) -> None:
    out, _ = shown(capsys, 0, str(grid.folder), "--csv")
    frame = results(grid.folder)
    assert out == frame.to_csv(index=False)
    out, _ = shown(capsys, 0, str(grid.folder))
    assert len(out.splitlines()) == len(frame) + 2
    assert out.endswith("24 runs of mine\n")
    words = ("--compare", f"{WARMUP}=60", "--metric", "val/perplexity", "--csv")
    out, _ = shown(capsys, 0, str(grid.folder), *words)
    expected = compare(grid.folder, axis=WARMUP, baseline=60, metric="val/perplexity")
    printed = pd.read_csv(io.StringIO(out))["estimate"].tolist()
    assert printed == pytest.approx(expected["estimate"].tolist())


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("variant == 'pre_ln'", 12),
        (f"`{PRESET}` == 'pre_ln' and seed <= 2", 4),
        ("`val/nll` < 100", 20),  # no run without a result
        ("`val/nll` != 0", 20),
        ("not (`val/nll` > 100)", 20),
        ("not (seed > 2)", 8),
        ("outcome == 'stalled'", 2),
        ("seed > 99", 0),
    ],
)
def test_a_query_selects_runs(grid: FakeGrid, capsys, query: str, count: int) -> None:
    out, _ = shown(capsys, 0, str(grid.folder), "--query", query, "--csv")
    assert len(out.splitlines()) == count + 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--query", "variant =="), '--query "variant ==": '),
        (("--query", "seed"), "expected a condition"),  # pandas would take rows by number
        (("--query", "@os.getcwd() == 1"), "--query"),
        (("--compare", f"{PRESET}=[", "--metric", "val/nll"), "not valid YAML"),
        (("--compare", f"{PRESET}=pre_ln", "--query", "seed == 1"), "use one of"),
    ],
)
def test_a_wrong_command_is_one_line(grid: FakeGrid, capsys, words: Any, said: str) -> None:
    out, err = shown(capsys, 2, str(grid.folder), *words)
    assert told(said.replace('"', "'")).search(err.replace('"', "'"))
    assert err.count("\n") == 1
    assert out == ""


STAND_IN = """#!/bin/sh
echo "$@" > words
echo "$ABLATE_STORAGE $PYTHONSAFEPATH" > environment
echo "1 of 2 cells"
echo "{error}" >&2
{work}
exit {code}
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    program = folder / "python"
    program.write_text(STAND_IN.format(**{"error": "", "work": "", **how}))
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_grid_runs_as_the_command_does(grid, tmp_path, monkeypatch, capsys, code: int) -> None:
    stand_in(tmp_path, monkeypatch, code=code)
    url = "postgresql://me:secret@host/db"
    frame = run_grid("mine", workers=2, max_time="01:00", retry_failed=True, storage=url)
    words = "-m lightning_app run mine --experiments experiments --workers=2 --max-time=01:00"
    assert Path("words").read_text() == f"{words} --retry-failed\n"
    assert Path("environment").read_text() == f"{url} 1\n"
    assert capsys.readouterr().out.strip() == "1 of 2 cells"
    pd.testing.assert_frame_equal(frame, results("mine"))


def test_a_grid_runs_with_the_plugins_of_the_caller(grid, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "my_parts.py"
    path.write_text("")
    plugins.load(str(path))
    try:
        stand_in(tmp_path, monkeypatch, code=0)
        run_grid("mine")
        words = Path("words").read_text()
        assert words.startswith(f"-m lightning_app --plugin {path} run mine --experiments")
        path.write_text("CHANGED = 1\n")
        with pytest.raises(UserError, match="has changed since"):
            run_grid("mine")
    finally:
        plugins.unload("my_parts")


def test_a_refusal_is_a_mistake_a_crash_none(tmp_path: Path, monkeypatch) -> None:
    stand_in(tmp_path, monkeypatch, code=2, error="ablate: --workers: expected 1 or more, found 0")
    with pytest.raises(UserError, match=r"^--workers: expected 1.*0$"):
        run_grid("demo", workers=0)
    stand_in(tmp_path, monkeypatch, code=3, error="RuntimeError: broken")
    with pytest.raises(RuntimeError, match="code 3: RuntimeError: broken"):
        run_grid("demo")


def test_an_interrupt_stops_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = "trap 'echo kept > kept; exit 130' INT TERM; echo > ready; while :; do sleep 0.05; done"
    stand_in(tmp_path, monkeypatch, code=0, work=work)

    def interrupt() -> None:
        while not Path("ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_grid("demo")
    assert Path("kept").exists()
