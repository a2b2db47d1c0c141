"""The index, read back by TensorBoard's own server over HTTP."""

# pyright: reportAttributeAccessIssue=false
# The generated protocol buffer modules of TensorBoard carry no type information.

import json
import math
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lightning_app.analysis.read_results import read_results
from lightning_app.analysis.tensorboard import run_url, write_index
from lightning_app.analysis.tensorboard.pages import curve_tag, layout, rulers_of
from lightning_app.analysis.tensorboard.text import question_of
from tests.analysis.conftest import ENTROPY

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
SEED = "seed_everything"
EVERY_STATUS = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
SMALL = {SEED: [1, 2], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}


def log(run: Path, tag: str, points: Mapping[int, float]) -> None:
    """What the training logger leaves in a run folder."""
    writer = EventFileWriter(str(run))
    for step, value in points.items():
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    writer.close()


@contextmanager
def server(folder: Path, *options: str) -> Iterator[Callable[..., Any]]:
    """TensorBoard on a free port of this machine; the value asks it, by POST where a body is."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
    command += ["--host", "127.0.0.1", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stderr)
        address = next(match[0] for match in found if match)

        def ask(route: str, body: Any = None) -> Any:
            data = None if body is None else json.dumps(body).encode()
            header = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address}/data/plugin/{route}", data, header)
            with urllib.request.urlopen(request, timeout=20) as response:
                return json.loads(response.read())

        yield ask
    finally:
        process.terminate()
        process.communicate()


def until(condition: Callable[[], Any]) -> Any:
    """The first true value of the condition; TensorBoard reads files in its own time."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError("TensorBoard never showed it")


def table(ask: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """The rows of the HParams table by run."""
    body = {"experimentName": "", "allowedStatuses": EVERY_STATUS, "colParams": []}
    answer = ask("hparams/session_groups", {**body, "startIndex": 0, "sliceSize": 10_000})
    rows = {}
    for group in answer.get("sessionGroups", []):
        assert len(group["sessions"]) == 1
        rows[group["name"]] = {
            "status": group["sessions"][0]["status"],
            "hparams": group.get("hparams", {}),
            "metrics": {m["name"]["tag"]: float(m["value"]) for m in group.get("metricValues", [])},
        }
    return rows


def complete(ask: Callable[..., Any], count: int) -> dict[str, dict[str, Any]] | None:
    """The table once all runs are in it with the last scalar of their file, None before."""
    rows = table(ask)
    full = len(rows) == count and all("val/perplexity" in row["metrics"] for row in rows.values())
    return rows if full else None


def columns(ask: Callable[..., Any]) -> tuple[list[str], list[str]]:
    answer = ask("hparams/experiment", {"experimentName": ""})
    names = [info["name"] for info in answer["hparamInfos"]]
    return names, [info["name"]["tag"] for info in answer["metricInfos"]]


def test_five_restarts_show_the_same_complete_table(make_grid, outcome):
    grid = make_grid(outcome)
    write_index(grid.folder)
    seen = []
    for _ in range(5):
        with server(grid.folder) as ask:
            rows = until(lambda: complete(ask, 30))
            seen.append((rows, columns(ask), ask("custom_scalars/layout"), ask("scalars/tags")))
    assert all(each == seen[0] for each in seen[1:])
    rows, (hparams, metrics), _, tags = seen[0]
    assert set(hparams) == {"variant", "status", "outcome", PRESET, WARMUP, SEED}
    assert metrics == ["delta", "val/nll", "val/perplexity", "val/accuracy"]
    for cell in grid.cells:
        row, axes = rows[f"runs/{cell['name']}"], cell["axes"]
        stalled = axes[PRESET] == "post_ln" and axes[WARMUP] == 0
        assert row["status"] == "STATUS_SUCCESS"
        assert row["hparams"] == {
            "variant": axes[PRESET],
            "status": "diverged" if stalled else "ok",
            "outcome": "stalled" if stalled else "ok",
            PRESET: axes[PRESET],
            WARMUP: axes[WARMUP],
            SEED: axes[SEED],
        }
        assert row["metrics"]["val/nll"] == pytest.approx(outcome(axes), rel=1e-6)
        loss, twin = outcome(axes), outcome({**axes, WARMUP: 60})
        lost = (ENTROPY if stalled else loss) - twin
        assert row["metrics"]["delta"] == pytest.approx(lost, abs=1e-6)
        assert (
            f"curves/{axes[PRESET]}/warmup_{axes[WARMUP]}/val/nll" in tags[f"runs/{cell['name']}"]
        )


@pytest.mark.parametrize("loader", ["true", "false"])
def test_final_metrics_win_over_what_the_logger_saw_last(make_grid, loader):
    grid = make_grid(lambda axes: None if axes[WARMUP] == 0 else 2.0, SMALL)
    for cell in grid.cells:
        log(grid.run(cell), "val/nll", {50: 5.0, 150: 4.75})
    write_index(grid.folder)
    with server(grid.folder, f"--load_fast={loader}") as ask:
        rows = until(lambda: complete(ask, 8))
        run = urllib.parse.quote(f"runs/{grid.cells[1]['name']}")
        curve = ask(f"scalars/scalars?tag=val%2Fnll&run={run}")
    for cell in grid.cells:
        value = rows[f"runs/{cell['name']}"]["metrics"]["val/nll"]
        assert math.isnan(value) if cell["axes"][WARMUP] == 0 else value == 2.0
    assert [(step, value) for _, step, value in curve] == [(50, 5.0), (150, 4.75), (200, 2.0)]


@pytest.mark.parametrize("loader", ["true", "false"])
def test_an_open_server_follows_a_grid_that_goes_on(make_grid, loader):
    ends = {("post_ln", 0): "unfinished", ("pre_ln", 0): "failed", ("post_ln", 60): "waiting"}
    grid = make_grid(lambda axes: ends.get((axes[PRESET], axes[WARMUP]), 2.0), {**SMALL, SEED: [1]})
    running, waiting, failed, done = (grid.cells[i] for i in (0, 1, 2, 3))
    name = {cell["name"]: f"runs/{cell['name']}" for cell in grid.cells}
    log(grid.run(running), "val/nll", {50: 5.0})
    write_index(grid.folder)
    with server(grid.folder, f"--load_fast={loader}", "--reload_interval=1") as ask:
        before = until(lambda: (rows := table(ask)) and len(rows) == 3 and rows)
        assert name[waiting["name"]] not in before
        assert before[name[running["name"]]]["status"] == "STATUS_UNKNOWN"
        assert "status" not in before[name[running["name"]]]["hparams"]
        assert before[name[failed["name"]]]["status"] == "STATUS_FAILURE"
        assert before[name[failed["name"]]]["hparams"]["status"] == "failed"
        assert before[name[done["name"]]]["status"] == "STATUS_SUCCESS"
        columns_before = columns(ask)
        grid.end(running, 2.25)
        grid.end(waiting, 4.5)
        write_index(grid.folder)

        def followed() -> Any:
            rows = table(ask)
            row = rows[name[running["name"]]]
            return row["status"] == "STATUS_SUCCESS" and "val/perplexity" in row["metrics"] and rows

        after = until(followed)
        assert after[name[running["name"]]]["metrics"]["val/nll"] == 2.25
        waited = until(lambda: table(ask).get(name[waiting["name"]]))
        assert (waited["hparams"]["status"], waited["status"]) == ("diverged", "STATUS_SUCCESS")
        assert columns(ask) == columns_before


def test_each_variant_has_charts_that_match_its_curves_only(make_grid, outcome):
    axes = {
        SEED: [1],
        PRESET: ["sas", "sas_p"],
        "model.block.norm": ["none", None],
        WARMUP: [0, 60],
    }
    grid = make_grid(lambda axes: 2.0, axes)
    write_index(grid.folder)
    with server(grid.folder) as ask:
        layout = until(lambda: ask("custom_scalars/layout"))
        until(lambda: complete(ask, 8))
        tags = ask("scalars/tags")
    warmup, health = layout["category"]
    assert (warmup["title"], health["title"]) == ("Warm-up", "Health")
    matched = {}
    for chart in warmup["chart"]:
        (pattern,) = chart["multiline"]["tag"]
        runs = [run for run in tags if any(re.match(pattern, tag) for tag in tags[run])]
        matched[chart["title"]] = runs
        variant = chart["title"].split(":")[0]
        assert len(runs) == 2
        assert all(f"-{variant.split('+')[0]}-" in run for run in runs)
    assert len(matched) == 8
    health_tags = [chart["multiline"]["tag"] for chart in health["chart"]]
    shown = ("grad_norm", "tokens_per_second", "data_wait_share", "lr")
    assert health_tags == [[f"^train/{name}$"] for name in shown]


def test_inside_the_blocks_has_a_chart_for_what_some_run_probes(make_grid):
    grid = make_grid(lambda axes: 2.0, {**SMALL, SEED: [1]})
    write_index(grid.folder)
    bare, probed = grid.run(grid.cells[0]), grid.run(grid.cells[1])
    header, _, rest = (probed / "metrics.csv").read_text().partition("\n")
    columns = ["probe/zeta_skip/encoder/1", "probe/alpha/decoder/2", "probe/token_cosine/decoder/1"]
    (probed / "metrics.csv").write_text(f"{header},{','.join(columns)}\n{rest}")
    for tag in columns:
        log(probed, tag, {1: 0.5})
    (bare / "metrics.csv").unlink()
    write_index(grid.folder)
    with server(grid.folder) as ask:
        inside = until(lambda: ask("custom_scalars/layout").get("category", [])[2:])[0]
        logged = until(lambda: (t := ask("scalars/tags")[f"runs/{probed.name}"]) and set(t))
    assert inside["title"] == "Inside the blocks"
    patterns = [chart["multiline"]["tag"][0] for chart in inside["chart"]]
    found = [[tag for tag in logged if re.match(pattern, tag)] for pattern in patterns]
    assert found == [[columns[2]], [columns[1]], [columns[0]]]
    assert inside["chart"][2]["title"] == "learned gain zeta skip, by layer"


def test_the_text_has_question_config_and_block(make_grid):
    question = "Which *blocks* | need warm-up?\n\nTwo paragraphs."
    ends = {"post_ln": 2.0, "pre_ln": "unfinished"}
    grid = make_grid(
        lambda axes: ends[axes[PRESET]], {SEED: [1], PRESET: [*ends]}, question=question
    )
    done, running = (grid.run(cell) for cell in grid.cells)
    same = {"norm": {"kind": "pre", "bias": True}, "around_cross": {"skip": 1.0}}
    other = {"norm": {"kind": "none"}, "carry": None}
    block = {"encoder": {"blocks": [same, same, other], "final_norm": "layer_norm"}}
    (done / "block.json").write_text(json.dumps(block))
    (done / "block.svg").write_text("<svg/>")
    write_index(grid.folder)

    def rows(page: str) -> list[list[str]]:
        cells = (re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in page.split("<tr>")[1:])
        return [[re.sub("<.*?>", "", cell) for cell in row] for row in cells]

    with server(grid.folder) as ask:
        texts = {
            run: until(lambda run=run: ask(f"text/text?run=runs%2F{run.name}&tag=run"))
            for run in (done, running)
        }
    shown = {run: texts[run][0]["text"] for run in texts}
    for page in shown.values():
        assert "<p>Two paragraphs.</p>" in page
        assert "max_steps: 200" in page
    assert "Resolved block" not in shown[running]
    drawing = f'href="runs/{done.name}/block.svg"'
    assert [drawing in shown[run] for run in (done, running)] == [True, False]
    assert rows(shown[done]) == [
        ["field", "layers 1-2", "layer 3"],
        ["norm.kind", "pre", "none"],
        ["norm.bias", "true", ""],
        ["carry", "", "null"],
    ]
    assert "final_norm <code>layer_norm</code>" in shown[done]


def test_the_address_of_a_run_names_it_alone(make_grid):
    grid = make_grid(lambda axes: 2.0, {SEED: [1, 11], "model.block.x": ["a+b(c)", "a", "a.b"]})
    cells = read_results(grid.folder).cells
    names = [f"somewhere/runs/{cell.name}" for cell in cells]
    for cell, name in zip(cells, names, strict=True):
        parts = urllib.parse.urlsplit(run_url("http://127.0.0.1:6006/", cell))
        assert (parts.netloc, parts.path) == ("127.0.0.1:6006", "/")
        tab, _, query = parts.fragment.partition("&")
        assert tab == "timeseries"
        for key, text in (("runFilter", parts.query), ("regexInput", query)):
            (pattern,) = urllib.parse.parse_qs(text)[key]
            assert [other for other in names if re.search(pattern, other)] == [name]


def test_one_run_alone_holds_what_is_the_grids(make_grid):
    grid = make_grid(lambda axes: 2.0 if axes[WARMUP] else "waiting", {**SMALL, SEED: [1]})

    def holders() -> list[str]:
        files = grid.folder.rglob("*.index")
        return [f.parent.name for f in files if b"_hparams_/experiment" in f.read_bytes()]

    write_index(grid.folder, only_new=True)
    assert holders() == [grid.cells[1]["name"]]
    grid.end(grid.cells[0], "unfinished")
    write_index(grid.folder, only_new=True)
    assert holders() == [grid.cells[0]["name"]]
    grid.end(grid.cells[0], 3.0)
    write_index(grid.folder, only_new=True)
    assert holders() == [grid.cells[0]["name"]]
    with server(grid.folder) as ask:
        until(lambda: complete(ask, 3))
        assert set(columns(ask)[0]) == {"variant", "status", "outcome", SEED, PRESET, WARMUP}


def test_an_index_of_an_earlier_version_goes(make_grid):
    grid = make_grid(lambda axes: 2.0, {SEED: [1]})
    run = grid.run(grid.cells[0])
    for folder, place in ((grid.folder, "0000000000"), (run, "9999999999")):
        (folder / f"events.out.tfevents.{place}.0123456789ab.index").write_bytes(b"")
    write_index(grid.folder)
    assert list(grid.folder.glob("*tfevents*")) == []
    assert len(list(run.glob("*tfevents*"))) == 1


def test_writing_again_changes_no_file(make_grid, outcome):
    grid = make_grid(outcome, SMALL)
    write_index(grid.folder)

    def files() -> dict[Path, tuple[int, bytes]]:
        found = grid.folder.rglob("*tfevents*")
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}

    first = files()
    assert len(first) == len(grid.cells)
    write_index(grid.folder)
    assert files() == first


def test_a_cell_that_went_on_leaves_one_index_file(make_grid):
    grid = make_grid(lambda axes: "failed", {SEED: [1]})
    (cell,) = grid.cells
    log(grid.run(cell), "val/nll", {50: 5.0})
    write_index(grid.folder)
    grid.end(cell, 2.0)
    write_index(grid.folder)
    assert len(list(grid.run(cell).glob("*tfevents*.index"))) == 1
    assert len(list(grid.run(cell).glob("*tfevents*"))) == 2


def test_columns_have_one_type_and_absent_values_no_cell(make_grid):
    axes = {
        SEED: [1],
        "model.block.shaped_attention": [{"alpha": 1.0}, None],
        "trainer.flag": [True, False],
        "trainer.mixed": [1, "one"],
        "data.tokens_per_batch": [512, 1024.0],
    }
    grid = make_grid(lambda axes: 2.0, axes)
    write_index(grid.folder)
    with server(grid.folder) as ask:
        rows = until(lambda: complete(ask, 16))
        answer = ask("hparams/experiment", {"experimentName": ""})
    kinds = {
        info["name"]: info["type"].removeprefix("DATA_TYPE_") for info in answer["hparamInfos"]
    }
    assert kinds == {
        "variant": "STRING",
        "status": "STRING",
        "outcome": "STRING",
        SEED: "FLOAT64",
        "model.block.shaped_attention": "STRING",
        "trainer.flag": "BOOL",
        "trainer.mixed": "STRING",
        "data.tokens_per_batch": "FLOAT64",
    }
    shaped = [row["hparams"].get("model.block.shaped_attention") for row in rows.values()]
    assert sorted(str(value) for value in shaped) == ["None"] * 8 + ['{"alpha":1.0}'] * 8
    assert {row["hparams"]["trainer.flag"] for row in rows.values()} == {True, False}
    assert {row["hparams"]["trainer.mixed"] for row in rows.values()} == {"1", "one"}


def test_only_new_leaves_alone_what_is_newer_than_its_result(make_grid):
    grid = make_grid(lambda axes: 2.0, {**SMALL, SEED: [1]})
    second, first = (grid.run(cell) for cell in grid.cells[:2])
    write_index(grid.folder, only_new=True)
    before = index_of(first), index_of(second)
    (first / "metrics.csv").unlink()  # would take the curves out of the index
    grid.end(grid.cells[0], 3.0)
    write_index(grid.folder, only_new=True)
    assert index_of(first) == before[0]
    assert index_of(second) != before[1]
    write_index(grid.folder)
    assert index_of(first) != before[0]


def test_what_a_cell_loses_is_logged_once_its_reference_run_has_ended(make_grid):
    axes = {SEED: [1], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}
    grid = make_grid(lambda axes: "unfinished" if axes[WARMUP] else 3.0, axes)
    bare, ends_well, other, stalls = grid.cells
    name = {cell["name"]: f"runs/{cell['name']}" for cell in grid.cells}
    write_index(grid.folder)
    with server(grid.folder, "--reload_interval=1") as ask:
        before = until(lambda: (rows := table(ask)) and len(rows) == 4 and rows)
        assert all("delta" not in row["metrics"] for row in before.values())
        grid.end(ends_well, 2.5)
        grid.end(stalls, ENTROPY)
        write_index(grid.folder, only_new=True)
        seen = until(
            lambda: "delta" in (rows := table(ask))[name[bare["name"]]]["metrics"] and rows
        )
        until(lambda: "delta" in table(ask)[name[ends_well["name"]]]["metrics"])
    assert seen[name[bare["name"]]]["metrics"]["delta"] == 0.5
    assert "delta" not in seen[name[other["name"]]]["metrics"]  # its twin learned nothing


def test_without_a_reference_warmup_nothing_is_compared(make_grid):
    grid = make_grid(lambda axes: 2.0, {SEED: [1]}, sensitivity={})
    write_index(grid.folder)
    with server(grid.folder) as ask:
        until(lambda: complete(ask, 1))
        assert columns(ask)[1] == ["val/nll", "val/perplexity", "val/accuracy"]


def test_a_new_plan_makes_every_index_again(make_grid):
    grid = make_grid(lambda axes: 2.0, {**SMALL, SEED: [1]})
    folder = grid.run(grid.cells[1])
    write_index(grid.folder, only_new=True)
    before = index_of(folder)
    (folder / "metrics.csv").unlink()
    plan = grid.folder / "plan.json"
    plan.write_text(plan.read_text())
    write_index(grid.folder, only_new=True)
    assert index_of(folder) != before


def index_of(run: Path) -> str:
    (path,) = run.glob("*.index")
    return path.name


def test_losses_that_count_other_tokens_share_no_chart(make_grid):
    axes = {SEED: [1], PRESET: ["sas"], "data.tokenizer": ["word", "char"], WARMUP: [0, 60]}
    grid = make_grid(lambda axes: 2.0, axes, question="Which?")
    found = read_results(grid.folder)
    kinds = rulers_of(found)
    tags = [curve_tag(cell, "val/nll", kind) for cell, kind in zip(found.cells, kinds, strict=True)]
    pages = layout_pb2.Layout()
    pages.ParseFromString(layout(found).value[0].tensor.string_val[0])
    patterns = [
        chart.multiline.tag[0] for chart in pages.category[0].chart if "val/nll" in chart.title
    ]
    matched = [[tag for tag in tags if re.match(pattern, tag)] for pattern in patterns]
    assert [len(each) for each in matched] == [2, 2]
    assert not set(matched[0]) & set(matched[1])
    assert "data.tokenizer is word and char" in question_of(found)
