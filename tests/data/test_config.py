from dataclasses import asdict

import pytest

from lightning_app.core.errors import UserError
from lightning_app.data.config import DataConfig
from lightning_app.training.parser import config_parser


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


def test_the_parser_offers_every_field_with_its_default():
    wanted = asdict(DataConfig())
    for name in ("task", "next_sentence", "init_from", "seed"):  # they are set from other fields
        del wanted[name]
    own_class = {"class_path": None, "init_args": None}
    assert config_parser().get_defaults().data.as_dict() == wanted | own_class


def test_every_field_is_documented_in_the_help():
    text = " ".join(config_parser().format_help().split())
    for field in ("tokens_per_batch", "mask_probability", "source_language", "num_workers"):
        _, _, after = text.partition(f" --data.{field} {field.upper()} ")
        assert len(after.partition("(type:")[0]) > 20
