"""The files of SQuAD: what is read and refused, how a dev set is divided, and the hub's form."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from lightning_app.core.errors import UserError
from lightning_app.data.config import CORPORA, DataConfig, Splits
from lightning_app.data.corpora.squad import SquadReader
from lightning_app.data.prepare import corpus_summary, prepare
from lightning_app.data.sources import corpus_digest, locate, read, require_test
from tests import questions
from tests.told import told

NAMES = list(questions.VERSIONS)


def config(root: Path, name: str, /, **fields: Any) -> DataConfig:
    return DataConfig(**{**questions.answering(root, name)["data"], "task": "squad", **fields})


def corpus_of(root: Path, name: str, /, **fields: Any) -> Any:
    given = config(root, name, **fields)
    return read(locate(given), given)


def paragraphs_of(tree: Any) -> list[Any]:
    return [paragraph for article in tree["data"] for paragraph in article["paragraphs"]]


@pytest.mark.parametrize("kind", ["word", "char", "byte", "bpe"])
@pytest.mark.parametrize("name", NAMES)
def test_questions_contexts_and_answers_are_read(tmp_path: Path, name: str, kind: Any) -> None:
    root = questions.write_squad(tmp_path, name, test=10)
    corpus = prepare(config(root, name, tokenizer=kind, vocab_size=20 if kind == "bpe" else None))
    assert corpus.meta["sizes"] == {"train": 40, "valid": 35, "test": 10}
    assert "not the published" in corpus.meta["protocol"]
    decode = corpus.tokenizer.decode
    for seed, (split, count) in enumerate(corpus.meta["sizes"].items()):
        paragraphs = paragraphs_of(questions.tree_of(name, count, seed))
        numbers = iter(range(count))
        starts, asked = (corpus.offsets(split, x) for x in ("context", "question"))
        for paragraph in paragraphs:
            ids = None
            for question in paragraph["qas"]:
                row = next(numbers)
                at = corpus.ids(split, "question")[asked[row] : asked[row + 1] - 1]
                assert decode(at.tolist()) == question["question"]
                mine = corpus.ids(split, "context")[starts[row] : starts[row + 1] - 1].tolist()
                assert bool(mine) == (ids is None), "a context is there once"
                ids = mine or ids
                assert ids is not None
                assert decode(ids) == paragraph["context"]
                first, last = corpus.labels(split)[row].astype(int)
                if not question["answers"]:
                    assert (first, last) == (-1, -1)
                    continue
                gold = question["answers"][0]["text"]
                assert gold in decode(ids[first : last + 1])
                assert gold not in decode(ids[first + 1 : last + 1])
                assert gold not in decode(ids[first:last])
        if split != "train":
            golds = [json.loads(line) for line in corpus.lines(split, "answers")]
            assert golds == [
                [a["text"] for a in q["answers"]] for p in paragraphs for q in p["qas"]
            ]
    assert "questions of valid" in corpus_summary(corpus, 128)


def test_text_that_is_hard_to_store(tmp_path: Path) -> None:
    """Line ends, spaces, characters outside the BMP, and words that the tokenizer does not know."""
    root = questions.write_squad(tmp_path, "squad1")
    context = "one 😀\n東京  two\u2028three é "
    golds = ["😀", "東京", "two\u2028three", "é"]
    qas = [
        {
            "id": f"q{n}",
            "question": "which\none",
            "answers": [{"text": gold, "answer_start": context.index(gold)}],
        }
        for n, gold in enumerate(golds)
    ]
    tree = {"data": [{"title": "t", "paragraphs": [{"context": context, "qas": qas}]}]}
    (root / "dev-v1.1.json").write_text(json.dumps(tree))
    corpus = prepare(config(root, "squad1", tokenizer="char"))
    assert json.loads(corpus.lines("valid", "context")[0]) == context
    offsets = corpus.tokenizer.offsets(context)
    for (first, last), gold in zip(corpus.labels("valid").astype(int), golds, strict=True):
        assert gold in offsets.text_of(first, last)


def test_the_published_dev_sets(shared_data: Path) -> None:
    for name, count in (("squad1", 10_570), ("squad2", 11_873)):
        corpus = corpus_of(shared_data / "squad", name, train_from_dev=0.75)
        train, valid = (corpus.splits[split] for split in ("train", "valid"))
        assert len(train) + len(valid) == count
        assert not set(train["article"]) & set(valid["article"])
        assert not (set(train["context"]) & set(valid["context"])) - {""}
        assert corpus.protocol.startswith(f"SQuAD {questions.VERSIONS[name]}: NOT the published")


def edited(root: Path, name: str, edit: Callable[[Any], None], **fields: Any) -> Any:
    """Read a corpus after a change of its dev set."""
    questions.write_squad(root, name)
    file = root / f"dev-v{questions.VERSIONS[name]}.json"
    tree = json.loads(file.read_text())
    edit(tree)
    file.write_text(json.dumps(tree))
    return corpus_of(root, name, **fields)


def set_in(*path: Any, to: Any) -> Callable[[Any], None]:
    def edit(tree: Any) -> None:
        for key in path[:-1]:
            tree = tree[key]
        if to is None:
            del tree[path[-1]]
        else:
            tree[path[-1]] = to

    return edit


def make_impossible(tree: Any) -> None:
    asked = [q for p in paragraphs_of(tree) for q in p["qas"] if not q["is_impossible"]]
    asked[0]["is_impossible"] = True


FIRST = ("data", 0, "paragraphs", 0)
ASKED = (*FIRST, "qas", 0)
GOLD = (*ASKED, "answers", 0)
NO = {"is_impossible": True, "id": "n", "question": "w1", "answers": []}
REFUSED = [
    ("squad1", set_in("data", to=None), "'data'"),
    ("squad1", set_in("data", to=[]), "empty, no question"),
    ("squad1", set_in("data", 0, "title", to=None), "data[0]: … 'title'"),
    ("squad1", set_in(*FIRST, "qas", to={}), "data[0].paragraphs[0]:"),
    ("squad1", set_in(*FIRST, "context", to=" ▁ "), "'context'"),
    ("squad1", set_in(*ASKED, "id", to=None), "qas[0]: … 'id'"),
    ("squad1", set_in(*ASKED, "question", to="  "), "qas[0]: … 'question'"),
    ("squad1", set_in(*ASKED, "question", to="a\ud800"), "'question'"),
    ("squad1", set_in(*ASKED, "answers", to=[]), "answers, but at"),
    ("squad1", set_in(*ASKED, "id", to="T1x0-0-1"), "question 'T1x0-0-1'"),
    ("squad1", set_in(*ASKED, "is_impossible", to=False), "whose data.name is 'squad2'"),
    ("squad1", set_in(*GOLD, "answer_start", to=1), "answer_start is 1"),
    ("squad1", set_in(*GOLD, "answer_start", to=-2), "answer_start is -2, where"),
    ("squad1", set_in(*GOLD, "answer_start", to=999), "answer_start is 999"),
    ("squad1", set_in(*GOLD, "answer_start", to=True), "'answer_start', found True"),
    ("squad1", set_in(*GOLD, "answer_start", to="3"), "'answer_start', found '3'"),
    ("squad1", set_in(*GOLD, "text", to=""), "answers[0]: … 'text'"),
    ("squad2", set_in(*ASKED, "is_impossible", to=None), "'is_impossible'"),
    ("squad2", set_in(*ASKED, to={**NO, "is_impossible": False}), "at least one"),
    ("squad2", set_in(*ASKED, "is_impossible", to=1), "true or false"),
    ("squad2", make_impossible, "answers, but no"),
]


@pytest.mark.parametrize(("name", "edit", "said"), REFUSED)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, name, edit, said: str) -> None:
    with pytest.raises(UserError, match=told(f"{tmp_path}/dev-v … {said}")) as caught:
        edited(tmp_path, name, edit)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", '{"data": [', "[" * 100_000, "{}"])
def test_damaged_json_is_one_line(tmp_path: Path, text: str) -> None:
    root = questions.write_squad(tmp_path, "squad1")
    (root / "dev-v1.1.json").write_text(text)
    with pytest.raises(UserError, match=r"dev-v1\.1\.json: .*(damaged JSON|field 'data')") as error:
        corpus_of(root, "squad1")
    assert "\n" not in str(error.value)


def test_a_dev_set_is_divided_by_articles(tmp_path: Path) -> None:
    """The same articles train whatever their order in the file, and the protocol counts all."""
    seen = []
    for folder, backwards in (("one", False), ("two", True)):
        root = questions.write_squad(tmp_path / folder, "squad1", train=0, dev=35)
        file = root / "dev-v1.1.json"
        tree = json.loads(file.read_text())
        if backwards:
            tree["data"].reverse()
            file.unlink()
            file = file.with_suffix(".json.gz")
            file.write_bytes(gzip.compress(json.dumps(tree).encode()))
        corpus = corpus_of(root, "squad1", train_from_dev=0.75)
        train, valid = (corpus.splits[split] for split in ("train", "valid"))
        seen.append(set(train["article"]))
        assert len(seen[-1]) == 3
        assert len(train) + len(valid) == 35
        contexts = {p["context"]: len(p["qas"]) for p in paragraphs_of(tree)}
        parts = [set(rows["context"]) - {""} for rows in (train, valid)]
        assert not parts[0] & parts[1]
        assert parts[0] | parts[1] == set(contexts)
        assert [sum(contexts[c] for c in part) for part in parts] == [len(train), len(valid)]
        assert "NOT the published splits: of dev-v1.1 3 articles" in corpus.protocol
    assert seen[0] == seen[1]


def test_a_test_is_required_of_other_articles_and_nothing_divided_silently(tmp_path: Path) -> None:
    root = questions.write_squad(tmp_path, "squad1", train=0)
    with pytest.raises(UserError, match=r"test-v1\.1\.json"):
        require_test(config(root, "squad1"))
    corpus = corpus_of(root, "squad1", train_from_dev=0.5, splits=Splits(test="dev"))
    assert corpus.splits["test"]["id"] == corpus.splits["valid"]["id"]
    (root / "test-v1.1.json").write_text((root / "dev-v1.1.json").read_text())
    copied = corpus_of(root, "squad1", train_from_dev=0.5)
    assert len(copied.splits["test"]) == 35
    assert "paragraphs of test" in copied.protocol
    with pytest.raises(UserError, match=r"train-v1\.1\.json.*data\.train_from_dev"):
        locate(config(root, "squad1"))
    for share in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="between 0 and 1"):
            config(root, "squad1", train_from_dev=share)
    with pytest.raises(UserError, match="'rte'"):
        DataConfig(name="rte", task="glue", train_from_dev=0.5)
    few, many = (prepare(config(root, "squad1", train_from_dev=x)) for x in (0.3, 0.7))
    assert few.folder != many.folder
    alone = slice(1, 9)
    with pytest.raises(UserError, match="has one article"):
        edited(tmp_path, "squad1", lambda tree: tree["data"].__delitem__(alone), train_from_dev=0.5)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("squad1", {"task": "glue"}, r"model.objective.kind 'squad',.*'glue'"),
        ("rte", {}, r"model.objective.kind 'glue',.*'squad'"),
        ("squad1", {"task": "masked_lm"}, r"'squad1' has labels: model.objective.kind 'masked_lm'"),
        ("squad1", {"context_stride": 0}, r"context_stride is 0; .*at least 1"),
    ],
)
def test_corpora_and_tasks_fit_together(tmp_path: Path, name: str, fields: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        config(tmp_path, name, **fields)


@pytest.mark.parametrize("name", NAMES)
def test_the_hub_gives_the_questions_of_the_files(tmp_path: Path, name: str, monkeypatch) -> None:
    """With a replacement of the hub, whose columns are those of rajpurkar/squad and squad_v2."""
    reader = CORPORA[name]()
    assert isinstance(reader, SquadReader)

    def rows(count: int, seed: int) -> list[dict[str, Any]]:
        return [
            {
                "id": q["id"],
                "title": article["title"],
                "context": p["context"],
                "question": q["question"],
                "answers": {
                    "text": [a["text"] for a in q["answers"]],
                    "answer_start": [a["answer_start"] for a in q["answers"]],
                },
            }
            for article in questions.tree_of(name, count, seed)["data"]
            for p in article["paragraphs"]
            for q in p["qas"]
        ]

    asked = []

    def load_dataset(repository: str, name: str, revision: str | None) -> dict[str, Any]:
        asked.append((repository, name, revision))
        return {"train": rows(40, 0), "validation": rows(35, 1)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.delenv("LIGHTNING_APP_DATA", raising=False)
    corpus = corpus_of(tmp_path, name, root=None)
    one, two = ("rajpurkar/squad", "plain_text"), ("rajpurkar/squad_v2", "squad_v2")
    assert asked == [(*(one if name == "squad1" else two), reader.revision)]
    expected = corpus_of(questions.write_squad(tmp_path / "files", name), name)
    for split in ("train", "valid"):
        for column in expected.splits[split].column_names:
            assert list(corpus.splits[split][column]) == list(expected.splits[split][column])
    assert corpus.protocol == expected.protocol


def test_answers_are_a_part_of_what_is_prepared(tmp_path: Path) -> None:
    """Another answer is another corpus, also of a question that only an evaluation reads."""
    root = questions.write_squad(tmp_path, "squad2")
    before, digest = prepare(config(root, "squad2")), corpus_digest(config(root, "squad2"))
    file = root / "dev-v2.0.json"
    tree = json.loads(file.read_text())
    qas = [q for p in paragraphs_of(tree) for q in p["qas"] if q["answers"]]
    qas[0]["answers"].append(dict(qas[0]["answers"][0]))
    file.write_text(json.dumps(tree))
    after = prepare(config(root, "squad2"))
    assert np.array_equal(after.labels("valid"), before.labels("valid"))
    assert after.digest != before.digest
    assert corpus_digest(config(root, "squad2")) != digest
