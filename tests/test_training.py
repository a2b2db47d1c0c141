"""Every preset trains: two tasks, two precisions, compiled in place, on two processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.models.heads import ArchitectureConfig
from tests import warm
from tests.representatives import REPRESENTATIVES
from tests.train import STEPS, train

LONG = ("post_ln", "pre_ln", "admin", "dual_stream", "realformer", "sas")

every_preset = pytest.mark.parametrize("preset", PRESETS)
every_task = pytest.mark.parametrize("task", ["translation", "masked_lm"])


@pytest.mark.in_turn(8)
@every_preset
@every_task
def test_some_steps(tmp_path: Path, cache: str, preset: str, task: str) -> None:
    precision = "32-true" if task == "translation" else "bf16-mixed"
    train(tmp_path, cache, preset, task, precision, steps=STEPS if preset in LONG else 12)


@pytest.mark.slow
@pytest.mark.parametrize("preset", LONG)
def test_fifty_steps_of_causal_lm(tmp_path: Path, cache: str, preset: str) -> None:
    train(tmp_path, cache, preset, "causal_lm", "32-true")


@pytest.mark.slow
@every_preset
@pytest.mark.parametrize(
    ("task", "precision"), [("translation", "bf16-mixed"), ("masked_lm", "32-true")]
)
def test_fifty_steps_in_the_other_precision(tmp_path, cache, preset, task, precision: str) -> None:
    train(tmp_path, cache, preset, task, precision)


def run_program(
    how: str, folder: Path, cache: str, task: str, processes: int = 1, runs: Any = PRESETS
) -> list[Any]:
    """Run `tests.train` over `runs`, else all presets, and return what each rank found."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*(launch if processes > 1 else []), "-m", "tests.train"]
    command += [how, str(folder), cache, task, *runs]
    done = warm.run(command, folder=Path(__file__).parents[1], timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((folder / f"rank{n}.json").read_text()) for n in range(processes)]
    assert all(set(rank) == set(runs) for rank in ranks)
    return ranks


@pytest.mark.slow  # `test_compiled.py` compiles some presets in each run of the tests
@every_task
def test_one_graph_without_breaks(tmp_path: Path, cache: str, task: str) -> None:
    (found,) = run_program("graph", tmp_path, cache, task)
    assert [preset for preset, result in found.items() if not result["equal"]] == []


@pytest.mark.slow
@every_task
def test_fifty_compiled_steps(tmp_path: Path, cache: str, task: str) -> None:
    (found,) = run_program("compiled", tmp_path, cache, task, runs=sorted(REPRESENTATIVES))
    for preset, result in found.items():
        assert len(result["losses"]) == STEPS
        assert result["losses"][:5] == pytest.approx(result["plain"], rel=1e-4), preset


@pytest.mark.slow
@every_task
def test_fifty_steps_on_two_processes(tmp_path: Path, cache: str, task: str) -> None:
    presets = sorted(REPRESENTATIVES)  # of all of them it took a quarter of an hour
    first, second = run_program("ddp", tmp_path, cache, task, processes=2, runs=presets)
    for preset in presets:
        assert len(first[preset]["losses"]) == STEPS
        assert first[preset]["weights"] == second[preset]["weights"]


def test_none_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="initialisation: norm_placement none"):
        ArchitectureConfig().stacks(BlockConfig(preset="pre_ln", norm_placement="none"))


@pytest.mark.slow
@every_task
def test_fast_forms_train_as_their_oracles_do(tmp_path: Path, cache: str, task: str) -> None:
    (found,) = run_program("forms", tmp_path, cache, task, runs=("sum", "mean", "sas"))
    for carry, losses in found.items():
        for form in ("fast", "compiled"):
            assert losses[form] == pytest.approx(losses["plain"], rel=1e-4), (carry, form)
