"""`ablate report`: of one grid, of several, and for scripts."""

import csv
import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.commands.grid import plan_command, report_command, status_command
from lightning_app.core.errors import UserError
from lightning_app.report.results import read_results
from lightning_app.report.write import claim, is_current, write
from lightning_app.runs.folder import GridFolder
from lightning_app.runs.locks import if_free
from tests.report.conftest import PRESET, SEED, WARMUP


@pytest.fixture
def grid(make_grid: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A grid file, and the folders that its runs and those of another one would have left."""
    monkeypatch.chdir(tmp_path)
    for name, loss, seeds in (("flat", 2.0, [1, 2]), ("deep", 3.0, [2, 3])):
        axes = {PRESET: ["sas"], WARMUP: [0, 60], SEED: seeds}
        named = {"reference_warmup": 60}
        where = f"experiments/{name}"
        fake = make_grid(lambda _, at=loss: at, axes, name=where, sensitivity=named)
        (tmp_path / f"{name}.yaml").write_text((fake.folder / "grid.yaml").read_text())
    return "flat.yaml"


def test_scripts_read_one_document_with_the_keys_that_are_documented(grid: str, capsys) -> None:
    assert report_command(grid, as_json=True) == 0
    out, error = capsys.readouterr()
    told = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert told["report"] == "experiments/flat/report.html"
    assert (told["grid"], told["cells"], told["states"]["ok"]) == ("flat", 4, 4)
    (row,) = told["headline"]
    assert row["scores"]["delta"]["estimate"] == 0.0
    assert row["scores"]["interaction"]["estimate"] is None  # no baseline
    (verdict,) = told["verdicts"]
    assert (verdict["variant"], verdict["kind"], verdict["estimate"]) == ("sas", "arm", 0.0)
    assert verdict["low"] is None  # no spread
    page = Path(told["report"]).read_text(encoding="utf-8")
    assert f"<h1>{told['answer']}</h1>" in page
    assert "report: experiments/flat/report.html" in error
    assert (set(told), told["command"]) == (documented("report"), "report")
    for command, call in (("plan", plan_command), ("status", status_command)):
        assert call("demo", as_json=True) == 0
        told = json.loads(capsys.readouterr().out)
        assert (set(told), told["command"]) == (documented(command), command)


def documented(command: str) -> set[str]:
    """The keys that docs/json.md names for a command."""
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {command}\n")[1].split("\n## ")[0]
    heads = re.findall(r"^- ([^:]+):", section, re.M)
    return {"schema", "command", *re.findall(r"`(\w+)`", " ".join(heads))}


def test_a_report_or_study_replaces_none_of_another_grid(grid: str) -> None:
    for out in ("experiments/deep", "experiments/deep/runs/mine"):
        with pytest.raises(UserError, match=f"--out: {out}: lies in the folder of the grid deep"):
            report_command(grid, out=Path(out))
    for out in ("experiments/flat", "mine"):
        assert report_command(grid, out=Path(out)) == 0
        assert Path(out, "report.html").is_file()
    with pytest.raises(UserError, match="--publish"):
        report_command(grid, publish_in=Path("experiments/deep"))


def test_a_taken_port_and_results_of_other_cells_are_reported_before_any_work(grid: str) -> None:
    with claim(0) as other, pytest.raises(UserError, match=r"--port: .* in use"):
        report_command(grid, serve=True, port=other.getsockname()[1])
    assert not list(Path("experiments").glob("*/report.html"))
    tree = yaml.safe_load(Path(grid).read_text())
    tree["axes"][WARMUP] = [0, 60, 4000]
    Path(grid).write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match="holds another grid"):
        report_command(grid)
    assert not Path("experiments/flat/report.html").exists()


def test_an_edited_question_is_shown_and_the_path_of_a_folder_asks_for_no_file(grid: str) -> None:
    path = Path(grid)
    tree = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**tree, "question": "Does it matter at all?"}))
    assert report_command(grid) == 0
    assert "Does it matter" in Path("experiments/flat/report.html").read_text()
    Path(grid).write_text("name: another\n")
    assert report_command(Path("experiments/flat")) == 0


def test_one_process_at_a_time_writes_the_report_of_a_grid(grid: str) -> None:
    folder = GridFolder(Path("experiments/flat"))
    with ThreadPoolExecutor() as pool:
        with if_free(folder.report_lock) as free:
            assert free
            waits = pool.submit(report_command, folder.path)
            time.sleep(1.0)
            assert not folder.report.exists()
            run = read_results(folder.path).cells[0].folder
            shutil.move(run, run.with_name("elsewhere"))
        assert waits.result(timeout=240) == 0
    assert is_current(read_results(folder.path), folder.report)
    table = (folder.path / "results.csv").read_text(encoding="utf-8")
    assert [row["status"] for row in csv.DictReader(table.splitlines())].count("ok") == 3


def test_a_page_is_current_by_what_it_is_made_from(grid: str) -> None:
    """Not by the times of files: they may come from another machine, or a clock was set back."""
    assert report_command(grid) == 0
    folder = Path("experiments/flat")
    page = folder / "report.html"
    assert is_current(read_results(folder), page)
    os.utime(page, (0, 0))
    assert is_current(read_results(folder), page)
    os.utime(page, (2**32, 2**32))
    result = sorted(folder.glob("runs/*/result.json"))[0]
    before = result.read_text()
    result.write_text(before.replace('"seconds": ', '"seconds": 1'))
    assert not is_current(read_results(folder), page)
    result.write_text(before)
    assert is_current(read_results(folder), page)
    tree = yaml.safe_load((folder / "grid.yaml").read_text()) | {"question": "Why?"}
    # Of the page that another file of the same cells has: here its question is not asked.
    assert is_current(read_results(folder), page)
    assert not is_current(read_results(folder, tree), page)
    write(read_results(folder, tree), folder)
    assert is_current(read_results(folder, tree), page)
    assert not is_current(read_results(folder), page)
    (folder / "grid.yaml").write_text(yaml.safe_dump(tree))
    assert is_current(read_results(folder), page)


def test_a_folder_that_may_only_be_read_gives_its_document(grid: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    before = sorted(Path().rglob("*"))
    assert report_command(grid, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["report"], told["cells"]) == (None, 4)
    assert sorted(Path().rglob("*")) == before
