"""What README and the pages of `docs` tell a reader to type is understood."""

import dataclasses
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.cli import main, parse_arguments, plugins_of
from lightning_app.config.config import Config, linked, read_config, resolve
from lightning_app.config.grid import read_spec
from lightning_app.config.sources import FIELDS_OF, Written
from lightning_app.core.project import PROJECT, read_project
from lightning_app.core.schema import read
from lightning_app.plugins import KEY
from tests.pages import PAGES, README, ROOT, Fenced, fenced, inline, typed
from tests.warm import run

COMMANDS = [command for command in typed() if command.startswith("ablate ")]
OTHERS = [command for command in typed() if not command.startswith("ablate ")]
SHOWING = [c for c in COMMANDS if c.startswith("ablate blocks") and "--svg" not in c]
SECTIONS = {"seed_everything", "trainer", "model", "data"}
LIGHTNING = {"fit", "validate", "test", "predict"}
YAML = fenced("yaml")
NAMED = re.compile(r"# (?:[\w-]+/)*([\w-]+\.yaml)\n")
OF_PAGES = {found[1] for block in YAML if (found := NAMED.match(block.text))}
"""The files that the pages show, which another test reads."""


def named(blocks: list[Fenced]) -> list[str]:
    return [f"{block.page}-{number}" for number, block in enumerate(blocks)]


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) >= 40
    assert len(OTHERS) >= 5
    assert len(YAML) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command: str) -> None:
    words = shlex.split(command)[1:]
    args = parse_arguments(words)
    assert args.command == plugins_of(words)[1][0]
    if args.command in LIGHTNING:
        rest = [word for word in args.words if word not in ("--ckpt_path", "last")]
        written = Written(rest, FIELDS_OF[args.command])
        assert read(Config, linked(written.typed(Config))).trainer.max_steps > 0
    elif getattr(args, "config", None):
        for config in [args.config] if isinstance(args.config, Path) else args.config:
            if config.name not in OF_PAGES:
                assert read_config(config, getattr(args, "overrides", ()))["model"]
    if grid := getattr(args, "grid", None):
        if Path(grid).is_dir():  # a published study
            assert Path(grid, "runs.tar.xz").is_file()
        elif Path(grid).name not in OF_PAGES:
            assert read_spec(grid).axes


@pytest.mark.parametrize("command", SHOWING)
def test_the_commands_that_only_show_run(command: str, capsys) -> None:
    assert main(shlex.split(command)[1:]) == 0
    shown = capsys.readouterr().out
    assert "as ablations/base/" in shown if "--config" in command else "2311.01906" in shown


@pytest.mark.parametrize("command", OTHERS)
def test_a_command_of_another_program_names_what_is_there(command: str) -> None:
    """No program but these: a page that names another one needs a check of it here."""
    words = shlex.split(command)
    match words:
        case ["make", target]:
            check_target(target)
        case ["python", script, *rest]:
            check_script(script, rest)
        case ["pip", "install", *wanted]:
            check_extras(" ".join(wanted))
        case ["tensorboard", "--logdir", folder]:
            assert folder.startswith("experiments/")
        case ["echo", _]:
            pass
        case _:
            pytest.fail(f"no check for: {command}")


def check_target(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


def check_script(script: str, rest: list[str]) -> None:
    source = (ROOT / script).read_text("utf-8")
    for word in rest:
        if word.startswith("-"):
            assert f'"{word.partition("=")[0]}"' in source, word


def check_extras(wanted: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\[([\w,]+)\]", wanted):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), wanted


def test_the_commands_within_lines_name_what_is_there(capsys) -> None:
    """Such a command may have placeholders, so its options are looked up and it is not parsed."""
    helped: dict[str, str] = {}

    def help_of(*words: str) -> str:
        key = " ".join(words)
        if key not in helped:
            with pytest.raises(SystemExit):
                main([*words, "--help"])
            helped[key] = capsys.readouterr().out
        return helped[key]

    found = [(page, command) for page, command in inline("ablate") if command != "ablate"]
    assert len(found) >= 30
    for page, command in found:
        name, *rest = shlex.split(command)[1:]
        assert re.search(rf"^ +{name}\b", help_of(), re.M), (page, command)
        if name not in LIGHTNING:
            for word in rest:
                if word.startswith("--") and "." not in word:
                    assert word.partition("=")[0] in help_of(name), (page, command)
    for page, command in inline("make"):
        assert page
        check_target(command.split()[1])
    for _, command in inline("python"):
        if command.split()[1] != "-m":
            check_script(command.split()[1], shlex.split(command)[2:])
    for _, command in inline("pip"):
        check_extras(command)


def as_grid(tree: Mapping[str, Any], folder: Path) -> Path:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(dict(tree)))
    return path


@pytest.mark.parametrize("block", YAML, ids=named(YAML))
def test_a_yaml_block_is_what_it_seems(block: Fenced, tmp_path: Path) -> None:
    """A comment with the name of a file begins a whole config or grid; others are a part of one."""
    tree = yaml.safe_load(block.text)
    name = NAMED.match(block.text)
    if name is not None and name[1] == PROJECT:
        (tmp_path / PROJECT).write_text(block.text, encoding="utf-8")
        assert {KEY: list(read_project(tmp_path).plugins)} == tree
        return
    if set(tree) <= SECTIONS:
        assert name is None or set(tree) == SECTIONS
        assert resolve(tree, block.page)["model"]
        return
    if name is None:
        tree = {**yaml.safe_load((ROOT / "ablations/demo.yaml").read_text("utf-8")), **tree}
    beside = [other.text for other in YAML if other.page == block.page]
    bases = [yaml.safe_load(text) for text in beside if f"# {tree['base']}\n" in text]
    if bases:
        tree["base_config"] = resolve(bases[0], block.page)
        del tree["base"]
    else:
        tree["base"] = str((ROOT / "ablations" / tree["base"]).resolve())
    spec = read_spec(as_grid(tree, tmp_path))
    assert len(spec.axes) >= 3
    assert spec.sensitivity["baseline"] in PRESETS


PYTHON = sorted({block.page for block in fenced("python")})


@pytest.mark.parametrize("page", PYTHON)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """In a process of its own: a preset of a page would stay in the table of this one."""
    code = "\n".join(block.text for block in fenced("python") if block.page == page)
    done = run(["-c", code], folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_block_and_the_project_of_a_page_are_read(tmp_path: Path) -> None:
    page = "docs/own-block.md"
    block = next(each for each in fenced("python") if each.page == page)
    project = next(each for each in YAML if each.page == page and f"# {PROJECT}\n" in each.text)
    (tmp_path / "my_blocks.py").write_text(block.text, encoding="utf-8")
    (tmp_path / PROJECT).write_text(project.text, encoding="utf-8")
    done = run(["-m", "lightning_app", "blocks", "damped"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0.2887" in done.stdout
    first = next(each.text for each in fenced("python") if each.page == "README.md")
    assert first == block.text


LONGER = sorted({block.page for block in fenced("py")})


@pytest.mark.slow
@pytest.mark.parametrize("page", LONGER)
def test_the_longer_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """Blocks of the language `py` read files of the repository or train."""
    (tmp_path / "ablations").symlink_to(ROOT / "ablations")
    block = next(each for each in fenced("python") if each.page == "docs/own-block.md")
    (tmp_path / "my_blocks.py").write_text(block.text, encoding="utf-8")
    (tmp_path / "gain.json").write_text("{}", encoding="utf-8")
    code = "\n".join(block.text for block in fenced("py") if block.page == page)
    done = run(["-c", code], folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)|(?:src|srcset)=\"([^\"]+)\"", README)
    assert len(links) >= 20
    for link in links:
        assert (ROOT / (link[0] or link[1])).exists(), link
    for page in (ROOT / "docs").glob("*.md"):
        if page.name != "index.md":
            assert f"](docs/{page.name})" in README, page


def test_axes_shipped_grids_and_the_tree_are_named() -> None:
    section = PAGES["docs/variants.md"].split("## The axes")[1].split("\n## ")[0]
    for field in dataclasses.fields(BlockConfig):
        assert field.name == "preset" or f"`{field.name}`" in section, field.name
    shown = PAGES["docs/grids.md"].split("## Shipped grids")[1]
    for path in (ROOT / "ablations").glob("*.yaml"):
        assert f"`{path.stem}`" in shown, path.stem
    tree = README.split("## The tree")[1].split("```")[1].strip()
    assert len(tree.splitlines()) <= 20
    for line in tree.splitlines():
        name = line.split()[0] if line.strip() else ""
        inside = line.startswith("  ")
        if name:
            path = Path("lightning_app") / name if inside else Path(name)
            assert path.exists(), path


def test_the_workflow_is_valid_and_runs_the_slow_tests() -> None:
    path = ROOT / ".github" / "workflows" / "checks.yml"
    done = run(["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)])
    assert done.returncode == 0, done.stdout + done.stderr
    workflow = yaml.safe_load(path.read_text())
    assert workflow[True]["schedule"]  # YAML reads the key `on` as true
    runs = [step.get("run", "") for step in workflow["jobs"]["everything"]["steps"]]
    assert any("WHICH=\"-m 'slow or not slow'\"" in line for line in runs)
    assert "$(WHICH)" in (ROOT / "Makefile").read_text()
