"""The index, read back by TensorBoard's own server over HTTP."""

# pyright: reportAttributeAccessIssue=false
# The generated protocol buffer modules of TensorBoard carry no type information.

import hashlib
import json
import math
import os
import re
import shutil
import signal
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lightning_app.report import tensorboard
from lightning_app.report.headline import answer
from lightning_app.report.results import GridResults, read_results
from lightning_app.report.tensorboard import (
    IndexedGrid,
    curve_tag,
    experiment,
    layout,
    question_of,
    run_url,
    write_index,
)
from lightning_app.report.verdicts import verdicts
from lightning_app.report.warmup import sensitivity_scores
from lightning_app.runs.folder import GridFolder
from lightning_app.runs.locks import if_free
from lightning_app.runs.store import link_run, stored
from lightning_app.scores.task_facts import QualityMetric
from tests import warm
from tests.report.conftest import ENTROPY, PRESET, SEED, WARMUP, FakeGrid, write_report

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
    """TensorBoard on a free port of this machine; the value asks it, by POST where a body is.

    A fork of a process that has imported it, which takes it a second.
    """
    words = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", "0", *options]
    program = "from tensorboard.main import run_main; run_main()"
    process = warm.start(["-c", program, *words], modules=("tensorboard.main", "pandas"))
    try:
        pattern = r"http://127\.0\.0\.1:\d+"
        address = until(lambda: re.search(pattern, process.printed(errors=True)))[0]

        def ask(route: str, body: Any = None) -> Any:
            data = None if body is None else json.dumps(body).encode()
            header = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address}/data/plugin/{route}", data, header)
            with urllib.request.urlopen(request, timeout=240) as response:
                return json.loads(response.read())

        yield ask
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def until(condition: Callable[[], Any]) -> Any:
    """The first true value of the condition; TensorBoard reads files in its own time."""
    end = time.monotonic() + 240
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


def of(grid: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a row in one grid."""
    found = {key.partition("/"): value for key, value in row["hparams"].items()}
    return {key: value for (name, _, key), value in found.items() if name == grid}


def columns(ask: Callable[..., Any]) -> tuple[list[str], list[str]]:
    answer = ask("hparams/experiment", {"experimentName": ""})
    names = [info["name"] for info in answer["hparamInfos"]]
    return names, [info["name"]["tag"] for info in answer["metricInfos"]]


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
        assert "outcome" not in of("demo", before[name[running["name"]]])
        assert before[name[failed["name"]]]["status"] == "STATUS_FAILURE"
        assert of("demo", before[name[failed["name"]]])["outcome"] == "failed"
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
        assert (of("demo", waited)["outcome"], waited["status"]) == ("stalled", "STATUS_SUCCESS")
        assert columns(ask) == columns_before


def test_the_text_has_question_config_and_block(make_grid):
    question = "Which *blocks* | need warm-up?\n\nTwo paragraphs."
    ends = {"post_ln": 2.0, "pre_ln": "unfinished"}
    axes = {SEED: [1], PRESET: [*ends]}
    grid = make_grid(lambda axes: ends[axes[PRESET]], axes, question=question)
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
            run: until(lambda run=run: ask(f"text/text?run=runs%2F{run.name}&tag=run/demo"))
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


def test_the_answer_and_the_verdicts_are_shown_once_a_report_is_written(make_grid, outcome):
    grid = make_grid(outcome, curves=False)
    results = read_results(grid.folder)
    scores = sensitivity_scores(results)
    said = answer(results, scores)

    def written() -> int:
        files = grid.folder.rglob("*tfevents*")
        return sum(said.encode() in path.read_bytes() for path in files)

    write_index(grid.folder, only_new=True)
    assert written() == 0
    write_index(grid.folder)
    assert written() == 1
    with server(grid.folder) as ask:
        runs = until(lambda: [r for r, of in ask("text/tags").items() if "answer/demo" in of])
        (run,) = map(urllib.parse.quote, runs)
        page = until(lambda: ask(f"text/text?run={run}&tag=answer/demo"))[0]["text"]
    found = verdicts(results, scores)
    assert f"<h1>{said}</h1>" in page
    assert re.findall(r"<li>(.*)</li>", page) == [f"{v.variant}: {v.words}" for v in found]


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
        files = grid.folder.rglob("*tfevents*")
        return [f.parent.name for f in files if b"_hparams_/experiment" in f.read_bytes()]

    write_index(grid.folder, only_new=True)
    assert holders() == [grid.cells[1]["name"]]
    grid.end(grid.cells[0], "unfinished")
    write_index(grid.folder, only_new=True)
    assert holders() == [grid.cells[0]["name"]]
    grid.end(grid.cells[0], 3.0)
    write_index(grid.folder, only_new=True)
    assert holders() == [grid.cells[0]["name"]]
    assert len(list(grid.run(grid.cells[0]).glob("*.run"))) == 1  # of one that went on, too
    with server(grid.folder) as ask:
        until(lambda: complete(ask, 3))
        names = ("variant", "outcome", SEED, WARMUP)
        assert set(columns(ask)[0]) == {f"demo/{name}" for name in names}


def test_columns_have_one_type_and_absent_values_no_cell(make_grid):
    axes = {
        SEED: [1],
        "model.block.shaped_attention": [{"alpha": 1.0}, None],
        "trainer.flag": [True, False],
        "trainer.mixed": [1, "one"],
        "data.tokens_per_batch": [512, 1024.0],
    }
    grid = make_grid(lambda axes: 2.0, axes, sensitivity={})
    write_index(grid.folder)
    with server(grid.folder) as ask:
        rows = until(lambda: complete(ask, 16))
        assert columns(ask)[1] == ["val/nll", "val/perplexity", "val/accuracy"]  # nothing compared
        answer = ask("hparams/experiment", {"experimentName": ""})
    kinds = {
        info["name"].removeprefix("demo/"): info["type"].removeprefix("DATA_TYPE_")
        for info in answer["hparamInfos"]
    }
    texts = ("variant", "outcome", "model.block.shaped_attention", "trainer.mixed")
    numbers = dict.fromkeys((SEED, "data.tokens_per_batch"), "FLOAT64")
    assert kinds == {**dict.fromkeys(texts, "STRING"), **numbers, "trainer.flag": "BOOL"}
    rows = {name: of("demo", row) for name, row in rows.items()}
    shaped = [row.get("model.block.shaped_attention") for row in rows.values()]
    assert sorted(str(value) for value in shaped) == ["None"] * 8 + ['{"alpha":1.0}'] * 8
    assert {row["trainer.flag"] for row in rows.values()} == {True, False}
    assert {row["trainer.mixed"] for row in rows.values()} == {"1", "one"}


def test_what_a_cell_loses_is_logged_once_its_reference_run_has_ended(make_grid):
    axes = {**SMALL, SEED: [1]}
    grid = make_grid(lambda axes: "unfinished" if axes[WARMUP] else ENTROPY + 1, axes)
    bare, ends_well, other, stalls = grid.cells
    name = {cell["name"]: f"runs/{cell['name']}" for cell in grid.cells}
    write_index(grid.folder)
    with server(grid.folder, "--reload_interval=1") as ask:
        before = until(lambda: (rows := table(ask)) and len(rows) == 4 and rows)
        assert all("delta/demo" not in row["metrics"] for row in before.values())
        grid.end(ends_well, 2.5)
        grid.end(stalls, ENTROPY)
        write_index(grid.folder, only_new=True)
        first = name[bare["name"]]
        seen = until(lambda: "delta/demo" in (rows := table(ask))[first]["metrics"] and rows)
        until(lambda: "delta/demo" in table(ask)[name[ends_well["name"]]]["metrics"])
    assert seen[first]["metrics"]["delta/demo"] == ENTROPY - 2.5
    assert "delta/demo" not in seen[name[other["name"]]]["metrics"]  # its twin learned nothing


def test_only_new_leaves_alone_what_is_newer_than_its_result_and_plan(make_grid, monkeypatch):
    grid = make_grid(lambda axes: 2.0, {**SMALL, SEED: [1]})
    write_index(grid.folder, only_new=True)
    for path in grid.folder.parent.rglob("*"):  # files of one tick of the clock have equal times
        age = 10 if path.name == "plan.json" else 20 if path.suffix == ".run" else 30
        os.utime(path, (time.time() - age, time.time() - age))
    made: list[str] = []
    original = tensorboard.run_text
    monkeypatch.setattr(
        tensorboard, "run_text", lambda cell, why: made.append(cell.id) or original(cell, why)
    )
    write_index(grid.folder, only_new=True)
    assert sorted(made) == sorted(cell["id"] for cell in grid.cells)
    write_index(grid.folder, only_new=True)
    assert len(made) == len(grid.cells)
    second, first = (grid.run(cell) for cell in grid.cells[:2])
    before = index_of(first), index_of(second)
    (first / "metrics.csv").unlink()  # would take the curves out of the index
    grid.end(grid.cells[0], 3.0)
    write_index(grid.folder, only_new=True)
    assert index_of(first) == before[0]
    assert index_of(second) != before[1]
    write_index(grid.folder)
    assert index_of(first) != before[0]


def index_of(run: Path) -> str:
    (path,) = run.glob("*.run")
    return path.name


def charts_of(grid: GridResults, page: int) -> dict[str, str]:
    """The patterns of the charts of a page by their titles."""
    pages = layout_pb2.Layout()
    pages.ParseFromString(layout(IndexedGrid(grid)).value[0].tensor.string_val[0])
    return {chart.title: chart.multiline.tag[0] for chart in pages.category[page].chart}


def test_each_variant_has_charts_that_match_its_curves_only(make_grid):
    axes = {PRESET: ["sas", "sas_p"], "model.block.norm": ["none", None], WARMUP: [0, 60]}
    grid = read_results(make_grid(lambda axes: 2.0, axes).folder)
    charts = {title: each for title, each in charts_of(grid, 0).items() if "val/nll" in title}
    assert len(charts) == 4
    for title, pattern in charts.items():
        tags = ((cell, curve_tag(IndexedGrid(grid), cell, "val/nll")) for cell in grid.cells)
        found = [cell.variant for cell, tag in tags if re.match(pattern, tag)]
        assert found == [title.split(":")[0]] * 2
    shown = ("grad_norm", "tokens_per_second", "data_wait_share", "lr")
    assert [*charts_of(grid, 1).values()] == [f"^train/{name}$" for name in shown]


def test_inside_the_blocks_has_a_chart_for_what_some_run_probes(make_grid):
    """A gain of layers and an update of stacks are both called output_change."""
    grid = make_grid(lambda axes: 2.0, {**SMALL, SEED: [1]})
    path = grid.run(grid.cells[1]) / "metrics.csv"
    header, _, rest = path.read_text().partition("\n")
    tags = ["probe/zeta_skip/encoder/1", "probe/alpha/decoder/2", "probe/token_cosine/decoder/1"]
    tags += ["probe/output_change/decoder/3", "probe/output_change/decoder"]
    path.write_text(f"{header},{','.join(tags)}\n{rest}")
    (grid.run(grid.cells[0]) / "metrics.csv").unlink()
    charts = charts_of(read_results(grid.folder), 2)
    titles = [[title for title in charts if re.match(charts[title], tag)] for tag in tags]
    assert [len(each) for each in titles] == [1] * 5 == [1] * len(charts)
    assert titles[0] == ["learned gain zeta skip, by layer"]
    assert [each[0].partition(" ")[0] for each in titles[3:]] == ["learned", "squared"]


def test_losses_that_count_other_tokens_share_no_chart(make_grid):
    axes = {SEED: [1], PRESET: ["sas"], "data.tokenizer": ["word", "char"], WARMUP: [0, 60]}
    grid = make_grid(lambda axes: 2.0, axes, question="Which?")
    found = read_results(grid.folder)
    part = IndexedGrid(found)
    tags = [curve_tag(part, cell, "val/nll") for cell in found.cells]
    patterns = [each for title, each in charts_of(found, 0).items() if "val/nll" in title]
    matched = [[tag for tag in tags if re.match(pattern, tag)] for pattern in patterns]
    assert [len(each) for each in matched] == [2, 2]
    assert not set(matched[0]) & set(matched[1])
    assert "data.tokenizer is word and char" in question_of(found)


def test_the_column_of_the_metric_has_its_own_name(make_grid: Any) -> None:
    grid = read_results(make_grid(lambda _: 2.0).folder)
    accuracy = QualityMetric("val/accuracy", "accuracy", "", "max")
    scored = replace(grid, cells=tuple(replace(c, scores=(accuracy,)) for c in grid.cells))
    summary = experiment(IndexedGrid(scored))
    content = summary.value[0].metadata.plugin_data.content
    data = plugin_data_pb2.HParamsPluginData.FromString(content)
    shown = {info.name.tag: info.display_name for info in data.experiment.metric_infos}
    assert shown["val/nll"] == "val/nll, lower is better (the grid's metric)"


def listing(grid: FakeGrid, labels: Mapping[str, list[str]] | None = None) -> FakeGrid:
    """Move the runs of a grid into the store, where equal configs are one run."""
    for cell in grid.cells:
        run = grid.run(cell)
        cell["id"] = hashlib.sha256((run / "config.yaml").read_bytes()).hexdigest()[:16]
        if (run / "result.json").exists():
            record = json.loads((run / "result.json").read_text())
            (run / "result.json").write_text(json.dumps({**record, "id": cell["id"]}))
        place = stored(grid.folder.parent, cell["id"])
        place.parent.mkdir(exist_ok=True)
        shutil.rmtree(run) if place.exists() else run.rename(place)
        link_run(GridFolder(grid.folder), cell["name"], cell["id"])
    for name, change in ("plan.json", {"cells": grid.cells}), ("grid.yaml", {"labels": labels}):
        tree = yaml.safe_load((grid.folder / name).read_text())
        text = json.dumps({**tree, **{key: value for key, value in change.items() if value}})
        (grid.folder / name).write_text(f"{text}\n")
    return grid


def loss_of(axes: Mapping[str, Any]) -> float:
    """Another loss for each cell, the same in any grid."""
    return 2.0 + {"post_ln": 0.0, "pre_ln": 0.5, "sas": 1.0}[axes[PRESET]] - axes[WARMUP] / 256


MIXED = "trainer.mixed"
HALVES: dict[str, Any] = {
    "a.b": {PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 20, 60], MIXED: [1]},
    "a": {MIXED: [1, "one"], SEED: [1], PRESET: ["pre_ln", "sas"], WARMUP: [0, 20, 60]},
}
"""Axes of two grids that share half the runs of the first."""
REFERENCE = {"a.b": 60, "a": 20}
LABEL = {"a.b": "pre_ln", "a": "Pre (a)"}


def halves(make_grid: Callable[..., FakeGrid], name: str) -> FakeGrid:
    asks = {"question": f"Question of {name}?"}
    asks |= {"sensitivity": {"reference_warmup": REFERENCE[name]}}
    grid = make_grid(loss_of, HALVES[name], name=name, **asks)
    return listing(grid, {PRESET: ["Pre (a)", "sas"]} if name == "a" else None)


def check_half(grid: FakeGrid, loader: str) -> None:
    """Check all that TensorBoard shows of one of the two."""
    name = grid.folder.name
    with server(grid.folder, f"--load_fast={loader}") as ask:
        rows = until(lambda: complete(ask, len(grid.cells)))
        shown, metrics = columns(ask)
        tags, pages = ask("scalars/tags"), ask("custom_scalars/layout")
        run = f"runs%2F{grid.cells[-1]['name']}"
        (text,) = ask(f"text/text?run={run}&tag=run/{name}")
    assert f"Question of {name}?" in text["text"]
    axes = {*HALVES[name]} - ({PRESET} if name == "a.b" else set())  # there it is the variant
    assert sorted(shown) == sorted(f"{name}/{key}" for key in ("variant", *axes, "outcome"))
    assert metrics == [f"delta/{name}", "val/nll", "val/perplexity", "val/accuracy"]
    assert set(tags) == set(rows) == {f"runs/{cell['name']}" for cell in grid.cells}
    for cell in grid.cells:
        row, axes = rows[f"runs/{cell['name']}"], cell["axes"]
        typed = {**axes, MIXED: str(axes[MIXED]) if name == "a" else axes[MIXED]}
        variant = LABEL[name] if axes[PRESET] == "pre_ln" else axes[PRESET]
        if name == "a.b":
            del typed[PRESET]
        assert of(name, row) == {**typed, "variant": variant, "outcome": "ok"}
        assert row["metrics"]["val/nll"] == pytest.approx(loss_of(axes), rel=1e-6)
        lost = loss_of(axes) - loss_of({**axes, WARMUP: REFERENCE[name]})
        assert row["metrics"][f"delta/{name}"] == pytest.approx(lost, abs=1e-6)
    variants = [LABEL[name], "post_ln" if name == "a.b" else "sas"]
    charts = [chart for chart in pages["category"][0]["chart"] if "val/nll" in chart["title"]]
    matched = {}
    for chart in charts:
        (pattern,) = chart["multiline"]["tag"]
        of_chart = {run: [tag for tag in tags[run] if re.match(pattern, tag)] for run in tags}
        assert all(len(each) <= 1 for each in of_chart.values())
        matched[chart["title"].split(":")[0]] = sum(map(len, of_chart.values()))
    assert matched == dict.fromkeys(variants, len(grid.cells) // 2)
    assert list(grid.folder.glob("*tfevents*")) == []


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    ("order", "loader"),
    [(("a.b", "a"), "true"), (("a", "a.b"), "false"), (("a.b", "a", "a.b"), "true")],
)
def test_each_of_two_grids_that_share_runs_shows_its_own(make_grid, order, loader):
    grids: dict[str, FakeGrid] = {}
    for name in order:
        grids[name] = grids.get(name) or halves(make_grid, name)
        write_index(grids[name].folder, only_new=True)
    shared = [{cell["id"] for cell in grid.cells} for grid in grids.values()]
    assert len(shared[0] & shared[1]) == 3
    for grid in grids.values():
        check_half(grid, loader)


@pytest.mark.parametrize("order", [("a.b", "a"), ("a", "a.b")])
def test_whichever_grid_writes_the_file_of_a_shared_run_writes_the_same(make_grid, order):
    grids = {name: halves(make_grid, name) for name in ("a.b", "a")}
    written = []
    for name in order:
        write_index(grids[name].folder)
        files = (grids["a"].folder.parent / ".runs").glob("*/*.run")
        written.append({path.parent.name: (path.name, path.stat().st_mtime_ns) for path in files})
    shared = {cell["id"] for cell in grids["a"].cells} & {c["id"] for c in grids["a.b"].cells}
    assert {run: written[0][run] for run in shared} == {run: written[1][run] for run in shared}


def wholes(experiments: Path) -> dict[str, list[str]]:
    """The folders that hold columns, with the grids whose columns they are."""
    found: dict[str, list[str]] = {}
    for path in sorted(experiments.rglob("*tfevents*.grid")):
        names = re.findall(rb"([\w.]+)/variant", path.read_bytes())
        found.setdefault(path.parent.name, []).extend({name.decode() for name in names})
    return found


def test_the_columns_of_a_grid_move_out_of_a_run_that_another_grid_lists(make_grid):
    small = listing(make_grid(loss_of, {PRESET: ["pre_ln"], WARMUP: [0, 60]}, name="small"))
    write_index(small.folder)
    first, second = (cell["id"] for cell in small.cells)
    assert wholes(small.folder.parent) == {first: ["small"]}
    axes = {PRESET: ["pre_ln", "sas"], WARMUP: [0, 60]}
    large = listing(make_grid(loss_of, axes, name="large"))
    write_index(large.folder, only_new=True)
    own = large.cells[2]["id"]
    assert wholes(small.folder.parent) == {"small": ["small"], own: ["large"]}
    for grid in (small, large):
        with server(grid.folder) as ask:
            until(lambda grid=grid: complete(ask, len(grid.cells)))
            shown, metrics = columns(ask)
        assert {name.partition("/")[0] for name in shown} == {grid.folder.name}
        assert f"delta/{grid.folder.name}" in metrics
    (large.folder / "runs" / large.cells[1]["name"]).unlink()
    write_index(small.folder, only_new=True)
    assert wholes(small.folder.parent) == {second: ["small"], own: ["large"]}
    shutil.rmtree(small.folder)
    link_run(GridFolder(large.folder), large.cells[1]["name"], second)
    write_index(large.folder, only_new=True)
    assert wholes(large.folder.parent) == {first: ["large"]}


def test_a_grid_that_cannot_be_read_shows_nothing_and_harms_no_other(make_grid):
    grids = {name: halves(make_grid, name) for name in ("a.b", "a")}
    write_index(grids["a"].folder)
    plan = (grids["a"].folder / "plan.json").read_text()
    (grids["a"].folder / "plan.json").write_text("{")
    write_index(grids["a.b"].folder)
    check_half(grids["a.b"], "true")
    (grids["a"].folder / "plan.json").write_text(plan)
    write_index(grids["a"].folder, only_new=True)
    for grid in grids.values():
        check_half(grid, "true")


def test_two_grids_do_not_write_their_indexes_at_once(make_grid):
    grid = halves(make_grid, "a")
    lock = grid.folder.parent / ".runs" / ".index.lock"
    with ThreadPoolExecutor() as pool:
        with if_free(lock) as free:
            assert free
            write_index(grid.folder, only_new=True)
            waits = pool.submit(write_index, grid.folder)
            time.sleep(0.5)
            assert wholes(grid.folder.parent) == {}
        waits.result(timeout=240)
    assert list(wholes(grid.folder.parent).values()) == [["a"]]


def test_a_run_without_a_link_holds_nothing_of_the_grid_and_its_curves_have_no_link(make_grid):
    grid = halves(make_grid, "a")
    unlinked, linked = (cell["name"] for cell in grid.cells[:2])
    (grid.folder / "runs" / unlinked).unlink()
    page = write_report(grid.folder, figures=False).read_text(encoding="utf-8")
    assert wholes(grid.folder.parent) == {grid.cells[1]["id"]: ["a"]}
    shown = re.findall(r'aria-label="curves of (\S+) in', page)
    assert linked in shown
    assert unlinked not in shown
