"""What warm-up gives in BLEU: from stored translations, and from the metrics alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from lightning_app.report.results import read_results
from lightning_app.report.tasks import MOST_TESTS, bleu_scores
from tests.report.conftest import PRESET, SEED, WARMUP, write_report

AXES = {SEED: [1, 2, 3], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}
WORDS = ["a", "dog", "sees", "the", "old", "house", "and", "three", "cats", "near", "the", "river"]
REFERENCES = [" ".join(WORDS[i % 7 : i % 7 + 4 + i % 3]) for i in range(60)]


def translated(seed: int, warmup: int) -> list[str]:
    """Without warm-up, every second sentence lacks words; each seed spoils another one."""
    lines = list(REFERENCES)
    lines[seed] = "no"
    if warmup == 0:
        lines = [line if i % 2 else line.rsplit(" ", 2)[0] for i, line in enumerate(lines)]
    return lines


def store(grid: Any, cell: Any, **changes: Any) -> float:
    """Leave what a run that translated its test set leaves; return its BLEU."""
    path: Path = grid.run(cell)
    lines = translated(cell["axes"][SEED], cell["axes"][WARMUP])
    score = sacrebleu.BLEU(tokenize="none", lowercase=True).corpus_score(lines, [REFERENCES]).score
    for name, text in (("hypotheses", lines), ("references", REFERENCES)):
        (path / f"{name}.txt").write_text("".join(f"{line}\n" for line in text))
    record = json.loads((path / "result.json").read_text())
    record["metrics"]["test/bleu"] = score
    record["bleu_signature"] = "nrefs:1|case:lc|eff:no|tok:none|smooth:exp"
    (path / "result.json").write_text(json.dumps({**record, **changes}))
    return score


def test_bleu_is_compared_over_seeds_and_over_sentences(make_grid, outcome):
    grid = make_grid(outcome, AXES, curves=False)
    bleu = {cell["id"]: store(grid, cell) for cell in grid.cells}
    found = {score.variant: score for score in bleu_scores(read_results(grid.folder))}
    assert set(found) == {"post_ln", "pre_ln"}
    by_point = {tuple(cell["axes"].values()): bleu[cell["id"]] for cell in grid.cells}
    changes = [by_point[seed, "pre_ln", 60] - by_point[seed, "pre_ln", 0] for seed in (1, 2, 3)]
    assert found["pre_ln"].estimate == pytest.approx(sum(changes) / 3)
    assert found["pre_ln"].low < found["pre_ln"].estimate < found["pre_ln"].high
    assert [value for _, value in found["pre_ln"].each] == pytest.approx(changes)
    # Half of the sentences lost their end: no shuffling of the two systems does that by chance.
    assert found["pre_ln"].note == "p over sentences, by seed 1: 0.001, 2: 0.001, 3: 0.001"
    assert "so no interval" in found["post_ln"].note or found["post_ln"].low < changes[0]


def test_runs_without_translations_are_compared_over_seeds_alone(make_grid, outcome):
    grid = make_grid(outcome, AXES, curves=False)
    for number, cell in enumerate(grid.cells):
        store(grid, cell, **({"bleu_signature": None} if number % 2 else {}))
    for score in bleu_scores(read_results(grid.folder)):
        assert score.seeds == 3
        assert "over sentences" not in score.note


@pytest.mark.parametrize(
    ("tokenizer", "tested"), [("zh", True), ("char", True), ("ja-mecab-0.996-IPA", False)]
)
def test_sentences_are_compared_by_a_tokenizer_that_is_here(
    make_grid, outcome, tokenizer: str, tested: bool
):
    grid = make_grid(outcome, AXES, curves=False)
    for cell in grid.cells:
        store(grid, cell, bleu_signature=f"nrefs:1|case:lc|eff:no|tok:{tokenizer}|smooth:exp")
    for score in bleu_scores(read_results(grid.folder)):
        assert score.seeds == 3
        assert ("over sentences" in score.note) == tested


def test_other_references_are_not_compared(make_grid, outcome):
    grid = make_grid(outcome, AXES, curves=False)
    for cell in grid.cells:
        store(grid, cell)
        if cell["axes"][WARMUP] == 0:
            (grid.run(cell) / "references.txt").write_text("another\n" * len(REFERENCES))
    assert all("over sentences" not in s.note for s in bleu_scores(read_results(grid.folder)))


def test_no_more_pairs_are_tested_than_a_report_has_time_for(make_grid, outcome):
    axes = {**AXES, SEED: list(range(1, MOST_TESTS // 2 + 3))}
    grid = make_grid(outcome, axes, curves=False)
    for cell in grid.cells:
        store(grid, cell)
    notes = [score.note for score in bleu_scores(read_results(grid.folder))]
    assert sum(note.count("0.001") for note in notes) == MOST_TESTS


def test_without_a_test_set_there_is_no_table(make_grid, outcome):
    grid = make_grid(outcome, AXES, curves=False)
    assert bleu_scores(read_results(grid.folder)) == []
    assert "ΔBLEU" not in write_report(grid.folder, figures=False).read_text()
    for cell in grid.cells:
        store(grid, cell)
    assert "ΔBLEU" in write_report(grid.folder, figures=False).read_text()
