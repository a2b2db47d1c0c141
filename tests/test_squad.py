"""Fine-tuning runs on small files of SQuAD, from the config to the result."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_app.config.config import data_module, resolve, transformer_module
from lightning_app.config.experiment import cell_id
from lightning_app.grids.size import parameters
from lightning_app.models.loss import Evaluated, ObjectiveConfig
from lightning_app.probes.hooks import MODEL
from lightning_app.probes.probe import preconditioned_sharpness, probe
from lightning_app.scores.squad import score_v1, score_v2
from lightning_app.tasks.base import build_task
from lightning_app.tasks.squad import Answer, QuestionTexts, scores_v2
from tests import questions, warm
from tests.tables import changed
from tests.test_fine_tuning import fit, on_one_and_two, one_by_one, single_precision

QUICK: dict[str, Any] = {"trainer__max_steps": 7, "trainer__val_check_interval": 7}
QUICK |= {"trainer__precision": "64-true", "data__tokens_per_batch": 100, "data__window": 14}


def by_hand(rows: Any, texts: QuestionTexts, logits: list[np.ndarray], number: int) -> Any:
    """The best span of a question by trying all, and its null score: the words of the context."""
    context, best, null = texts.offsets(int(rows.holders[number])), (-np.inf, ""), np.inf
    windows = rows.windows[number]
    for index, window in enumerate(windows):
        starts, ends = logits[rows.first_rows[number] + index]
        null = min(null, starts[0] + ends[0])
        top = [sorted(range(len(x)), key=lambda i, x=x: -x[i])[:20] for x in (starts, ends)]
        for i in top[0]:
            for j in top[1]:
                first, last = (place - window.offset + window.start for place in (i, j))
                inside = window.offset <= i <= j < window.offset + window.length
                shown = [
                    (min(first - w.start, w.stop - 1 - first) + 0.01 * w.length, -n)
                    for n, w in enumerate(windows)
                    if w.start <= first < w.stop
                ]
                total = starts[i] + ends[j]
                if inside and -max(shown)[1] == index and j - i < 30 and total > best[0]:
                    best = (total, context.text_of(first, last))
    return best[1], null - best[0]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", list(questions.VERSIONS))
def test_two_ranks_give_the_metric_of_one_exactly(tmp_path: Path, name: str) -> None:
    """35 questions in windows on two ranks; the scores again from rows computed alone."""
    tree = questions.answering(questions.write_squad(tmp_path / "files", name), name)
    single, double = on_one_and_two(tree, tmp_path, **QUICK)
    metrics, others = single["metrics"], double["metrics"]
    for key, value in metrics.items():
        if key in ("val/nll", "val/perplexity"):
            assert others[key] == pytest.approx(value, rel=1e-6), key
        elif key != "train/tokens_per_second":
            assert others[key] == value, key

    rows, corpus, logits = one_by_one(tmp_path / "one" / "it")
    texts = QuestionTexts(corpus, "valid")
    assert len(texts.ids) == 35
    assert len(rows) > 35
    assert sum(single["validation_parts"]["tokens"]) == len(rows)
    answers = [by_hand(rows, texts, logits, number) for number in range(35)]
    golds = dict(zip(texts.ids, texts.golds, strict=True))
    if name == "squad1":
        found = score_v1(golds, dict(zip(texts.ids, (a for a, _ in answers), strict=True)))
        expected = {"exact_match": found.exact, "f1": found.f1}
    else:
        silent = ["" if difference > 0 else text for text, difference in answers]
        whole = score_v2(golds, dict(zip(texts.ids, silent, strict=True)))
        expected = {"exact_match": whole.every.exact, "f1": whole.every.f1}
        assert whole.has_answer is not None
        expected["has_answer_f1"] = whole.has_answer.f1
        expected["always_no_answer"] = 100 * sum(not of for of in texts.golds) / 35
        assert metrics["val/best_f1"] >= max(metrics["val/f1"], metrics["val/always_no_answer"])
    for key, value in expected.items():
        assert metrics[f"val/{key}"] == single_precision(value), key
    nll, right = [], []
    for row, of in enumerate(logits):
        shifted = of - of.max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        nll.append(-logs[[0, 1], rows.labels[row]].mean())
        right.append((of.argmax(axis=1) == rows.labels[row]).all())
    assert metrics["val/nll"] == pytest.approx(np.mean(nll), rel=1e-6)
    assert metrics["val/accuracy"] == single_precision(float(np.mean(right)))
    entropy = []
    for side in rows.labels.T:
        shares = np.unique(side, return_counts=True)[1] / len(side)
        entropy.append(-(shares * np.log(shares)).sum())
    assert single["unigram_entropy"] == pytest.approx(np.mean(entropy))


@pytest.mark.slow
def test_an_answer_is_learned_and_predicted(tmp_path: Path) -> None:
    root = questions.write_squad(tmp_path / "files", "squad2", train=0, dev=150)
    tree = questions.answering(root, "squad2")
    settings: dict[str, Any] = {"trainer__max_steps": 150, "trainer__val_check_interval": 150}
    settings |= {"model__optimizer__lr": 0.01, "data__tokens_per_batch": 512, "data__window": 32}
    settings |= {"data__train_from_dev": 0.75, "data__splits": {"test": "dev"}}
    found = fit(tree, tmp_path / "run", **settings, model__objective__evaluate_test=True)
    said = "SQuAD 2.0: NOT the published splits: of dev-v2.0 3"
    assert found["data"]["protocol"].startswith(said)
    metrics = found["metrics"]
    assert metrics["train/tokens_per_second"] > 0
    for score in ("f1", "exact_match"):
        assert metrics[f"test/{score}"] == metrics[f"val/{score}"]
    folder = tmp_path / "run" / "it"
    call = ["--config", str(folder / "config.yaml"), "--ckpt_path", "last"]
    done = warm.run(["-m", "lightning_app", "predict", *call])
    assert done.returncode == 0, done.stderr[-3000:]
    answers = done.stdout.split("\n")[:-1]
    data = data_module(yaml.safe_load((folder / "config.yaml").read_text())["data"])
    data.setup()
    texts = QuestionTexts(data.corpus, "test")
    golds = dict(zip(texts.ids, texts.golds, strict=True))
    scores = score_v2(golds, dict(zip(texts.ids, answers, strict=True)))
    assert metrics["test/f1"] == single_precision(scores.every.f1)
    assert metrics["test/exact_match"] == single_precision(scores.every.exact)


def test_a_part_of_the_validation_set_has_whole_questions(tmp_path: Path) -> None:
    tree = questions.answering(questions.write_squad(tmp_path / "files", "squad2"), "squad2")
    found = fit(tree, tmp_path / "run", **QUICK, trainer__limit_val_batches=2)
    windows = sum(found["validation_parts"]["tokens"])
    assert f"{windows} of " in found["data"]["protocol"]
    share = found["metrics"]["val/always_no_answer"] / 100
    assert any(share * n == pytest.approx(round(share * n)) for n in range(2, 35))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = questions.write_squad(tmp_path_factory.mktemp("built"), "squad2")
    tree = resolve(changed(questions.answering(root, "squad2"), data__window=26), "a")
    data = data_module(tree["data"])
    data.setup()
    module = transformer_module(tree["model"])
    module.build(data.vocab_size)
    assert parameters(tree) == sum(p.numel() for p in module.parameters())
    return SimpleNamespace(tree=tree, data=data, model=module.model, task=module.objective)


def test_probes_read_batches_of_different_lengths(built: Any) -> None:
    loader = built.data.val_dataloader()
    batches = list(loader)
    assert len({batch.tokens.shape[1] for batch in batches}) > 1
    built.model.double()
    measured = probe(built.model, built.task, batches)
    found = {row.quantity: row.value for row in measured if row.stack == MODEL}
    rows = loader.dataset
    batch = rows[0, np.arange(len(rows))]
    with torch.no_grad():
        sums = built.task.sums(built.model, batch)
    assert found["nll"] == pytest.approx(float(sums.nll) / len(rows))
    assert found["loss"] == pytest.approx(found["nll"])
    p = built.task.predictions(built.model, batch).logits.detach().softmax(dim=1)
    entropy = torch.special.entr(p).sum(dim=1).mean()
    expected = torch.special.entr(p.mean(dim=0)).sum() - entropy
    assert found["output_information"] == pytest.approx(float(expected), abs=1e-9)
    assert np.isfinite(preconditioned_sharpness(built.model, built.task, batch, 1e-8).value)


def test_the_result_is_that_of_the_threshold_0() -> None:
    """Without an answer to "a"; the best threshold, which reads the golds, gives it."""
    scores = scores_v2({"a": ["x"], "b": []}, {"a": Answer("x", 1.0), "b": Answer("y", 2.0)})
    assert (scores["exact_match"], scores["f1"]) == (50.0, 50.0)
    assert (scores["best_exact_match"], scores["best_f1"]) == (100.0, 100.0)


def test_a_diverged_run_has_no_score(built: Any) -> None:
    """NaN, and no prediction that would look like an answer."""
    task = build_task(ObjectiveConfig(kind="squad"))
    rows = built.data.val_dataloader().dataset
    batch = rows[0, np.arange(len(rows))]

    def broken(tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        logits = built.model(tokens, segments).detach()
        logits[3, 0, 1] = torch.nan
        return logits

    with torch.no_grad():
        task.sums(broken, batch)
    task.decode(broken, batch, "val")
    scores = task.scores("val", built.data, Evaluated(0.0, len(rows)))
    assert {"val/f1", "val/exact_match", "val/best_f1"} <= scores.keys()
    assert all(np.isnan(value) for value in scores.values())


def test_parser_and_plain_completion_agree(tmp_path: Path) -> None:
    for name in questions.VERSIONS:
        root = questions.write_squad(tmp_path / name, name)
        tree = changed(questions.answering(root, name), data__train_from_dev=0.5)
        complete = resolve(tree, "a")
        assert complete["model"]["objective"]["label_smoothing"] == 0.0
        assert cell_id(complete) != cell_id(resolve(changed(tree, data__train_from_dev=0.6), "a"))
        assert cell_id(complete) != cell_id(resolve(changed(tree, data__context_stride=6), "a"))


LEARNED = {"positions": "learned", "max_positions": 12}
MISTAKES = [
    ({"data__window": 5}, "data.window is 5: … 2 tokens"),
    ({f"model__architecture__{k}": v for k, v in LEARNED.items()}, "few for data.window 14"),
    ({"model__objective__label_smoothing": 0.1}, "label_smoothing 0.1:"),
    ({"data__name": "squad1"}, "train-v1.1.json[.gz|.xz]; data.splits names"),
    ({"data__name": "rte", "data__root": None}, "model.objective.kind 'glue'"),
    ({"model__architecture__kind": "decoder"}, "cannot serve model.objective.kind 'squad'"),
]


@pytest.mark.parametrize(("fields", "said"), MISTAKES)
def test_mistakes_are_one_line(tmp_path: Path, refuse: Any, fields: Any, said: str) -> None:
    root = questions.write_squad(tmp_path / "files", "squad2")
    refuse(changed(questions.answering(root, "squad2"), data__window=14), said, **fields)
