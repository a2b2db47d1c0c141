"""Finished cells in further stores: what is copied, and what is refused."""

import errno
import json
import os
import shutil
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
from lightning_app.grids import copies
from lightning_app.grids.copies import copy_found, find_elsewhere
from lightning_app.grids.plan import Grid, expand
from lightning_app.runs.folder import STORE, GridFolder, RunFolder
from lightning_app.runs.records import is_sealed, read_result, sealed
from tests.told import told

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
        run = grid.place(cell)
        shutil.copytree(FORMER / "former" / "runs" / cell.name, run.path, dirs_exist_ok=True)
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
    return Path(shutil.copytree(made.folder.path.parent, tmp_path / "theirs", symlinks=True))


def mine(made: Grid, root: Path, **changes: Any) -> Grid:
    """The same cells in another grid, whose folder is in another folder of experiments."""
    folder = GridFolder(root / "experiments" / "mine")
    spec = replace(made.spec, name="mine", **changes)
    return Grid(spec, folder, replace(made.plan, name="mine"))


def runs_in(results: Path) -> list[RunFolder]:
    return [RunFolder(path) for path in sorted((results / STORE).iterdir())]


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in paths}


def edit(path: Path, change: Edit) -> None:
    tree = yaml.safe_load(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree))


def states(grid: Grid) -> list[str]:
    return [grid.state(cell).state for cell in grid.cells]


def found_in(grid: Grid, *stores: Path) -> list[Path]:
    return list(find_elsewhere(grid, stores).places.values())


def reasons(grid: Grid, store: Path) -> dict[Path, str]:
    return {path: why for _, path, why in find_elsewhere(grid, [store]).refused}


def copy(grid: Grid, store: Path) -> list[str]:
    return copy_found(grid, find_elsewhere(grid, [store]))


def store_of(grid: Grid) -> list[str]:
    store = grid.folder.experiments / STORE
    return sorted(path.name for path in store.iterdir()) if store.is_dir() else []


def test_a_finished_cell_is_copied_whole_and_the_source_stays(
    made: Grid, results: Path, tmp_path: Path
) -> None:
    before = files(results)
    grid = mine(made, tmp_path)
    assert copy(grid, results) == []
    assert states(grid) == ["done", "done"]
    assert files(results) == before
    for cell in grid.cells:
        source = RunFolder(results / STORE / cell.id)
        theirs = {name: content for name, (content, _) in files(source.path).items()}
        ours = {name: content for name, (content, _) in files(grid.run(cell).path).items()}
        record = json.loads(ours.pop("result.json"))
        assert record.pop("taken_from") == str(source.path)
        assert record == json.loads(theirs.pop("result.json"))
        del theirs["grids/source"]  # these grids list the original
        assert ours == theirs
    assert store_of(grid) == sorted(cell.id for cell in grid.cells)
    assert found_in(grid, results) == []  # only once


def test_a_run_that_is_here_is_not_looked_for(made: Grid, results: Path, tmp_path: Path) -> None:
    """Also one that has not finished: two copies of one run would be trained on."""
    grid = mine(made, tmp_path)
    grid.place(grid.cells[0])
    assert found_in(grid, results) == [results / STORE / grid.cells[1].id]


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
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_the_finished_cell_is_refused(
    made: Grid, results: Path, tmp_path: Path, case: str
) -> None:
    change, reason = REFUSED[case]
    first, second = runs_in(results)
    change(first)
    grid = mine(made, tmp_path)
    assert found_in(grid, results) == [second.path]
    assert list(reasons(grid, results)) == [first.path]
    assert reason in reasons(grid, results)[first.path]
    copy(grid, results)
    assert sorted(states(grid)) == ["done", "missing"]


def test_a_sound_run_in_a_second_store_is_used(made: Grid, results: Path, tmp_path: Path) -> None:
    shutil.copytree(results, tmp_path / "others", symlinks=True)
    for run in runs_in(results):
        run.block.unlink()
    found = find_elsewhere(mine(made, tmp_path), [results, tmp_path / "others"])
    assert {path.parents[1].name for path in found.places.values()} == {"others"}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [("last", ["last.ckpt"]), ("best", ["best.ckpt"]), ("none", [])],
)
def test_a_copy_has_the_checkpoints_that_the_grid_keeps(
    made: Grid, results: Path, tmp_path: Path, keep: str, kept: list[str]
) -> None:
    grid = mine(made, tmp_path, checkpoints=keep)
    copy(grid, results)
    for cell in grid.cells:
        assert sorted(path.name for path in grid.run(cell).checkpoints.glob("*")) == kept


def test_what_a_finished_run_lacks_is_named(made: Grid, results: Path, tmp_path: Path) -> None:
    runs_in(results)[0].checkpoint("last").unlink()
    grid = mine(made, tmp_path)
    copy(grid, results)

    def lacking(grid: Grid) -> dict[str, int]:
        found = grid.lacking({cell.id: grid.state(cell) for cell in grid.cells})
        return {name: len(cells) for name, cells in found.items()}

    assert lacking(grid) == {"last.ckpt": 1}
    assert lacking(mine(made, tmp_path, checkpoints="best")) == {}
    base = made.spec.base_config
    probe = {"class_path": "lightning_app.training.callbacks.probes.SignalProbe"}
    probing = {**base, "trainer": {**base["trainer"], "callbacks": [probe]}}
    assert lacking(mine(made, tmp_path, checkpoints="none", base_config=probing)) == {
        "probes.csv": 2
    }
    # Probes of other steps, or others, leave other rows in the same file.
    bare = mine(made, tmp_path, checkpoints="none", base_config=probing)
    for cell in bare.cells:
        run, all_steps = bare.run(cell), {**probe, "init_args": {"steps": None}}
        run.probes.write_text("step\n")
        edit(run.config, lambda t, of=all_steps: t["trainer"].update(callbacks=[of]))
    assert lacking(bare) == {}
    other = {**probe, "init_args": {"steps": [1]}}
    others = {**base, "trainer": {**base["trainer"], "callbacks": [other]}}
    assert lacking(mine(made, tmp_path, checkpoints="none", base_config=others)) == {
        "probes.csv": 2
    }
    saving_none = {**base, "trainer": {**base["trainer"], "enable_checkpointing": False}}
    assert lacking(mine(made, tmp_path, base_config=saving_none)) == {}
    for cell in grid.cells:  # such a run may have left no checkpoint
        path = grid.run(cell).result
        edit(path, lambda t: t.update(outcome="non_finite", metrics={"val/nll": None}))
    assert lacking(grid) == {}


def test_the_folder_of_another_user_may_be_read_only(
    made: Grid, results: Path, tmp_path: Path
) -> None:
    for path in (results, *results.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    grid = mine(made, tmp_path)
    copy(grid, results)
    assert states(grid) == ["done", "done"]
    for path in (grid.folder.experiments, *grid.folder.experiments.rglob("*")):
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
    assert found_in(grid, results) == [other.path]
    assert name in reasons(grid, results)[run.path]


def test_files_that_no_run_writes_are_not_copied(made: Grid, results: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("private key")
    for run in runs_in(results):
        (run.path / "notes.txt").symlink_to(secret)
        (run.path / "evil.html").write_text("<script>")
        (run.path / "attempts" / "more").symlink_to(tmp_path)
    grid = mine(made, tmp_path)
    copy(grid, results)
    assert states(grid) == ["done", "done"]
    copied = {path.name for path in grid.folder.experiments.rglob("*")}
    assert not copied & {"notes.txt", "evil.html", "more", "secret"}


def test_a_linked_run_is_not_copied(made: Grid, results: Path, tmp_path: Path) -> None:
    before = files(results)
    store = tmp_path / "links" / STORE
    store.mkdir(parents=True)
    for run in runs_in(results):
        (store / run.name).symlink_to(run.path)
    grid = mine(made, tmp_path)
    assert found_in(grid, tmp_path / "links") == []
    assert all("link" in why for why in reasons(grid, tmp_path / "links").values())
    assert files(results) == before


def test_a_seal_holds_after_a_run_was_copied(made: Grid, results: Path, tmp_path: Path) -> None:
    """Places are written anew by this program; a seal that does not hold is refused."""
    first, second = runs_in(results)
    for run in (first, second):
        run.result.write_text(json.dumps(sealed(json.loads(run.result.read_text()), run.path)))
    second.metrics.write_text(second.metrics.read_text().replace("1", "2", 1))
    grid = mine(made, tmp_path)
    assert "metrics.csv" in reasons(grid, results)[second.path]
    copy(grid, results)
    here = RunFolder(grid.folder.experiments / STORE / first.name)
    assert is_sealed(read_result(here.result, first.name) or {})


def test_a_run_that_changes_while_it_is_copied_is_left(
    made: Grid, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = runs_in(results)
    grid = mine(made, tmp_path)
    plain = shutil.copyfileobj

    def restarting(source: Any, target: Any) -> None:
        plain(source, target)
        first.environment.write_text("{}")  # sound, but of another attempt than the rest

    monkeypatch.setattr(shutil, "copyfileobj", restarting)
    (line,) = copy(grid, results)
    assert line.startswith(f"{first}: not copied: ")
    assert sorted(states(grid)) == ["done", "missing"]
    assert len(store_of(grid)) == 1


def test_a_run_that_changed_since_the_search_is_checked_again(
    made: Grid, results: Path, tmp_path: Path
) -> None:
    grid = mine(made, tmp_path)
    found = find_elsewhere(grid, [results])
    for run in runs_in(results):
        run.block.unlink()
    assert all("block.json" in line for line in copy_found(grid, found))
    assert states(grid) == ["missing", "missing"]
    assert store_of(grid) == []


def test_a_copy_that_is_cut_short_is_no_finished_cell(
    made: Grid, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = mine(made, tmp_path)

    def killed(source: object, target: object) -> None:
        raise SystemExit  # nothing of this process runs afterwards

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(SystemExit):
            copy(grid, results)
    assert len(store_of(grid)) == 1
    assert states(grid) == ["missing", "missing"]
    copy(grid, results)
    assert states(grid) == ["done", "done"]


def test_a_full_disk_stops_and_leaves_no_part(
    made: Grid, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = mine(made, tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left") as caught:
        copy(grid, results)
    assert caught.value.errno == errno.ENOSPC
    assert store_of(grid) == []


def test_two_copies_of_one_run_leave_one(
    made: Grid, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Supervisors of two grids, whose locks are two, may copy the same run at once."""
    grid = mine(made, tmp_path)
    found = find_elsewhere(grid, [results])
    plain = copies._set_places

    def beaten(*arguments: Any) -> None:
        plain(*arguments)
        monkeypatch.setattr(copies, "_set_places", plain)
        assert copy_found(grid, found) == []

    monkeypatch.setattr(copies, "_set_places", beaten)
    (line,) = copy_found(grid, found)[:1]
    assert "not copied: " in line
    assert states(grid) == ["done", "done"]
    assert store_of(grid) == sorted(cell.id for cell in grid.cells)


def test_a_copy_names_corpus_and_parent_where_they_are_here(
    made: Grid, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id of a run says what these hold, and its config where they were."""
    grid = mine(made, tmp_path)
    found = find_elsewhere(grid, [results])
    (cell, _), (run, _) = grid.cells, runs_in(results)
    cell = next(each for each in grid.cells if each.id == run.name)
    edit(run.config, lambda t: t["model"].update(init_from="elsewhere/runs/x"))
    edit(run.config, lambda t: t["data"].update(root="/of/another/machine"))
    child = replace(cell, parent="parents/runs/x")
    grid = replace(grid, plan=replace(grid.plan, cells=(child,)))
    monkeypatch.setattr(copies, "_check", lambda *_: dict(found.found[cell.id].result or {}))
    assert copy_found(grid, found) == []
    config = yaml.safe_load(grid.run(child).config.read_text())
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
    names = {cell.id: cell.name for cell in made.cells}
    assert document["found_in"] == {names[second.name]: str(second)}
    assert document["refused"] == [
        {"cell": names[first.name], "folder": str(first), "reason": "has no block.json"}
    ]
    assert plan_command(*where) == 0
    text = capsys.readouterr().out
    assert told(f"1 … {results / STORE}: `ablate run`").search(text)
    assert told(f"{first}: not copied: … block.json").search(text)
    assert files(results) == before
    assert not (tmp_path / "experiments" / "mine" / "runs").exists()


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[nowhere]", "results: … {}/nowhere (written 'nowhere')"),
        ("[a_file]", "results: … {}/a_file"),
        ("[no_store]", "results: {}/no_store (written 'no_store') … .runs"),
        ("theirs", "results: … null, found 'theirs'"),
        ("[theirs, 3]", "2: … 3"),
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
    Path("no_store").mkdir()
    assert main([command, "demo"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ablate: {tmp_path}/ablate.yaml: ")
    assert told(said.format(tmp_path)).search(error)
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
