"""Every field of every dataclass of a config refuses what is wrong in one line that names it."""

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_origin, get_type_hints

import lightning.pytorch as pl
import pytest

from lightning_app.config.config import Config, ModelConfig
from lightning_app.config.grid import GridFile, InitFrom
from lightning_app.config.trainer import ClassSpec, TrainerConfig
from lightning_app.core.errors import UserError
from lightning_app.core.schema import (
    as_plain,
    as_written,
    docs_of,
    expected,
    hints_of,
    kinds_of,
    part_of,
    parts_of,
    read,
)
from lightning_app.runs.records import Plan, PrunedRecord, ResultRecord
from lightning_app.training.module import TransformerModule
from tests.records import pruned, result
from tests.told import told


def places(kind: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted key, the type and the dataclass of every field, at any depth."""
    for each in fields(kind):
        key, hint = f"{path}{each.name}", hints_of(kind)[each.name]
        yield key, hint, kind
        if (part := part_of(hint)) is not None and part is not ClassSpec:
            yield from places(part, f"{key}.")


ROOTS: dict[type, dict[str, Any]] = {
    Config: {},
    GridFile: {"name": "mine", "base": "base.yaml"},
    InitFrom: {"grid": "parent", "match": ["seed_everything"]},
    ResultRecord: result("a" * 16),
    PrunedRecord: pruned("a" * 16),
    Plan: {
        **{"name": "mine", "hash": "", "made_from": "", "metric": "val/nll", "mode": "min"},
        **{"axes": {}, "excluded": 0, "data": [], "cells": []},
    },
}
"""The kinds of files and of entries in their lists, each with at least the fields it needs."""
PLACES = [
    (root, *place)
    for root in ROOTS
    for place in places(root)
    if root is not GridFile or not place[0].startswith("init_from.")  # is a root of its own
]
VALUES: list[Any] = [None, True, 3, 2.5, "a word that nothing is called", [[]], {"no such": 1}]


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def fits(hint: Any, value: Any) -> bool:
    """Whether a value may be read as a type; a mapping and a list count whatever they hold."""
    kinds = kinds_of(hint)
    if value is None:
        return NoneType in kinds
    if isinstance(value, dict):
        return any(is_dataclass(kind) or get_origin(kind) is dict for kind in kinds)
    if isinstance(value, list):
        return any(get_origin(kind) in (list, tuple) for kind in kinds)
    if isinstance(value, int) and not isinstance(value, bool):
        return int in kinds or float in kinds
    return type(value) in kinds


def refused(root: type, tree: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        read(root, ROOTS[root] | tree, "mine.yaml")
    said = str(error.value)
    assert said.startswith("mine.yaml: ")
    assert "\n" not in said
    return said.removeprefix("mine.yaml: ")


@pytest.mark.parametrize(
    ("root", "key", "hint"),
    [place[:3] for place in PLACES],
    ids=[f"{root.__name__}-{key}" for root, key, *_ in PLACES],
)
def test_a_value_of_another_type_names_field_type_and_value(root, key: str, hint: Any) -> None:
    wrong = [value for value in VALUES if not fits(hint, value)]
    assert wrong
    for value in wrong:
        said = refused(root, nested(key, value))
        assert said.startswith(f"{key}: expected {expected(hint)}, found {as_written(value)}"), said


@pytest.mark.parametrize("kind", sorted({place[3] for place in PLACES}, key=str), ids=str)
def test_an_unknown_key_names_the_nearest(kind: type) -> None:
    for root, key, _, owner in PLACES:
        above, _, name = key.rpartition(".")
        if owner is not kind or len(name) < 4 or hasattr(kind, "EXTRA"):
            continue
        wrong = f"{above}.{name}z" if above else f"{name}z"
        said = refused(root, nested(wrong, 1))
        assert told(f"'{wrong}'; … '{name}'?").search(said)


@pytest.mark.parametrize("root", [root for root in ROOTS if root is not Config], ids=str)
def test_a_missing_field_is_named(root: type) -> None:
    needed = [each.name for each in fields(root) if each.default is each.default_factory is MISSING]
    assert needed
    for key in needed:
        tree = {name: value for name, value in ROOTS[root].items() if name != key}
        with pytest.raises(UserError) as error:
            read(root, tree, "mine.yaml")
        assert str(error.value).startswith(f"mine.yaml: {key}: ")


@dataclass(frozen=True, kw_only=True)
class Inner:
    needed: int
    other: Literal["one", "two"] = "one"


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    several: list[Inner] = field(default_factory=list)
    pair: tuple[float, float] = (0.5, 1.0)
    by_name: dict[str, Inner] = field(default_factory=dict)
    either: Inner | list[Inner] | None = None


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "no value is"),
        ({"inner": {}}, "inner.needed:"),
        ({"inner": {"needed": "1"}}, "inner.needed: … '1'"),
        ({"inner": {"needed": 1.0}}, "inner.needed: … 1.0"),
        ({"inner": {"needed": True}}, "inner.needed: … true"),
        (
            {"inner": {"needed": 1, "other": "tow"}},
            "inner.other: expected 'one' or 'two', found 'tow'; … 'two'?",
        ),
        ({"inner": {"needed": 1}, "several": [{"needed": None}]}, "1.needed: … null"),
        ({"inner": {"needed": 1}, "pair": [1]}, "pair: … 2 … [1]"),
        ({"inner": {"needed": 1}, "by_name": {"x": {"needed": "a"}}}, "by_name.x.needed: … 'a'"),
        ({"inner": {"needed": 1}, "either": [{"need": 1}]}, "'either entry 1.need'"),
        ({"inner": {"needed": 1}, "either": {"needed": []}}, "either.needed: expected a whole"),
        ([], "the file: … {inner, … either}, found []"),
        ({"inner": object()}, "the config holds"),
    ],
)
def test_what_is_missing_or_inside_of_lists_and_mappings(tree: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        read(Outer, tree)
    assert told(said).search(str(error.value))


def test_what_is_right_is_read_as_it_is_written_and_defaults_as_themselves() -> None:
    tree = {"inner": {"needed": 2}, "pair": [1, 0.25], "either": [{"needed": 3}]}
    found = read(Outer, tree)
    assert found == Outer(inner=Inner(needed=2), pair=(1.0, 0.25), either=[Inner(needed=3)])
    assert type(found.pair[0]) is float
    assert as_plain(found)["pair"] == [1.0, 0.25]
    for kind in parts_of(Config):
        given = {}
        for each in fields(kind):
            made = each.default if each.default_factory is MISSING else each.default_factory()
            if made is not MISSING:
                given[each.name] = as_plain(made)
        if kind is not Config and len(given) == len(fields(kind)):
            assert as_plain(read(kind, given)) == given


def test_every_field_of_the_trainer_and_of_a_section_is_documented() -> None:
    for kind in (Config, *(part_of(hint) for hint in hints_of(Config).values() if part_of(hint))):
        names = {each.name for each in fields(kind)}
        missing = names - docs_of(kind).keys()
        assert kind.__name__ == "ModelConfig" or not missing, (kind, missing)


def test_the_sections_of_model_and_trainer_have_the_arguments_of_their_classes() -> None:
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
    # Names, order and defaults; where it fails, Lightning has another flag.
    trainer: Any = pl.Trainer
    parameters = dict(inspect.signature(trainer).parameters)
    found = {field.name: field.default for field in fields(TrainerConfig)}
    wanted = {name: each.default for name, each in parameters.items()}
    assert list(found) == list(wanted)
    own = {
        "max_steps": 20000,
        "precision": "32-true",
        "log_every_n_steps": 50,
        "val_check_interval": 1000,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    assert {name: found[name] for name in wanted if found[name] != wanted[name]} == own
