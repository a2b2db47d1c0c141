"""What a report leaves for other programs and for a paper."""

import json
import re
from typing import Any

import pandas as pd
import pytest
from matplotlib.mathtext import MathTextParser

from lightning_app.report.bibliography import bibliography, references
from lightning_app.report.facts import bounded, facts, nats, p_value
from lightning_app.report.page import Report
from lightning_app.report.results import read_results
from lightning_app.report.table import ReportTable, latex, markdown, tex
from lightning_app.report.tables import delta_table, loss_by_warmup, verdict_table
from lightning_app.report.warmup import sensitivity_scores
from lightning_app.report.write import write_exports
from tests.report.conftest import BASE, PRESET, RATE, SEED, WARMUP

PRESETS = ["post_ln", "pre_ln", "sas"]
THREE = {SEED: [1, 2, 3], PRESET: PRESETS, WARMUP: [0, 60]}


def losses(axes):
    return 2.0 + 0.5 * (axes[WARMUP] == 0) + 0.1 * axes[SEED] * PRESETS.index(axes[PRESET])


GRIDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any] | None]] = {
    "regular": (losses, THREE, None),
    "one seed": (losses, {**THREE, SEED: [1]}, None),
    "several rates": (losses, {**THREE, RATE: [0.001, 0.002]}, None),
    "another axis": (losses, {**THREE, "data.max_length": [64, 128]}, None),
    "missing": (lambda a: "failed" if a[SEED] == 2 else losses(a), THREE, None),
    "all stalled": (lambda a: 4.6, THREE, None),
    "nothing finite": (lambda a: None, THREE, None),
    "nothing finished": (lambda a: "waiting", THREE, None),
    "no scores asked for": (losses, THREE, {}),
    "no warm-up axis": (lambda a: 2.0, {SEED: [1, 2], PRESET: PRESETS}, None),
    "no variants": (lambda a: 2.0, {SEED: [1, 2], WARMUP: [0, 60]}, None),
}


def test_the_files(make_grid, outcome, tmp_path):
    grid = read_results(make_grid(outcome, THREE).folder)
    report = Report(grid, sensitivity_scores(grid), tmp_path / "out")
    write_exports(report)
    left = {str(p.relative_to(tmp_path / "out")) for p in tmp_path.glob("out/**/*") if p.is_file()}
    tables = {f"tables/{x}.{of}" for x in ("headline", "loss_by_warmup") for of in ("md", "tex")}
    frames = {f"{name}.{of}" for name in ("results", "validations") for of in ("csv", "parquet")}
    assert left == tables | frames | {"sensitivity.csv", "references.bib"}
    results = pd.read_parquet(tmp_path / "out" / "results.parquet")
    pd.testing.assert_frame_equal(results, report.results, check_dtype=False)
    assert len(results) == len(grid.cells)
    for name in ("results", "validations"):
        written = pd.read_csv(tmp_path / "out" / f"{name}.csv")
        same = pd.read_parquet(tmp_path / "out" / f"{name}.parquet")
        assert list(same) == list(written)
        assert same["val/nll"].tolist() == pytest.approx(written["val/nll"].tolist())


@pytest.mark.parametrize("name", GRIDS)
def test_every_grid_has_every_export(make_grid, tmp_path, name):
    outcome, axes, sensitivity = GRIDS[name]
    fake = make_grid(outcome, axes, sensitivity=sensitivity, curves=False)
    grid = read_results(fake.folder)
    scores = sensitivity_scores(grid)
    write_exports(Report(grid, scores, tmp_path))
    for table in (verdict_table(grid, scores), loss_by_warmup(grid, scores)):
        latex_is_well_formed(table)
        the_same_numbers_stand_in_both_kinds(table)
    listed = set(re.findall(r"^@\w+\{(\w+),$", (tmp_path / "references.bib").read_text(), re.M))
    assert listed <= set(bibliography())
    assert (tmp_path / "tables").exists() == bool(grid.finished)
    for path in tmp_path.glob("tables/*.md"):
        assert path.read_text(encoding="utf-8").count("\n| ") > 1, path.name  # rows below the head


def rows_of(table: str) -> list[str]:
    """The rows of a table in LaTeX, the header first."""
    inner = table.split(r"\toprule")[1].split(r"\bottomrule")[0]
    return [line.removesuffix(r" \\") for line in inner.splitlines() if line.endswith(r" \\")]


def latex_is_well_formed(table: ReportTable) -> None:
    text = latex(table)
    width = len(table.on("paper"))
    (spec,) = re.findall(r"\\begin\{tabular\}\{(\w+)\}", text)
    assert len(spec) == width
    for row in rows_of(text):
        slice_of = row.startswith(rf"\multicolumn{{{width}}}{{l}}{{\emph{{")
        assert slice_of or len(re.split(r"(?<!\\) ?& ?", row)) == width
    begun, ended = (re.findall(rf"\\{word}\{{([\w*]+)\}}", text) for word in ("begin", "end"))
    assert begun == ended[::-1]
    plain = re.sub(r"\\[{}]", "", text)
    depth = 0
    for letter in plain:
        depth += (letter == "{") - (letter == "}")
        assert depth >= 0
    assert depth == 0
    body = text.split(r"\begin{table*}")[1]
    for letter in "#_":
        assert not re.search(rf"(?<!\\)\{letter}", re.sub(r"\$[^$]*\$", "", body)), letter
    for formula in re.findall(r"(?<!\\)\$[^$]*\$", body):
        MathTextParser("path").parse(formula)
    assert len(re.findall(r"(?<!\\)\$", body)) % 2 == 0
    assert body.isascii()


def the_same_numbers_stand_in_both_kinds(table: ReportTable) -> None:
    piped = [line for line in markdown(table).splitlines() if line.startswith("|")][2:]
    texts = " ".join(rows_of(latex(table))[1:]).replace("$-$", "−")
    texts = re.sub(r"\\multicolumn\{\d+\}", "", texts)
    first, second = (re.findall(r"−?\d[.\d]*", text) for text in (" ".join(piped), texts))
    assert sorted(first) == sorted(second)


def by_name(table: ReportTable, where: str = "") -> dict[str, dict[str, str]]:
    """The cells of a slice by the names of row and column, an interval after a line break."""
    return {
        row[0].text: {
            column.title: "\n".join((row[n].text, *row[n].below)) for n, column in table.on("page")
        }
        for row in table.bodies[where]
    }


def test_the_numbers_are_those_of_the_scores(make_grid, outcome):
    grid = read_results(make_grid(outcome, THREE, curves=False).folder)
    found = {(score.variant, score.score): score for score in sensitivity_scores(grid)}
    rows = by_name(verdict_table(grid, sensitivity_scores(grid)))
    assert list(rows) == ["all variants", *PRESETS]
    sure = {name: f"\n[{nats(s.holm_low)}, {nats(s.holm_high)}]" for name, s in found.items()}
    for place, variant in enumerate(rows):
        row, name = rows[variant], (variant, "delta" if place else "pooled")
        ends = sure[name] * (variant != "post_ln")  # whose p value is that of its failures
        shown = f"{bounded(found[name])}{ends}"
        assert (row["saved by warm-up"], row["p"]) == (shown, p_value(found[name].p_holm))
    for variant, sign in (("sas", ""), ("post_ln", "≥ ")):
        more = (variant, "interaction")
        shown = f"{sign}{nats(found[more].estimate)}{sure[more]}"
        assert rows[variant]["minus that of pre_ln"] == shown
    assert rows["pre_ln"]["minus that of pre_ln"] == rows["all variants"]["failed with"] == "–"
    failed = ("failed without", "failed with")
    assert [rows["post_ln"][name] for name in failed] == ["3 of 3", "0 of 3\np 0.031"]
    rows = by_name(delta_table(grid, sensitivity_scores(grid)))
    delta = found["sas", "delta"]
    assert rows["sas"]["Δ"] == f"{nats(delta.estimate)}\n[{nats(delta.low)}, {nats(delta.high)}]"
    assert rows["post_ln"]["stalled, warm-up 0"].split("\n")[0] == "3 / 3"
    assert rows["pre_ln"]["interaction"] == "–"
    means = by_name(loss_by_warmup(grid, sensitivity_scores(grid)))
    own = [cell.loss for cell in grid.cells if (cell.variant, cell.warmup) == ("sas", 60)]
    assert means["sas"]["warm-up 60"].split("\n")[0] == nats(sum(own) / 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pre_ln", r"pre\_ln"),
        ("sas_p_no_norm", r"sas\_p\_no\_norm"),
        (
            "50 % & #1 {x} $5 ~ ^ a\\b",
            r"50 \% \& \#1 \{x\} \$5 \textasciitilde{} \textasciicircum{} "
            r"a\textbackslash{}b",
        ),
        ("R_w, S_w", r"$R_{\mathrm{w}}$, $S_{\mathrm{w}}$"),
        ("T_ref", r"$T_{\mathrm{ref}}$"),
        ("η_max", r"$\eta_{\mathrm{max}}$"),
        ("model_X_y", r"model\_X\_y"),
        ("−0.1 < Δ", r"$-$0.1 $<$ $\Delta$"),
        ("– “a”", "-- ``a''"),
    ],
)
def test_text_for_latex(text, expected):
    assert tex(text) == expected


def test_references_are_of_what_was_used_and_markdown_rows_are_escaped(make_grid, outcome):
    fake = make_grid(outcome, {**THREE, "model.optimizer.kind": ["adamw"]}, curves=False)
    keys = re.findall(r"^@\w+\{(\w+),$", references(read_results(fake.folder)), re.M)
    assert len(keys) == len(set(keys))
    there = {"vaswani2017attention", "xiong2020layer", "he2023simplifying"}
    there |= {"loshchilov2017decoupled", "holm1979simple", "paszke2019pytorch"}
    assert there <= set(keys)
    assert not {"he2021realformer", "cettolo2014report", "papineni2002bleu"} & set(keys)
    axes = {SEED: [1], PRESET: ["a|b", "pre_ln"], WARMUP: [0, 60]}
    grid = read_results(make_grid(lambda a: 2.0, axes, curves=False, name="pipe").folder)
    assert r"| a\|b |" in markdown(verdict_table(grid, sensitivity_scores(grid)))
    assert "a|b" not in references(grid)


def test_a_setting_that_no_sentence_mentions_is_shown_by_name_and_value(make_grid):
    base = json.loads(json.dumps(BASE))
    for section in ("architecture", "objective", "schedule"):
        base["model"][section]["mystery"] = 0.75
    base["model"]["architecture"] |= {"positions": "rope", "attention_dropout": 0.0}
    base["model"]["optimizer"]["mystery"] = [1, 2]
    found = facts(read_results(make_grid(losses, THREE, curves=False, base=base).folder))
    for name in ("Model", "Task", "Schedule"):
        assert "; mystery 0.75" in found[name], name
    assert "; mystery [1,2]" in found["Optimizer"]
    assert "; positions rope" in found["Model"]
    assert "Other settings" not in found
    assert "attention_dropout" not in found["Model"]


def test_what_can_change_all_runs_is_shown(make_grid):
    """What no row of its own shows; a probe and a worker of the data change nothing."""
    base = json.loads(json.dumps(BASE))
    callbacks = ["training.callbacks.safety.QKClip", "training.callbacks.probes.SignalProbe"]
    base["trainer"] = {
        "callbacks": [{"class_path": f"lightning_app.{each}"} for each in callbacks],
        "accumulate_grad_batches": 2,
    }
    base["model"]["block"] = {"norm": "rms_norm", "qk_norm": None}
    base["model"]["optimizer"] = {"kind": "schedule_free"}
    base["data"] = {"name": "wikitext2", "tokens_per_batch": 512, "window": 64, "num_workers": 2}
    axes = {**THREE, "data.mask_probability": [0.15, 0.3]}
    found = facts(read_results(make_grid(losses, axes, curves=False, base=base).folder))
    told = dict(each.split(" ", 1) for each in found["Other settings"].split("; "))
    assert {key: value for key, value in told.items() if key != "trainer.callbacks"} == {
        "model.block.norm": "rms_norm",
        "trainer.accumulate_grad_batches": "2",
        "data.window": "64",
    }
    assert "QKClip" in told["trainer.callbacks"]
    assert "SignalProbe" not in told["trainer.callbacks"]
    assert " in batches of at most 512" in found["Budget per run"]
    assert "schedule_free validated and tested with its averaged weights" in found["Optimizer"]


def test_a_p_value_shows_its_side_of_the_level() -> None:
    shown = [p_value(p) for p in (0.0499, 0.0502, 0.05, 0.0004, 0.2)]
    assert shown == ["0.0499", "0.0502", "0.050", "< 0.001", "0.200"]
