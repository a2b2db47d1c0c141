"""Ids, settings, records, documents and tables are those of the frozen set."""

import contextlib
from pathlib import Path

import pytest

from tests.frozen.frozen import (
    BASES,
    GRIDS,
    ROOT,
    STUDIES,
    differences,
    documents_of,
    expected,
    settings_of,
    write_corpora,
)

SLOW = {"joint", "xiong_small", "warmup_lm"}


@pytest.mark.parametrize("path", [*BASES, *GRIDS], ids=lambda path: path.stem)
@pytest.mark.in_turn(12)
def test_a_shipped_file_has_its_settings_and_ids(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpora(tmp_path)
    monkeypatch.setenv("LIGHTNING_APP_DATA", str(tmp_path / "corpora"))
    with contextlib.chdir(tmp_path):
        found = settings_of(path)
    wanted = expected()["settings"][str(path.relative_to(ROOT))]
    assert found == wanted, "\n".join(differences(found, wanted, exactly=True))


@pytest.mark.parametrize(
    "study", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in STUDIES]
)
def test_a_study_has_its_numbers(study: str, tmp_path: Path) -> None:
    found = documents_of(study, tmp_path)
    assert not list(differences(found, expected()[study]))


def test_a_difference_is_found() -> None:
    """A change of one digit, a missing key, an added row; the tolerance covers rounding alone."""
    wanted = {"a": [1.0, {"b": "x y"}], "t.csv": "rate,loss\n0.1,2.5\n", "s": "one two three four"}
    assert not list(differences(wanted, wanted, exactly=True))
    for changed in (
        {**wanted, "a": [1.00001, {"b": "x y"}]},
        {**wanted, "a": [1.0, {"b": "x z"}]},
        {**wanted, "a": [1.0, {}]},
        {**wanted, "a": [1.0]},
        {**wanted, "t.csv": "rate,loss\n0.1,2.5001\n"},
        {**wanted, "t.csv": "rate,loss\n0.1,2.5\n0.1,2.5\n"},
        {**wanted, "more": 1},
    ):
        assert len(list(differences(changed, wanted))) == 1
    rounded = {**wanted, "a": [1.0 + 1e-12, {"b": "x y"}], "s": "other words of a sentence"}
    assert not list(differences(rounded, wanted))
    assert len(list(differences(rounded, wanted, exactly=True))) == 2
