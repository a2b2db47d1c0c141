from pathlib import Path

from lightning_app.runs.folder import GridFolder


def test_strays_are_the_finished_runs_that_are_not_planned(tmp_path: Path) -> None:
    folder = GridFolder(tmp_path / "mine")
    assert folder.strays(()) == []
    for name in ("planned", "other", "another", ".copy.part"):
        run = folder.run(name)
        run.path.mkdir(parents=True)
        run.result.write_text("{}")
    folder.run("unfinished").path.mkdir()
    assert [run.name for run in folder.strays({"planned"})] == ["another", "other"]
    names = ["another", "other", "planned", "unfinished"]
    assert [run.name for run in folder.all_runs()] == names
    assert str(folder) == str(tmp_path / "mine")
