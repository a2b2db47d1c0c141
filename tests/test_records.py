"""One module checks results for all readers."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_app.runs.folder import RunFolder
from lightning_app.runs.records import (
    OtherVersion,
    Unsound,
    column_names,
    is_sealed,
    read_json,
    read_pruned,
    read_result,
    read_yaml,
    sealed,
)
from tests.records import pruned, result

ID = "a" * 16
DEEP = "[" * 200 + "]" * 200


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


def test_a_sound_result_is_what_was_written(path: Path) -> None:
    assert read_result(path, ID) is None
    for tree in (result(ID), result(ID, "diverged", None), result(ID, data={"name": "text"})):
        path.write_text(json.dumps(tree))
        assert read_result(path, ID) == tree
    # A trained run has reported the metric of the grid.
    path.write_text(json.dumps(result(ID)))
    assert read_result(path, ID, "val/nll")
    with pytest.raises(Unsound, match=r"^.*'test/bleu',.*$"):
        read_result(path, ID, "test/bleu")
    path.write_text(json.dumps(result(ID, "diverged", None)))
    assert read_result(path, ID, "test/bleu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": "gone"}, "field 'schema' is missing"),
        ({"schema": 0}, "schema:.*3, found '0'"),
        ({"schema": True}, "schema:.*3, found 'True'"),
        ({"schema": "2"}, "schema:.*3, found '2'"),
        ({"id": "b"}, f"id: 'b'.*{ID}"),
        ({"id": ["a"]}, "is not the"),
        ({"status": "fine"}, "status: .*'ok'.*'diverged'.*'cut_short'.*'fine'"),
        ({"status": ["ok"]}, "status: expected "),
        ({"status": "diverged", "diverged": None}, "contradict each other"),
        ({"outcome": "perfect"}, "outcome: expected "),
        ({"outcome": "gone"}, "outcome: no value"),
        ({"outcome": ["ok"]}, "outcome: expected "),
        ({"outcome": "stalled"}, "status 'ok'.*'stalled'"),
        ({"metrics": {}}, "'val/nll'"),
        ({"metrics": {"val/nll": None}}, "'val/nll'"),
        ({"metrics": {"val/nll": "2"}}, "metrics.val/nll:.*null, found '2'"),
        ({"metrics": {"val/nll": True}}, "metrics.val/nll: expected a number"),
        ({"metrics": [2.0]}, "expected a mapping"),
        ({"unigram_entropy": 0}, "unigram_entropy:.*0, found 0"),
        ({"unigram_entropy": 1e300}, "unigram_entropy:.*64"),
        ({"steps": -1}, "steps:.*0, found -1"),
        ({"tokens": 0.5}, "tokens:.*null, found 0.5"),
        ({"data": "text"}, "expected a mapping"),
        ({"data": {"sizes": {"train": "many"}}}, "data.sizes.train:"),
        ({"versions": {"torch": 2}}, "versions.torch:.*2"),
        ({"started": "2026-01-01"}, "expected a time"),
    ],
)
def test_an_unsound_result_says_why(path: Path, changes: dict, said: str) -> None:
    path.write_text(json.dumps(result(ID, **changes)))
    with pytest.raises(Unsound, match=f"^.*{said}"):
        read_result(path, ID)


@pytest.mark.parametrize("read", [read_result, read_pruned])
def test_a_newer_schema_is_recognised_whatever_else_has_changed(path: Path, read) -> None:
    path.write_text(json.dumps({"schema": 99}))
    words = "schema 99: made by a newer version of this program; update the program"
    with pytest.raises(OtherVersion, match=f"^{words}$"):
        read(path, ID)


def test_a_pruned_run_is_checked_too(path: Path) -> None:
    assert read_pruned(path, ID) is None
    path.write_text(json.dumps(pruned(ID)))
    assert read_pruned(path, ID) == pruned(ID)
    path.write_text(json.dumps(pruned(ID, value="3")))
    with pytest.raises(Unsound, match=r"value:.*null, found '3'"):
        read_pruned(path, ID)


NO_JSON = [
    *((b"", "damaged:.*JSON"), (b'{"a": 1', "damaged:.*JSON"), (b"\xff\xfe{}", "damaged:.*JSON")),
    *((b"\x00" * 64, "damaged:.*JSON"), (b"[1]", "JSON"), (b'{"a": NaN}', "holds NaN,.*JSON")),
    *((b'{"a": 1e999}', "1e999"), (b'{"a": %d}' % 10**400, "10+")),
    (b'{"a": %s}' % (b"9" * 5000), "not valid JSON"),
    (b'{"a": %s' % (b"[" * 200_000), "damaged:.*JSON"),
]
NO_YAML = [
    *((b"a: 1", "torn or"), (b"a: [\n", "damaged:.*YAML"), (b"\xff\n", "damaged:.*YAML")),
    *((b"- a\n", "YAML"), (b"a: %s\n" % DEEP.encode(), "too deeply")),
    (b"- " * 1_000_000 + b"\n", "too deeply"),
]


@pytest.mark.parametrize(
    ("read", "data", "said"),
    [*((read_json, *case) for case in NO_JSON), *((read_yaml, *case) for case in NO_YAML)],
)
def test_what_is_no_record_and_no_config(path: Path, read, data: bytes, said: str) -> None:
    path.write_bytes(data)
    with pytest.raises(Unsound, match=said):
        read(path)


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_a_folder_in_the_place_of_a_file(path: Path, read) -> None:
    with pytest.raises(FileNotFoundError):
        read(path)
    path.mkdir()
    with pytest.raises(Unsound, match=r"is not a"):
        read(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_file_without_the_right_to_read_it(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(Unsound, match=r"cannot be"):
        read_json(path)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    for path in (folder.config, folder.identity, folder.metrics, folder.probes, folder.hypotheses):
        path.write_text(f"what the run wrote: {path.name}\n")
    made = {"arithmetic": {}}  # as all versions that seal record
    for path, tree in ((folder.result, result(ID)), (folder.pruned, pruned(ID))):
        path.write_text(json.dumps(sealed({**tree, "provenance": made}, folder.path)))
    return folder


def edited(path: Path, change: Callable[[dict], object]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree["metrics"].update({"val/nll": 1.5}),
        lambda tree: tree["metrics"].update({"val/nll": 2}),  # for 2.0
        lambda tree: tree.update(seconds=1.1),
        lambda tree: tree.update(extra=1),
        lambda tree: tree.pop("name"),
        lambda tree: tree.pop("seal"),
        lambda tree: tree["seal"]["files"].update({"../secret": "0"}),
        lambda tree: tree.update(schema=2),
        lambda tree: (tree.pop("seal"), tree.update(schema=2)),
    ],
)
def test_a_changed_result_is_damaged(run: RunFolder, change: Callable[[dict], object]) -> None:
    for path in (run.result, run.pruned):
        if path == run.pruned and "metrics" not in json.loads(path.read_text()):
            edited(path, lambda tree: tree.update(value=1.0))
        else:
            edited(path, change)
    with pytest.raises(Unsound):
        read_result(run.result, ID)
    with pytest.raises(Unsound, match="seal"):
        read_pruned(run.pruned, ID)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("config.yaml", "lr: 3\n"), ("identity.json", "{}")),
        *(("metrics.csv", "step,val/nll\n1,2\n"), ("probes.csv", "")),
        *(("hypotheses.txt", "another line\n"), ("references.txt", "added after the run\n")),
        *(("block.json", "{}"), ("plugins.json", "{}"), ("config.yaml", None)),
        *(("identity.json", None), ("metrics.csv", None)),
    ],
)
def test_a_file_changed_beside_it_is_damage(run: RunFolder, name: str, content: str | None) -> None:
    """Also one that was added or removed; each reader gets it from `read_result`."""
    path = run.path / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(Unsound, match=name):
        read_result(run.result, ID)
    with pytest.raises(Unsound, match=name):
        read_pruned(run.pruned, ID)
    assert read_pruned(run.pruned, ID, beside=False)


def test_a_sealed_result_in_another_form_an_earlier_one_and_a_pipe(run: RunFolder) -> None:
    """And files that nobody reads, or that a published study leaves out, do not count."""
    tree = json.loads(run.result.read_text())
    run.result.write_text(json.dumps(tree, indent=4, sort_keys=True))
    run.probes.unlink()
    (run.path / "notes.txt").write_text("of the user")
    assert read_result(run.result, ID) == tree
    run.result.write_text(json.dumps(result(ID, schema=2)))
    assert not is_sealed(read_result(run.result, ID) or {"seal": 1})
    run.result.unlink()
    os.mkfifo(run.result)
    with pytest.raises(Unsound, match="is not a"):
        read_result(run.result, ID)


@pytest.mark.parametrize("line", [b"step,a\rb,c\n", b"[" * 200_000 + b"\n", b"", b"\x00\xff\n"])
def test_a_damaged_line_of_names_ends_nothing(run: RunFolder, line: bytes) -> None:
    run.metrics.write_bytes(line)
    assert "step" not in column_names(run.metrics)
    run.metrics.write_bytes(b"step,val/nll\n")
    assert column_names(run.metrics) == ["step", "val/nll"]
