"""`ablate completion`: scripts for three shells, made from the parser, and what each one offers."""

import os
import pty
import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_app.blocks.presets import PRESETS
from lightning_app.cli import build_parser, main
from lightning_app.commands.completion import SHELLS, preset_names

LATER = "mkdir experiments/mine/runs/two"
OFFERED = {
    "tri": set(),
    "tra": {"translate"},
    "test --ru": {"--run"},
    "fit --conf": {"--config"},
    "fit --config con": {"config.yaml"},
    "fit --trainer.max_s": {"--trainer.max_steps"},
    "plan warmup_": {"warmup_iwslt14", "warmup_lm", "warmup_lm_fine", "warmup_mlm"},
    "run --workers 2 con": {"config.yaml"},
    "report demo grids/mi": {"grids/mine.yaml"},
    "blocks sas": {"sas", "sas_p", "sas_p_no_norm"},
    "prepare --data iws": {"iwslt14"},
    "show experiments/m": {"experiments/mine", "experiments/mine/runs/one"},
    LATER: None,
    "diff experiments/mine/runs/one experiments/mine/runs/": {
        "experiments/mine/runs/one",
        "experiments/mine/runs/two",
    },
    "test --checkpoint be": {"best"},
    "completion ": set(SHELLS),
}
"""What is typed after `ablate`, and what is offered; None for a command of the shell."""

BASH = """
source ./script
ask() {
  COMP_WORDS=(ablate $1); COMP_CWORD=$#; COMPREPLY=()
  case "$1" in *" ") COMP_WORDS+=("");; esac
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _shtab_ablate
  echo "? $1"; printf '%s\\n' "${COMPREPLY[@]}"
}
"""
FISH = """
source ./script
function ask
  echo "? $argv[1]"; complete -C "ablate $argv[1]" | string replace -r '\\t.*' ''
end
"""
ZSH = """
autoload -U compinit && compinit -u -D
eval "$(<script)"
compadd() {
  case ${@[1,(i)(-|--)]} in *-(O|A|D)\\ *) builtin compadd "$@"; return;; esac
  typeset -a hits; builtin compadd -A hits "$@"; print -rl -- $hits >> offered
}
ask() { print -r -- "? $1" >> offered; BUFFER="ablate $1"; CURSOR=$#BUFFER; zle list-choices }
zle-line-init() {
%s
  exit 0
}
zle -N zle-line-init
"""
"""zsh completes only on a terminal; every word that a function of completion adds is written."""


def script_of(shell: str, capsys) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_names_every_command_option_grid_and_preset(shell: str, capsys) -> None:
    script = script_of(shell, capsys)
    for command, argument in build_parser().all_arguments():
        for word in (command.split()[-1], *argument.option_strings):
            assert word.lstrip("-") in script
    for name in ("trainer.max_steps", "warmup_iwslt14", "demo", *PRESETS):
        assert name in script


def test_the_presets_are_those_of_the_table() -> None:
    assert preset_names() == sorted(PRESETS)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_offers_what_fits(shell: str, tmp_path: Path, capsys) -> None:
    script = script_of(shell, capsys)
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} on the PATH, so its script is not run")
    (tmp_path / "script").write_text(script)
    (tmp_path / "config.yaml").touch()
    (tmp_path / "experiments/mine/runs/one").mkdir(parents=True)
    (tmp_path / "grids").mkdir()
    (tmp_path / "grids/mine.yaml").touch()
    asked = "\n".join(
        line if words is None else f"  ask '{line}'" for line, words in OFFERED.items()
    )
    printed = of_zsh(program, asked, tmp_path) if shell == "zsh" else ""
    if shell == "bash":
        printed = output_of([program, "--norc", "-c", BASH + asked], tmp_path)
    if shell == "fish":
        printed = output_of([program, "--no-config", "-c", FISH + asked], tmp_path)
    expected = {line: words for line, words in OFFERED.items() if words is not None}
    if shell == "zsh":  # offers the parts of a path one after the other
        expected = {line: {Path(word).name for word in words} for line, words in expected.items()}
    offered: dict[str, set[str]] = {line: set() for line in expected}
    line = ""
    for word in printed.splitlines():
        if word.startswith("? "):
            line = word.removeprefix("? ")
        elif word:
            offered[line].add(Path(word).name if shell == "zsh" else word.rstrip("/"))
    assert offered == expected


HOSTILE = (
    "$(touch pwned)",
    "`touch pwned`",
    "a;touch pwned",
    "a' $(touch pwned) '",
    'a" $(touch pwned) "',
    "a\n$(touch pwned)\n",
    "$'\\x24(touch pwned)'",
    "${x:=$(touch pwned)}",
    "|touch pwned",
    "&touch pwned&",
    "*",
    "(touch pwned)",
)


@pytest.mark.parametrize("shell", SHELLS)
def test_no_name_of_a_folder_is_evaluated(shell: str, tmp_path: Path, capsys) -> None:
    script = script_of(shell, capsys)
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} on the PATH, so its script is not run")
    (tmp_path / "script").write_text(script)
    for name in HOSTILE:
        (tmp_path / f"experiments/mine/runs/{name}").mkdir(parents=True)
        (tmp_path / f"experiments/{name}/runs/one").mkdir(parents=True)
        (tmp_path / name).mkdir()
    (tmp_path / "experiments/mine/runs/fine-1.0_a").mkdir()
    words = ("test --run ", "show ", "show experiments/mine/runs/", "show a", "fit --config ")
    asked = "\n".join(f"  ask '{line}'" for line in words)
    printed = of_zsh(program, asked, tmp_path) if shell == "zsh" else ""
    if shell == "bash":
        printed = output_of([program, "--norc", "-c", BASH + asked], tmp_path)
    if shell == "fish":
        printed = output_of([program, "--no-config", "-c", FISH + asked], tmp_path)
    assert "fine-1.0_a" in printed
    assert not (tmp_path / "pwned").exists()


def output_of(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    return done.stdout


def of_zsh(program: str, asked: str, folder: Path) -> str:
    """Run zsh on a terminal of its own, with the questions in its start-up file."""
    (folder / ".zshrc").write_text(ZSH % asked)
    environment = {**os.environ, "ZDOTDIR": str(folder), "HOME": str(folder), "TERM": "xterm"}
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        [program, "-d", "-i"],
        cwd=folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    timer = threading.Timer(120, shell.kill)
    timer.start()
    shown = b""
    with suppress(OSError):  # Linux: the last process has closed the terminal
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert shell.wait() == 0, shown.decode(errors="replace")
    timer.cancel()
    return (folder / "offered").read_text()


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
