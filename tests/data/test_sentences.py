"""Sentences and documents of a corpus whose next sentences are predicted."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_app.core.errors import UserError
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus, corpus_summary, prepare
from lightning_app.data.sources import sentences_of, split_sentences
from lightning_app.data.tokenizer import EOS
from tests.told import told

TEXT = "The dog sees. The cat runs.\nAll of it.\n\n# A heading\n\nA house is big! Is it? so it is\n"


@pytest.mark.parametrize(
    ("line", "sentences"),
    [
        ("", []),
        ("  ", []),
        ("one line without a mark", ["one line without a mark"]),
        ("It ran. It hid! Did it? Yes.", ["It ran.", "It hid!", "Did it?", "Yes."]),
        ("It cost 3.5 Euro. then more", ["It cost 3.5 Euro. then more"]),
        ("a tokenised line . It goes on .", ["a tokenised line .", "It goes on ."]),
        ("the H. americanus . It", ["the H. americanus .", "It"]),
        ('He said "no." "Yes," she said.', ['He said "no."', '"Yes," she said.']),
        ("So (he said.) (Or not.)", ["So (he said.)", "(Or not.)"]),
        ("Wait... What?  Étienne!  Übung.", ["Wait...", "What?", "Étienne!", "Übung."]),
        ("Mr. Smith", ["Mr.", "Smith"]),
        ("in 1990. 23 men", ["in 1990. 23 men"]),
        ("A b. C d! (E) f? 'G.' H i... J. k", ["A b.", "C d!", "(E) f?", "'G.'", "H i...", "J. k"]),
    ],
)
def test_a_line_is_split_before_capitals(line: str, sentences: list[str]) -> None:
    assert split_sentences(line) == sentences


def test_documents_without_sentences_are_none() -> None:
    lines = ["# T", "a b.", "", "# only a heading", "", "c", "d. E"]
    found = sentences_of(lines, [0, 3, 5], lambda line: line.startswith("#"))
    assert found.sentences == ["a b.", "c", "d.", "E"]
    assert found.documents == [0, 1]
    assert found.left_out == 2


def write(root: Path, text: str) -> Path:
    for split in ("train", "valid", "test"):
        (root / f"{split}.txt").write_text(text)
    return root


def rows(corpus: PreparedCorpus, split: str = "train") -> list[str]:
    ids, offsets = corpus.ids(split, "text"), corpus.offsets(split, "text")
    return [corpus.tokenizer.decode(ids[a:b].tolist()) for a, b in pairwise(offsets)]


def test_rows_are_sentences_and_a_separator_is_none(tmp_path: Path, text_config) -> None:
    """The lines alone make other rows in another folder."""
    fields: dict[str, Any] = {"task": "masked_lm", "next_sentence": True}
    made = prepare(text_config(write(tmp_path, TEXT), **fields))
    wanted = ["The dog sees.", "The cat runs.", "All of it.", "A house is big!"]
    assert rows(made) == [*wanted, "Is it? so it is"]
    offsets = made.offsets("train", "text")
    assert made.documents("train").tolist() == [offsets[0], offsets[3]]
    assert (made.ids("train", "text")[np.asarray(offsets[1:]) - 1] == EOS).all()
    assert told("5 / 5 / 5 … 2 / 2 / 2 documents, 1 / 1 / 1").search(made.meta["protocol"])
    assert "5 of 5 sentences" in corpus_summary(made, 100)
    plain = prepare(text_config(tmp_path, task="masked_lm"))
    assert plain.folder != made.folder
    assert len(rows(plain)) == 4
    assert plain.meta["documents"] == {}
    text = "# One\n\n---\nA b. C d.\n\nE f.\n# Two\n---\nG h.\n"
    made = prepare(text_config(write(tmp_path, text), document_separator="---", **fields))
    assert rows(made) == ["A b.", "C d.", "E f.", "G h."]
    assert made.meta["documents"]["train"] == 2
    other = prepare(text_config(tmp_path, **fields))
    assert other.folder != made.folder
    assert rows(other) == ["---", "A b.", "C d.", "E f.", "---", "G h."]


def test_articles_are_documents_without_their_headings(tmp_path: Path) -> None:
    text = (
        " \n = One = \n \n A b . C = d . \n \n = = Part = = \n \n E f . \n \n = Two = \n \n G . \n"
    )
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text(text)
    places: dict[str, Any] = {"root": str(tmp_path), "cache": str(tmp_path / "c")}
    fields: dict[str, Any] = {"tokenizer": "word", "vocab_size": None, "next_sentence": True}
    made = prepare(DataConfig(name="wikitext2", task="masked_lm", **places, **fields))
    assert rows(made) == ["A b .", "C = d .", "E f .", "G ."]
    assert made.documents("train").tolist() == [0, made.offsets("train", "text")[3]]
    assert told("splits … 4").search(made.meta["protocol"])


def test_one_document_is_refused(tmp_path: Path, text_config) -> None:
    write(tmp_path, TEXT)
    (tmp_path / "valid.txt").write_text("One. Two.\nThree.\n")
    said = r"next_sentence is true, but the valid split has 1 document with .*\.document_separator$"
    with pytest.raises(UserError, match=said):
        prepare(text_config(tmp_path, task="masked_lm", next_sentence=True))
    (tmp_path / "valid.txt").write_text("# One\n")
    with pytest.raises(UserError, match="0 documents"):
        prepare(text_config(tmp_path, task="masked_lm", next_sentence=True))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"next_sentence": True, "window": 4}, "data.window is 4:.*3.*5"),
        ({"whole_word": True, "task": "causal_lm"}, "data.whole_word is true: data.task 'causal_"),
        *(
            (
                {"whole_word": True, "tokenizer": kind, "vocab_size": None},
                f"data.whole_word is true: data.tokenizer '{kind}'",
            )
            for kind in ("byte", "char")
        ),
        *(
            (
                {"name": name, "next_sentence": True, "root": "."},
                f"^model.objective.next_sentence is true: data.name '{name}' has no documents, so",
            )
            for name in ("iwslt14", "synthetic", "tinyshakespeare")
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        DataConfig(**{"name": "wikitext2", "task": "masked_lm", **fields})
