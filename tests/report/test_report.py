"""The report's files: what they hold, that the page is sound HTML, and that odd grids have one."""

import errno
import json
import re
import subprocess
import tomllib
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pandas as pd
import pytest

from lightning_app.config.tree import PRESET, RATE, SEED, WARMUP
from lightning_app.report.facts import p_value, preset_words
from lightning_app.report.headline import answer
from lightning_app.report.limits import limits
from lightning_app.report.page import _templates
from lightning_app.report.results import read_results
from lightning_app.report.verdicts import verdicts
from lightning_app.report.warmup import sensitivity_scores
from tests import warm
from tests.report.conftest import FakeGrid, messages, typical, write_report
from tests.told import told

ROOT = Path(__file__).parents[2]
VOID = {"meta", "br", "hr", "col"}
QUESTIONS = ["need", "cost", "inside", "run", "appendix"]


class Page(HTMLParser):
    """The page as a reader's program sees it; fails on a tag that is not closed where it should."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script", "pre"} & set(self.open):
            self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FakeGrid:
    """A grid with its report, which no test changes."""
    grid = FakeGrid(tmp_path_factory.mktemp("finished") / "demo", typical)
    write_report(grid.folder)
    return grid


def test_the_files_and_the_page_of_a_report(finished):
    grid = finished
    left = {path.name for path in grid.folder.iterdir()}
    wanted = "results.csv results.parquet sensitivity.csv report.html figures recompute_study.py"
    assert left >= {*wanted.split()}
    figures = {path.name for path in (grid.folder / "figures").iterdir()}
    names = ("forest", "warmup_effect", "loss_by_warmup", "training", "resources")
    assert figures >= {f"{name}.{kind}" for name in names for kind in ("svg", "pdf", "csv")}
    assert len(list(grid.folder.glob("runs/*/events.out.tfevents*.run"))) == 30
    path = grid.folder / "report.html"
    assert path.stat().st_size < 1_500_000  # small enough to mail
    page = Page(path)
    assert page.all("html") == [{"lang": "en"}]
    assert all("src" not in attributes for attributes in page.all("script"))
    assert all(attributes.get("scope") for attributes in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table")) == 7
    drawn = {name.removesuffix(".svg") for name in figures if name.endswith(".svg")}
    assert len(page.all("svg")) == len(drawn)
    assert len(page.all("figcaption")) == len(drawn) - len({"forest-narrow"} & drawn)
    assert all(attributes.get("role") == "group" for attributes in page.all("svg"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_wheel_has_the_templates():
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert target["targets"]["wheel"]["packages"] == ["lightning_app"]
    assert "exclude" not in target["targets"]["wheel"]
    names = [path.name for path in (ROOT / "lightning_app/report/templates").iterdir()]
    assert sorted(names) == sorted(_templates().list_templates())
    asked = "\n".join(f"lightning_app/report/templates/{name}" for name in names)
    command = ["git", "check-ignore", "--stdin"]
    ignored = subprocess.run(command, cwd=ROOT, input=asked, text=True, capture_output=True)
    assert ignored.stdout == ""


def test_the_page_opens_with_the_answer_and_folds_the_rest(finished):
    grid, page = read_results(finished.folder), Page(finished.folder / "report.html")
    scores = sensitivity_scores(grid)
    text = (finished.folder / "report.html").read_text(encoding="utf-8")
    order = ["<h1>", 'id="figure-1"', "<table>", '<aside class="caution"', '<p class="summary">']
    order += [f'<details class="section" id="{question}">' for question in QUESTIONS]
    places = [text.index(tag) for tag in order]
    assert places == sorted(places)
    assert text.count('class="section"') == len(QUESTIONS)
    assert f"<h1>{answer(grid, scores)}</h1>" in text
    assert "figures/forest.svg" in text[places[1] : places[2]]
    words = {verdict.variant: verdict.word + verdict.more for verdict in verdicts(grid, scores)}
    assert {row[0]: row[1] for row in page.rows[1:5]} == words
    aside = text[places[3] : text.index("</aside>")]
    told_of = limits(grid)
    assert aside.partition("<details>")[0].count("<li>") == 5 < len(told_of)
    assert aside.count("<li>") == len(told_of)
    assert all(caution in page.text for caution in told_of)


def test_every_link_leads_somewhere(finished, tmp_path):
    elsewhere = tmp_path / "else" / "where"
    write_report(finished.folder, elsewhere)
    for out in (finished.folder, elsewhere):
        page = Page(out / "report.html")
        ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
        links = [
            value
            for _, attributes in page.tags
            for key, value in attributes.items()
            if key in ("href", "src", "xlink:href")
        ]
        assert len(links) > 100
        for link in links:
            assert link
            if link.startswith("#"):
                assert link[1:] in ids
            elif not link.startswith("http://localhost:6006/?runFilter="):
                assert (out / unquote(link)).exists()


def test_the_tables_say_what_the_csv_says(finished):
    scores = pd.read_csv(finished.folder / "sensitivity.csv")
    page = Page(finished.folder / "report.html")
    heads = [n for n, row in enumerate(page.rows) if row[:1] == ["variant"]]
    for head, first, ends in ((heads[0], 2, "holm_"), (heads[1], 1, "")):
        for variant in ("post_ln", "sas"):
            own = scores[scores["variant"] == variant].set_index("score")
            row = next(row for row in page.rows[head:] if row[0] == variant)
            for cell, name in ((row[first], "delta"), (row[first + 1], "interaction")):
                shown = [float(x.replace("−", "-")) for x in re.findall(r"[−\d.]+", cell)]
                columns = ["estimate", f"{ends}low", f"{ends}high"]
                estimate = own.loc[name, columns].astype(float)
                assert shown == pytest.approx(estimate.tolist(), abs=6e-4)
            assert p_value(own.loc["delta", "p_holm"]) in row


def test_every_string_is_escaped(make_grid):
    nasty = '<script>alert("1")</script> & <b>'
    axes = {SEED: [1, 2], PRESET: ["pre_ln", "x<i>&$_y"], WARMUP: [0, 60]}
    ends = {0: 3.0, 60: 2.0}

    def outcome(axes: Mapping[str, Any]) -> float | str:
        return "failed" if axes[SEED] == 2 else ends[axes[WARMUP]]

    page = Page(write_report(make_grid(outcome, axes, question=nasty, curves=False).folder))
    assert page.all("i") == []
    plain = make_grid(outcome, axes, curves=False, name="b").folder
    scripts = Page(write_report(plain, figures=False)).all("script")
    assert len(page.all("script")) == len(scripts)
    assert nasty in page.text
    assert "x<i>&$_y" in page.text
    assert told("RuntimeError: <b> … </b> memory").search(page.text)


def one_seed(axes: Mapping[str, Any]) -> float:
    return 2.0 + (axes.get(WARMUP) == 0)


def some_missing(axes: Mapping[str, Any]) -> float | str:
    ends = {2: "failed", 3: "unfinished", 4: "waiting"}
    return ends[axes[SEED]] if axes[WARMUP] == 0 and axes[SEED] in ends else 2.0 + 0.1 * axes[SEED]


SIX = {SEED: [1, 2], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}
ODD = {
    "one seed": (one_seed, {**SIX, SEED: [1]}, ["One seed: differences", "one seed, no interval"]),
    "missing cells": (
        some_missing,
        {**SIX, SEED: [1, 2, 3, 4]},
        ["2 crashed, 2 unfinished, 2 not started", "6 of 16 cells have no result", "out of"],
    ),
    "no baseline arm": (one_seed, {**SIX, PRESET: ["sas"]}, ["no arm of the baseline pre_ln"]),
    "all stalled": (lambda axes: None, SIX, ["never learned"]),
    "no warm-up axis": (
        one_seed,
        {SEED: [1, 2], PRESET: ["post_ln", "pre_ln"]},
        ["val/nll of each value less that of pre_ln"],
    ),
    "several rates": (
        one_seed,
        {**SIX, RATE: [0.001, 1e20]},
        ["learning rate 1e+20", "from 0.001 to 1e+20"],
    ),
    "extra axes": (
        one_seed,
        {**SIX, "data.tokens_per_batch": [512, 1024], "model.block.norm": [None, "rms_norm"]},
        ["data.tokens_per_batch=512", "post_ln+norm=rms_norm"],
    ),
    "one seed finished of three": (
        lambda axes: one_seed(axes) if axes[SEED] == 1 else "waiting",
        {**SIX, SEED: [1, 2, 3]},
        ["One seed: differences", "2 of 3 seeds not finished"],
    ),
    "nothing finished": (
        lambda axes: "waiting",
        SIX,
        ["No cell has finished yet, so there are no scores.", "8 not started", "not started"],
    ),
    "nothing but crashes": (lambda axes: "failed", SIX, ["No cell has finished yet", "8 crashed"]),
}


WITH_PDF = ("missing cells", "several rates", "extra axes")


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.pdf_files] if name in WITH_PDF else []) for name in ODD],
)
def test_odd_grids_have_a_report(make_grid, name):
    outcome, axes, wanted = ODD[name]
    fake = make_grid(outcome, axes, curves=name == "one seed")
    page = Page(write_report(fake.folder))
    for said in wanted:
        assert said in page.text
    assert not re.search(r"\bnan\b|\bNone\b(?!:)|<NA>|\binf\b", page.text)
    sections = [each for each in page.all("details") if each.get("class") == "section"]
    grid, nothing = read_results(fake.folder), name.startswith("nothing")
    assert {"open" in each for each in sections} == {nothing}
    assert (answer(grid, sensitivity_scores(grid)) == "") == nothing


def test_a_run_that_is_ok_without_a_finite_loss(make_grid):
    grid = make_grid(one_seed, {**SIX, SEED: [1, 2, 3]}, curves=False)
    grid.edit(0, {"val/nll": None, "val/accuracy": None})
    page = Page(write_report(grid.folder, figures=False))
    assert "1 of 3" in page.text
    assert "11 of 12" in page.text
    assert "1 with a" in page.text
    said = "result.json: reports no finite 'val/nll', though its status is ok"
    assert page.text.count(said) == 2  # what may not be concluded, and the missing cells
    assert not re.search(r"\bnan\b|\bNone\b(?!:)|<NA>|\binf\b", page.text)


def test_values_that_no_result_needs(make_grid, outcome):
    grid = make_grid(outcome, SIX, curves=False)
    write_report(grid.folder, figures=False)
    before = pd.read_csv(grid.folder / "sensitivity.csv")
    kept = "schema id name status outcome diverged metrics unigram_entropy steps seconds attempt"
    kept = {*kept.split(), "started", "finished"}
    grid.rewrite(lambda _, record: [record.pop(key) for key in record.keys() - kept])
    page = Page(write_report(grid.folder))
    pd.testing.assert_frame_equal(before, pd.read_csv(grid.folder / "sensitivity.csv"))
    assert "not recorded" in page.text
    assert not re.search(r"\bnan\b|\bNone\b(?!:)|<NA>|\binf\b", page.text)


def test_the_table_of_costs_has_the_means_of_the_runs(make_grid):
    presets = ["post_ln", "pre_ln", "sas"]  # pre_ln is the baseline
    grid = make_grid(one_seed, {SEED: [1, 2], PRESET: presets, WARMUP: [0, 60]}, curves=False)
    for number, cell in enumerate(grid.cells):
        place = presets.index(cell["axes"][PRESET])
        took = {"parameters": 1000 * (1 + place), "seconds": 100.0 * (1 + place) + number}
        took["peak_memory_bytes"] = None if place == 2 else 2**20 * (1 + place)
        grid.edit(number, **took)
    page = Page(write_report(grid.folder, figures=False))
    start = next(i for i, row in enumerate(page.rows) if "parameters" in row)
    shown = {row[0]: row[1:] for row in page.rows[start + 1 : start + 4]}
    for place, name in enumerate(presets):
        numbers = [n for n, cell in enumerate(grid.cells) if cell["axes"][PRESET] == name]
        seconds = [100.0 * (1 + place) + number for number in numbers]
        ratio = "" if name == "pre_ln" else f"{(1 + place) / 2:.3f} ×"
        assert shown[name][0] == f"{1000 * (1 + place):,}{ratio}"
        assert shown[name][2].startswith(("1", "2", "–")[place])
        assert shown[name][3].startswith(f"{sum(seconds) / 4:,.0f}")
        assert shown[name][4:] == [f"{sum(seconds) / 3600:,.2f}", "4"]


COUPLED = {"kind": "inverse_sqrt", "coupling": "decoupled", "reference_steps": 60}
ADAM = {"kind": "adam", "lr": 1e-3, "eps": 1e-9, "bias_correction": True}
COUPLINGS = {"model.schedule.coupling": ["decoupled", "paper"]}
SETTINGS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (  # each coupling has its own caution, and the optimizer is not that of the base alone
        {"schedule": COUPLED, "optimizer": ADAM},
        {**COUPLINGS, "model.optimizer.kind": ["adam", "sgd"], "model.optimizer.eps": [1e-9, 1e-6]}
        | {"trainer.gradient_clip_val": [0.0, 1.0]},
        ["coupling paper:", "coupling decoupled:", "1e-09 / 1e-06; … 0 / 1", "T_ref = 60 / inv"],
    ),
    (
        {"schedule": {**COUPLED, "kind": "linear"}},
        {"model.schedule.kind": ["linear", "constant"], **COUPLINGS},
        ["paper: … coupled:", "Runs with linear", "from step 60 / linear", "its end / constant"],
    ),
    (
        {"schedule": {**COUPLED, "kind": "cosine"}, "optimizer": ADAM},
        {"model.schedule.kind": ["cosine", "bert"]}
        | {"model.optimizer.bias_correction": [True, False]},
        ["Runs with cosine", "bert: … BERT's code", "60 / … BERT's code", "with and without"],
    ),
    ({"optimizer": {**ADAM, "bias_correction": False}}, {}, ["no bias correction"]),
]


@pytest.mark.parametrize(("base", "axes", "shown"), SETTINGS)
def test_settings_are_named_with_all_their_values(make_grid, base, axes, shown):
    fake = make_grid(one_seed, SIX | axes, base={"model": base}, curves=False)
    text = Page(write_report(fake.folder, figures=False)).text
    for said in shown:
        assert told(said).search(text), said
    assert "Runs with constant" not in text


def test_the_same_runs_give_the_same_bytes_and_stay_as_they_are(make_grid, outcome, tmp_path):
    grid = make_grid(outcome, SIX)
    before = sorted(grid.folder.rglob("*"))
    first, second = tmp_path / "new" / "first", tmp_path / "new" / "second"
    write_report(grid.folder, first)
    write_report(grid.folder, second)
    assert sorted(grid.folder.rglob("*")) == before
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(names) >= 18
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.slow
def test_figures_that_are_too_many_are_said_to_be_missing(make_grid, monkeypatch):
    monkeypatch.setattr("lightning_app.report.figures.sheet.MOST_PANELS", 12)
    widths = list(range(100, 104))
    axes = {SEED: [1], PRESET: list("abcdef"), "model.architecture.model_dim": widths}
    page = Page(write_report(make_grid(lambda a: 2.0, axes, curves=False).folder))
    assert "2 of 4" in page.text
    assert f"model_dim={widths[-1]}" in page.text  # in the tables


LIMITED = """
import resource, signal, sys
from pathlib import Path
from lightning_app.report.results import read_results
from lightning_app.report.write import write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    write(read_results(Path(sys.argv[1])), Path(sys.argv[1]))
except OSError as error:
    sys.exit(error.errno)
"""


def test_no_room_leaves_the_old_report_whole(make_grid, outcome):
    """The kernel refuses to make a file longer than 20 kB, as a full disk would."""
    grid = make_grid(outcome, SIX, curves=False)
    page = write_report(grid.folder)
    before = {path: path.read_bytes() for path in page.parent.rglob("*") if path.is_file()}
    grid.end(grid.cells[0], 3.0)
    changed = grid.run(grid.cells[0])
    done = warm.run(["-c", LIMITED, str(grid.folder)])
    assert done.returncode == errno.EFBIG
    for path, content in before.items():
        if changed not in path.parents and path.suffix in (".html", ".svg"):
            assert path.read_bytes() == content
    assert not list(page.parent.rglob("*.part"))


def test_a_preset_of_a_plugin_is_described_by_its_first_layer(make_grid):
    axes = {SEED: [1, 2], PRESET: ["damped", "pre_ln"], WARMUP: [0, 60]}
    fake = make_grid(lambda a: 2.0 + a[SEED], axes, curves=False)
    branch = {"value": 0.5, "learned": True}
    layer = {"norm_input": "none", "norm_sum": "layer_norm", "branch": branch, "rule": "highway"}
    used = {"plugins_used": {"my_blocks": "0" * 64}}
    fake.rewrite(lambda _, record: record.update(provenance=used))
    spec = {"encoder": {"blocks": [{"around_self": layer}]}}
    for cell in fake.cells:
        (fake.run(cell) / "block.json").write_text(json.dumps(spec))
    own, shipped = preset_words(read_results(fake.folder))
    assert own.startswith("damped: ")
    assert "my_blocks" in own
    assert own.endswith("norm_sum layer_norm, branch.value 0.5, branch.learned true, rule highway")
    assert shipped.startswith("pre_ln: ")


def test_a_metric_that_tells_no_arms_apart_is_a_limit(make_grid):
    alike = read_results(make_grid(lambda _: 0.25, SIX, curves=False).folder)
    (values,) = (v for n, v in messages(limits(alike)) if n == "limits.no_spread")
    assert values == {"metric": "val/nll", "corpus": "synthetic", "value": "0.25"}
