"""`ablate completion`: scripts for three shells, made from the parser."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_app.blocks.presets import PRESETS
from lightning_app.cli import main
from lightning_app.commands.arguments import build_parser
from lightning_app.commands.options import SHELLS

ASK = """
source ./script
words() {
  COMP_WORDS=(ablate "$@"); COMP_CWORD=$#; COMPREPLY=(); _shtab_ablate; echo "${COMPREPLY[*]}"
}
words tri
words test --ru
words plan warmup_
words blocks sas
words show ''
words completion ''
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_names_every_command(shell: str, capsys) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in build_parser().commands:
        assert command in script
    for name in ("--checkpoint", "warmup_iwslt14", *PRESETS):
        assert name in script


def test_bash_completes_commands_options_grids_presets_and_runs(tmp_path: Path, capsys) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "experiments/mine/runs/one").mkdir(parents=True)
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "--norc", "-c", ASK], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    command, option, grids, presets, runs, shells = (
        line.split() for line in done.stdout.splitlines()
    )
    assert command == []
    assert option == ["--run"]
    assert set(grids) == {"warmup_iwslt14", "warmup_lm", "warmup_mlm"}
    assert set(presets) == {name for name in PRESETS if name.startswith("sas")}
    assert runs == ["experiments/mine/runs/one"]
    assert shells == list(SHELLS)


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
