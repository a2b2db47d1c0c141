"""What the README tells a reader to type is understood, and what it states is so."""

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.ablation.grid_spec import read_spec
from lightning_app.blocks.block_config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.cli import main, parse_arguments, plugins_of
from lightning_app.config import resolve
from lightning_app.parser import config_parser

README = Path("README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
COMMANDS = [
    part.strip()
    for block in BLOCKS
    for line in block.splitlines()
    for part in line.split("#")[0].split("|")
    if part.strip().startswith("ablate ")
]


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command: str) -> None:
    words = shlex.split(command)[1:]
    args = parse_arguments(words)
    assert args.command == plugins_of(words)[1][0]
    if args.call.__name__ == "lightning":
        rest = [word for word in args.rest if word not in ("--ckpt_path", "last")]
        assert config_parser().parse_args(rest).trainer.max_steps > 0
    for grid in getattr(args, "grids", [args.grid] if hasattr(args, "grid") else []):
        assert read_spec(grid).axes


@pytest.mark.parametrize("command", [c for c in COMMANDS if re.match("ablate blocks( \\w+)?$", c)])
def test_the_commands_that_only_show_run(command: str, capsys) -> None:
    assert main(shlex.split(command)[1:]) == 0
    assert "2311.01906" in capsys.readouterr().out


def test_make_has_the_targets_that_are_named() -> None:
    makefile = Path("Makefile").read_text()
    for target in re.findall(r"make (demo|test|check|format)\b", README):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_preset_stands_in_the_table() -> None:
    named = re.findall(r"^\| \[`(\w+)`\]", README, re.M)
    assert named == list(PRESETS)


def test_every_axis_stands_in_the_variants() -> None:
    section = README.split("## The variants")[1].split("\n## ")[0]
    for field in dataclasses.fields(BlockConfig):
        assert field.name == "preset" or f"`{field.name}`" in section, field.name


def test_the_tree_names_what_is_there() -> None:
    tree = README.split("## The tree")[1].split("```")[1]
    for line in tree.splitlines():
        name = line.split()[0] if line.strip() else ""
        inside = line.startswith("  ")
        if name:
            path = Path("lightning_app") / name if inside else Path(name)
            assert path.exists(), path


def yaml_after(heading: str) -> dict[str, Any]:
    """Return the first YAML below a heading of the README."""
    return yaml.safe_load(README.split(f"\n{heading}\n")[1].split("```yaml\n")[1].split("```")[0])


def test_the_example_of_a_probe_is_part_of_a_config() -> None:
    resolved = resolve(yaml_after("## Looking inside"), "README")
    (callback,) = resolved["trainer"]["callbacks"]
    assert callback["class_path"] == "lightning_app.callbacks.probes.SignalProbe"


def test_the_example_grid_is_one(tmp_path: Path) -> None:
    tree = yaml_after("## Grids")
    tree["base"] = str(Path("ablations").resolve() / tree["base"])
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert len(read_spec(path).axes) == 3
