import inspect
from dataclasses import fields

import pytest

from lightning_app.data.config import DataConfig
from lightning_app.data.datamodule import TextDataModule
from lightning_app.errors import UserError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens_per_batch": 0}, r"data\.tokens_per_batch is 0"),
        ({"window": 1}, r"data\.window is 1"),
        ({"mask_probability": 0.0}, r"data\.mask_probability is 0\.0"),
        ({"mask_probability": 1.0}, r"data\.mask_probability is 1\.0"),
        ({"vocab_size": None}, r"data\.vocab_size is null"),
        ({"vocab_size": 5}, r"data\.vocab_size is 5"),
        ({"name": "wikitext2"}, r"data\.name 'wikitext2' has one language"),
        ({"name": "text"}, r"data\.root is null"),
        ({"source_language": "en"}, r"both 'en'"),
        ({"source_language": "fr"}, r"data\.source_language is 'fr'"),
        ({"num_workers": -1}, r"data\.num_workers is -1"),
    ],
)
def test_meaningless_values_are_refused(wrong: dict, message: str):
    with pytest.raises(UserError, match=message):
        DataConfig(**wrong)


def test_datamodule_has_the_same_fields_and_defaults():
    signature = inspect.signature(TextDataModule).parameters
    assert list(signature) == [field.name for field in fields(DataConfig)]
    assert DataConfig(**{name: p.default for name, p in signature.items()}) == DataConfig()


def test_every_argument_is_documented():
    doc = inspect.getdoc(TextDataModule) or ""
    for field in fields(DataConfig):
        assert f"{field.name}: " in doc
