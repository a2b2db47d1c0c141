"""The classes that a grid file may name, and where they may write.

A grid file, and the config of a run, may come from somebody else. Nothing is imported and no file
is read because they name it: classes are looked up in the tables of `config.classes`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from lightning_app.config.classes import CLASS_FIELDS, FIELDS, known_path, refusal, require_plugin
from lightning_app.config.schema import read
from lightning_app.config.sources import merged, nested
from lightning_app.config.trainer import ClassSpec, TrainerConfig
from lightning_app.errors import UserError, nearest
from lightning_app.grid_axes import SECTIONS

_WORDS: Mapping[str, tuple[str, ...]] = {
    "accelerator": ("auto", "cpu", "cuda", "gpu", "mps", "tpu"),
    "profiler": ("advanced", "pytorch", "simple"),
    "strategy": (
        "auto",
        "ddp",
        "ddp_find_unused_parameters_false",
        "ddp_find_unused_parameters_true",
        "fsdp",
    ),
}
"""Fields of the Trainer that take a class or a word, and the words of a grid file."""

_TEXT = ("api_key", "artifact_location", "checkpoint_name", "comment", "dir", "dirpath")
_TEXT += ("experiment_name", "filename", "filename_suffix", "monitor", "name", "prefix", "project")
_TEXT += ("run_name", "save_dir", "sub_dir", "tracking_uri", "version", "workspace")
"""Arguments of classes that may be any text; others are one word, and no path."""

_FOLDERS = ("dir", "dirpath", "save_dir", "sub_dir")
"""Those of them that name a folder: in a cell it lies below the folder of the run."""

_ADDRESSES = ("artifact_location", "tracking_uri")
_ADDRESS = re.compile(r"(?!file:|sqlite:)[a-z][a-z0-9+.-]*://[^/]")
_WORD = re.compile(r"[\w:=-]*")


def check_grid(base: Mapping[str, Any], axes: Mapping[str, list[Any]]) -> None:
    """Refuse a grid with a class that is in no table, or that writes elsewhere than in the folder
    of its run: see `check_config`.

    Raises:
        UserError: naming the field and its value.
    """
    check_config(base)
    _check_places(base)
    for axis, values in axes.items():
        for value in values if axis.partition(".")[0] not in ("model", "data") else values[:1]:
            tree = merged(base, nested({axis: value}))
            check_config(tree)
            _check_places(tree)


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a config, as written or resolved, with an unknown section, or a class in no table.

    Raises:
        UserError: naming the field and its value.
    """
    for key, value in config.items():
        if key not in SECTIONS:
            hint = nearest(str(key), SECTIONS)
            raise UserError(f"unknown key '{key}'; a config has {', '.join(SECTIONS)}{hint}")
        if key != "seed_everything" and not isinstance(value, Mapping):
            raise UserError(f"{key}: expected a mapping, found {value!r}")
    tree = nested(config)
    trainer = read(TrainerConfig, tree.get("trainer", {}), at="trainer")
    for name in FIELDS:
        value = getattr(trainer, name)
        words = _WORDS.get(name, ())
        if isinstance(value, str) and value not in words:
            raise UserError(
                f"trainer.{name}: expected one of {', '.join(words)}, or a mapping "
                f"{{class_path, init_args}}, found {value!r}{nearest(value, words)}"
            )
        for spec in value if isinstance(value, list) else [value]:
            if isinstance(spec, ClassSpec):
                _check_class(f"trainer.{name}", spec)
    for name in ("model", "data"):
        section = tree.get(name, {})
        path = section.get("class_path")
        if isinstance(path, str):
            require_plugin(name, path)
        elif path is not None:
            raise UserError(f"{name}.class_path: expected a text or null, found {path!r}")
        _check_data(f"{name}.init_args", section.get("init_args"), text=False)


def _check_class(field: str, spec: ClassSpec) -> None:
    if known_path(spec.class_path) is None:
        raise UserError(f"{field}.class_path: {refusal(spec.class_path)}")
    if spec.dict_kwargs is not None:
        raise UserError(
            f"{field}: unknown key 'dict_kwargs'; expected {' and '.join(CLASS_FIELDS)}"
        )
    for name, value in (spec.init_args or {}).items():
        _check_data(f"{field}.init_args.{name}", value, text=name in _TEXT)


def _check_data(field: str, value: Any, *, text: bool) -> None:
    """Refuse an argument that names a class, or unless `text` is allowed a path or code."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key in CLASS_FIELDS:
                raise UserError(f"{field}: a grid file may not have the key '{key}' there")
            _check_data(f"{field}.{key}", part, text=text)
    elif isinstance(value, list):
        for part in value:
            _check_data(field, part, text=text)
    elif isinstance(value, str) and not text and not _WORD.fullmatch(value):
        raise UserError(f"{field}: a grid file may not name files or code there, found {value!r}")


def place_below(folder: Path, trainer: dict[str, Any]) -> None:
    """Let the classes of a complete section `trainer` write below `folder`, where they name one.

    Relative to the working folder they could replace the files of another run.
    """
    for field in FIELDS:
        for _, arguments in _arguments_of(field, trainer.get(field)):
            for key in _FOLDERS:
                if isinstance(arguments.get(key), str):
                    arguments[key] = str(folder / arguments[key])


def _check_places(config: Mapping[str, Any]) -> None:
    for field, arguments in _arguments_of("trainer", nested(config).get("trainer")):
        for name, value in arguments.items():
            _check_place(f"{field}.{name}", name, value)


def _arguments_of(field: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arguments of each class in the value of a field."""
    if isinstance(value, list):
        for part in value:
            yield from _arguments_of(field, part)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key == "init_args" and isinstance(part, dict):
                yield f"{field}.{key}", part
            else:
                yield from _arguments_of(f"{field}.{key}", part)


def _check_place(field: str, name: str, value: Any) -> None:
    """Refuse an argument by which a class would write outside of the folder of its run."""
    if not isinstance(value, str) or not value:
        return
    if name in _ADDRESSES:
        if _ADDRESS.match(value):
            return
        wanted = "an address such as https://..."
    else:
        path = PurePath(value)
        if name not in _TEXT or not (path.is_absolute() or {"..", "~"} & {*path.parts}):
            return
        wanted = "a name or a path below the folder of the run"
    raise UserError(f"{field}: expected {wanted} in a grid file, found {value!r}")
