"""Plain configs are completed as LightningCLI's parser completes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_app.config.experiment import identity_of
from lightning_app.config.grid import read_spec
from lightning_app.config.identity import leaves
from lightning_app.core.errors import UserError
from lightning_app.grids.cells import cell_tree, combinations
from lightning_app.grids.plan import expand
from lightning_app.training import parser
from lightning_app.training.config import complete_plain, parse, resolve

BASES = sorted(Path("ablations/base").glob("*.yaml"))
GRIDS = sorted(Path("ablations").glob("*.yaml"))


def text(config: dict[str, Any]) -> str:
    """Tells 1 from 1.0 and true, which are equal."""
    return json.dumps(config, sort_keys=True)


def check_same(tree: dict[str, Any]) -> None:
    found = complete_plain(tree)
    assert found is not None
    assert text(found) == text(parser.parse_config(tree))


@pytest.mark.parametrize("path", BASES, ids=lambda path: path.stem)
def test_every_shipped_config(path: Path) -> None:
    check_same(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_value_of_a_shipped_grid(path: Path) -> None:
    grid = read_spec(path)
    seen: set[tuple[str, str]] = set()
    for axes in combinations(grid):
        values = {(axis, json.dumps(value)) for axis, value in axes.items()}
        if not values <= seen:
            seen |= values
            check_same(cell_tree(grid.base_config, axes))


def test_nothing_said() -> None:
    check_same({})
    check_same({"trainer": {}, "model": {"block": {}}, "data": {"splits": {}}})


NUMBERS = st.one_of(
    st.integers(-5, 10**18),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0, 1, 1.0, -0.0, 1e-9, 1e16, 2**53, 2**70]),
)
WORDS = st.one_of(
    st.sampled_from(
        [
            *("null", "Null", "true", "on", "nan", ".inf", "1e3", "0x10", "1_000", "2020-01-01"),
            *("a", "a/b", "../a.b", "~/a", "", " a", "a: b", "[a]", "{a}", "#", "a #b", "!x"),
            *("cpu", "auto", "ddp", "32-true", "bf16-mixed", "norm", "translation", "word", "de"),
            *("relu", "layer_norm", "post_ln", "none", "blocks", "sum", "post"),
        ]
    ),
    st.text("abc01.-/_ :~", max_size=6),
)
ANY = st.one_of(NUMBERS, WORDS, st.booleans(), st.none(), st.just({}), st.just([0.5, 1]))
KEYS = st.sampled_from(
    [
        *(name for name, _ in leaves(complete_plain({}) or {})),
        *("model.block.shaped_attention.alpha", "model.block.shaped_attention.learned"),
        *("model.block.value_gains.kept.value", "model.block.value_gains.change.learned"),
        *("model.block.attention_skip.value", "model.optimizer", "data.splits"),
    ]
)


def likely(default: Any) -> st.SearchStrategy[Any]:
    """Values of the kind of a default."""
    if isinstance(default, bool) or default is None:
        return ANY
    if isinstance(default, int):
        return st.integers(-5, 10**18)
    return NUMBERS if isinstance(default, float) else st.one_of(st.just(default), WORDS)


DEFAULTS = dict(leaves(complete_plain({}) or {}))
LEAVES = KEYS.flatmap(
    lambda key: st.tuples(st.just(key), st.one_of(ANY, likely(DEFAULTS.get(key))))
)


@settings(max_examples=150, deadline=None)
@example({"trainer.limit_train_batches": 2**53 + 1})
@given(st.lists(LEAVES, min_size=1, max_size=2).map(dict))
def test_whatever_is_completed_here_the_parser_completes_alike(values: dict[str, Any]) -> None:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        try:
            tree = cell_tree(tree, {key: value})
        except AttributeError:  # inside of another value
            return
    try:
        found = complete_plain(tree)
    except UserError:  # the parser's own, of the section `trainer`
        found = None
    if found is not None:
        assert text(found) == text(parser.parse_config(tree))


@pytest.mark.parametrize(
    "tree",
    [
        {"seed_everything": True},
        {"model.block.preset": "sas"},
        {"model": {"optimizer": {"lr": "1e-3"}}},
        {"model": {"optimizer": {"lr": True}}},
        {"model": {"schedule": {"warmup_steps": True}}},
        {"model": {"block": {"norm": "null"}}},
        {"model": "file.yaml"},
        {"data": {"root": "null"}},
        {"data": None},
    ],
)
def test_what_only_the_parser_knows_is_left_to_it(tree: dict[str, Any]) -> None:
    assert complete_plain(tree) is None


def test_a_word_that_names_a_file_is_left_to_the_parser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[Any] = []
    monkeypatch.setattr(parser, "parse_config", lambda tree: asked.append(tree) or {"trainer": {}})
    section = {"strategy": "ddp_find_unused_parameters_true", "max_epochs": 17}
    assert complete_plain({"trainer": section}) is not None
    assert asked == []
    (tmp_path / section["strategy"]).write_text("class_path: evil.Strategy\n")
    complete_plain({"trainer": section})
    assert asked == [{"trainer": section}]


def test_what_is_completed_is_the_callers_own() -> None:
    first = complete_plain({})
    assert first is not None
    first["model"]["block"]["preset"] = "sas"
    first["trainer"]["max_steps"] = 1
    second = complete_plain({})
    assert second is not None
    assert second["model"]["block"]["preset"] == "pre_ln"
    assert second["trainer"]["max_steps"] == 20000


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_values_of_an_axis_ask_the_parser_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Once for the callbacks of the base, and not at all for the values."""
    tree = yaml.safe_load((BASES[-1].parent / "synthetic.yaml").read_text())
    monitor = {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}
    tree["trainer"]["callbacks"] = [monitor]
    rates = [1, *(1e-5 * n for n in range(1, count))]
    path = tmp_path / "many.yaml"
    many = {"name": "many", "base_config": tree, "axes": {"model.optimizer.lr": rates}}
    path.write_text(yaml.safe_dump(many))
    grid, asked, plain = read_spec(path), [], parser.parse_config

    def counted(tree: dict[str, Any]) -> dict[str, Any]:
        asked.append(tree)
        return plain(tree)

    monkeypatch.setattr(parser, "parse_config", counted)
    plan, configs = expand(grid, resolve, identity_of)
    assert len(asked) <= 1
    assert len(plan.cells) == count
    for number in (0, 1, count // 2, count - 1):
        full = parse(cell_tree(grid.base_config, plan.cells[number].axes), "")
        assert text(configs[number]) == text(full)
        assert identity_of(full).id == plan.cells[number].id
    assert configs[0]["model"]["optimizer"]["lr"] == 1.0
    assert type(configs[0]["model"]["optimizer"]["lr"]) is float
