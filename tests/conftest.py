"""Fixtures that every test folder shares."""

import gc
import math
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

# One thread per process, set before torch reads it: sums in a fixed order, and no threads that spin
# while another process has the core they wait for, which makes a step take ten times as long.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import jaxtyping
import pytest
import torch

from tests.representatives import REPRESENTATIVES

pytest_plugins = ["tests.spent"]
ROOT = Path(__file__).parents[1]
MOST = 20
"""A test of more presets than this runs REPRESENTATIVES, unless it is marked all_presets."""
SHAPED = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("blocks", "models")
    for path in sorted((ROOT / "lightning_app" / folder).rglob("*.py"))
    if "jaxtyping" in path.read_text(encoding="utf-8")
]
"""The modules whose calls are checked; a check takes as long as ten calls, so no others are."""
CHECKED = pytest.StashKey[bool]()

jaxtyping.install_import_hook(SHAPED, "beartype.beartype")
jaxtyping.config.update("jaxtyping_disable", True)  # while tests are collected
# How long an example takes depends on what else runs.
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=50)
hypothesis.settings.load_profile("untimed")
gc.disable()  # until then: almost nothing of what is imported is garbage


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect garbage from now on, but never look again at all modules and all ten thousand tests:
    that takes half a second each time."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(5_000, 20, 50)  # the defaults take a twentieth of the time of all tests
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all cases but an n-th part as slow where a test is marked in_turn(n), and all cases but
    REPRESENTATIVES of a test of most presets that is marked neither so nor all_presets.

    The part is drawn by the digests of the names, so that it has all values of several axes.
    Tests of a GPU run only where `-m` names them.
    """
    if "gpu" not in config.option.markexpr:
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("gpu")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    cases = [item for item in items if isinstance(item, pytest.Function) and _indices(item)]
    tested = defaultdict[tuple[Path, str], set[int]](set)
    drawn = defaultdict[tuple[Path, str], list[int]](list)
    for item in cases:
        tested[item.path, item.originalname].add(_indices(item).get("preset", 0))
        if item.get_closest_marker("slow") is None:
            drawn[item.path, item.originalname].append(crc32(item.name.encode()))
    for item in cases:
        own = item.get_closest_marker("in_turn")
        if own is not None:
            draws = sorted(drawn[item.path, item.originalname])
            slow = crc32(item.name.encode()) not in draws[: math.ceil(len(draws) / own.args[0])]
        else:
            slow = (
                item.get_closest_marker("all_presets") is None
                and len(tested[item.path, item.originalname]) > MOST
                and item.callspec.params["preset"] not in REPRESENTATIVES
            )
        if slow:
            item.add_marker("slow")
    first = dict[tuple[Path, str, bool], pytest.Item]()
    for item in items:
        if item.path.parent.name in ("blocks", "models") and isinstance(item, pytest.Function):
            runs = item.get_closest_marker("slow") is None
            is_first = first.setdefault((item.path, item.originalname, runs), item) is item
            item.stash[CHECKED] = is_first or item.get_closest_marker("every_shape") is not None


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a text of up to millions of characters by its length."""
    return f"{len(val)} long" if isinstance(val, str | bytes) and len(val) > 400 else None


def _indices(item: pytest.Function) -> dict[str, int]:
    return item.callspec.indices if hasattr(item, "callspec") else {}


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check shapes in the first case of each test of blocks and models: most other cases make the
    same calls. Embed fonts only where a test asks for it."""
    jaxtyping.config.update("jaxtyping_disable", not item.stash.get(CHECKED, False))
    if sheet := sys.modules.get("lightning_app.report.figures.sheet"):
        # To embed the fonts of the report takes most of the time of a PDF file.
        kind = 3 if item.get_closest_marker("pdf_files") is None else 42
        sheet.STYLE["pdf.fonttype"] = kind


@pytest.fixture(autouse=True, scope="session")
def interrupts() -> None:
    """A shell starts a job in the background with SIGINT ignored, which tests of Ctrl-C send."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.default_generator.manual_seed(1)  # `torch.manual_seed` asks for all kinds of devices


@pytest.fixture
def float64() -> Iterator[None]:
    """New tensors and modules are float64 while the test runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for prepared corpora, shared by all tests and processes of a session."""
    base = tmp_path_factory.getbasetemp()
    return str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-cache")


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """`ablate fit` says so in one line, ends with code 2, and makes no folder of a run."""
    import yaml

    from lightning_app.cli import main
    from tests.tables import changed
    from tests.told import told

    def check(tree: dict[str, Any], said: str, **fields: Any) -> None:
        path, run = tmp_path / "mistake.yaml", tmp_path / "mistake"
        path.write_text(yaml.safe_dump(changed(tree, trainer__default_root_dir=str(run), **fields)))
        assert main(["fit", "--config", str(path)]) == 2
        output = capsys.readouterr().err.strip().splitlines()
        assert len(output) == 1, output
        assert told(said).search(output[0])
        assert not run.exists()

    return check
