"""A published study gives the report of the runs that it comes from, and refuses what is none."""

import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lightning_app.commands.grid import report_command
from lightning_app.core.errors import UserError
from lightning_app.core.files import sha256_of, with_seal
from lightning_app.report.frames import results_frame
from lightning_app.report.packed import PACKED, found_results, unpack
from lightning_app.report.results import read_results
from lightning_app.report.write import publish
from lightning_app.runs.records import is_sealed, sealed
from tests.report.conftest import PRESET, RATE, SEED, WARMUP, FakeGrid, write_report

AXES = {PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60], RATE: [0.004, 0.008], SEED: [1, 2, 3]}


def mixed(axes: Mapping[str, Any]) -> float | str | None:
    """One stalled, one non-finite, one failed, one waiting; the others differ by seed."""
    place = (axes[PRESET], axes[WARMUP], axes[RATE], axes[SEED])
    odd = {
        ("post_ln", 0, 0.008, 1): 4.49,
        ("post_ln", 0, 0.008, 2): None,
        ("pre_ln", 0, 0.008, 1): "failed",
        ("pre_ln", 60, 0.008, 2): "waiting",
    }
    need = 0.4 * (axes[PRESET] == "post_ln" and axes[WARMUP] == 0)
    return odd.get(place, 2.0 + need + 0.05 * axes[SEED] + 10 * axes[RATE])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a grid, `demo`, and of the published `study`."""
    folder = tmp_path_factory.mktemp("made")
    publish(read_results(FakeGrid(folder / "demo", mixed, AXES).folder), folder / "study")
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """The folder of the runs."""
    return shutil.copytree(made / "demo", tmp_path / "demo")


@pytest.fixture
def study(made: Path, tmp_path: Path) -> Path:
    """The folder of the published study."""
    return shutil.copytree(made / "study", tmp_path / "study")


def test_the_report_of_a_published_study_has_the_numbers_of_its_runs(runs, study, tmp_path, capsys):
    experiments = tmp_path / "elsewhere"
    assert report_command(str(study), experiments) == 0
    assert f"report: {experiments / 'demo' / 'report.html'}" in capsys.readouterr().out
    first, second = tmp_path / "first", experiments / "demo"
    write_report(runs, first, figures=False)
    for name in ("sensitivity.csv", "validations.csv"):
        text = (second / name).read_text()
        kept = [line for line in (first / name).read_text().splitlines() if ",failed," not in line]
        assert text.splitlines() == kept, name
        assert len(kept) > 30
    assert (study / "sensitivity.csv").read_text() == (second / "sensitivity.csv").read_text()
    table, whole = results_frame(read_results(runs)), pd.read_parquet(study / "results.parquet")
    pd.testing.assert_frame_equal(whole, table)
    results = [name for name in texts_of(study / PACKED) if name.endswith("/result.json")]
    assert len(results) == len(table) - 2  # one failed, one waits


def test_a_study_is_published_in_the_same_bytes_each_time(runs: Path, study, tmp_path) -> None:
    publish(read_results(runs), tmp_path / "again")
    restored = unpack(study / PACKED, tmp_path / "elsewhere")
    publish(read_results(restored.path), tmp_path / "from its folder")
    names = sorted(path.name for path in study.iterdir())
    looks = ["headline-dark.svg", "headline-light.svg"]
    assert names == [*looks, "results.parquet", "runs.tar.xz", "sensitivity.csv"]
    for name in names:
        assert (study / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    assert (study / PACKED).read_bytes() == (tmp_path / "from its folder" / PACKED).read_bytes()


def test_a_folder_is_that_of_a_study_with_the_same_results(runs, study, tmp_path) -> None:
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    assert unpack(study / PACKED, runs.parent).path == runs
    assert before == {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    assert not list(tmp_path.glob(".unpacking-*"))
    waiting = next(cell for cell in read_results(runs).cells if cell.state == "waiting")
    waiting.folder.mkdir(exist_ok=True)
    (waiting.folder / "result.json").write_text("{}")
    with pytest.raises(UserError, match=rf"{waiting.name} has ended there, but not in "):
        unpack(study / PACKED, runs.parent)
    (waiting.folder / "result.json").unlink()
    result = sorted(runs.rglob("result.json"))[0]
    result.write_text(result.read_text().replace("204800", "204801"))
    with pytest.raises(UserError, match=r"demo: runs/.*/result\.json.*study"):
        unpack(study / PACKED, runs.parent)
    assert "204801" in result.read_text()


def holding(name: str, text: bytes = b"") -> Callable[[Path], None]:
    return lambda path: repacked(path, lambda texts: texts.update({name: text}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "cannot be read"),
        (lambda path: path.write_bytes(b"text"), "cannot be read"),
        (lambda path: repacked(path, lambda texts: texts.pop("grid.yaml")), "holds no grid.yaml"),
        (lambda path: changed(path, lambda plan: plan["cells"].pop()), "not those of its plan"),
        (lambda path: added(path, tarfile.SYMTYPE, linkname="/etc/passwd"), "is no file of a"),
        (lambda path: added(path, tarfile.LNKTYPE, linkname="plan.json"), "is no file of a"),
        (lambda path: added(path, tarfile.DIRTYPE), "is no file of a"),
        *((holding(of), "is no file of a") for of in ("../out", "/tmp/out", "runs/../config.yaml")),
        (lambda p: changed(p, lambda of: of["cells"][0].update(name="../../out")), "the name of"),
        (lambda path: changed(path, lambda plan: plan.update(name="../out")), "name: expected"),
        (lambda path: changed(path, lambda plan: plan.update(schema=99)), "newer version"),
    ],
)
def test_a_wrong_archive_is_refused(study, tmp_path, damage, message):
    damage(study / PACKED)
    with pytest.raises(UserError, match=message):
        unpack(study / PACKED, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "out").exists()


def texts_of(path: Path) -> dict[str, bytes]:
    """The files of a packed grid."""
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read() for name, file in files.items() if file is not None}


def repacked(path: Path, change: Callable[..., object], *more: tarfile.TarInfo) -> None:
    """Change the files of a packed grid."""
    texts = texts_of(path)
    change(texts)
    with tarfile.open(path, "w:xz") as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
        for member in more:
            archive.addfile(member)


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the plan of a packed grid."""

    def of(texts: dict[str, bytes]) -> None:
        plan = json.loads(texts["plan.json"])
        change(plan)
        texts["plan.json"] = json.dumps(plan).encode()

    repacked(path, of)


def added(path: Path, kind: bytes, linkname: str = "") -> None:
    """Add a link or a folder in the place of a file of a run."""
    name = next(name for name in texts_of(path) if name.endswith("/config.yaml"))
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, linkname
    repacked(path, lambda texts: texts.pop(name), member)


def seal_all(runs: Path) -> None:
    for path in (*runs.glob("runs/*/result.json"), *runs.glob("runs/*/pruned.json")):
        path.write_text(json.dumps(sealed(json.loads(path.read_text()), path.parent), indent=1))
    plan, file = runs / "plan.json", runs / "grid.yaml"
    digests = {file.name: sha256_of(file.read_bytes())}
    plan.write_text(json.dumps(with_seal(json.loads(plan.read_text()), digests)))


def test_seals_survive_publishing_and_folders_of_commands_are_left_out(runs: Path, tmp_path):
    words = ["ablate", "run", "/home/me/grid.yaml", "--data.root=/mnt/a b/corpus", "a/b.yaml"]
    words.append('--logger={"dir": "/home/me/logs", "url": "http://a/b"}')
    for path in runs.glob("runs/*/result.json"):
        tree = json.loads(path.read_text())
        tree["provenance"] = {**tree.get("provenance", {}), "command": words}
        path.write_text(json.dumps(tree))
        path.with_name("env.json").write_text(json.dumps({"provenance": {"command": words}}))
    seal_all(runs)
    grid = read_results(runs)
    publish(grid, tmp_path / "study")
    assert unpack(tmp_path / "study" / PACKED, runs.parent).path == runs  # that it comes from
    there = unpack(tmp_path / "study" / PACKED, tmp_path / "there").path
    restored = read_results(there)
    one, two = ({c.name: c.state for c in of.cells if c.finished} for of in (grid, restored))
    assert one == two
    assert all(is_sealed(cell.record) for cell in restored.finished)
    shown = ["ablate", "run", "grid.yaml", "--data.root=corpus", "a/b.yaml"]
    shown.append('--logger={"dir": "logs", "url": "http://a/b"}')
    for name in ("result.json", "env.json"):
        records = [json.loads(path.read_text()) for path in there.glob(f"runs/*/{name}")]
        assert [tree["provenance"]["command"] for tree in records] == [shown] * len(records)
        assert records
    publish(restored, tmp_path / "again")
    again = read_results(unpack(tmp_path / "again" / PACKED, tmp_path / "elsewhere").path)
    assert [cell.record for cell in again.cells] == [cell.record for cell in restored.cells]


def test_an_edited_grid_file_or_plan_of_sealed_results_is_refused(runs: Path) -> None:
    """Another direction or baseline would give another answer without a sign of it."""
    seal_all(runs)
    plan, file = runs / "plan.json", runs / "grid.yaml"
    text = file.read_text()
    assert "mode: min" in text
    file.write_text(text.replace("mode: min", "mode: max"))
    with pytest.raises(UserError, match=r"grid\.yaml"):
        read_results(runs)
    file.write_text(text)
    assert read_results(runs).mode == "min"
    tree = json.loads(plan.read_text())
    cells = tree["cells"]
    cells[0]["axes"], cells[-1]["axes"] = cells[-1]["axes"], cells[0]["axes"]
    del tree["seal"]
    plan.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"plan\.json.* seal"):
        read_results(runs)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", ["result.json", "metrics.csv", "config.yaml", "env.json"])
def test_an_edited_cell_of_a_published_study_is_damaged(runs: Path, tmp_path: Path, name) -> None:
    for config in runs.glob("runs/*"):
        (config / "env.json").write_text('{"threads": 1}')
    seal_all(runs)
    publish(read_results(runs), tmp_path / "study")
    path = tmp_path / "study" / PACKED
    texts = texts_of(path)
    where = next(of for of, text in texts.items() if of.endswith(name) and re.search(rb"\d", text))
    text = texts[where].decode()
    places = [found.start() for found in re.finditer(r"\d", text)]
    last = places[20 if name == "result.json" else -1]
    changed_text = text[:last] + ("7" if text[last] != "7" else "8") + text[last + 1 :]
    repacked(path, lambda texts: texts.update({where: changed_text.encode()}))
    with found_results(tmp_path / "study", tmp_path) as found:
        damaged = [cell for cell in found.grid.cells if cell.state == "damaged"]
        assert [cell.name for cell in damaged] == [where.split("/")[1]]
        assert damaged[0].result is None


def test_a_study_is_neither_mixed_with_a_grid_nor_overwritten(runs, study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs, tmp_path / "experiments" / study.name)
    here = Path("experiments")
    with pytest.raises(UserError, match=r"is the published"), found_results(study.name, here):
        pass
    with found_results(here / study.name, here) as found:
        assert not found.restored
    with found_results(study, here) as found:
        assert found.restored
    before = (study / PACKED).read_bytes()
    with pytest.raises(UserError, match=r"--out: .*holds a published study"):
        report_command(str(study), experiments=tmp_path / "elsewhere", out=study)
    assert (study / PACKED).read_bytes() == before
    with pytest.raises(UserError, match=r"--publish: .*: holds the study demo"):
        publish(replace(read_results(runs), name="other"), study)
    assert (study / PACKED).read_bytes() == before
    publish(read_results(runs), study)


def test_no_file_of_the_user_is_removed_and_no_link_kept(runs: Path, tmp_path: Path) -> None:
    own = {"headline-news.txt", "comparisons.csv", "effects.csv", "failed_runs.csv"}
    for name in own:
        (tmp_path / name).write_text("mine")
    publish(read_results(runs), tmp_path)
    assert {name for name in own if (tmp_path / name).read_text() == "mine"} == own
    secret = tmp_path / "secret"
    secret.write_text("private: key\n")
    config = next(iter(sorted(runs.glob("runs/*/result.json")))).with_name("config.yaml")
    config.unlink(missing_ok=True)
    config.symlink_to(secret)
    with pytest.raises(UserError, match="link"):
        publish(read_results(runs), tmp_path / "study")
