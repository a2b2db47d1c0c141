"""A grid whose corpus is edited or moved, with the real program: one result, one corpus."""

import json
import os
import signal
import time
from pathlib import Path

import yaml

from tests import warm
from tests.small import tiny_config

ROOT = Path(__file__).parents[2]
WORDS = ("haus", "baum", "hund", "berg", "tal", "see", "wald", "stadt")


def write_corpus(folder: Path, shift: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    for split, lines in (("train", 200), ("valid", 20), ("test", 20)):
        for side in ("de", "en"):
            rows = (
                " ".join(side + WORDS[(n * k + shift) % len(WORDS)] for k in range(1, 5))
                for n in range(lines)
            )
            (folder / f"{split}.{side}").write_text("".join(f"{row}\n" for row in rows))


def write_grid(root: Path, corpus: Path, steps: int, seeds: list[int]) -> None:
    trainer = {"max_steps": steps, "val_check_interval": min(steps, 20)}
    data = {"data__name": "text", "data__root": str(corpus), "data__tokens_per_batch": 128}
    tree = {"name": "edited", "base_config": tiny_config(trainer, **data)}
    tree["axes"] = {"seed_everything": seeds}
    (root / "edited.yaml").write_text(yaml.safe_dump(tree))


def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "LIGHTNING_APP_CACHE": str(root / "cache"), "PYTHONPATH": str(ROOT)}


def start(root: Path, *words: str) -> warm.Process:
    return warm.start(["-m", "lightning_app", *words], folder=root, environment=environment(root))


def ablate(root: Path, *words: str) -> tuple[int, str, str]:
    process = start(root, *words)
    out, error = process.communicate(timeout=300)
    return process.wait(), out, error


def results(root: Path) -> dict[str, dict]:
    paths = (root / "experiments" / "edited" / "runs").glob("*/result.json")
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


# Over 5 s: three calls of the program, of which two train and two report.
def test_a_corpus_that_is_edited_in_mid_cell_or_moved(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    write_corpus(corpus)
    write_grid(tmp_path, corpus, steps=60, seeds=[1])
    running = start(tmp_path, "run", "edited.yaml", "--workers", "1")
    runs = tmp_path / "experiments" / "edited" / "runs"
    until = time.monotonic() + 120
    while not list(runs.glob("*/checkpoints/last.ckpt")):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGTERM)
    assert running.communicate(timeout=120)[1] == ""
    assert running.returncode == 130
    [begun] = [path.name for path in runs.iterdir()]
    assert results(tmp_path) == {}

    write_corpus(corpus, shift=1)
    write_grid(tmp_path, corpus, steps=60, seeds=[1])
    code, out, error = ablate(tmp_path, "run", "edited.yaml", "--workers", "1")
    assert (code, error) == (0, ""), out
    [(name, result)] = results(tmp_path).items()
    assert name != begun
    assert result["attempt"] == 1

    moved = corpus.rename(tmp_path / "elsewhere")
    write_grid(tmp_path, moved, steps=60, seeds=[1])
    stamp = (runs / name / "result.json").stat().st_mtime_ns
    code, out, error = ablate(tmp_path, "run", "edited.yaml", "--workers", "1")
    assert (code, error) == (0, "")
    assert "to run" not in out
    assert (runs / name / "result.json").stat().st_mtime_ns == stamp


def test_fit_refuses_the_folder_of_another_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    write_corpus(corpus)
    write_grid(tmp_path, corpus, steps=2, seeds=[1])
    tree = yaml.safe_load((tmp_path / "edited.yaml").read_text())["base_config"]
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump(tree))
    words = ["fit", "--config", "fit.yaml", "--trainer.default_root_dir", "run"]
    code, _, error = ablate(tmp_path, *words)
    assert code == 0, error
    result = (tmp_path / "run" / "result.json").read_bytes()
    write_corpus(corpus, shift=1)
    code, out, error = ablate(tmp_path, *words)
    assert (code, out) == (2, "")
    assert error.count("\n") == 1
    assert "holds another run" in error
    assert (tmp_path / "run" / "result.json").read_bytes() == result
