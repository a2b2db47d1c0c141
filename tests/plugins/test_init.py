"""`ablate init` writes a project that loads, splits without overlap, and overwrites nothing."""

import gzip
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app import plugins
from lightning_app.commands.init import init_command, split_of_line
from lightning_app.config.config import resolve
from lightning_app.config.grid import read_spec
from lightning_app.core.errors import UserError
from lightning_app.data.prepare import prepare
from lightning_app.data.sources import resolved_data
from lightning_app.testing import CHECKS
from tests.told import told

PAIRS = [(f"satz {i % 350} von {i % 7}", f"sentence {i % 350} of {i % 7}") for i in range(400)]


def write_pairs(folder: Path, pairs: list[tuple[str, str]] = PAIRS) -> list[Path]:
    paths = [folder / "my.de.gz", folder / "my.en"]
    with gzip.open(paths[0], "wt", encoding="utf-8") as file:
        file.write("".join(f"{source}\n" for source, _ in pairs))
    paths[1].write_text("".join(f"{target}\n" for _, target in pairs), encoding="utf-8")
    return paths


def refused(folder: Path, data: list[Path]) -> str:
    with pytest.raises(UserError) as caught:
        init_command(folder / "project", data)
    assert not (folder / "project").exists()
    return str(caught.value)


def splits(folder: Path, language: str) -> dict[str, list[str]]:
    names = ("train", "valid", "test")
    return {n: (folder / f"data/{n}.{language}").read_text().splitlines() for n in names}


def project(folder: Path, data: list[Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Write a project and go there; return its grid and its config, whose vocabulary is right."""
    assert init_command(folder / "project", data) == 0
    monkeypatch.chdir(folder / "project")
    plugins.load_all([])
    spec = read_spec("grid.yaml")
    complete = resolve(dict(spec.base_config), "grid.yaml")
    prepared = prepare(resolved_data({**complete["data"], "cache": str(folder / "cache")}))
    assert prepared.meta["vocab_size"] == complete["data"]["vocab_size"]
    return spec, complete


def test_a_project_of_a_corpus(tmp_path: Path, monkeypatch, capsys) -> None:
    blank = [("nur deutsch", ""), ("", "english alone")]
    spec, complete = project(tmp_path, write_pairs(tmp_path, [*PAIRS, *blank]), monkeypatch)
    assert "pip install pytest" in capsys.readouterr().out  # the package needs no pytest
    sources, targets = splits(Path(), "de"), splits(Path(), "en")
    for name in sources:
        pairs = set(zip(sources[name], targets[name], strict=True))
        assert pairs <= set(PAIRS)
        others = {line for other in sources if other != name for line in sources[other]}
        assert not others & set(sources[name])
    assert sum(map(len, sources.values())) == len(PAIRS)
    assert 5 <= len(sources["valid"]) <= 40
    config = Path("config.yaml").read_text()
    assert f"400 pairs: {len(sources['train'])} to train" in config
    assert "2 with an" in " ".join(config.split())
    axes = {"model.block.preset": 3, "model.schedule.warmup_steps": 2, "seed_everything": 5}
    assert {key: len(values) for key, values in spec.axes.items()} == axes
    assert (spec.search.per, spec.search.trials) == ("seed", 4)
    (rates,) = spec.search.fields.values()
    assert rates.low < spec.base_config["model"]["optimizer"]["lr"] < rates.high
    assert complete["model"]["schedule"]["reference_steps"] == 100
    assert complete["data"]["source_language"] == "de"


def test_a_project_of_one_text_is_a_language_model(tmp_path: Path, monkeypatch) -> None:
    lines = [f"line {i} of {i % 17} words" for i in range(400)]
    (tmp_path / "my.txt").write_text("\n\n".join(lines) + "\n")
    _, complete = project(tmp_path, [tmp_path / "my.txt"], monkeypatch)
    found = splits(Path(), "txt")
    assert {name: len(of) for name, of in found.items()} == {"train": 360, "valid": 20, "test": 20}
    assert [*found["train"], *found["valid"], *found["test"]] == lines  # in the order of the text
    assert complete["model"]["objective"]["kind"] == "causal_lm"
    assert complete["model"]["architecture"]["decoder_depth"] == 4


WORDS = ("haus baum hund geht", "house tree dog goes")
SMALL = {
    "few words": [
        tuple(" ".join(side.split()[i // 4**k % 4] for k in range(4)) for side in WORDS)
        for i in range(256)
    ],
    "one letter each": [(f"{chr(97 + i % 26)} {chr(97 + i // 26)}", "a b") for i in range(300)],
    "long numbers": [(f"{i}.{i}", f"{i},{i}") for i in range(10**9, 10**9 + 300)],
    "many characters": [(chr(0x4E00 + 2 * i) * 20, chr(0x4E01 + 2 * i)) for i in range(600)],
    "two alphabets in a word": [(f"a{chr(0x430 + i % 30)}b{i % 9}", "ab") for i in range(300)],
}


@pytest.mark.parametrize("corpus", SMALL)
def test_the_vocabulary_suits_a_small_corpus(corpus: str, tmp_path: Path, monkeypatch) -> None:
    project(tmp_path, write_pairs(tmp_path, SMALL[corpus]), monkeypatch)


def test_the_block_of_a_project_is_sound(tmp_path: Path) -> None:
    assert init_command(tmp_path, None) == 0
    plugins.load(str(tmp_path / "blocks.py"))
    assert yaml.safe_load((tmp_path / "ablate.yaml").read_text()) == {"plugins": ["blocks.py"]}
    resolve(yaml.safe_load((tmp_path / "config.yaml").read_text()), "config.yaml")
    for check in CHECKS:
        if "initial_value" in check.name:
            check("my_block")


def test_a_wrong_corpus_is_one_line(tmp_path: Path) -> None:
    assert told("100 … 200").search(refused(tmp_path, write_pairs(tmp_path, PAIRS[:100])))
    same = [("ein satz", f"sentence {i}") for i in range(300)]
    assert "would be empty" in refused(tmp_path, write_pairs(tmp_path, same))


def test_the_split_depends_on_the_source_alone() -> None:
    found = [split_of_line(f"line {i}", 0.05) for i in range(2000)]
    assert found == [split_of_line(f"line {i}", 0.05) for i in range(2000)]
    assert 60 < found.count("valid") < 140
    assert 60 < found.count("test") < 140
