"""Which results were made alike, in plain numbers."""

from typing import Any

import pytest

from lightning_app.runs.mixtures import (
    SAME_CODE,
    UNKNOWN,
    groups,
    made_by,
    mixed,
    others,
    statements,
    strangers,
    unsealed,
)
from tests.told import told

PROVENANCE = {
    "code": "aaaa",
    "plugins": {},
    "libraries": {"python": "3.12.1", "torch": "2.13.0", "optuna": "5.0.0"},
    "data": "d1",
    "cpu": "EPYC",
    "gpus": [],
    "matmul": "oneDNN (AVX512)",
    "threads": 1,
    "resumed_from": [],
}
OLD: dict[str, Any] = {"device": "cpu (x86_64, 1 threads)", "data": {"checksum": "c1"}}


def record(checksum: str = "c1", digest: str | None = "d1", **changes: Any) -> dict[str, Any]:
    data = {"checksum": checksum} | ({} if digest is None else {"digest": digest})
    made = {**PROVENANCE, "data": digest or checksum, **changes}
    return {"provenance": made, "data": data, "precision": "32-true", "finished": "2026-01-01"}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("code", {"code": "bbbb"}),
        ("code", {"classes": {"mine.Callback": "cccc"}}),
        ("libraries", {"libraries": {"python": "3.12.1", "torch": "2.14.0"}}),
        ("device", {"cpu": "Xeon"}),
        ("device", {"matmul": "MKL (AVX2)"}),
        ("device", {"gpus": ["H200"], "matmul": "cuBLAS (float32 highest)"}),
        ("threads", {"threads": 2}),
        ("arithmetic", {"arithmetic": {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}}),
        ("arithmetic", {"arithmetic": {"float32_matmul_precision": "medium"}}),
        ("arithmetic", {"arithmetic": {"MKL_CBWR": "COMPATIBLE"}}),
    ],
)
def test_what_differs_is_said(kind: str, changes: dict[str, Any]) -> None:
    records = {"one": record(), "two": record(**changes), "three": record()}
    assert set(mixed(records)) == {kind}
    assert list(mixed(records)[kind].values()) == [["one", "three"], ["two"]]
    said = "The 3 … (torch 2.13.0: 2; torch 2.14.0: 1)" if kind == "libraries" else "The 3 … 2 "
    assert told(said).search(statements(records)[kind])


def trained_by(library: str) -> dict[str, Any]:
    return {**record(), "trained_by": [{"role": "gains", "library": library}, {"role": "output"}]}


def test_versions_of_an_optimizers_package_are_versions_of_the_code() -> None:
    """Not that some runs have an optimizer of a package and others do not."""
    records = {"one": trained_by("schedulefree 1.4.1"), "two": trained_by("schedulefree 1.4")}
    versions = {"aaaa+schedulefree 1.4.1": ["one"], "aaaa+schedulefree 1.4": ["two"]}
    assert mixed(records)["code"] == versions
    records["two"] = trained_by("pytorch-optimizer 4.1.0")
    assert not mixed({**records, "three": record()})
    assert not mixed({"one": trained_by("torch 2.13.0"), "two": trained_by("torch 2.13.1")})


def test_what_moves_no_number_is_no_difference() -> None:
    libraries = {**PROVENANCE["libraries"], "optuna": "6.0.0"}
    other = record(libraries=libraries, commit="f00", command=["ablate"], dirty=True)
    assert mixed({"one": record(), "two": other}) == {}
    assert statements({"one": record(), "two": other}) == {}
    new = record(arithmetic={}, devices=1) | {"devices": 1}  # defaults, recorded or not
    assert mixed({"old": record() | {"devices": 1}, "new": new}) == {}
    for former, present in SAME_CODE.items():  # of another form, which computes the same
        runs = {"one": record(code=former), "two": record(code=present)}
        assert mixed(runs) == {}
        assert others(runs, {"provenance": PROVENANCE | {"code": present}, "corpora": None}) == {}
        resumed = record(code=present, resumed_from=[PROVENANCE | {"code": former}])
        assert made_by(resumed)["code"] == present
        assert set(mixed(runs | {"three": record(code="bbbb")})) == {"code"}


def test_numbers_of_devices_and_precisions_differ() -> None:
    """Each number draws its own dropout masks; also where one attempt had others."""
    found = mixed({"one": record(), "two": record() | {"precision": "bf16-mixed"}})
    assert found == {"precision": {"32-true": ["one"], "bf16-mixed": ["two"]}}
    one, two = record() | {"devices": 1}, record() | {"devices": 2}
    assert mixed({"one": one, "two": two}) == {"devices": {"1": ["one"], "2": ["two"]}}
    later = record(devices=1, resumed_from=[{**PROVENANCE, "devices": 2}]) | {"devices": 1}
    assert mixed({"one": one, "later": later})["devices"] == {"1": ["one"], "2 then 1": ["later"]}


def test_a_run_by_two_versions_is_of_neither_and_old_ones_have_no_code_and_no_seal() -> None:
    half = record(code="bbbb", resumed_from=[{**PROVENANCE}])
    found = groups({"one": record(), "two": half})
    assert list(found["code"]) == ["aaaa", "aaaa then bbbb"]
    assert len(found["libraries"]) == len(found["device"]) == 1
    unknown = record(resumed_from=[dict.fromkeys(PROVENANCE)])
    assert list(groups({"one": unknown})["code"]) == [f"{UNKNOWN} then aaaa"]
    assert set(mixed({"one": OLD, "two": OLD})) == set()
    assert "The version of" in statements({"one": OLD, "two": OLD})["code"]
    assert set(mixed({"one": OLD, "two": record()})) == {"code", "device"}
    assert "1 or more" in statements({"one": OLD, "two": record()})["code"]
    assert unsealed({"one": {"seal": {}}, "none": {}}) == ""
    assert "b, c" in unsealed({"a": {"seal": {}}, "b": {"id": 1}, "c": {"id": 2}})


AXES = {name: {"seed_everything": 1} for name in ("one", "two", "three", "four")}


def test_other_data_than_most_or_than_an_axis_plans_is_a_stranger() -> None:
    records = {"one": record(), "two": record("c2", "d2"), "three": record()}
    assert strangers(records, AXES) == {"d2": ["two"]}
    assert strangers({"one": record(), "three": record()}, AXES) == {}
    del records["three"]
    records["two"]["finished"] = "2026-01-02"  # the latest decides between equals
    assert strangers(records, AXES) == {"d1": ["one"]}
    records = {"one": record(), "two": record("c2", "d2")}
    assert strangers(records, {"one": {"data.window": 16}, "two": {"data.window": 32}}) == {}
    both = record(resumed_from=[{**PROVENANCE, "data": "d0"}])
    assert strangers({"one": both, "two": both}, AXES) == {"d0 then d1": ["one", "two"]}


def test_others_than_here_and_now() -> None:
    here = {"provenance": PROVENANCE, "corpora": [{"digest": "d1"}]}
    records = {
        "same": record(),
        "code": record(code="bbbb"),
        "data": record("c2", "d2"),
        "device": record(cpu="Xeon"),
        "old": OLD,
        "package": record() | {"trained_by": [{"library": "pytest 1.0"}, {"rule": "adamw"}]},
        "none": record() | {"trained_by": [{"library": "no-such-package 1.0"}]},
        "torch": record() | {"trained_by": [{"library": "torch 1.0"}]},
    }
    usual = made_by(record())["libraries"]
    packages = {"package": "pytest", "none": "no-such-package"}
    assert others(records, here) == {
        "libraries": {f"{usual}, {name} 1.0": [key] for key, name in packages.items()},
        "code": {"bbbb": ["code"]},
        "data": {"d2": ["data"], UNKNOWN: ["old"]},
        "device": {"Xeon, oneDNN (AVX512)": ["device"]},
        "unrecorded": {UNKNOWN: ["old"]},
    }
    assert "data" not in others(records, {**here, "corpora": None})
