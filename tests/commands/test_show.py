"""`ablate show` and `ablate diff`: what the folders of runs say, and how two of them differ."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lightning_app.commands.recorded import read_run
from lightning_app.commands.run import compare_runs, differing
from tests.records import reseal
from tests.tables import changed

pytestmark = pytest.mark.xdist_group("trained")


@pytest.fixture(autouse=True)
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    """A copy of the run `mine/one`, to be changed."""
    return Path(shutil.copytree("experiments/mine/runs/one", tmp_path / "copy"))


def test_a_run_is_described_as_its_files_say(printed) -> None:
    result = json.loads(Path("experiments/mine/runs/one/result.json").read_text())
    tree = json.loads(printed("show", "mine/one", "--json"))
    assert (tree["schema"], tree["command"]) == (1, "show")
    for name in ("id", "metrics", "steps", "seconds", "provenance", "device", "outcome_rule"):
        assert tree[name] == result[name], name
    assert tree["task"] == "translation"
    assert (tree["preset"], tree["block"], tree["grid"]) == ("pre_ln", {}, "mine")
    assert tree["data"]["sizes"] == {"train": 30, "valid": 30, "test": 30}
    assert tree["checkpoints"] == ["last", "best"]
    text = printed("show", "mine/one")
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert lines["block"] == "pre_ln"
    assert lines["outcome"].startswith("stalled (")
    assert lines["val/nll"] == f"{result['metrics']['val/nll']:.6g}"
    assert result["provenance"]["code"] in text
    assert f"torch {result['provenance']['libraries']['torch']}" in text


def test_the_block_names_its_axes_and_a_changed_config_is_refused(printed, refused, run) -> None:
    change(run / "config.yaml", model__block__norm="rms_norm")
    refused("config.yaml", "show", run)
    reseal(run / "result.json")
    assert json.loads(printed("show", run, "--json"))["block"] == {"norm": "rms_norm"}
    assert "pre_ln, norm=rms_norm" in printed("show", run)


def change(config: Path, **fields: object) -> None:
    config.write_text(yaml.safe_dump(changed(yaml.safe_load(config.read_text()), **fields)))


def test_a_run_that_has_not_ended_says_so(printed, run: Path) -> None:
    (run / "result.json").unlink()
    tree = json.loads(printed("show", run, "--json"))
    assert (tree["state"], tree["metrics"], tree["steps"]) == ("missing", {}, None)
    (run / "attempts/1/error.txt").write_text("Traceback\nValueError: boom\n")
    tree = json.loads(printed("show", run, "--json"))
    assert (tree["state"], tree["error"]) == ("failed", "ValueError: boom")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("result.json", "{", "result.json: torn or damaged"),
        ("result.json", None, "is not the"),
        ("config.yaml", "model: {}\n", "config.yaml: damaged:"),
        ("config.yaml", "a: [\n", "config.yaml: torn or damaged"),
        ("identity.json", "[]", "identity.json: damaged"),
    ],
)
def test_a_damaged_run_is_refused_in_one_line(refused, run, name, text, said: str) -> None:
    if text is None:  # the result of another run
        text = Path("experiments/mine/runs/two/result.json").read_text()
    (run / name).write_text(text)
    for words in (["show", run], ["diff", "mine/one", run, "--json"]):
        refused(said, *words)


def test_two_runs_are_compared(printed) -> None:
    tree = json.loads(printed("diff", "mine/one", "mine/two", "--json"))
    fields = {row["field"]: row for row in tree["config"]}
    assert fields.keys() == {"seed_everything", "data.seed", "trainer.default_root_dir"}
    row = {"field": "seed_everything", "left": 1, "right": 2, "counts": True}
    assert fields["seed_everything"] == row
    assert not fields["trainer.default_root_dir"]["counts"]
    assert tree["same_experiment"] is False
    assert "seed" in tree["reason"]
    assert tree["provenance"] == []
    for row in tree["metrics"].values():
        assert row["difference"] == row["right"] - row["left"]
    assert tree["metrics"]["val/nll"]["difference"] != 0
    text = printed("diff", "mine/one", "mine/two")
    assert "Two experiments:" in text
    assert "made by:" in text


def test_equal_ids_are_said_plainly_and_a_missing_one_is_refused(printed, refused, run) -> None:
    result = json.loads((run / "result.json").read_text())
    result["provenance"]["libraries"]["torch"] = "1.0"
    reseal(run / "result.json", provenance=result["provenance"])
    tree = json.loads(printed("diff", "mine/one", run, "--json"))
    assert tree["same_experiment"] is True
    assert [row["field"] for row in tree["provenance"]] == ["libraries.torch"]
    text = printed("diff", "mine/one", run)
    assert "The same" in text
    assert "config: no difference" in text
    (run / "identity.json").unlink()
    refused("identity.json is missing", "diff", "mine/one", run)


def test_metrics_of_other_things_have_no_difference_and_values_of_another_type_differ() -> None:
    left = read_run("mine/one")
    data = {**left.config["data"], "vocab_size": 20}
    tree = compare_runs(left, left._replace(config={**left.config, "data": data}))
    loss = tree["metrics"]["val/nll"]
    assert loss["left"] == loss["right"]
    assert loss["difference"] is None
    assert "data.vocab_size" in loss["unlike"]
    same = compare_runs(left, left)["metrics"]["val/nll"]
    assert same == {**loss, "difference": 0, "unlike": None}
    assert left.record is not None
    other = left._replace(record=replace(left.record, corpus="another"))
    assert "data.root" in compare_runs(left, other)["metrics"]["val/nll"]["unlike"]
    found = differing({"a": 1, "b": None, "c": 2}, {"a": 1.0, "b": None, "d": 2})
    assert [row["field"] for row in found] == ["a", "c", "d"]
    assert differing({"a": 1}, {"a": True})
