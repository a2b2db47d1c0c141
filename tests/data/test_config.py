from dataclasses import asdict

import pytest

from lightning_app.config.config import DataSection
from lightning_app.core.errors import UserError
from lightning_app.core.schema import docs_of
from lightning_app.data.config import DataConfig


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
        (
            {"name": "wikitext2", "task": "causal_lm", "tokens_per_batch": 64},
            r"data\.tokens_per_batch is 64: .* at least data\.window 128",
        ),
    ],
)
def test_meaningless_values_are_refused(wrong: dict, message: str):
    with pytest.raises(UserError, match=message):
        DataConfig(**wrong)


def test_every_field_is_documented():
    docs = docs_of(DataSection)
    assert docs.keys() >= asdict(DataConfig()).keys()
    assert {name for name, text in docs.items() if len(text) < 15} == set()
