"""The tables of GLUE: what is read, what is refused, and what the hub's form becomes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from lightning_app.core.errors import UserError
from lightning_app.data.config import CORPORA, DataConfig
from lightning_app.data.corpora.glue import GlueReader
from lightning_app.data.prepare import prepare
from lightning_app.data.sources import locate, read, require_test
from lightning_app.scores.task_facts import GLUE_CORPORA, GLUE_TASKS
from tests import tables
from tests.told import told

NAMES = list(GLUE_CORPORA)


def config(root: Path, name: str, /, **fields: Any) -> DataConfig:
    return DataConfig(**{**tables.fine_tuning(root, name)["data"], "task": "glue", **fields})


def corpus_of(root: Path, name: str, /, **fields: Any) -> Any:
    given = config(root, name, **fields)
    return read(locate(given), given)


def parsed(root: Path, name: str, text: str, split: str = "dev") -> Any:
    tables.write_table(root, name)
    (root / f"{split}.tsv").write_text(text)
    return corpus_of(root, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_task_is_read_in_its_published_format(tmp_path: Path, name: str) -> None:
    corpus = prepare(config(tables.write_table(tmp_path, name), name))
    facts = GLUE_TASKS[GLUE_CORPORA[name]]
    splits = {"train": 40, "valid": 71} | ({"test": 13} if name == "mnli" else {})
    assert corpus.meta["sizes"] == splits
    assert "not the published" in corpus.meta["protocol"]
    for seed, (split, rows) in enumerate(splits.items()):
        random, expected, first, second = np.random.default_rng(seed), [], [], []
        for _ in range(rows):
            label = int(random.integers(facts.classes or 6))
            expected.append(label)
            first.append(f"{tables.WORDS[label]} {tables.text(random)}")
            second.append(tables.text(random))
        assert corpus.labels(split).tolist() == expected
        for column, texts in {"first": first, "second": second}.items():
            if column == "second" and not facts.pair:
                assert not (corpus.folder / f"{split}.second.ids.npy").exists()
                continue
            ids, offsets = corpus.ids(split, column), corpus.offsets(split, column)
            decoded = [corpus.tokenizer.decode(ids[a:b].tolist()) for a, b in pairwise(offsets)]
            assert decoded == texts


def test_the_published_tables(shared_data: Path, tmp_path: Path) -> None:
    """The counts of the paper, the known majorities, and texts with quotation marks as they are."""
    majorities = {"cola": 0.6913, "sst2": 0.5092, "mrpc": 0.6838, "rte": 0.5271}
    for name in ("cola", "sst2", "mrpc", "rte", "stsb"):
        folder = shared_data / "glue" / tables.FOLDERS[name]
        corpus = corpus_of(folder, name, cache=str(tmp_path))
        assert ", the published counts" in corpus.protocol, corpus.protocol
        labels = np.array(corpus.splits["valid"]["label"])
        if name == "stsb":
            assert labels.min() == 0
            assert labels.max() == 5
            continue
        share = np.unique(labels, return_counts=True)[1].max() / len(labels)
        assert round(float(share), 4) == majorities[name]
        texts = [*corpus.splits["valid"]["first"], *corpus.splits["train"]["first"]]
        assert any(text.count('"') == 1 for text in texts) or name != "mrpc"


REFUSED = [
    ("rte", "index\tsentence1\tlabel\n0\ta\tentailment\n", "line 1:"),
    ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\n", "line 2: expected 4 columns"),
    ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tc\tentailment\n", "found 5"),
    ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tneutral\n", "label 'neutral' is not"),
    ("rte", "index\tsentence1\tsentence2\tlabel\n0\t\tb\tentailment\n", "'sentence1' is empty"),
    ("rte", "index\tsentence1\tsentence2\tlabel\n", "empty, no row"),
    ("rte", "", "empty, no line"),
    ("rte", "label\tlabel\tsentence1\tsentence2\n", "found 2 columns 'label'"),
    ("sst2", "sentence\tlabel\na film\t2\n", "'2' … SST-2: expected '0' or '1'"),
    ("sst2", "sentence\tlabel\na film\t-1\n", "label '-1'"),
    ("mrpc", f"{tables.HEADERS['mrpc']}\n3.8\t1\t2\ta\tb\n", "label '3.8' … MRPC"),
    ("stsb", f"{tables.HEADERS['stsb']}\n" + "x\t" * 9 + "5.5\n", "0 to 5"),
    ("stsb", f"{tables.HEADERS['stsb']}\n" + "x\t" * 9 + "nan\n", "label 'nan'"),
    ("stsb", f"{tables.HEADERS['stsb']}\n" + "x\t" * 9 + "good\n", "label 'good'"),
    ("cola", "sentence\tlabel\na film\t1\n", "line 1: expected 4 columns"),
    ("cola", "source\tlabel\tmark\tsentence\n", "label 'label' … CoLA"),
]


@pytest.mark.parametrize(("name", "text", "said"), REFUSED)
def test_a_wrong_table_is_one_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(UserError, match=told(f"{tmp_path}/dev.tsv … {said}")):
        parsed(tmp_path, name, text)


def test_qqp_leaves_out_short_lines_and_keeps_empty_questions(tmp_path, monkeypatch) -> None:
    header = tables.HEADERS["qqp"]
    rows = parsed(tmp_path, "qqp", f"{header}\n0\t1\t2\ta\t\t1\n1\t1\t2\ta\n2\t1\t2\tb\tc\t0\n")
    assert rows.splits["valid"]["first"] == ["a", "b"]
    assert rows.splits["valid"]["second"] == ["", "c"]
    assert rows.splits["valid"]["label"] == [1, 0]
    # The hub's form keeps them, too.
    texts = [("a", "b"), ("", "What name suits me?"), ("c", "")]
    of_hub = [{"question1": a, "question2": b, "label": 1} for a, b in texts]
    found = {"train": of_hub, "validation": of_hub}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    train = corpus_of(tmp_path, "qqp", root=None).splits["train"]
    assert [*zip(train["first"], train["second"], strict=True)] == texts


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("wnli", {}, "sentences of its"),
        ("text", {}, r"'text' has no labels: model.objective.kind 'glue'"),
        ("rte", {"task": "masked_lm"}, r"'rte' has labels: model.objective.kind 'masked_lm'"),
        ("synthetic", {"task": "masked_lm", "init_from": "run"}, "must be null"),
        ("rte", {"window": 4}, "window is 4"),
    ],
)
def test_corpora_and_tasks_fit_together(tmp_path: Path, name: str, fields: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        config(tmp_path, name, **fields)


def test_a_test_split_has_labels(tmp_path: Path) -> None:
    tables.write_table(tmp_path, "rte")
    (tmp_path / "test.tsv").write_text("index\tsentence1\tsentence2\n0\ta\tb\n")
    with pytest.raises(UserError, match=r"test_labelled\.tsv"):
        require_test(config(tmp_path, "rte"))
    assert "test" not in locate(config(tmp_path, "rte")).columns  # GLUE keeps its labels
    (tmp_path / "test_labelled.tsv").write_text((tmp_path / "dev.tsv").read_text())
    assert "test" in locate(config(tmp_path, "rte")).columns


@pytest.mark.parametrize("name", NAMES)
def test_the_hub_gives_the_rows_of_the_published_tables(tmp_path, name: str, monkeypatch) -> None:
    """With a replacement of the hub, whose columns and classes are those of nyu-mll/glue."""
    facts, reader = GLUE_TASKS[GLUE_CORPORA[name]], CORPORA[name]()
    assert isinstance(reader, GlueReader)
    columns = {
        **dict.fromkeys(("cola", "sst2"), ("sentence",)),
        **dict.fromkeys(("mrpc", "stsb", "rte"), ("sentence1", "sentence2")),
        "qqp": ("question1", "question2"),
        "mnli": ("premise", "hypothesis"),
        "qnli": ("question", "sentence"),
    }[name]

    def rows(split: str) -> list[dict[str, Any]]:
        labels = range(facts.classes) if facts.classes else [2.5999999046325684, 5.0]
        texts = ({of: f'{split} {of}\t"{x}' for of in columns} for x in labels)
        return [{**row, "label": x, "idx": 0} for row, x in zip(texts, labels, strict=True)]

    asked = []

    def load_dataset(repository: str, name: str, revision: str | None) -> dict[str, Any]:
        asked.append((repository, name, revision))
        found = ("train", "validation", "validation_matched", "validation_mismatched")
        return {split: rows(split) for split in found}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = corpus_of(tmp_path, name, root=None)
    assert asked == [("nyu-mll/glue", name, "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c")]
    valid = "validation_matched" if name == "mnli" else "validation"
    assert ("test" in corpus.splits) == (name == "mnli")
    labels = list(range(facts.classes)) if facts.classes else [2.6, 5.0]
    assert corpus.splits["valid"]["label"] == labels
    for of, column in zip(columns, ("first", "second"), strict=False):
        expected = [f'{valid} {of} "{row["label"]}' for row in rows(valid)]
        assert corpus.splits["valid"][column] == expected


@pytest.mark.parametrize(("name", "label"), [("rte", -1), ("mnli", 3), ("sst2", -1), ("rte", 0.5)])
def test_a_label_of_the_hub_is_one_of_the_task(tmp_path, name, label: float, monkeypatch) -> None:
    """A row without a label has -1 there, which would count as the last class in words."""
    columns = ("sentence", "sentence1", "sentence2", "premise", "hypothesis")
    row = {**dict.fromkeys(columns, "a text"), "label": label}
    splits = ("train", "validation", "validation_matched", "validation_mismatched")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {key: [row] for key in splits})
    with pytest.raises(UserError, match=f"{label}; it must be from 0 to [12]"):
        locate(config(tmp_path, name, root="hf://someone/else"))


def test_labels_are_a_part_of_what_is_prepared(tmp_path: Path) -> None:
    root = tables.write_table(tmp_path, "rte")
    before = prepare(config(root, "rte"))
    table = root / "dev.tsv"
    table.write_text(table.read_text().replace("\tentailment", "\tnot_entailment", 1))
    after = prepare(config(root, "rte"))
    assert after.meta["checksum"] != before.meta["checksum"]
    assert after.digest != before.digest
