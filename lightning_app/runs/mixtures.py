"""Which results share code, data, libraries and devices.

This module is fast to import. It reads `result.json` and `pruned.json`, mostly `provenance`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_app.runs.records import is_sealed

Record = Mapping[str, Any]
Groups = dict[str, list[str]]  # names of runs by their provenance

UNKNOWN = "not recorded"
DEFAULTS = "defaults"

KINDS = {
    "code": "versions of the code",
    "libraries": "sets of library versions",
    "device": "kinds of device",
    "threads": "numbers of threads",
    "precision": "precisions",
    "plugins": "sets of plug-ins that were loaded without being used",
    "arithmetic": "settings of arithmetic",
    "devices": "numbers of devices",
}
"""The kinds of differences between results besides the data, in plural words."""

STALE = ("data", "libraries", "unrecorded")
"""The kinds in `others` that `--rerun-stale` repeats; other code, which may give the same numbers,
or another device is no reason."""

_PRESENT = "5aecf219bd6e04ed"
_FORMER = ("33721b7fbe889387", "dc4f94306fbdd733", "8f37dfc827d452c9", "7719a4a49b4f8cee")
_FORMER += ("18a07f3796e88749", "0c20664317c5764a", "ce1531634f2606d5", "9183bcae47c6c9d4")
_FORMER += ("49a07a38c11b79f4", "0cecc023533d0e8e", "02d552e578cf8014", "3238696f42e11693")
_FORMER += ("fc3c829897399ea1", "e97a10d3fbfab9b6", "e3addfd17e2bfbb5", "b9dcdcb267c259ef")
_FORMER += ("d878b536f3f08f87", "bff809bff7dbb107", "6ea9816bb18eb6f4")
SAME_CODE: Mapping[str, str] = dict.fromkeys(_FORMER, _PRESENT)
"""Digests of differently written code that computes the same numbers, each with the last of them.
On one host with torch 2.13.0, the first two and the fourth give equal bits in the 40 cells of
`demo` and in the losses of ten steps of every preset in each of the five tasks (`tests/golden`). In
these losses the later ones give equal bits too, on a CPU; tiles and forms of
attention on a GPU have changed since the fifth. The third differs from the second only in how the
probe for a writable folder is removed. Code after the last one is not listed. Its losses are equal
except those of `hyper_connections`, whose scalars no longer decay; it also trains otherwise with
several states or an average over depth under bf16-mixed, and with gates beside `unit_matrices` or
`sigma_reparam`."""

SHOWN = 3  # names of runs in a line

_NO_NUMBERS = ("datasets", "optuna")  # data has its own digest; the queue changes no number


def made_by(record: Record) -> dict[str, str]:
    """The provenance of a result by kind; for a resumed run, of all attempts in order."""
    made = record.get("provenance") or {}
    parts = [*(made.get("resumed_from") or ()), made]
    device = _in_turn(map(_device, parts))
    devices = [str(each["devices"]) for each in parts if each.get("devices")]
    threads = [str(each["threads"]) for each in parts if each.get("threads")]
    return {
        "code": _in_turn(map(_code, parts)),
        "libraries": _in_turn(map(_libraries, parts)),
        "device": str(record.get("device") or UNKNOWN) if device == UNKNOWN else device,
        "threads": UNKNOWN if made.get("gpus") else _in_turn(threads) or UNKNOWN,
        "precision": str(record.get("precision") or UNKNOWN),
        "arithmetic": _in_turn(map(_arithmetic, parts)),
        # Each device draws its own dropout masks.
        "devices": _in_turn(devices) or str(record.get("devices") or UNKNOWN),
    }


def groups(records: Mapping[str, Record]) -> dict[str, Groups]:
    """The names of the runs by kind and provenance.

    Plug-ins used by runs, and packages of their optimizers, count as code if there are several
    versions of them; one that only some runs use is an intended difference.
    """
    found: dict[str, Groups] = {kind: {} for kind in KINDS}
    versions: dict[str, set[str]] = {}
    for record in records.values():
        for name, version in _versions(record).items():
            versions.setdefault(name, set()).add(version)
    for name, record in records.items():
        made = made_by(record)
        used = [f"{n} {v[:16]}" for n, v in _versions(record).items() if len(versions[n]) > 1]
        made["code"] = "+".join([made["code"], *used])
        for kind, value in made.items():
            found[kind].setdefault(value, []).append(name)
    found["plugins"] = _idle(records)
    return found


def _idle(records: Mapping[str, Record]) -> Groups:
    """The names of the runs by versions of plug-ins that they loaded but did not use.

    Only plug-ins count that non-users loaded in several versions, or that only some loaded.
    """
    loaded = {name: _loaded(record) for name, record in records.items()}
    states: dict[str, set[str]] = {}
    for plugin in {each for of in loaded.values() for each in of or ()}:
        idle = [n for n, of in loaded.items() if of is not None and plugin not in _used(records[n])]
        states[plugin] = {(loaded[n] or {}).get(plugin, "none") for n in idle}
    several = sorted(plugin for plugin, of in states.items() if len(of) > 1)
    found: Groups = {}
    for name, of in loaded.items():
        shown = [
            f"{plugin} {of.get(plugin, 'none')[:16]}"
            for plugin in several
            if of is not None and plugin not in _used(records[name])
        ]
        found.setdefault(UNKNOWN if of is None else ", ".join(shown) or "all used", []).append(name)
    return found


def _loaded(record: Record) -> Mapping[str, str] | None:
    made = record.get("provenance") or {}
    return made.get("plugins") if "plugins_used" in made else None


def _used(record: Record) -> Mapping[str, str]:
    return (record.get("provenance") or {}).get("plugins_used") or {}


def _versions(record: Record) -> Mapping[str, str]:
    """The versions of the plug-ins that a run uses and of the package of its optimizer, by name.

    Of torch, each run records its version anyway.
    """
    return {**_used(record), **_packages(record)}


def _packages(record: Record) -> Mapping[str, str]:
    rows = record.get("trained_by") or ()
    packages = dict(row["library"].split() for row in rows if "library" in row)
    return {name: of for name, of in packages.items() if name != "torch"}


def mixed(records: Mapping[str, Record]) -> dict[str, Groups]:
    """The groups of each kind in which the runs differ.

    If only some runs record a value, they differ in code: the others are from an older version.
    """
    return {
        kind: of
        for kind, of in groups(records).items()
        if len(of) > 1 and (kind == "code" or len(of.keys() - {UNKNOWN}) > 1)
    }


def strangers(records: Mapping[str, Record], axes: Mapping[str, Mapping[str, Any]]) -> Groups:
    """The runs trained on other data than most runs planned on the same data, by digest.

    `axes` holds the axes of each run: data that differ along an axis are intended. Between
    groups of equal size the most recent wins. A run that does not record its data is not listed.
    """
    states = {name: _data(record) for name, record in records.items()}
    planned: dict[str, Groups] = {}
    for name, state in states.items():
        if state != UNKNOWN:
            data = {key: axes[name][key] for key in axes[name] if _names_data(key)}
            key = json.dumps(data, sort_keys=True, default=str)
            planned.setdefault(key, {}).setdefault(state, []).append(name)

    def weight(names: list[str]) -> tuple[int, str]:
        return len(names), max(str(records[name].get("finished")) for name in names)

    found: Groups = {}
    for by_state in planned.values():
        usual = max(by_state, key=lambda state: weight(by_state[state]))
        for state, names in by_state.items():
            if state != usual or " then " in state:
                found.setdefault(state, []).extend(names)
    return found


def others(records: Mapping[str, Record], here: Record) -> dict[str, Groups]:
    """The runs whose `code`, `data`, `libraries` or kind of `device` differ from `here`, by kind.

    `unrecorded` are runs without a recorded provenance. The package of an optimizer is compared
    with the one installed.

    `here` holds `provenance` as a run would record it now, and under `corpora` the description of
    the data of each corpus in the plan, or None if unknown.
    """
    now = made_by(here)
    corpora = here.get("corpora")
    known = {(corpus or {}).get("digest") for corpus in corpora or ()}
    found: dict[str, Groups] = {}
    for name, record in records.items():
        made = made_by(record)
        values = {kind: made[kind] for kind in ("code", "libraries", "device")}
        differ = {kind: value for kind, value in values.items() if value != now[kind]}
        if old := [f"{n} {v}" for n, v in _packages(record).items() if _installed(n) != v]:
            differ["libraries"] = ", ".join([values["libraries"], *old])
        if not record.get("provenance"):
            differ = {"unrecorded": UNKNOWN}
        if corpora is not None and (data := _data(record)) not in known:
            differ["data"] = data
        for kind, value in differ.items():
            found.setdefault(kind, {}).setdefault(value, []).append(name)
    return found


def _installed(package: str) -> str:
    from importlib import metadata  # a fifth of the time that this module takes to import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def statements(records: Mapping[str, Record]) -> dict[str, str]:
    """One sentence per kind in which the runs differ, and one if no run records its code."""
    found = {
        kind: f"The {len(records)} finished cells are of {_several(of)} {KINDS[kind]} "
        f"({counted(of)}): differences between cells may come from that."
        for kind, of in mixed(records).items()
    }
    if records and list(groups(records)["code"]) == [UNKNOWN]:
        found["code"] = (
            f"The version of the code is not recorded in any of the {len(records)} finished "
            "cells, so it is unknown whether all are of the same version."
        )
    return found


def left_out(of: Mapping[str, Sequence[str]]) -> str:
    """The sentence about runs on other data; empty if there are no such runs."""
    if not of:
        return ""
    total = sum(map(len, of.values()))
    cells, them = (
        ("1 finished cell was", "it") if total == 1 else (f"{total} finished cells were", "them")
    )
    return (
        f"{cells} trained on other data than the rest ({counted(of)}; such as {some(of)}) and "
        f"left out of every score, table and figure; --rerun-stale repeats {them}."
    )


def unsealed(records: Mapping[str, Record]) -> str:
    """The sentence about results without a seal; empty if all have one."""
    names = [name for name, record in records.items() if record and not is_sealed(record)]
    if not names:
        return ""
    results = "1 result has" if len(names) == 1 else f"{len(names)} results have"
    return (
        f"{results} no seal, from the time before results were sealed ({some({'': names})}): no "
        "later change of the files would be found."
    )


def counted(of: Mapping[str, Sequence[str]]) -> str:
    """The number of runs in each group, in one line, without the parts common to all."""
    parts = [set(label.split(", ")) for label in of if label != UNKNOWN and " then " not in label]
    common = set.intersection(*parts) if len(parts) > 1 else set()
    shown = []
    for label, names in of.items():
        kept = [part for part in label.split(", ") if part not in common]
        shown.append(f"{', '.join(kept)}: {len(names)}")
    return "; ".join(shown)


def some(of: Mapping[str, Sequence[str]]) -> str:
    """A few names."""
    names = [name for each in of.values() for name in each]
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _several(of: Groups) -> str:
    known = len(of.keys() - {UNKNOWN})
    return f"{known} or more" if UNKNOWN in of else str(known)


def _in_turn(values: Iterable[str]) -> str:
    return " then ".join(dict.fromkeys(values))


def _code(made: Record) -> str:
    if not made.get("code"):
        return UNKNOWN
    # Plug-ins do not count here: those used by a run are part of its identity.
    code = SAME_CODE.get(made["code"], made["code"])
    return "+".join([code, *map(str, (made.get("classes") or {}).values())])


def _libraries(made: Record) -> str:
    found = made.get("libraries") or {}
    names = (name for name in sorted(found) if name not in _NO_NUMBERS)
    return ", ".join(f"{name} {found[name]}" for name in names) or UNKNOWN


def _device(made: Record) -> str:
    names = dict.fromkeys(made.get("gpus") or [made.get("cpu")])
    known = [str(each) for each in (*names, made.get("matmul")) if each]
    return ", ".join(known) if len(known) == len(names) + 1 else UNKNOWN


def _arithmetic(made: Record) -> str:
    found = (made.get("arithmetic") or {}).items()
    return ", ".join(f"{key} {value}" for key, value in found) or DEFAULTS


def _names_data(axis: str) -> bool:
    return axis.startswith("data.") or axis == "model.objective.kind"  # it sets the task


def _data(record: Record) -> str:
    """The digest of the data of a record; all in order if the run continued with other data."""
    description, made = record.get("data") or {}, record.get("provenance") or {}
    earlier = [each.get("data") for each in made.get("resumed_from") or ()]
    turns = dict.fromkeys(each for each in (*earlier, made.get("data")) if each)
    if len(turns) > 1:
        return _in_turn(turns)
    return description.get("digest") or next(iter(turns), UNKNOWN)
