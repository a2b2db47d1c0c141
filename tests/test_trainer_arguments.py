"""The Trainer's arguments as its source says them are those of the class."""

import inspect
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightning_app.config.names import TRAINER_DEFAULTS, trainer_arguments


@pytest.mark.parametrize("method", ["__init__", "fit", "validate", "test", "predict"])
def test_the_arguments_are_those_of_the_class(method: str) -> None:
    found = trainer_arguments(method)
    assert found is not None
    wanted = dict(inspect.signature(getattr(pl.Trainer, method)).parameters)
    del wanted["self"]
    assert list(found) == list(wanted)
    for name, parameter in wanted.items():
        default = None if parameter.default is parameter.empty else parameter.default
        assert found[name].default == default
        assert type(found[name].default) is type(default)


def test_the_kinds_are_what_the_annotations_say() -> None:
    found = trainer_arguments()
    assert found is not None
    assert found["max_steps"].kinds == {"int"}
    assert found["devices"].kinds == {"list[int]", "str", "int"}
    assert found["limit_val_batches"].kinds == {"int", "float", "None"}
    assert "None" in found["precision"].kinds
    assert found["precision"].kinds & {"str", "int"} == set()
    assert found.keys() >= TRAINER_DEFAULTS.keys()


@pytest.mark.parametrize(
    "source",
    [
        None,
        "class Other: pass\n",
        "class Trainer:\n    def __init__(self, **kwargs): pass\n",
        "class Trainer:\n    def __init__(self, *, max_steps: int = count()): pass\n",
    ],
)
def test_a_source_of_another_form_says_nothing(
    source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lightning" / "pytorch" / "trainer"
    folder.mkdir(parents=True)
    (tmp_path / "lightning" / "__init__.py").touch()
    if source is not None:
        (folder / "trainer.py").write_text(source)
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: type("Spec", (), {"submodule_search_locations": [str(tmp_path / name)]}),
    )
    trainer_arguments.cache_clear()
    try:
        assert trainer_arguments() is None
    finally:
        trainer_arguments.cache_clear()
