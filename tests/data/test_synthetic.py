import lzma
from pathlib import Path

import pytest

from data.synthetic import sentences
from lightning_app.core.errors import UserError
from lightning_app.data.config import DataConfig
from lightning_app.data.corpora import texts
from lightning_app.data.sources import corpus_digest, locate, read


def test_sentences_are_well_formed_and_a_damaged_file_is_refused(tmp_path: Path, monkeypatch):
    corpus = read(locate(DataConfig()), DataConfig())
    assert {split: len(of) for split, of in corpus.splits.items()} == texts._SIZES
    for column in ("source", "target"):
        lines = [line for of in corpus.splits.values() for line in of[column]]
        assert len(set(lines)) == len(lines)
        for line in lines:
            assert 4 <= len(line.split(" ")) <= 25
            assert line[0].isupper()
            assert line[-1] in ".?"
            assert not any(wrong in line for wrong in ("  ", " , ,", " , ."))
    digest = corpus_digest(DataConfig())
    damaged = tmp_path / "synthetic.tsv.xz"
    damaged.write_bytes(lzma.compress(b"Ja .\tYes .\n"))
    monkeypatch.setattr(texts, "_PAIRS", damaged)
    with pytest.raises(UserError, match=r"synthetic\.tsv\.xz: damaged; install the package again"):
        read(locate(DataConfig()), DataConfig())
    damaged.unlink()
    assert corpus_digest(DataConfig()) == digest  # a plan reads no file


@pytest.mark.slow
def test_the_grammar_makes_the_packaged_file():
    """The text, and not its compressed form, which may depend on the version of liblzma."""
    assert sentences.text() == lzma.decompress(texts._PAIRS.read_bytes())
