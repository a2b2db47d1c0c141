"""Finished cells in the folders that a project lists: what is copied, and what is refused."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.cli import main
from lightning_app.commands.grid import plan_command
from lightning_app.config.config import resolve
from lightning_app.config.experiment import identity_of
from lightning_app.config.grid import read_spec
from lightning_app.core.project import read_project
from lightning_app.grids import takeover
from lightning_app.grids.plan import Grid, expand
from lightning_app.grids.supervisor import current_grid
from lightning_app.grids.takeover import find_finished, refusals, take_over
from lightning_app.runs.folder import GridFolder, RunFolder
from lightning_app.runs.locks import supervisor_lock, turn
from lightning_app.runs.records import is_sealed, read_result, sealed

FORMER = Path(__file__).parent / "made_at_4ea995c"
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    """A grid of two cells that are finished: trained at commit 4ea995c."""
    root = tmp_path_factory.mktemp("made")
    tree = yaml.safe_load((FORMER / "former.yaml").read_text()) | {"name": "source"}
    tree["axes"]["model.schedule.warmup_steps"] = [2]
    (root / "source.yaml").write_text(yaml.safe_dump(tree))
    spec = read_spec(root / "source.yaml")
    folder = GridFolder(root / "experiments" / "source")
    plan = expand(spec, resolve, identity_of)[0]
    grid = Grid(spec, folder, plan)
    for cell in grid.cells:
        run = grid.run(cell)
        shutil.copytree(FORMER / "former" / "runs" / cell.name, run.path)
        run.tokenizer.write_text("a tokenizer")
        run.checkpoints.mkdir()
        for name in ("last", "best"):
            run.checkpoint(name).write_text(name)
        result = json.loads(run.result.read_text())
        made = {"code": "a", "libraries": {"torch": "2"}, "plugins_used": {}}
        run.result.write_text(json.dumps(result | {"provenance": made}))
    grid.save()
    return grid


@pytest.fixture
def results(made: Grid, tmp_path: Path) -> Path:
    """A folder of experiments with that grid, which a test may damage."""
    return Path(shutil.copytree(made.folder.path.parent, tmp_path / "theirs"))


def mine(made: Grid, root: Path, **changes: Any) -> Grid:
    """The same cells in another grid, whose folder is in another folder of experiments."""
    folder = GridFolder(root / "experiments" / "mine")
    spec = replace(made.spec, name="mine", **changes)
    return Grid(spec, folder, replace(made.plan, name="mine"))


def runs_in(results: Path) -> list[RunFolder]:
    return GridFolder(results / "source").all_runs()


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in paths}


def edit(path: Path, change: Edit) -> None:
    tree = yaml.safe_load(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree))


def states(grid: Grid) -> list[str]:
    return [grid.state(cell).state for cell in grid.cells]


def test_a_finished_cell_is_copied_whole_and_the_source_stays(
    made: Grid, results: Path, tmp_path: Path
) -> None:
    before = files(results)
    grid = mine(made, tmp_path)
    found, refused = find_finished(grid, [results])
    assert refused == []
    assert take_over(grid, found) == [f"2 cells are finished in {results / 'source'}: taken over"]
    assert states(grid) == ["done", "done"]
    assert files(results) == before
    for cell in grid.cells:
        copy, source = grid.run(cell), RunFolder(results / "source" / "runs" / cell.name)
        theirs = {name: content for name, (content, _) in files(source.path).items()}
        ours = {name: content for name, (content, _) in files(copy.path).items()}
        record = json.loads(ours.pop("result.json"))
        assert record.pop("taken_from") == str(source.path)
        assert record == json.loads(theirs.pop("result.json"))
        assert ours == theirs
    assert [path.name for path in sorted(grid.folder.runs.iterdir())] == sorted(
        cell.name for cell in grid.cells
    )
    assert find_finished(grid, [results]).found == []


def test_the_folder_of_one_grid_may_be_named(made: Grid, results: Path, tmp_path: Path) -> None:
    assert len(find_finished(mine(made, tmp_path), [results / "source"]).found) == 2
    assert find_finished(mine(made, tmp_path), [tmp_path]).found == []  # one level too high


def test_a_run_of_the_same_experiments_is_named_by_its_grid(made: Grid, tmp_path: Path) -> None:
    shutil.copytree(made.folder.path, tmp_path / "experiments" / "source")
    grid = mine(made, tmp_path)
    # The output root among the results changes nothing.
    found, refused = find_finished(grid, [tmp_path / "experiments", tmp_path / "experiments"])
    assert len(found) == 2
    assert refused == []
    take_over(grid, found[:1])
    (tmp_path / "experiments" / "source" / "runs" / grid.cells[1].name / "block.json").unlink()
    assert len(find_finished(grid, [tmp_path / "experiments"]).refused) == 1
    record = json.loads(grid.run(grid.cells[0]).result.read_text())
    assert record["taken_from"] == f"source/{grid.cells[0].name}"


def rewrite(name: str, old: str, new: str) -> Callable[[RunFolder], object]:
    def change(run: RunFolder) -> None:
        text = (run.path / name).read_text()
        assert old in text
        (run.path / name).write_text(text.replace(old, new))

    return change


def without(*names: str) -> Callable[[RunFolder], object]:
    return lambda run: [(run.path / name).unlink() for name in names]


def edited(name: str, change: Edit) -> Callable[[RunFolder], object]:
    return lambda run: edit(run.path / name, change)


def not_finite_at_last(run: RunFolder) -> None:
    *rows, last = (line.split(",") for line in run.metrics.read_text().splitlines())
    last[rows[0].index("val/nll")] = "nan"
    run.metrics.write_text("".join(f"{','.join(row)}\n" for row in (*rows, last)))


REFUSED = {
    "unfinished": (without("result.json"), "not finished: has no result.json"),
    "pruned": (
        lambda run: run.result.rename(run.pruned),
        "was ended by the pruner of its grid: has no result.json",
    ),
    "torn result": (rewrite("result.json", "}", ""), "result.json: torn or damaged"),
    "another id": (edited("result.json", lambda t: t.update(id="0" * 16)), "result.json: id: "),
    "newer": (edited("result.json", lambda t: t.update(schema=99)), "made by a newer version"),
    "no metric": (
        edited(
            "result.json",
            lambda t: t.update(status="ok", diverged=None, outcome="trained", metrics={}),
        ),
        "result.json: reports no finite 'val/nll'",
    ),
    "contradiction": (edited("result.json", lambda t: t.update(status="ok")), "contradict"),
    "edited identity": (
        edited("identity.json", lambda t: t["config"].update({"trainer.max_steps": 3})),
        "identity.json is of another experiment than result.json",
    ),
    "another corpus": (
        edited("identity.json", lambda t: t.update(corpus="0" * 64)),
        "identity.json is of another experiment than result.json",
    ),
    "another plug-in": (
        edited("identity.json", lambda t: t["config"].update({"plugins.mine": "0" * 64})),
        "identity.json is of another experiment than result.json",
    ),
    "damaged identity": (rewrite("identity.json", "{", "["), "identity.json: damaged"),
    "other steps": (
        edited("config.yaml", lambda t: t["trainer"].update(max_steps=200)),
        "cut short at 4 of 200 steps",
    ),
    "other callbacks": (
        edited("config.yaml", lambda t: t["trainer"].update(callbacks=[{"class_path": "x.Y"}])),
        "config.yaml and identity.json differ in trainer.callbacks",
    ),
    "a parent": (
        edited("config.yaml", lambda t: t["model"].update(init_from="elsewhere")),
        "config.yaml and identity.json differ in model.init_from",
    ),
    "torn config": (lambda run: run.config.write_text("[torn"), "config.yaml: torn or damaged"),
    "half a config": (lambda run: run.config.write_text("model: 1\n"), "do not agree"),
    "other blocks": (
        edited("block.json", lambda t: t["encoder"].update(final_norm="rms_norm")),
        "block.json and identity.json are of different blocks",
    ),
    "other plug-ins": (
        edited("result.json", lambda t: t["provenance"].update(plugins_used={"own": "0" * 64})),
        "result.json and identity.json are of different plug-ins",
    ),
    "other data": (
        edited("result.json", lambda t: t["data"].update(name="iwslt14")),
        "result.json and config.yaml are of different data",
    ),
    "no curves": (without("metrics.csv"), "has no metrics.csv"),
    "torn curves": (
        lambda run: run.metrics.write_bytes(run.metrics.read_bytes()[:-4]),
        "metrics.csv: torn",
    ),
    "short curves": (
        lambda run: run.metrics.write_text(
            "".join(run.metrics.read_text().splitlines(keepends=True)[:-1])
        ),
        "metrics.csv has no val/nll at the last step of result.json",
    ),
    "other curves": (
        edited("result.json", lambda t: t["metrics"].update({"val/nll": 3.0})),
        "metrics.csv has another val/nll at the last step of result.json",
    ),
    "curves that are not finite": (
        not_finite_at_last,
        "metrics.csv has another val/nll at the last step of result.json",
    ),
    "no tokenizer": (without("tokenizer.model"), "has no tokenizer.model, which this grid keeps"),
    "no last": (
        without("checkpoints/last.ckpt"),
        "has no last.ckpt, which this grid keeps (checkpoints: all)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_the_finished_cell_is_refused(
    made: Grid, results: Path, tmp_path: Path, case: str
) -> None:
    change, reason = REFUSED[case]
    first, second = runs_in(results)
    change(first)
    grid = mine(made, tmp_path)
    found, refused = find_finished(grid, [results])
    assert [each.folder.path for each in found] == [second.path]
    (line,) = refusals(refused)
    assert line.startswith(f"{first}: not used: ")
    assert reason in line
    take_over(grid, found)
    assert sorted(states(grid)) == ["done", "missing"]


def test_runs_that_are_refused_for_one_reason_have_one_line(
    made: Grid, results: Path, tmp_path: Path
) -> None:
    for run in runs_in(results):
        run.block.unlink()
    (line,) = refusals(find_finished(mine(made, tmp_path), [results]).refused)
    runs = results / "source" / "runs"
    assert line.startswith(f"{runs}: 2 runs not used, such as ")
    assert line.endswith(": has no block.json")


def test_a_second_sound_run_of_a_cell_is_used(made: Grid, results: Path, tmp_path: Path) -> None:
    shutil.copytree(results / "source", results / "another")
    for run in runs_in(results):
        run.block.unlink()
    found, refused = find_finished(mine(made, tmp_path), [results])
    assert {each.grid.name for each in found} == {"another"}
    assert refused == []  # nothing is missing because of the damaged ones


@pytest.mark.parametrize(
    ("keep", "there", "kept"),
    [
        ("last", ["last"], ["last.ckpt"]),
        ("last", ["best"], None),
        ("best", ["best", "last"], ["best.ckpt"]),
        ("best", ["last"], None),
        ("all", ["best"], None),
        ("none", ["best", "last"], []),
        ("none", [], []),
    ],
)
def test_a_copy_has_the_checkpoints_that_the_grid_keeps(
    made: Grid, results: Path, tmp_path: Path, keep: str, there: list[str], kept: list[str] | None
) -> None:
    for run in runs_in(results):
        for name in {"last", "best"} - {*there}:
            run.checkpoint(name).unlink()
    grid = mine(made, tmp_path, checkpoints=keep)
    found, refused = find_finished(grid, [results])
    take_over(grid, found)
    if kept is None:
        assert len(refused) == 2
        assert states(grid) == ["missing", "missing"]
        return
    for cell in grid.cells:
        assert sorted(path.name for path in grid.run(cell).checkpoints.glob("*")) == kept


def test_no_checkpoint_is_asked_of_a_run_that_could_not_leave_one(
    made: Grid, results: Path, tmp_path: Path
) -> None:
    for run in runs_in(results):
        shutil.rmtree(run.checkpoints)
    grid = mine(made, tmp_path)
    assert find_finished(grid, [results]).found == []
    trainer = {**grid.spec.base_config["trainer"], "enable_checkpointing": False}
    saving_none = mine(made, tmp_path, base_config={**grid.spec.base_config, "trainer": trainer})
    assert len(find_finished(saving_none, [results]).found) == 2
    for run in runs_in(results):
        edit(run.result, lambda t: t.update(outcome="non_finite", metrics={"val/nll": None}))
    assert len(find_finished(grid, [results]).found) == 2


def test_a_grid_that_probes_takes_only_runs_with_probes(
    made: Grid, results: Path, tmp_path: Path
) -> None:
    probe = {"class_path": "lightning_app.training.callbacks.probes.SignalProbe"}
    base = made.spec.base_config
    grid = mine(
        made, tmp_path, base_config={**base, "trainer": {**base["trainer"], "callbacks": [probe]}}
    )
    run, _ = runs_in(results)
    run.probes.write_text("step,quantity,stack,layer,head,value\n1,cosine,encoder,1,,0.5\n")
    found, refused = find_finished(grid, [results])
    assert [each.folder.path for each in found] == [run.path]
    assert "has no probes.csv" in refused[0].reason


def test_what_the_grid_has_superseded_does_not_come_back(
    made: Grid, results: Path, tmp_path: Path
) -> None:
    grid = mine(made, tmp_path)
    take_over(grid, find_finished(grid, [results]).found)
    aside = grid.folder.superseded / grid.cells[0].name
    aside.parent.mkdir()
    grid.run(grid.cells[0]).path.rename(aside)
    found, refused = find_finished(grid, [results])
    assert found == []
    assert [each.reason for each in refused] == ["this grid has superseded it (--rerun-stale)"]
    edit(RunFolder(aside).result, lambda t: t.update(finished="2020-01-01T00:00:00+00:00"))
    assert len(find_finished(grid, [results]).found) == 1  # that was another run of the cell


def test_the_folder_of_another_user_may_be_read_only(
    made: Grid, results: Path, tmp_path: Path
) -> None:
    for path in (results, *results.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    grid = mine(made, tmp_path)
    take_over(grid, find_finished(grid, [results]).found)
    for path in (grid.folder.path, *grid.folder.path.rglob("*")):
        assert path.stat().st_mode & 0o200, path
    for path in (results, *results.rglob("*")):  # so that it can be removed
        path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.parametrize("name", ["checkpoints", "metrics.csv", "attempts", "env.json"])
def test_nothing_is_copied_through_a_link_or_from_a_pipe(
    made: Grid, results: Path, tmp_path: Path, name: str
) -> None:
    """It may lead to a private file, or never end."""
    run, other = runs_in(results)
    if name == "env.json":
        run.environment.unlink()
        os.mkfifo(run.environment)
    else:
        (run.path / name).rename(tmp_path / "elsewhere")
        (run.path / name).symlink_to(tmp_path / "elsewhere")
    grid = mine(made, tmp_path)
    found, refused = find_finished(grid, [results])
    assert [each.folder.path for each in found] == [other.path]
    assert [name in each.reason for each in refused] == [True]


def test_files_that_no_run_writes_are_not_copied(made: Grid, results: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("private key")
    for run in runs_in(results):
        (run.path / "notes.txt").symlink_to(secret)
        (run.path / "evil.html").write_text("<script>")
        (run.path / "attempts" / "more").symlink_to(tmp_path)
    grid = mine(made, tmp_path)
    take_over(grid, find_finished(grid, [results]).found)
    assert states(grid) == ["done", "done"]
    copied = {path.name for path in grid.folder.path.rglob("*")}
    assert not copied & {"notes.txt", "evil.html", "more", "secret"}


def test_a_linked_run_is_not_copied(made: Grid, results: Path, tmp_path: Path) -> None:
    before = files(results)
    grid = mine(made, tmp_path)
    grid.folder.runs.mkdir(parents=True)
    for run in runs_in(results):
        (grid.folder.runs / f"old-{run.name[-8:]}").symlink_to(run.path)
    found, refused = find_finished(grid)
    assert not found
    assert all("link" in each.reason for each in refused)
    assert files(results) == before


def test_a_seal_holds_after_a_run_was_copied(made: Grid, results: Path, tmp_path: Path) -> None:
    """Name, id and places are written anew by this program; one that does not hold is refused."""
    first, second = runs_in(results)
    for run in (first, second):
        run.result.write_text(json.dumps(sealed(json.loads(run.result.read_text()), run.path)))
    second.metrics.write_text(second.metrics.read_text().replace("1", "2", 1))
    grid = mine(made, tmp_path)
    found, refused = find_finished(grid, [results])
    take_over(grid, found)
    copy = grid.folder.run(first.name)
    assert is_sealed(read_result(copy.result, json.loads(copy.result.read_text())["id"]) or {})
    assert ["metrics.csv" in each.reason for each in refused] == [True]


def test_a_run_that_changes_while_it_is_copied_is_left(
    made: Grid, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = runs_in(results)
    grid = mine(made, tmp_path)
    found, _ = find_finished(grid, [results])
    copy = shutil.copyfileobj

    def restarting(source: Any, target: Any) -> None:
        copy(source, target)
        first.environment.write_text("{}")  # sound, but of another attempt than the rest

    monkeypatch.setattr(shutil, "copyfileobj", restarting)
    lines = take_over(grid, found)
    assert lines[0] == f"1 cells are finished in {results / 'source'}: taken over"
    assert lines[1].startswith(f"{first}: not copied: ")
    assert sorted(states(grid)) == ["done", "missing"]
    assert len(list(grid.folder.runs.iterdir())) == 1


def test_a_run_that_changed_since_the_search_is_checked_again(
    made: Grid, results: Path, tmp_path: Path
) -> None:
    grid = mine(made, tmp_path)
    found, _ = find_finished(grid, [results])
    first, second = runs_in(results)
    first.checkpoint("last").unlink()
    second.block.unlink()
    said = dict(line.split(": not copied: ") for line in take_over(grid, found))
    assert said[str(second)] == f"has no block.json; the cell {second.name} runs"
    assert said[str(first)].startswith("has no last.ckpt, which this grid keeps")
    assert states(grid) == ["missing", "missing"]
    assert list(grid.folder.runs.glob("*")) == []


def test_a_copy_that_is_cut_short_is_no_finished_cell(
    made: Grid, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = mine(made, tmp_path)
    found, _ = find_finished(grid, [results])

    def killed(source: object, target: object) -> None:
        raise SystemExit  # nothing of this process runs afterwards

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", killed)
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(SystemExit):
            take_over(grid, found)
    (left,) = grid.folder.runs.iterdir()
    assert (left / "result.json").is_file()
    assert states(grid) == ["missing", "missing"]
    assert grid.folder.all_runs() == []
    assert grid.folder.strays([]) == []
    (grid.folder.runs / ".of another cell.part").mkdir()
    take_over(grid, find_finished(grid, [results]).found)
    assert states(grid) == ["done", "done"]
    assert {path.name for path in grid.folder.runs.iterdir()} == {c.name for c in grid.cells}


def test_a_full_disk_stops_and_leaves_no_part(
    made: Grid, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = mine(made, tmp_path)
    found, _ = find_finished(grid, [results])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left") as caught:
        take_over(grid, found)
    assert caught.value.errno == errno.ENOSPC
    assert list(grid.folder.runs.iterdir()) == []


def test_two_supervisors_copy_a_cell_once(
    made: Grid, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = mine(made, tmp_path)
    grid.save()
    copied: list[str] = []
    take = takeover.check_finished

    def noted(folder: RunFolder, *args: Any, **kwargs: Any) -> Any:
        if not folder.name.startswith("."):  # the check of what was found, not of the copy
            copied.append(folder.name)
        return take(folder, *args, **kwargs)

    monkeypatch.setattr(takeover, "check_finished", noted)
    both, seen = threading.Barrier(2), []

    def supervise() -> None:
        with turn(grid.folder.start_lock, lambda: False, "waiting"):
            held = supervisor_lock(grid.folder, "a database", several=True)
            alone = held.__enter__()
            plan = grid.plan
            made_here = current_grid(
                grid.spec, grid.folder, lambda: plan, alone, lambda _: plan.corpora[0], [results]
            )
            seen.append((alone, states(made_here)))
        both.wait(60)
        held.__exit__(None, None, None)

    # The plan of the second must be valid: both have the same.
    monkeypatch.setattr("lightning_app.grids.supervisor.is_valid", lambda *_, **__: True)
    threads = [threading.Thread(target=supervise) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(seen) == [(False, ["done", "done"]), (True, ["done", "done"])]
    assert len(copied) == 2


def test_a_copy_names_corpus_and_parent_where_they_are_here(
    made: Grid, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id of a run says what these hold, and its config where they were."""
    grid = mine(made, tmp_path)
    found, _ = find_finished(grid, [results])
    each = found[0]
    edit(each.folder.config, lambda t: t["model"].update(init_from="elsewhere/runs/x"))
    edit(each.folder.config, lambda t: t["data"].update(root="/of/another/machine"))
    child = replace(each, cell=replace(each.cell, parent="parents/runs/x"))
    monkeypatch.setattr(takeover, "check_finished", lambda *_, **__: each.result)
    take_over(grid, [child])
    config = yaml.safe_load(grid.run(child.cell).config.read_text())
    here = str(grid.folder.path.parent / "parents/runs/x")
    assert (config["model"]["init_from"], config["data"]["init_from"]) == (here, here)
    assert config["data"]["root"] is None


def test_a_plan_says_what_is_finished_elsewhere(
    made: Grid,
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = runs_in(results)
    first.block.unlink()
    tree = made.spec.tree() | {"name": "mine"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    before = files(results)
    where = (tmp_path / "mine.yaml", tmp_path / "experiments")
    monkeypatch.chdir(tmp_path)
    Path("ablate.yaml").write_text(f"results: [{results}]\n")
    assert plan_command(*where, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["elsewhere"] == document["states"]["done"] == 1
    assert document["found_in"] == {second.name: str(second)}
    assert document["refused"] == [
        {"cell": first.name, "folder": str(first), "reason": "has no block.json"}
    ]
    assert plan_command(*where) == 0
    text = capsys.readouterr().out
    assert "1 of them finished under another name: `ablate run` takes them over" in text
    assert f"1 of these in {results / 'source'}: copied from there" in text
    assert f"{first}: not used: has no block.json" in text
    assert files(results) == before
    assert not (tmp_path / "experiments" / "mine" / "runs").exists()


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[nowhere]", "results: there is no folder {}/nowhere (written 'nowhere')"),
        ("[a_file]", "results: there is no folder {}/a_file"),
        ("theirs", "results: expected a list or null, found 'theirs'"),
        ("[theirs, 3]", "results entry 2: expected a text, found 3"),
    ],
)
def test_a_wrong_list_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    written: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ablate.yaml").write_text(f"results: {written}\n")
    Path("a_file").touch()
    assert main([command, "demo"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ablate: {tmp_path}/ablate.yaml: ")
    assert said.format(tmp_path) in error
    assert error.count("\n") == 1
    assert not Path("experiments").exists()


def test_folders_are_relative_to_the_project_or_to_the_home(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "ablate.yaml").write_text("results: [../theirs, ~/theirs]\n")
    found = read_project(tmp_path / "mine").folders_of_results()
    assert [folder.resolve() for folder in found] == [results, results]
