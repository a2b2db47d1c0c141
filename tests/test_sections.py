"""The sections say what the classes take that Lightning's parser reads."""

import inspect
from dataclasses import fields
from typing import Any, get_type_hints

from lightning_app.config.sections import ModelConfig, hints_of
from lightning_app.training.module import TransformerModule


def test_the_model_section_has_the_arguments_of_its_class() -> None:
    section: Any = ModelConfig
    owner: Any = TransformerModule
    hints = get_type_hints(owner.__init__)
    del hints["return"]
    assert hints_of(section) == hints
    parameters = inspect.signature(owner.__init__).parameters
    defaults = {field.name: field.default for field in fields(section)}
    assert defaults == {name: parameters[name].default for name in hints}
