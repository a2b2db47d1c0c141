"""One reader of YAML for every file: the core schema of YAML 1.2, each key once."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_app.commands.run import read_data
from lightning_app.config.grid import read_spec
from lightning_app.config.parents import _data_of
from lightning_app.config.sources import read_tree
from lightning_app.core.errors import UserError
from lightning_app.core.project import PROJECT, read_project
from lightning_app.core.strict_yaml import dump_yaml, load_yaml
from lightning_app.runs.records import Unsound, read_yaml

# YAML 1.2.2, section 10.3.2, and texts that YAML 1.1 reads as something else.
CORE = {
    **{"010": 10, "08": 8, "-011": -11, "+7": 7, "0o17": 15, "0x1F": 31, "0": 0},
    **{"1e-3": 1e-3, "1E5": 1e5, "1.": 1.0, "+.5": 0.5, "-.5e+3": -500.0, "08.5": 8.5},
    "1.0e5": 1e5,
    **{".inf": math.inf, "-.Inf": -math.inf, "~": None, "Null": None, "": None},
    **{"true": True, "TRUE": True, "False": False},
    **dict.fromkeys(("1:30", "10:00:00", "1_000", "0b11", "0x_1", "0o8", "-0x1", "1e", ".", "e3")),
    **dict.fromkeys(("yes", "No", "on", "OFF", "y", "tRue", "nULL", "2020-01-01", "=", "1.5.2")),
}


@pytest.mark.parametrize(("text", "value"), CORE.items())
def test_a_plain_value_is_what_the_core_schema_says(text: str, value: Any) -> None:
    wanted = text if value is None and text not in ("~", "Null", "") else value
    found = load_yaml(text)
    assert found == wanted
    assert type(found) is type(wanted)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63) + 1, 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.text()
        | st.sampled_from([*CORE, "null", "<<", "true"]),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_what_is_written_is_read_back_by_both_versions(tree: Any) -> None:
    text = dump_yaml(tree)
    for read in (load_yaml, yaml.safe_load):
        found = read(text)
        assert found == tree
        assert json.dumps(found) == json.dumps(tree)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        *(("a: 1\na: 1\n", "a"), ("a: {b: {c: 1, d: 2, c: 3}}", "c")),
        *(("- {x: 1}\n- {y: 1, y: 2}", "y"), ("{1: a, 0x1: b}", "0x1")),
        *(("{1: a, true: b}", "true"), ("'a': 1\na: 2", "a"), ("~: 1\nnull: 2", "null")),
        *(("x: &x {a: 1}\ny: {<<: *x, <<: *x}", "<<"), ('{"a": 1, "a": 2}', "a")),
    ],
)
def test_a_key_twice_is_refused_by_its_name(text: str, key: str) -> None:
    with pytest.raises(UserError, match=f"line.*key '{key}'"):
        load_yaml(text)


def test_own_keys_win_over_merged_ones_and_earlier_mappings_over_later() -> None:
    text = "a: {b: &b {<<: &c {xx: 1, y: 2}, xx: 3}}\nd: {<<: [*b, *c], y: 4}\ne: *b\n"
    a, d, f = {"b": {"xx": 3, "y": 2}}, {"xx": 3, "y": 4}, {"xx": 1, "y": 2}
    assert load_yaml(f"{text}f: &f {{<<: [*c, *b, *f]}}") == {"a": a, "d": d, "e": a["b"], "f": f}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "nested too deeply|nesting depth") for text in ("[" * 100_000, "- " * 200 + "x")),
        *(("a: *b", "undefined alias"), ("? [a]\n: b", "a key must"), ("!!set {a, b}", "tag")),
        *(("!!timestamp 2020-01-01", "tag"), ("!!python/object/apply:os.getcwd []", "tag")),
        *(("!!int 1_000", "1_000"), ("!!bool yes", "yes"), ("9" * 5000, "digits")),
        *(("99999999999999999999", "digits"), ("--- 1\n--- 2\n", "another document")),
        ("a: \x00", "not valid YAML"),
    ],
)
def test_a_text_without_plain_values_is_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        load_yaml(text)


@pytest.mark.parametrize("reader", ["fit", "prepare", "project", "grid", "base", "run", "parent"])
def test_every_reader_refuses_a_key_twice(reader: str, tmp_path: Path) -> None:
    twice = "name: a\nname: b\n"
    file = tmp_path / "x.yaml"
    file.write_text(twice)
    grid = tmp_path / "g.yaml"
    grid.write_text("name: g\nbase: x.yaml\naxes: {seed_everything: [1]}\n")
    (tmp_path / PROJECT).write_text("plugins: []\nplugins: []\n")
    calls = {
        "fit": lambda: read_tree(file),
        "prepare": lambda: read_data(file),
        "project": lambda: read_project(tmp_path),
        "grid": lambda: read_spec(file),
        "base": lambda: read_spec(grid),
        "run": lambda: read_yaml(file),
        "parent": lambda: _data_of(file),
    }
    with pytest.raises((UserError, Unsound), match=r"given twice|damaged"):
        calls[reader]()
