"""The sections of a config say what the classes take that are made of them."""

import inspect
from dataclasses import fields
from typing import Any, get_type_hints

import lightning.pytorch as pl

from lightning_app.config.config import ModelConfig
from lightning_app.config.trainer import OWN_DEFAULTS, TrainerConfig
from lightning_app.core.schema import hints_of, kinds_of
from lightning_app.training.module import TransformerModule


def test_the_model_section_has_the_arguments_of_its_class() -> None:
    owner: Any = TransformerModule
    taken = get_type_hints(owner.__init__)
    del taken["return"]
    hints = hints_of(ModelConfig)
    assert hints.keys() == taken.keys()
    for name, hint in hints.items():
        assert set(kinds_of(hint)) <= set(kinds_of(taken[name])), name
    parameters = inspect.signature(owner.__init__).parameters
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    assert defaults == {name: parameters[name].default for name in hints}


def test_the_trainer_section_has_the_arguments_of_lightnings_trainer() -> None:
    """Names, order and defaults; where it fails, Lightning has another flag."""
    owner: Any = pl.Trainer
    parameters = dict(inspect.signature(owner).parameters)
    found = {field.name: field.default for field in fields(TrainerConfig)}
    wanted = {name: each.default for name, each in parameters.items()}
    assert list(found) == list(wanted)
    assert found == {**wanted, **OWN_DEFAULTS}
    kept = {name for name in OWN_DEFAULTS if OWN_DEFAULTS[name] == wanted[name]}
    assert kept == set()
