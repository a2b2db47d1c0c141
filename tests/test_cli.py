"""The command line: what it answers, and how it tells a user's mistake."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.cli import COMMANDS, build_parser, main, parse_arguments
from tests.told import told

BASE = Path("ablations/base/synthetic.yaml").resolve()
FIT, PRESET = ["fit", "--config", BASE], ["--model.block.preset", "post_ln"]
VECTOR = "model.block.ff_skip: gain vector: true … learned: true"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_APP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def mistake(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Call `ablate` with a mistake in it and return its one line."""
    assert main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("ablate: ")]
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    return lines[0]


def corpus(folder: Path, **files: str | bytes) -> Path:
    """A small German-English corpus, some of its files replaced."""
    root = folder / "corpus"
    root.mkdir()
    for split in ("train", "valid", "test"):
        for language in ("de", "en"):
            name = f"{split}_{language}"
            text = files.get(name, f"ein {language} satz hier\nnoch ein {language} satz\n" * 20)
            data = text if isinstance(text, bytes) else text.encode()
            (root / f"{split}.{language}").write_bytes(data)
    return root


def grid(folder: Path, **changes: Any) -> Path:
    tree: dict[str, Any] = {
        "name": "mine",
        "base_config": yaml.safe_load(BASE.read_text()),
        "axes": {"model.block.preset": ["post_ln", "pre_ln"], "seed_everything": [1]},
        **changes,
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_help_lists_the_commands_in_order() -> None:
    command = [sys.executable, "-m", "lightning_app", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    order = "blocks fit validate test predict translate prepare plan run status report probe"
    places = [done.stdout.index(f"\n    {name}") for name in order.split(" ")]
    assert places == sorted(places)


def test_a_command_takes_its_arguments_by_name() -> None:
    for name, parser in build_parser().commands.items():
        names = {argument.dest for argument in parser.arguments} - {"help"}
        names -= {"threads"}
        names |= {COMMANDS[name].takes} - {""}
        inspect.signature(parser.get_default("call")).bind(**dict.fromkeys(names))


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, lightning_app.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'lightning', 'optuna', 'pandas', 'numpy', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--versoin", "fit", "--config", BASE], "did you mean '--version'"),
        (["--plug", "a.py", "blocks"], "did you mean '--plugin'"),
        (["--", "blocks"], "unknown argument '--'"),
        (["run", "demo", "--workers", "two"], "--workers"),
        (["report", "demo", "--serve", "--json"], "--serve:"),
        (["report", "demoo"], "did you mean 'demo'"),
        (["report", "demo"], "holds no plan"),
        (["report", "demo", "demo_mlm"], "takes one grid; a third grid over both"),
        (["status", "demo", "--jsn"], "did you mean '--json'"),
        (["prepare"], "--data"),
        (["prepare", "--data", "text"], "--root"),
        (["fit", "--config", "nowhere.yaml"], "nowhere.yaml"),
        ([*FIT, "--model.block.nrom", "x"], "did you mean 'norm'"),
        ([*FIT, "--model.optimizer.lr", "fast"], "model.optimizer.lr"),
        ([*FIT, "--model.optimizer.kind", "adamm"], "found 'adamm'; … 'adam'?"),
        ([*FIT, "--data.name", "wikitext"], "found 'wikitext'; … 'wikitext2'?"),
        ([*FIT, "--model.block.preset", "pre_lm"], "did you mean 'pre_ln'"),
        ([*FIT, "--data.vocab_size", "2"], "vocab_size"),
        ([*FIT, "--data.vocab_size", "100000"], "100000"),
        ([*FIT, "--model.block", "null"], "expected a mapping"),
        ([*FIT, "--model.block.attention_skip", "0"], "a mapping {value, "),
        ([*FIT, "--model.block.ff_skip", "1.0"], "or null, found 1.0"),
        ([*FIT, "--model.block.ff_skip.vector", "true"], VECTOR),
        ([*FIT, "--model.block.value_gains.kept", "3"], "found 3"),
        (["blocks", "sas", "--svg", "/proc/x/sas.svg"], "/proc/x: cannot be written"),
        (["blocks", "sas", "--svg", "."], "it is a"),
        (["blocks", "--svg-dir", "/proc/x"], "/proc/x: cannot be written"),
        ([*FIT, *PRESET, "--model.block.layout", "parallel"], "norm_placement"),
        ([*FIT, "--trainer.max_step", "3"], "trainer.max_step"),
        ([*FIT, "--trainer.accelerator", "gpuu"], "gpuu"),
        ([*FIT, "--trainer.max_steps", "-5"], "max_steps"),
        ([*FIT, "--trainer.max_steps", "-1"], "max_steps"),
        ([*FIT, "--trainer.val_check_interval", "0"], "val_check_interval"),
        ([*FIT, "--model.optimizer.betas", "[1.5,0.9]"], "betas"),
        ([*FIT, "--ckpt_path", "last"], "last"),
        ([*FIT, "--ckpt_path", "nowhere.ckpt"], "nowhere.ckpt"),
        ([*FIT, "--ckpt_path", "."], "ckpt_path"),
        ([*FIT, "--ckpt_path", BASE], "not a complete"),
        (["test", "--config", BASE, "--ckpt_path", "best"], "best"),
        (["validate", "--config", BASE], "--ckpt_path is needed"),
        (["predict", "--config", BASE], "--ckpt_path is needed"),
    ],
)
def test_a_mistake_is_one_line(capsys, folder: Path, words: list, expected: str) -> None:
    assert told(expected).search(mistake(capsys, *words))
    assert not list(folder.glob("experiments/*/runs/*"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"train_de": "nur eine zeile\n"}, ["train.de", "train.en", "1", "40"]),
        ({"train_en": b"gut\nschlecht \xff\n" * 20}, ["train.en", "UTF-8", "2"]),
        ({"train_de": "", "train_en": ""}, ["train"]),
        ({"train_de": "\n" * 40, "train_en": "\n" * 40}, ["train"]),
    ],
)
def test_a_broken_corpus_is_one_line(capsys, folder: Path, files, expected: list[str]) -> None:
    words = ["fit", "--config", BASE, "--data.name", "text", "--data.root", corpus(folder, **files)]
    line = mistake(capsys, *words)
    for word in expected:
        assert word in line
    assert not [p for p in (folder / "cache").glob("*") if p.suffix != ".lock"]


def test_a_missing_file_of_a_corpus_is_named(capsys, folder: Path) -> None:
    root = corpus(folder)
    (root / "valid.en").unlink()
    assert "valid.en" in mistake(capsys, "prepare", "--data", "text", "--root", root)


def test_the_arguments_of_lightning_are_left_to_it() -> None:
    args = parse_arguments(["fit", "--config", "x.yaml", "--trainer.max_steps", "3", "--help"])
    assert args.words == ["--config", "x.yaml", "--trainer.max_steps", "3", "--help"]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("prepare", b""),  # for `fit` an empty file is a run with every default
        *((command, b"- a list\n") for command in ("fit", "prepare")),
        *((command, b"caf\xe9: 1\n") for command in ("fit", "prepare")),
        *((command, b"a: [\n") for command in ("fit", "prepare")),
    ],
)
def test_a_config_that_is_none(capsys, folder: Path, command: str, text: bytes) -> None:
    path = folder / "mine.yaml"
    path.write_bytes(text)
    assert "mine.yaml" in mistake(capsys, command, "--config", path)


def test_status_of_another_grid(capsys, folder: Path) -> None:
    assert main(["plan", str(grid(folder))]) == 0
    capsys.readouterr()
    changed = grid(folder, axes={"model.block.preset": ["sas"], "seed_everything": [1]})
    assert "another grid" in mistake(capsys, "status", changed)


def test_a_shell_without_utf8(folder: Path) -> None:
    """Names are read and shown as they are, where Python's own UTF-8 mode is off."""
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "lightning_app", "blocks", "größe →"]
    command = [word.encode() for word in words]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 2
    assert "größe →" in done.stderr.decode("utf-8")


UNREAD = """
import argparse, sys
from lightning_app import cli

def call(**_):
    print("x" * 100_000, flush=True)
    return 0

cli.parse_arguments = lambda words: argparse.Namespace(command=words[0], plugin=[], call=call)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "code"), [(["run"], 130), (["fit"], 130), (["results"], 0), (["results", "run"], 0)]
)
def test_a_pipe_without_a_reader_ends_no_work_with_success(words: list[str], code: int) -> None:
    """As `ablate run grid.yaml | head -1`: not all cells have run."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", UNREAD, *words]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_of_all_commands_and_options(shell: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert ended.value.code == 0
    script = capsys.readouterr().out
    for command, argument in build_parser().all_arguments():
        for word in (command.split()[-1], *argument.option_strings):
            assert word.lstrip("-") in script


def test_bash_completes_commands_options_and_files(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    command = [sys.executable, "-m", "lightning_app", "--print-completion", "bash"]
    script = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    asked = """
    for words in "tra" "run --work" "plan con"; do
      COMP_WORDS=(ablate $words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
      _shtab_ablate; echo "${COMPREPLY[*]}"
    done
    """
    program = ["bash", "--norc", "-c", script + asked]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["translate", "--workers", "config.yaml"]


def test_every_argument_has_a_description() -> None:
    described = [
        (command, argument)
        for command, argument in build_parser().all_arguments()
        if argument.option_strings or argument.metavar or argument.choices
    ]
    assert len(described) > 80
    for command, argument in described:
        text = argument.help or ""
        name = f"{command} {'/'.join(argument.option_strings) or argument.dest}"
        assert text, name
        assert not text.startswith("default"), name
