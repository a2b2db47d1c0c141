"""The classes that a config names: looked up in tables and built with checked arguments.

Only `import_named` imports what a config names, and only for a config that the user passes by
``--config`` or to `fit`: a grid file or the config of a run may come from someone else."""

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from pydoc import ErrorDuringImport
from pydoc import locate as find_object
from types import NoneType
from typing import Any

from lightning_app.config.trainer import ClassSpec, TrainerConfig
from lightning_app.core.errors import UserError, nearest
from lightning_app.core.schema import as_plain, as_written, expected, kinds_of, part_of, read
from lightning_app.plugins import CALLBACKS, loaded

_PASSED_ON: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "DDPStrategy": ("torch.nn.parallel.DistributedDataParallel", ("module", "device_ids")),
    "EMAWeightAveraging": ("torch.optim.swa_utils.AveragedModel", ("model", "avg_fn")),
    "PyTorchProfiler": ("torch.profiler.profile", ()),
}
"""The classes that pass arguments on: to which class, and the arguments that they set
themselves."""


_PACKAGES = {  # imported by the constructors of Lightning's loggers
    "CometLogger": "comet_ml",
    "LitLogger": "litlogger",
    "MLFlowLogger": "mlflow",
    "NeptuneLogger": "neptune",
    "WandbLogger": "wandb",
}


REFUSED_CALLBACKS: Mapping[str, str] = {
    "StochasticWeightAveraging": "changes the learning rate, and validations do not use its "
    "average; use WeightAveraging or EMAWeightAveraging",
    "LearningRateFinder": "replaces model.optimizer.lr by a rate that no config records; give "
    "model.optimizer.lr several values in a grid instead",
    "BatchSizeFinder": "replaces the batch by one that no config records; set "
    "data.tokens_per_batch instead",
    "BaseFinetuning": "changes which parameters are trained, and at which rate, apart from "
    "model.optimizer and model.schedule; write a model.class_path instead",
    "ModelPruning": "stores other parameters than those of the model, so that no checkpoint of the "
    "run can be read; write a model.class_path instead",
}
"""The callbacks of Lightning (and their subclasses) that change the rate, the batch or the
weights without any config field for it, and what to use instead."""
_EXTENDING = {"BackboneFinetuning": "BaseFinetuning"}


def classes_of(given: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the path and the arguments of each class that a field of the trainer names."""
    for part in given if isinstance(given, list) else [given]:
        if isinstance(part, Mapping):
            yield str(part["class_path"]), part.get("init_args") or {}
        elif isinstance(part, str):
            yield part, {}


def check_named_callback(path: str) -> None:
    """Refuse a callback of Lightning by its path: see `check_callback`."""
    name = path.rpartition(".")[2]
    check_callback(name, (_EXTENDING.get(name, name),))


def check_callback(name: str, kinds: Iterable[str]) -> None:
    """Refuse a callback that is one of `REFUSED_CALLBACKS`.

    Args:
        name: Its class.
        kinds: The names of that class and its base classes.
    """
    for kind in kinds:
        if kind in REFUSED_CALLBACKS:
            raise UserError(f"trainer.callbacks: {name} {REFUSED_CALLBACKS[kind]}")


def check_parts(trainer: Mapping[str, Any]) -> None:
    """Refuse loggers without their package, and callbacks that would change the batch of a step.

    Raises:
        UserError: naming the class.
    """
    for path, _ in classes_of(trainer["logger"]):
        name = path.rpartition(".")[2]
        package = _PACKAGES.get(name)
        if package is not None and PathFinder.find_spec(package) is None:
            raise UserError(f"trainer.logger: {name} needs the package '{package}': pip install it")
    for path, arguments in classes_of(trainer["callbacks"]):
        check_named_callback(path)
        accumulates = path.rpartition(".")[2] == "GradientAccumulationScheduler"
        scheduled = arguments.get("scheduling") or {}
        for epoch, batches in scheduled.items() if accumulates else ():
            if batches != 1:
                raise UserError(
                    f"trainer.callbacks: GradientAccumulationScheduler with scheduling "
                    f"{{{epoch}: {batches}}}; every factor must be 1: the batch of a step is "
                    "data.tokens_per_batch, so make data.tokens_per_batch larger instead"
                )


def import_named(field: str, path: str) -> Any:
    """Import an object named by a config on the user's own command line.

    This is the only place in the program that imports a module because a config names it.

    Raises:
        UserError: if there is no such object, or its module cannot be imported.
    """
    names = [path]
    if "." not in path:  # a class of Lightning by its last word
        parts = ("callbacks", "loggers", "strategies", "plugins", "profilers", "accelerators")
        names = [f"lightning.pytorch.{part}.{path}" for part in parts]
    try:
        target = next((item for name in names if (item := find_object(name)) is not None), None)
    except ErrorDuringImport as error:
        raise UserError(f"{field}: {path!r} cannot be imported: {error.value}") from error
    if target is None:
        raise UserError(f"{field}: there is no {path!r}; a class by its import path, module.Name")
    return target


@cache
def signature_of(kind: Any) -> inspect.Signature:
    """Return the arguments of a class, all by name, after those that it passes on to another."""
    try:
        given = inspect.signature(kind, eval_str=True).parameters.values()
    except (NameError, TypeError):  # an annotation names what is imported for types alone
        given = inspect.signature(kind).parameters.values()
    others = [param for param in given if param.kind is param.VAR_KEYWORD]
    parameters: dict[str, inspect.Parameter] = {}
    if others and kind.__name__ in _PASSED_ON:
        passed, fixed = _PASSED_ON[kind.__name__]
        inner = signature_of(find_object(passed)).parameters
        parameters = {name: inner[name] for name in inner if name not in fixed}
    for param in given:
        if param.kind not in (param.VAR_KEYWORD, param.VAR_POSITIONAL):
            hint = Any if param.annotation is param.empty else param.annotation
            parameters[param.name] = param.replace(kind=param.KEYWORD_ONLY, annotation=hint)
    return inspect.Signature([*parameters.values(), *others])


def completed_arguments(
    key: str, signature: inspect.Signature, given: Mapping[str, Any], *, imports: bool
) -> dict[str, Any]:
    """Check plain arguments and return them with every default.

    Raises:
        UserError: for an unknown or a missing argument, and for a value of another type.
    """
    if not any(param.kind is param.VAR_KEYWORD for param in signature.parameters.values()):
        for name in given:
            if name not in signature.parameters:
                raise UserError(f"unknown key '{key}.{name}'{nearest(name, signature.parameters)}")
    try:
        bound = signature.bind(**given)
    except TypeError as error:
        raise UserError(f"{key}: {error}") from error
    bound.apply_defaults()
    arguments = bound.kwargs
    for name, value in arguments.items():
        if name not in given:
            arguments[name] = _plain_default(f"{key}.{name}", value)
        elif name in signature.parameters:
            typed = _value(
                f"{key}.{name}", signature.parameters[name].annotation, value, imports=imports
            )
            if isinstance(value, int | float) and isinstance(typed, int | float):
                arguments[name] = typed  # in the declared type; the rest stays as written
    return arguments


def _built_arguments(
    key: str, signature: inspect.Signature, given: Mapping[str, Any], *, imports: bool
) -> dict[str, Any]:
    """Return complete arguments in the form for the constructor, without defaults."""
    arguments = {}
    for name, value in given.items():
        param = signature.parameters.get(name)
        if param is None or not _is_default(value, param.default):
            hint = Any if param is None else param.annotation
            arguments[name] = _value(f"{key}.{name}", hint, value, imports=imports)
    return arguments


def _plain_default(key: str, value: Any) -> Any:
    value = as_plain(value)
    if isinstance(value, timedelta | Path):
        return str(value)
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{key}: its default {value!r} cannot be written to config.yaml, which holds only "
            "text, numbers, lists and mappings; give it a value"
        ) from error


def _is_default(value: Any, default: Any) -> bool:
    try:
        return type(value) is type(written := _plain_default("", default)) and value == written
    except UserError:
        return False


def _value(key: str, hint: Any, value: Any, *, imports: bool) -> Any:
    """Return a plain value as an argument of a type.

    Raises:
        UserError: if it has another type.
    """
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

    if imports and isinstance(value, Mapping) and "class_path" in value:
        kind = import_named(key, value["class_path"])
        given = value.get("init_args") or {}
        return kind(**_built_arguments(key, signature_of(kind), given, imports=imports))
    kinds, part = kinds_of(hint), part_of(hint)
    if part is not None and isinstance(value, Mapping):
        return read(part, value, at=key)
    if imports and isinstance(value, str) and any(_is_code(kind) for kind in kinds):
        return import_named(key, value)
    if timedelta in kinds and isinstance(value, str):  # not in a format of Lightning's own
        hint, kinds = timedelta, (timedelta,)
    try:
        strict = ConfigDict(strict=True, arbitrary_types_allowed=True)
        adapter = TypeAdapter(hint, config=strict)
    except PydanticUserError:  # a dataclass, or a type unknown to pydantic
        return value
    try:
        return adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        wanted = " or ".join(expected(kind) for kind in kinds if kind is not NoneType)
        raise UserError(f"{key}: expected {wanted}, found {as_written(value)}") from error


def _is_code(kind: Any) -> bool:
    origin = getattr(kind, "__origin__", kind)
    return origin is Callable or getattr(origin, "__name__", "") in ("Callable", "type")


_LISTED = {
    "lightning_app.training.callbacks.averages": "LastAverage",
    "lightning_app.training.callbacks.probes": "SignalProbe UpdateProbe",
    "lightning_app.training.callbacks.safety": "QKClip",
    "lightning.pytorch.callbacks": "DeviceStatsMonitor EMAWeightAveraging EarlyStopping "
    "GradientAccumulationScheduler LearningRateMonitor ModelCheckpoint ModelSummary "
    "OnExceptionCheckpoint SpikeDetection StochasticWeightAveraging Timer WeightAveraging",
    "lightning.pytorch.loggers": "CSVLogger CometLogger MLFlowLogger TensorBoardLogger WandbLogger",
    "lightning.pytorch.plugins": "DoublePrecision HalfPrecision MixedPrecision TorchSyncBatchNorm",
    "lightning.pytorch.profilers": "AdvancedProfiler PassThroughProfiler PyTorchProfiler "
    "SimpleProfiler",
    "lightning.pytorch.strategies": "DDPStrategy FSDPStrategy SingleDeviceStrategy",
}
CLASSES = tuple(f"{module}.{name}" for module, names in _LISTED.items() for name in names.split())
"""The classes that every config may name, including a grid's, with the callbacks of plug-ins."""

FIELDS = ("accelerator", "strategy", "logger", "callbacks", "profiler", "plugins")
"""The fields of the Trainer that take classes."""

CLASS_FIELDS = ("class_path", "init_args")
"""The fields of a section that select the class to build."""

OWN_CLASS = "model.class_path"
"""The field that names a LightningModule of a plug-in."""


@dataclass(frozen=True, kw_only=True)
class OwnClass:
    """The class built from the section `model` or `data`.

    It extends `TransformerModule` or `TextDataModule`, whose arguments are the other fields of the
    section, and passes them on: ``def __init__(self, mine: float = 0.5, **others)``.
    """

    class_path: str | None = None
    """The class of a plug-in, such as my_module.Mine; null for the class of the package."""
    init_args: dict[str, Any] | None = None
    """The arguments of that class that the package's class does not have."""


Entry = dict[str, Any]
"""A class as a config writes it: `class_path`, `init_args`, and `dict_kwargs`."""


def entries(value: Any) -> list[Any]:
    """Return the classes that a field of a complete section `trainer` names."""
    listed = value if isinstance(value, list) else [value]
    return [entry for entry in listed if isinstance(entry, Mapping) and "class_path" in entry]


def complete_classes(trainer: TrainerConfig, *, imports: bool) -> dict[str, Any]:
    """Return the section with every argument of the classes that it names.

    Args:
        trainer: The section.
        imports: Whether it may name classes outside the tables: see `import_named`.

    Raises:
        UserError: naming the class or the argument.
    """
    section = {}
    for name, value in vars(trainer).items():
        if isinstance(value, ClassSpec):
            value = _completed(f"trainer.{name}", value, imports=imports)
        elif name in FIELDS and isinstance(value, list):
            value = [_completed(f"trainer.{name}", spec, imports=imports) for spec in value]
        section[name] = value
    return section


def _completed(field: str, spec: ClassSpec, *, imports: bool) -> Entry:
    # Keyed by text, since cells of a grid share them.
    given = json.dumps([spec.init_args, spec.dict_kwargs])
    plugins = tuple(CALLBACKS.values())
    return json.loads(_complete(field, spec.class_path, given, imports, plugins))


@cache
def _complete(field: str, path: str, given: str, imports: bool, _: tuple[type, ...]) -> str:
    kind, full_path = class_of(field, path, imports=imports)
    arguments, passed_on = json.loads(given)
    init_args = completed_arguments(
        f"{field}.init_args", signature_of(kind), arguments or {}, imports=imports
    )
    entry = {"class_path": full_path, "init_args": init_args, "dict_kwargs": passed_on}
    return json.dumps({key: value for key, value in entry.items() if value})


def made_object(field: str, entry: Mapping[str, Any], *, imports: bool) -> Any:
    """Build the object of a complete class.

    Raises:
        UserError: for arguments that its constructor refuses.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    kind, _ = class_of(field, entry["class_path"], imports=imports)
    given = entry.get("init_args") or {}
    arguments = _built_arguments(f"{field}.init_args", signature_of(kind), given, imports=imports)
    try:
        return kind(**arguments, **(entry.get("dict_kwargs") or {}))
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise UserError(f"{field}: {kind.__name__}: {error}") from error


def made_fields(trainer: Mapping[str, Any], *, imports: bool) -> dict[str, Any]:
    """Return the Trainer arguments of a complete section, with its classes built."""

    def make(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [make(name, entry) for entry in value]
        if isinstance(value, Mapping) and "class_path" in value:
            return made_object(f"trainer.{name}", value, imports=imports)
        return value

    return {name: make(name, value) if name in FIELDS else value for name, value in trainer.items()}


def class_of(field: str, path: str, *, imports: bool) -> tuple[type, str]:
    """Return the class that a Trainer field names and its path in the tables.

    Raises:
        UserError: if it is in no table and may not be imported, or is of the wrong kind.
    """
    full_path = known_path(path)
    callback = next((kind for kind in CALLBACKS.values() if _path(kind) == full_path), None)
    if callback is not None:
        return callback, path
    check_named_callback(path)
    if full_path is not None:
        kind = _listed(full_path)
    elif imports:
        kind = import_named(f"{field}.class_path", path)
    else:
        raise UserError(f"{field}.class_path: {refusal(path)}")
    bases = _bases(field.rpartition(".")[2])
    if not isinstance(kind, type) or not issubclass(kind, bases):
        names = " or ".join(f"{base.__module__}.{base.__name__}" for base in bases)
        raise UserError(
            f"{field}.class_path: expected a class that extends {names}, found {path!r}"
        )
    if full_path is None:
        alike = (dotted for dotted in CLASSES if dotted.rpartition(".")[2] == kind.__name__)
        full_path = next((dotted for dotted in alike if _listed(dotted) is kind), path)
    return kind, full_path


def known_path(path: str) -> str | None:
    """Return the path of a class in the tables, where `path` may be only its last word."""
    if path in CLASSES or path in map(_path, CALLBACKS.values()):
        return path
    return next((dotted for dotted in CLASSES if dotted.rpartition(".")[2] == path), None)


def refusal(path: Any) -> str:
    """Report that a class is in no table."""
    short = [dotted.rpartition(".")[2] for dotted in CLASSES]
    last = str(path).rpartition(".")[2]
    hint = f"; did you mean '{CLASSES[short.index(last)]}'?" if last in short else ""
    return (
        "a grid file may only name listed classes of lightning.pytorch, SignalProbe, UpdateProbe, "
        f"QKClip, LastAverage and callbacks of plug-ins (--plugin FILE), found {path!r}{hint}"
    )


@cache
def _listed(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@cache
def _bases(name: str) -> tuple[type, ...]:
    """The classes of Lightning that a field of the Trainer takes."""
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins import LayerSync, Precision
    from lightning.pytorch.profilers import Profiler
    from lightning.pytorch.strategies import Strategy

    return {
        "accelerator": (Accelerator,),
        "strategy": (Strategy,),
        "logger": (Logger,),
        "callbacks": (pl.Callback,),
        "profiler": (Profiler,),
        "plugins": (Precision, ClusterEnvironment, CheckpointIO, LayerSync),
    }[name]


_SECTION_CLASSES: Mapping[str, str] = {
    "model": "lightning_app.training.module.TransformerModule",
    "data": "lightning_app.training.datamodule.TextDataModule",
}
"""The class of a section that names none, which plug-in classes extend. Slow to import."""


def named_class(section: str, fields: Mapping[str, Any]) -> Any:
    """Return the class that the fields of a section name; by default the package's.

    Only loaded plug-ins are searched: nothing is imported because a config names it.

    Raises:
        UserError: if no loaded plug-in has that class, or it does not extend the package's.
    """
    base = _listed(_SECTION_CLASSES[section])
    path = fields.get("class_path")
    if path is None:
        return base
    require_plugin(section, path)
    prefix = f"{section}.class_path: '{path}'"
    module, _, name = path.rpartition(".")
    package = module.partition(".")[0]
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not isinstance(kind, type):
        names = [
            key for key, value in vars(sys.modules[package]).items() if isinstance(value, type)
        ]
        raise UserError(f"{prefix} is not in the plug-in '{package}'{nearest(name, names)}")
    if not issubclass(kind, base):
        raise UserError(
            f"{prefix} does not extend {base.__module__}.{base.__name__}, from which loss, metrics "
            "and checkpoints come"
        )
    return kind


def require_plugin(section: str, path: str) -> None:
    """Refuse a class that is in no loaded plug-in: no digest would cover its code.

    Raises:
        UserError: naming the class.
    """
    if path.partition(".")[0] not in {plugin.package for plugin in loaded().values()}:
        raise UserError(
            f"{section}.class_path: '{path}' is in no plug-in that is loaded; name its file with "
            "--plugin FILE, or in ablate.yaml"
        )


def own_arguments(section: str, fields: Mapping[str, Any]) -> tuple[Any, Entry]:
    """Return the class of a complete section `model` or `data`, and its additional arguments.

    Raises:
        UserError: naming the field, and what would be right.
    """
    key, given = f"{section}.init_args", fields.get("init_args")
    kind = named_class(section, fields)
    if fields.get("class_path") is None:
        if given is not None:
            raise UserError(f"{key}: needs {section}.class_path, which is null")
        return kind, {}
    given = given or {}
    for name in given:
        if name in fields:
            raise UserError(f"{key}.{name}: belongs to {section}.{name}")
    named = (param for param in signature_of(kind).parameters.values() if param.name not in fields)
    apart = [param for param in named if param.kind is param.KEYWORD_ONLY]
    signature = inspect.Signature(apart)
    if given and not apart:
        raise UserError(f"unknown key '{key}.{next(iter(given))}'; the class has no arguments")
    arguments = completed_arguments(key, signature, given, imports=False)
    return kind, _built_arguments(key, signature, arguments, imports=False)
