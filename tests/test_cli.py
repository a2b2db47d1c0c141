"""The command line: what it answers, and how it tells a user's mistake."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_app.cli import COMMANDS, build_parser, main
from tests.told import told

BASE = Path("ablations/base/synthetic.yaml").resolve()
FIT = ["fit", "--config", BASE]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_APP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def mistake(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("ablate: ")]
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    return lines[0]


def test_a_command_takes_its_arguments_by_name_and_each_has_a_description() -> None:
    for name, parser in build_parser().commands.items():
        names = {argument.dest for argument in parser.arguments} - {"help"}
        names -= {"threads"}
        names |= {COMMANDS[name].takes} - {""}
        inspect.signature(parser.get_default("call")).bind(**dict.fromkeys(names))
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
        (["report", "demo", "demo_mlm"], "takes one grid; a third grid over both"),
        (["prepare"], "--data"),
        ([*FIT, "--model.optimizer.kind", "adamm"], "'adamm'; … 'adam'?"),
        ([*FIT, "--data.name", "wikitext"], "'wikitext'; … 'wikitext2'?"),
        ([*FIT, "--data.vocab_size", "2"], "vocab_size"),
        (["blocks", "sas", "--svg", "/proc/x/sas.svg"], "/proc/x: cannot be written"),
        (["blocks", "sas", "--svg", "."], "it is a"),
        (["blocks", "--svg-dir", "/proc/x"], "/proc/x: cannot be written"),
        ([*FIT, "--trainer.accelerator", "gpuu"], "gpuu"),
        ([*FIT, "--trainer.max_steps", "-1"], "max_steps"),
        ([*FIT, "--trainer.val_check_interval", "0"], "val_check_interval"),
        ([*FIT, "--model.optimizer.betas", "[1.5,0.9]"], "betas"),
        ([*FIT, "--ckpt_path", "last"], "last"),
        ([*FIT, "--ckpt_path", "."], "ckpt_path"),
        ([*FIT, "--ckpt_path", BASE], "not a complete"),
        (["predict", "--config", BASE], "--ckpt_path is needed"),
    ],
)
def test_a_mistake_is_one_line(capsys, folder: Path, words: list, expected: str) -> None:
    assert told(expected).search(mistake(capsys, *words))
    assert not list(folder.glob("experiments/*/runs/*"))


# For `fit` an empty file is a run with every default.
@pytest.mark.parametrize("text", [b"", b"- a list\n", b"caf\xe9: 1\n"])
def test_a_corpus_of_no_config(capsys, folder: Path, text: bytes) -> None:
    (folder / "mine.yaml").write_bytes(text)
    assert "mine.yaml" in mistake(capsys, "prepare", "--config", "mine.yaml")


def test_status_of_another_grid(capsys, folder: Path) -> None:
    tree = {"name": "mine", "base": str(BASE), "axes": {"seed_everything": [1]}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(tree))
    assert main(["plan", "mine.yaml"]) == 0
    capsys.readouterr()
    changed = {**tree, "axes": {"seed_everything": [2]}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(changed))
    assert "another grid" in mistake(capsys, "status", "mine.yaml")


def test_a_shell_without_utf8(folder: Path) -> None:
    """Names are read and shown as they are, where Python's own UTF-8 mode is off."""
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "lightning_app", "status", "größe →"]
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
