"""The classes that a grid may name, and a guard against other imports.

Refuse imports of unknown modules while a config is parsed.

Refuse grid files that import classes other than those listed here, or read other files.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from lightning_app.config.names import SECTIONS
from lightning_app.core.errors import UserError, nearest
from lightning_app.plugins import CALLBACKS
from lightning_app.plugins.own_class import CLASS_FIELDS, require_plugin

# Packages with which jsonargparse reads signatures of classes.
_HELPERS = ("docstring_parser", "typeshed_client")


class _Refuse(MetaPathFinder):
    def __init__(self) -> None:
        loaded = {name.partition(".")[0] for name in sys.modules}
        self._known = loaded | sys.stdlib_module_names | {*_HELPERS}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._known:
            raise ImportError(f"a grid may not import the module '{fullname}'")
        return None  # the other finders look for it


_ASKED: ContextVar[bool] = ContextVar("only_known_packages", default=False)


@contextmanager
def only_known_packages() -> Iterator[None]:
    """Let configs that are parsed in this context import only known packages.

    If the working folder has a file named like a text such as `ddp`, the parser reads it as a
    config, and imports the classes that the file names.
    """
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)


@contextmanager
def no_foreign_imports() -> Iterator[None]:
    """Inside `only_known_packages`, refuse packages neither loaded nor of Python's library."""
    if not _ASKED.get():
        yield
        return
    guard = _Refuse()
    sys.meta_path.insert(0, guard)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)


CLASSES = (
    "lightning_app.training.callbacks.probes.SignalProbe",
    "lightning.pytorch.callbacks.DeviceStatsMonitor",
    "lightning.pytorch.callbacks.EMAWeightAveraging",
    "lightning.pytorch.callbacks.EarlyStopping",
    "lightning.pytorch.callbacks.GradientAccumulationScheduler",
    "lightning.pytorch.callbacks.LearningRateMonitor",
    "lightning.pytorch.callbacks.ModelCheckpoint",
    "lightning.pytorch.callbacks.ModelSummary",
    "lightning.pytorch.callbacks.OnExceptionCheckpoint",
    "lightning.pytorch.callbacks.SpikeDetection",
    "lightning.pytorch.callbacks.StochasticWeightAveraging",
    "lightning.pytorch.callbacks.Timer",
    "lightning.pytorch.callbacks.WeightAveraging",
    "lightning.pytorch.loggers.CSVLogger",
    "lightning.pytorch.loggers.CometLogger",
    "lightning.pytorch.loggers.MLFlowLogger",
    "lightning.pytorch.loggers.TensorBoardLogger",
    "lightning.pytorch.loggers.WandbLogger",
    "lightning.pytorch.plugins.DoublePrecision",
    "lightning.pytorch.plugins.HalfPrecision",
    "lightning.pytorch.plugins.MixedPrecision",
    "lightning.pytorch.plugins.TorchSyncBatchNorm",
    "lightning.pytorch.profilers.AdvancedProfiler",
    "lightning.pytorch.profilers.PassThroughProfiler",
    "lightning.pytorch.profilers.PyTorchProfiler",
    "lightning.pytorch.profilers.SimpleProfiler",
    "lightning.pytorch.strategies.DDPStrategy",
    "lightning.pytorch.strategies.FSDPStrategy",
    "lightning.pytorch.strategies.SingleDeviceStrategy",
)
"""The classes that a grid file may name. No argument of theirs names code or a file."""

_WORDS = {  # fields of the Trainer that take classes, and the words that are allowed there
    "callbacks": (),
    "logger": (),
    "plugins": (),
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
# Arguments of these classes that may be any text; all other arguments may be one word at most.
_TEXT = ("api_key", "artifact_location", "checkpoint_name", "comment", "dir", "dirpath")
_TEXT += ("experiment_name", "filename", "filename_suffix", "monitor", "name", "prefix", "project")
_TEXT += ("run_name", "save_dir", "sub_dir", "tracking_uri", "version", "workspace")

_FOLDERS = ("dir", "dirpath", "save_dir", "sub_dir")
"""Those of them that name a folder: in a cell it lies below the folder of the run."""

_ADDRESSES = ("artifact_location", "tracking_uri")
_ADDRESS = re.compile(r"(?!file:|sqlite:)[a-z][a-z0-9+.-]*://[^/]")

_PARTS = ("block", "architecture", "objective", "optimizer", "schedule", "splits")
_KEY = re.compile(r"[A-Za-z]\w*|[0-9]+")
_WORD = re.compile(r"[\w:=-]*")
_CLASS_KEYS = ("class_path", "init_args")


def check_imports(base_config: Mapping[str, Any], axes: Mapping[str, Any]) -> None:
    """Refuse a config that would import a module or read a file, or write one elsewhere than in the
    folder of its run: see `check_config`.

    Raises:
        UserError: naming the field and its value.
    """
    trees = [base_config, *(_nested(axis, value) for axis in axes for value in axes[axis])]
    for tree in trees:
        check_config(tree)
        for field, arguments in _arguments_of("trainer", tree.get("trainer")):
            for name, value in arguments.items():
                _check_place(f"{field}.{name}", name, value)


def place_below(folder: Path, trainer: Any) -> None:
    """Let the parsed classes of a trainer's section write below `folder`, where they name a folder.

    Relative to the working folder they could replace the files of another run.
    """
    for name in _WORDS:
        parts = trainer.get(name)
        for part in parts if isinstance(parts, list) else [parts]:
            arguments = getattr(part, "init_args", None) or {}
            for key in _FOLDERS:
                if isinstance(arguments.get(key), str | Path):
                    arguments[key] = str(folder / arguments[key])


def _arguments_of(field: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The arguments of each class in the value of a field."""
    if isinstance(value, list):
        for part in value:
            yield from _arguments_of(field, part)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key == "init_args" and isinstance(part, Mapping):
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


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a config, as written or resolved, that names other code than `CLASSES`, or a file.

    The Trainer takes classes and functions by their names; the parser takes any section and any
    class from a file whose path is given instead.

    Raises:
        UserError: naming the field and its value.
    """
    for key, value in config.items():
        if key not in SECTIONS:
            hint = nearest(str(key), SECTIONS)
            raise UserError(f"unknown key '{key}'; a config has {', '.join(SECTIONS)}{hint}")
        if key == "seed_everything":
            continue
        if not isinstance(value, Mapping):
            raise UserError(f"{key}: expected a mapping, found {value!r}")
        for name, part in value.items():
            field = f"{key}.{name}"
            if name not in CLASS_FIELDS or key == "trainer":
                _check_key(key, name)
            if key == "trainer" and name in _WORDS:
                _check_classes(field, part, _WORDS[name])
            elif key != "trainer" and name in CLASS_FIELDS:
                _check_own_class(key, name, part)
            elif name in _PARTS and not isinstance(part, Mapping):
                raise UserError(f"{field}: expected a mapping, found {part!r}")
            else:
                # A parent's checkpoint is data: it is read without running code of it.
                _check_values(field, part, text=field == "model.init_from" or key != "model")


def _check_classes(field: str, value: Any, words: tuple[str, ...]) -> None:
    """Check a field that takes classes: a mapping with a known class, a list of them, a word."""
    if isinstance(value, list):
        for part in value:
            _check_classes(field, part, words)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key == "class_path":
                _check_class(f"{field}.class_path", part)
            elif key == "init_args":
                _check_arguments(f"{field}.init_args", part)
            else:
                raise UserError(
                    f"{field}: unknown key '{key}'; expected {' and '.join(_CLASS_KEYS)}"
                )
    elif isinstance(value, str) and value not in words:
        known = f"one of {', '.join(words)}, or " if words else ""
        raise UserError(
            f"{field}: expected {known}a mapping {{class_path, init_args}}, found "
            f"{value!r}{nearest(value, words)}"
        )


def callback_paths() -> list[str]:
    """Return the import paths of the callbacks that plug-ins have registered."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in CALLBACKS.values()]


def _check_class(field: str, name: Any) -> None:
    short = [known.rpartition(".")[2] for known in CLASSES]
    if name in CLASSES or name in short or name in callback_paths():
        return
    last = str(name).rpartition(".")[2]
    hint = f"; did you mean '{CLASSES[short.index(last)]}'?" if last in short else ""
    raise UserError(
        f"{field}: a grid file may only import listed classes of lightning.pytorch, SignalProbe "
        f"and the callbacks that a plug-in registers (--plugin FILE), found {name!r}{hint}"
    )


def _check_own_class(section: str, name: str, value: Any) -> None:
    """Check the class of a section: one of a loaded plug-in, and arguments that are data."""
    if value is None:
        return
    if name == "init_args":
        _check_arguments(f"{section}.init_args", value)
    elif not isinstance(value, str):
        raise UserError(f"{section}.class_path: expected a text or null, found {value!r}")
    else:
        require_plugin(section, value)


def _check_arguments(field: str, arguments: Any) -> None:
    if not isinstance(arguments, Mapping):
        raise UserError(f"{field}: expected a mapping, found {arguments!r}")
    for name, value in arguments.items():
        _check_values(f"{field}.{name}", value, text=name in _TEXT)


def _check_values(field: str, value: Any, *, text: bool) -> None:
    """Check values that are data: no class, and unless `text` is allowed, no path and no name."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            _check_key(field, key)
            _check_values(f"{field}.{key}", part, text=text)
    elif isinstance(value, list):
        for part in value:
            _check_values(field, part, text=text)
    elif isinstance(value, str) and not text and not _WORD.fullmatch(value):
        raise UserError(f"{field}: a grid file may not name files or code there, found {value!r}")


def _check_key(field: str, key: Any) -> None:
    """Refuse dotted keys, which set other fields, and the keys of the parser."""
    if key in _CLASS_KEYS or not _KEY.fullmatch(str(key)):
        raise UserError(f"{field}: a grid file may not have the key '{key}' there")


def _nested(axis: str, value: Any) -> dict[str, Any]:
    """The config in which only the field of an axis is set."""
    for key in reversed(axis.split(".")):
        value = {key: value}
    return value
