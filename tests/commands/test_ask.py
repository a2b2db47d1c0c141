"""`ablate ask` writes a grid of per-seed studies and runs it."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_app.cli import main
from lightning_app.commands import ask
from lightning_app.config.grid import read_spec
from lightning_app.core.errors import UserError
from lightning_app.grids import program

PRESET, WARMUP, SEED = "model.block.preset", "model.schedule.warmup_steps", "seed_everything"


def test_eight_seeds_come_before_a_fourth_trial_and_no_time_is_exceeded() -> None:
    ways = itertools.product((10, 31, 60, 200), (1, 2, 8), (4, 6), (3.0, 20.0))
    for minutes, workers, cells, seconds in ways:
        needed = math.ceil(15 * cells * seconds / workers / 60)
        if needed > minutes:
            with pytest.raises(UserError, match=f"about {needed};"):
                ask.design(minutes, workers, cells, seconds)
            continue
        seeds, trials = ask.design(minutes, workers, cells, seconds)
        assert 5 <= seeds <= 20
        assert 3 <= trials <= 5
        assert seeds * trials * cells * seconds / workers <= 60 * minutes
        assert trials == 3 or seeds >= 8
        assert seeds <= 8 or trials == 5
        more = (seeds, trials + 1) if seeds == 8 and trials < 5 else (seeds + 1, trials)
        if more[0] <= 20:
            assert math.prod(more) * cells * seconds / workers > 60 * minutes


@pytest.fixture
def fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps take a tenth of a second, and the grids that would run are listed."""
    ran: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "seconds_per_step", lambda config: 0.1)
    monkeypatch.setattr(ask, "run_command", lambda path, *_, **__: ran.append(path) or 0)
    return ran


def test_it_writes_an_ordinary_grid_once(fast: list[Any], tmp_path: Path) -> None:
    assert main(["ask", "sas", "--workers", "2"]) == 0
    path = tmp_path / "ask_sas.yaml"
    spec: Any = read_spec(path)
    text = path.read_text()
    arms = {PRESET: ["sas", "pre_ln", "post_ln"], WARMUP: [0, 40]}
    assert spec.axes == {**arms, SEED: [*range(1, 9)]}
    assert (spec.search.per, spec.search.trials) == ("seed", 5)
    (values,) = spec.search.fields.values()
    assert (values.low, values.high, values.log) == (1e-3, 1.6e-2, True)
    compared = {"reference_warmup": 40, "baseline": "pre_ln", "control": "post_ln"}
    assert spec.sensitivity == {**compared, "matters": 0.2}
    assert main(["ask", "sas", "--minutes", "1000"]) == 0
    assert path.read_text() == text
    assert [str(each) for each in fast] == ["ask_sas.yaml"] * 2


def test_a_long_time_adds_seeds_until_the_answer_is_precise(fast, tmp_path: Path) -> None:
    assert main(["ask", "sas", "--workers", "2", "--minutes", "100"]) == 0
    spec: Any = read_spec(tmp_path / "ask_sas.yaml")
    assert (spec.axes[SEED], spec.search.trials) == ([*range(1, 9)], 5)
    assert (spec.until.half_width, spec.until.most_seeds) == (0.1, 14)
    # The control is no second arm.
    assert main(["ask", "post_ln", "--matters", "0.05"]) == 0
    tree = yaml.safe_load((tmp_path / "ask_post_ln.yaml").read_text())
    assert tree["axes"][PRESET] == ["post_ln", "pre_ln"]
    assert tree["sensitivity"]["matters"] == 0.05


@pytest.mark.parametrize("words", ["sas --minutes 1", "no_such_block", "sas --config absent.yaml"])
def test_a_mistake_writes_nothing(fast: list[Any], tmp_path: Path, words: str, capsys) -> None:
    assert main(["ask", *words.split(), "--workers", "1"]) == 2
    assert words.split()[-1] in capsys.readouterr().err
    assert not fast
    assert not list(tmp_path.iterdir())
