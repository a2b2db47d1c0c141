"""The examples in the docstrings of the public interface run as they are written."""

import inspect
import re
import textwrap
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import lightning_app
from lightning_app.api import runs
from lightning_app.config.grid import read_spec
from tests.report.conftest import FakeGrid, typical

SHOWN = ("Block", "Encoder", "Decoder", "fit", "run_grid", "results", "compare", "load_run")
METHODS = ("TrainedRun.translate", "TrainedRun.generate", "TrainedRun.score")
RUNS = {  # whose examples open a run of the task
    ("load_run", 0): "translation",
    ("TrainedRun.translate", 0): "translation",
    ("TrainedRun.generate", 0): "causal",
    ("TrainedRun.score", 0): "causal",
    ("TrainedRun.score", 1): "translation",
}


def examples(documentation: str) -> list[str]:
    """The indented blocks after an empty line, which are code."""
    text = inspect.cleandoc(documentation)
    blocks = re.findall(r"\n\n((?:    .*\n|\n)+)", f"{text}\n")
    return [textwrap.dedent(block) for block in blocks]


@pytest.mark.dear("three examples start cold")
def test_the_examples_run(tmp_path, cache: str, translation, causal, monkeypatch) -> None:
    (tmp_path / "ablations").symlink_to(Path("ablations").resolve())
    spec, demo = read_spec("demo"), tmp_path / "experiments" / "demo"
    FakeGrid(demo, typical, spec.axes, base=spec.base_config, curves=False)
    (tmp_path / "experiments" / "fit" / "runs").mkdir(parents=True)
    for run in (translation, causal):
        (tmp_path / run.folder.parent.name.rstrip("0123456789")).symlink_to(run.folder)
    monkeypatch.setattr(runs, "_ablate", lambda words, environment: (0, ""))
    monkeypatch.setenv("LIGHTNING_APP_CACHE", cache)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "experiments" / "fit" / "runs" / "RUN"
    for name in (*SHOWN, *METHODS):
        blocks = examples(attrgetter(name)(lightning_app).__doc__)
        assert blocks, f"{name} has no example"
        given: dict[str, Any] = {"load_run": lightning_app.load_run}
        for number, block in enumerate(blocks):
            if task := RUNS.get((name, number)):
                run.unlink(missing_ok=True)
                run.symlink_to(tmp_path / task)
            exec(compile(block, f"<example {number} of {name}>", "exec"), given)


def test_the_package_offers_what_it_names() -> None:
    """At type checking and at run time the same, without an import before the first use."""
    assert lightning_app.__doc__
    for block in examples(lightning_app.__doc__):
        exec(block, {})
    source = inspect.getsource(lightning_app)
    typed = re.findall(r"^    from (lightning_app[\w.]+) import ([\w, ]+)$", source, re.M)
    places = {name: module for module, names in typed for name in re.split(r",\s*", names)}
    assert sorted(places) == sorted(set(lightning_app.__all__) - {"__version__"})
    for name, module in places.items():
        assert f"lightning_app.{lightning_app._MODULES[name]}" == module
        assert getattr(lightning_app, name).__name__ == name
    assert set(lightning_app.__all__) <= set(dir(lightning_app))
    with pytest.raises(AttributeError, match="no attribute 'Bloc'"):
        _ = lightning_app.Bloc  # pyright: ignore[reportAttributeAccessIssue]
