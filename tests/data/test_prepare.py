import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from lightning_app.cli import main
from lightning_app.core.errors import UserError
from lightning_app.core.files import sha256_of
from lightning_app.data import prepare as module
from lightning_app.data import sources
from lightning_app.data.columns import also_in_train, row_kind
from lightning_app.data.config import DataConfig, Splits
from lightning_app.data.prepare import PreparedCorpus, corpus_summary, prepare
from lightning_app.data.tokenizer import EOS, UNK, unigram_entropy

PREPARE = """
import json, sys
from lightning_app.data.config import DataConfig, Splits
from lightning_app.data.prepare import prepare
fields = json.loads(sys.argv[1])
fields["splits"] = Splits(**fields["splits"])
print("ready", flush=True)
print(prepare(DataConfig(**fields)).folder)
"""


def start(config: DataConfig) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE, json.dumps(asdict(config))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def talks(root: Path, cache: Path) -> DataConfig:
    how = {"tokenizer": "word", "vocab_size": None}
    return DataConfig(name="iwslt14", root=str(root), cache=str(cache), **how)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_arrays_hold_the_text_and_meta_its_counts(write_pairs, text_config):
    corpus = prepare(text_config(write_pairs(valid_en=["the unseen word", "the cat ."] * 30)))
    lines = {"source": "der hund sieht die katze .", "target": "the dog sees the cat ."}
    for column, line in lines.items():
        ids, offsets = corpus.ids("train", column), corpus.offsets("train", column)
        assert ids.dtype == np.int32
        assert offsets.dtype == np.int64
        assert isinstance(ids, np.memmap)
        assert len(offsets) == 61
        first = ids[offsets[0] : offsets[1]]
        assert first[-1] == EOS
        assert corpus.tokenizer.decode(first) == line
        assert corpus.lengths("train", column)[0] == len(line.split()) + 1
    meta = corpus.meta
    assert meta["sizes"] == {"train": 60, "valid": 60, "test": 60}
    assert meta["tokens"]["train"]["target"] == 20 * (6 + 4 + 5) + 60
    # unknown words side by side are one UNK
    assert meta["unknown_rate"]["valid"]["target"] == 30 / (30 * (2 + 1) + 30 * (3 + 1))
    assert meta["unknown_rate"]["train"]["target"] == 0
    assert meta["tokenizer_sha256"] == sha256_of((corpus.folder / "tokenizer.model").read_bytes())
    assert meta["vocab_size"] == corpus.tokenizer.vocab_size
    expected = unigram_entropy(np.asarray(corpus.ids("valid", "target")))
    assert meta["unigram_entropy"]["valid"] == expected
    assert meta["protocol"].startswith("local text")


def test_drops_are_counted_and_only_in_train(write_pairs, text_config, tmp_path: Path):
    de = ["a b", "", "c d", "e " * 9, "f g"]
    sides = {"de": de, "en": ["a b", "x", "", "e " * 3, "f g"]}.items()
    files = {f"{split}_{k}": v for split in ("train", "valid", "test") for k, v in sides}
    corpus = prepare(text_config(write_pairs(**files), max_length=5))
    assert corpus.meta["dropped"] == {"train": {"empty": 2, "too_long": 1}, "valid": {}, "test": {}}
    assert corpus.meta["sizes"] == {"train": 2, "valid": 5, "test": 5}
    assert corpus.lengths("valid", "target").tolist() == [3, 2, 1, 4, 3]
    # The greatest length is of tokens without EOS.
    files = {"train_de": ["a b c", "a b c d"], "train_en": ["x", "x"]}
    corpus = prepare(text_config(write_pairs(**files), max_length=3))
    assert corpus.lengths("train", "source").tolist() == [4]
    # A ratio belongs to the protocol of IWSLT14.
    files = {"train_de": ["a b c", "a b c d", "a b"], "train_en": ["x y", "x y", "x y"]}
    dropped = prepare(talks(write_pairs(**files), tmp_path)).meta["dropped"]["train"]
    assert dropped == {"empty": 0, "ratio": 1, "too_long": 0}


def test_the_tokenizer_is_of_the_training_split_and_the_checksum_of_all(write_pairs, text_config):
    one = prepare(text_config(write_pairs()))
    two = prepare(text_config(write_pairs(valid_en=["entirely new words here"] * 60)))
    assert one.folder != two.folder
    assert one.meta["tokenizer_sha256"] == two.meta["tokenizer_sha256"]
    config = text_config(write_pairs())
    other = replace(config, max_length=100)
    assert prepare(config).meta["checksum"] == prepare(other).meta["checksum"]


def test_a_second_call_does_nothing_and_may_not_write(write_pairs, text_config, monkeypatch):
    config = text_config(write_pairs())
    one = prepare(config)
    before = {path: path.stat().st_mtime_ns for path in one.folder.iterdir()}
    monkeypatch.setattr(module, "_write", lambda *_: pytest.fail("prepared again"))
    monkeypatch.setattr(sources, "FileLock", lambda *_: pytest.fail("took a lock"))
    monkeypatch.setattr(sources, "output_folder", lambda *_: pytest.fail("wrote"))
    assert prepare(config) == one
    assert {path: path.stat().st_mtime_ns for path in one.folder.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"tokens_per_batch": 64}, True),
        ({"seed": 9}, True),
        ({"num_workers": 2}, True),
        ({"window": 5}, True),
        ({"vocab_size": 12}, False),
        ({"max_length": 100}, False),
        ({"source_language": "en", "target_language": "de"}, False),
        ({"splits": Splits(valid="test")}, False),
        ({"task": "masked_lm"}, False),
    ],
)
def test_folder_is_named_by_what_made_it(write_pairs, text_config, change: dict, same: bool):
    config = text_config(write_pairs())
    assert (prepare(config).folder == prepare(replace(config, **change)).folder) is same


def test_cache_root(write_pairs, text_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file cannot be one."""
    config = replace(text_config(write_pairs()), cache=None)
    assert prepare(config).folder.parent == tmp_path / "home" / "transformer-ablations"
    monkeypatch.setenv("LIGHTNING_APP_CACHE", str(tmp_path / "variable"))
    assert prepare(config).folder.parent == tmp_path / "variable"
    named = replace(config, cache=str(tmp_path / "named"))
    assert prepare(named).folder.parent == tmp_path / "named"
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(UserError, match=r"cache:.*data\.cache"):
        prepare(text_config(write_pairs()))


def test_references(write_pairs, text_config, tmp_path: Path):
    root = write_pairs(valid_en=["it 's here .", "yes"] * 30)
    assert prepare(text_config(root)).lines("valid", "reference")[0] == "it 's here ."
    (root / "test.raw.en").write_text("The cat!\n" * 60)
    corpus = prepare(talks(root, tmp_path))
    assert corpus.lines("valid", "reference")[0] == "it's here."
    assert corpus.lines("valid", "target")[0] == "it 's here ."
    assert corpus.lines("test", "reference") == ["The cat!"] * 60
    assert corpus.lines("test", "source")[1] == "die katze schläft ."
    (root / "test.raw.en").write_text("one line\n")
    with pytest.raises(UserError, match=r"test\.raw\.en has 1.*test\.en has 60"):
        prepare(text_config(root))


def test_masked_lm_leaves_blank_lines_out(tmp_path: Path, text_config):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a b\n\n \nc\n")
    corpus = prepare(text_config(tmp_path, task="masked_lm"))
    assert corpus.meta["dropped"]["test"] == {"empty": 2}
    assert corpus.tokenizer.decode(corpus.ids("test", "text")) == "a b c"
    assert np.count_nonzero(corpus.ids("test", "text") == EOS) == 2
    assert corpus.meta["protocol"].endswith("; blank lines left out")
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a b\nc\n")
    without = prepare(text_config(tmp_path, task="masked_lm"))
    assert "blank" not in without.meta["protocol"]
    assert without.digest == corpus.digest  # the same data, whatever is said of them


@pytest.mark.parametrize("task", ["translation", "masked_lm", "causal_lm"])
def test_a_corpus_without_a_test_split(write_pairs, text_config, task: str):
    root = write_pairs()
    for path in root.glob("test.*"):
        path.unlink()
    corpus = prepare(text_config(root, task=task))
    assert corpus.meta["sizes"].keys() == {"train", "valid"}
    assert corpus.meta["unigram_entropy"].keys() == {"valid"}
    assert not any(name.startswith("test") for name in names(corpus.folder))
    assert "test " not in corpus_summary(corpus, 64)


def test_two_processes_at_once(write_pairs, text_config, tmp_path: Path):
    config = text_config(write_pairs())
    processes = [start(config) for _ in range(2)]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    (folder,) = [n for n in names(tmp_path / "cache") if not n.endswith(".lock")]
    assert PreparedCorpus(tmp_path / "cache" / folder).meta["sizes"]["train"] == 60


def test_killed_while_preparing(tmp_path: Path):
    cache = tmp_path / "cache"
    config = DataConfig(tokenizer="word", vocab_size=None, cache=str(cache))
    process = start(config)
    while not any(name.endswith(".partial") for name in names(cache)):
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    partial = {n for n in names(cache) if n.endswith(".partial")}
    assert len(partial) == 1
    folder = partial.pop().removesuffix(".partial")
    assert folder not in names(cache)
    corpus = prepare(config)
    assert names(cache) == {folder, f"{folder}.lock"}
    assert corpus.meta["sizes"]["train"] == 30_000


def test_no_rows_and_a_full_disk_leave_nothing(write_pairs, text_config, tmp_path, monkeypatch):
    def left() -> set[str]:
        return {n for n in names(tmp_path / "cache") if not n.endswith(".lock")}

    with pytest.raises(UserError, match=r"nothing is left"):
        prepare(text_config(write_pairs(), max_length=2))
    assert left() == set()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_save", full)
    with pytest.raises(OSError, match="No space left") as error:
        prepare(text_config(write_pairs()))
    assert error.value.errno == errno.ENOSPC
    assert left() == set()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_saving_keeps_the_errno_of_a_full_disk():
    with pytest.raises(OSError, match="No space left") as error:
        module._save(Path("/dev/full"), np.arange(10**6))
    assert error.value.errno == errno.ENOSPC


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_read_only_cache(write_pairs, text_config, monkeypatch, number: int):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(UserError, match=r"cannot be written"):
        prepare(text_config(write_pairs()))


def test_preparing_does_not_load_torch():
    """It takes longer than everything that a second call does."""
    code = "import sys, lightning_app.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_carriage_return_inside_a_line_ends_none_and_bytes_may_be_marks(write_pairs, text_config):
    """Read as text, the lines behind it would be the targets of others."""
    root = write_pairs()
    path = root / "valid.en"
    lines = path.read_text(encoding="utf-8").split("\n")
    lines[1] = lines[1].replace(" ", " \r", 1)
    path.write_bytes("\n".join(lines).encode())
    corpus = prepare(text_config(root))
    for kind in ("source", "target", "reference"):
        assert len(corpus.lines("valid", kind)) == corpus.meta["sizes"]["valid"]
    assert corpus.lines("valid", "target") == [line.strip() for line in lines[:-1]]
    corpus = prepare(text_config(write_pairs(train_en=["a▅▁b"] * 60), tokenizer="byte"))
    assert corpus.lengths("train", "target")[0] == len("a▅▁b".encode()) + 1


@pytest.mark.parametrize(
    ("text", "tokenizer", "mark"),
    [
        *(("a\0b c", "word", "U+0000"), ("a\0b c", "char", "U+0000"), ("a\0b c", "byte", "U+0000")),
        *(("a ▁ b", "word", "U+2581"), ("▁a", "char", "U+2581"), ("a▅b c", "char", "U+2585")),
    ],
)
def test_text_without_tokenizer(write_pairs, text_config, text: str, tokenizer: str, mark: str):
    root = write_pairs(train_en=["fine", "fine too", text] * 20)
    size = {"vocab_size": None, "tokenizer": tokenizer}
    with pytest.raises(UserError, match=rf"train\.en: line 3 has .*{re.escape(mark)}"):
        prepare(text_config(root, **size))
    assert not any((root.parent / "cache").glob("*/meta.json"))


def test_unusual_characters_are_counted_and_old_ends_of_lines_refused(tmp_path: Path, text_config):
    lines = ["a \ufeffb", "c\rd", "e\x0bf \u2028g\x85", "<s> h<mask>", "i <unk> j", "naïve \ue000"]
    for stem in ("train", "valid"):
        text = "\ufeff" + "\n\ufeff".join(lines) + "\r\n"  # as files of Windows that were joined
        (tmp_path / f"{stem}.txt").write_bytes(text.encode())
    corpus = prepare(text_config(tmp_path, task="causal_lm", target_language="txt"))
    said = corpus.meta["protocol"]
    for part in ("2 byte order marks", "2 carriage returns", "6 other control", "4 marks such as"):
        assert part in said
    assert corpus.meta["sizes"]["train"] == 6
    assert corpus.meta["text"]["valid"]["bytes"] == sum(len(line.encode()) + 1 for line in lines)
    for stem in ("train", "valid"):
        (tmp_path / f"{stem}.txt").write_bytes(b"one line\ranother line\r")
    with pytest.raises(UserError, match=r"train\.txt: line 1 .*carriage return"):
        prepare(text_config(tmp_path, task="causal_lm", target_language="txt"))


def test_pairs_of_valid_and_test_that_are_in_train(write_pairs, text_config):
    valid_de = ["der hund sieht die katze .", "neu", "die katze schläft ."]
    valid_en = ["the dog sees the cat .", "y", "z"]
    root = write_pairs(valid_de=valid_de, valid_en=valid_en, test_de=["neu"], test_en=["new"])
    corpus = prepare(text_config(root))
    assert corpus.meta["also_in_train"] == {
        "valid": {"pairs": [1, 3], "source sides": [2, 3]},
        "test": {"pairs": [0, 1], "source sides": [0, 1]},
    }
    said = "; also in train: 1 of 3 pairs of valid, 2 of 3 source sides of valid"
    assert said in corpus.meta["protocol"]
    assert "33.3%" in corpus_summary(corpus, 64)
    assert corpus.digest == prepare(text_config(root)).digest


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
def test_lines_and_windows_of_a_text_that_are_in_train(tmp_path: Path, text_config, task: str):
    draw = random.Random(3)
    new = [" ".join(draw.choices("abcdefgh", k=12)) for _ in range(60)]
    (tmp_path / "train.txt").write_text("\n".join(new[:40]))
    # a copied passage, single lines in another order, short lines
    (tmp_path / "valid.txt").write_text("\n".join([*new[40:], *new[:8], new[30], new[12], "a b c"]))
    corpus = prepare(text_config(tmp_path, task=task, target_language="txt"))
    found = corpus.meta["also_in_train"]["valid"]
    assert found["lines of at least 5 words"] == [10, 30]
    shared, total = found["windows of 32 tokens"]
    assert total == len(corpus.ids("valid", "text")) // 32
    assert 2 <= shared <= 3


@pytest.mark.parametrize(
    ("kind", "train", "other", "counts"),
    [
        (
            "glue",
            {"first": ["a", "b"], "second": ["c", "d"], "label": [0, 1]},
            {"first": ["a", "a", "b"], "second": ["c", "d", "d"], "label": [1, 1, 1]},
            [(2, 3)],
        ),
        (
            "squad",
            {"question": ["q", "r", "q"], "context": ["one", "", "two"]},
            {"question": ["r", "q", "new"], "context": ["one", "two", ""]},
            [(2, 3), (2, 2)],
        ),
    ],
)
def test_rows_of_a_task_that_are_in_train(kind: str, train: dict, other: dict, counts: list):
    found = also_in_train(row_kind(kind), {"train": train, "valid": other})
    assert list(found["valid"].values()) == counts


def test_a_corpus_that_a_program_makes_has_no_root(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--data", "synthetic", "--root", "/nowhere"]) == 2
    assert "--root /nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_each_side_has_the_tokens_of_its_training_lines(write_pairs, text_config, kind: str):
    """Ids of the other side, also in valid, are UNK, as in the dictionaries of fairseq."""
    root = write_pairs(valid_de=["der dog ."] * 60, valid_en=["the hund ."] * 60)
    how = {"tokenizer": kind, "vocab_size": None if kind == "word" else 60}
    shared = prepare(text_config(root, **how))
    corpus = prepare(text_config(root, **how, vocabularies="separate"))
    both = {"source": corpus.tokenizer.source, "target": corpus.tokenizer}
    sizes = corpus.meta["source_vocab_size"], corpus.meta["vocab_size"]
    assert (both["source"].vocab_size, both["target"].vocab_size) == sizes
    for column, own in both.items():
        seen = sorted({int(id_) for id_ in shared.ids("train", column)} | set(range(5)))
        assert len(seen) == own.vocab_size < shared.tokenizer.vocab_size
        for split in ("train", "valid"):
            whole = shared.ids(split, column)
            expected = [seen.index(id_) if id_ in seen else UNK for id_ in whole.tolist()]
            assert corpus.ids(split, column).tolist() == expected
        assert UNK in expected
        line = {"source": "der hund schläft .", "target": "the dog sleeps ."}[column]
        assert own.decode(own.encode(line)) == line
        found, wanted = own.offsets(line), shared.tokenizer.offsets(line)
        assert found.ids.tolist() == own.encode(line)
        assert found.ends.tolist() == wanted.ends.tolist()
    assert "source_vocab_size" not in shared.meta
    file = str(corpus.tokenizer_file)
    with pytest.raises(UserError, match=r"data\.tokenizer_file: .*: of two languages"):
        prepare(text_config(root, tokenizer="file", tokenizer_file=file, vocab_size=None))
    with pytest.raises(UserError, match=r"data\.vocabularies is 'separate'"):
        text_config(root, vocabularies="separate", task="causal_lm")
