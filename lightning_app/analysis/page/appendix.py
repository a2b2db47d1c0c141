"""The appendix: definitions of the scores, and the program that computes them again."""

import os
import shlex
from pathlib import Path

from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.markup import Markup, element, join_markup
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.parts import section
from lightning_app.analysis.pairing import LEARNED

RECOMPUTE = "recompute_study.py"
FILES = {
    "results.csv, results.parquet": "a row for each cell: axes, state, metrics, time and memory",
    "validations.csv, validations.parquet": "a row for each cell and validation",
    "sensitivity.csv": "a row for each variant and score, with interval, p value and note",
    "effects.csv": "a row for each effect of the factors of the grid",
    "comparisons.csv": "a row for each comparison of the grid's metric",
    "failed_runs.csv": "a row for each arm: failed runs by each definition, medians and means",
    "failure_tests.csv": "a row for each exact test of shares of failed runs",
    "task_scores.csv": "a row for each score of a task by variant, ours and published",
    "figures/": "every figure as SVG and PDF, and its data as CSV",
    "tables/": "the headline, losses by warm-up, tasks: for LaTeX (booktabs) and Markdown",
    RECOMPUTE: "a program that computes the scores again",
    "references.bib": "the papers to cite",
}


def appendix(contents: Contents) -> Markup:
    return section(
        "appendix",
        "How are the numbers computed?",
        _formulas(contents.grid),
        _again(contents),
        _files(contents),
    )


def _formulas(grid: GridResults) -> Markup:
    reference = "the reference" if grid.reference_warmup is None else f"{grid.reference_warmup:,}"
    terms = {
        "l": f"final {grid.monitored.loss} of a run in nats per token, at most H; H for a run "
        "that stalled or was non-finite",
        "H": f"{grid.monitored.floor} of the validation targets: the loss of a model that "
        "knows how often each token occurs and nothing else",
        "stalled": "the run ended within 0.05 nats of H, or above, and was not learning; "
        "non-finite: its loss was not finite any more. Both count as H, the same for every variant",
        "not yet learned": "the run was learning when its budget ended, above that bar. It did not "
        "fail, but the same cap holds: its l is H if its loss is above H",
        "Δ": f"mean over seeds of l(warm-up 0) − l(warm-up {reference}), seed by seed",
        "relative Δ": "Δ / (H − l at the reference); undefined if the denominator is under "
        f"{LEARNED:g} nats (“never learned”)",
        "interaction": "Δ of the variant − Δ of the baseline, the same seeds in all four arms",
        "p": "the larger of two: Student's t of the values over seeds, and the same with the "
        "spread between seeds pooled over the variants of the slice; Holm's correction covers the "
        "whole grid",
        "steps saved": "τ = T − the step at which the run with warm-up reached the final loss of "
        "the run without, or minus the same the other way round; seed by seed",
        "lost steps": "T − the step at which the sum of the rates without warm-up reaches the sum "
        "with warm-up over all T steps",
        "R_w": "(mean over warm-ups of l − smallest l) / (H − smallest l), l averaged over seeds",
    }
    if len(grid.rates) > 1:
        terms |= {
            "N": "mean over seeds of l(0, best rate) − l(reference, best rate); the best rate of "
            "a warm-up is that of the smallest mean loss over the other seeds",
            "√(1 + n / (n − 1))": "factor of the standard errors of N and S, n seeds, where the "
            "second best rate of a warm-up is not worse by the t interval of its difference: the "
            "choices are not independent then (Nadeau and Bengio 2003)",
            "O": "mean over seeds of log2(θ(reference) / θ(0)); θ is the largest rate, going up "
            "from the best one, with l at most l* + 0.1 (H − l*), l* the smallest l of that seed "
            "and warm-up",
            "S": "mean over ln(rate) of l − l at the best rate, as in N (Wortsman et al. 2023)",
            "η_max": "largest rate of the grid at which no finished run stalled or was non-finite",
        }
    rows = (join_markup([element("dt", name), element("dd", text)]) for name, text in terms.items())
    return element("dl", *rows, class_="formulas")


def _again(contents: Contents) -> Markup:
    """How to compute the numbers again; a test types it."""
    grids = [part.folder for part in contents.grid.parts or (contents.grid,)]
    folders = [Path(os.path.relpath(folder, contents.out)).as_posix() for folder in grids]
    words = [RECOMPUTE, ".", *(folders if folders != ["."] else ())]
    return element(
        "p",
        element("a", RECOMPUTE, href=RECOMPUTE),
        " shares no code with this program. It computes every score again from the records of the "
        "runs, and compares it with sensitivity.csv, effects.csv and the table of mean losses. In "
        "the folder of this page: ",
        element("code", f"python {shlex.join(words)}"),
        " (exit code 0 if all numbers agree). Its first lines say what it leaves out.",
    )


def _files(contents: Contents) -> Markup:
    """The files that there are: the page is written after them."""
    there = {name: contents.out / name.split(",")[0] for name in FILES}
    items = (
        element("li", element("code", name), f": {FILES[name]}")
        for name, path in there.items()
        if path.exists()
    )
    return element("div", element("h3", "Files beside this page"), element("ul", *items))
