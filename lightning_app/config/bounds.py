"""Refuse values with which a run cannot train: bad seeds, no steps, non-finite numbers."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any

from lightning_app.core.errors import UserError
from lightning_app.core.strict_yaml import check_size

LARGEST_SEED = (1 << 32) - 1  # of NumPy's generator, which Lightning seeds too
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


LONG_WARMUP = 0.5
"""The share of a run's steps above which its warm-up is long. Published warm-ups take 1 % (BERT) to
10 % (fine-tuning); up to half, the rate is at its peak or after it for most of the run."""


def long_warmup(warmup: int, steps: int) -> str | None:
    """Warn that a warm-up takes more than `LONG_WARMUP` of the steps; None if it does not.

    The rate is then below its peak in most steps, and the mean rates of runs with different
    warm-ups differ by more than the effect of the warm-up itself.
    """
    if not 0 < steps * LONG_WARMUP < warmup:
        return None
    return (
        f"model.schedule.warmup_steps: {warmup} is more than half of the {steps} steps of the run, "
        "which is below its peak rate for most of them"
    )


def check_bounds(tree: Mapping[str, Any]) -> None:
    """Refuse a complete config that could not train or whose result would be meaningless.

    Raises:
        UserError: naming field and value.
    """
    check_numbers(tree)
    check_seed(tree["seed_everything"])
    _check_length(tree["trainer"])
    _check_loggers(tree["trainer"]["logger"])
    _check_callbacks(tree["trainer"]["callbacks"])


def check_numbers(tree: Mapping[str, Any]) -> None:
    """Refuse NaN, infinities, and integers of more than 64 bits, anywhere in the config."""
    for field, value in _leaves(tree):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{field}: {value} is not a finite number")
        check_size(field, value)


def check_seed(seed: Any) -> None:
    """Refuse a value that is not a seed: to Lightning, true means any seed and false none."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise UserError(
            f"seed_everything: expected a whole number from 0 to {LARGEST_SEED}, found {seed!r}"
        )


def _check_length(trainer: Mapping[str, Any]) -> None:
    if trainer["fast_dev_run"]:
        raise UserError(
            f"trainer.fast_dev_run: {trainer['fast_dev_run']!r} leaves no checkpoint and no "
            f"curves; set max_steps and limit_val_batches"
        )
    if trainer["overfit_batches"]:
        raise UserError(
            f"trainer.overfit_batches: {trainer['overfit_batches']!r} replaces the samplers, which "
            f"batches of equal lengths need; use limit_train_batches and limit_val_batches"
        )
    for field, what in (("max_steps", "1 step"), ("max_epochs", "1 epoch")):
        count = trainer[field]
        if count is not None and (count == 0 or count < -1):
            raise UserError(
                f"trainer.{field}: {count} trains nothing; at least {what}, or -1 for no limit"
            )
    limit = trainer["max_time"]
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", str(limit))
    if limit is not None and not (match and any(map(int, match.groups()))):
        raise UserError(
            f"trainer.max_time: expected 'DD:HH:MM:SS' in quotes, above 0, found {limit!r}"
        )
    for field in ("limit_train_batches", "limit_val_batches"):
        share = trainer[field]
        if share is not None and (share <= 0 or (isinstance(share, float) and share > 1.0)):
            raise UserError(
                f"trainer.{field}: expected batches from 1, or a share above 0.0 and up to 1.0, "
                f"found {share}"
            )


def classes_of(given: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the path and the arguments of each class that a field of the trainer names."""
    for part in given if isinstance(given, list) else [given]:
        if isinstance(part, Mapping):
            yield str(part["class_path"]), part.get("init_args") or {}
        elif isinstance(part, str):
            yield part, {}


def check_unit(decay: float, strategy: Any) -> None:
    """Refuse what rows of matrices of length 1, `model.block.unit_matrices`, do not survive.

    Raises:
        UserError: naming field and value.
    """
    unit = "model.block.unit_matrices (as in preset ngpt)"
    if decay:
        raise UserError(
            f"model.optimizer.weight_decay: {decay} with {unit}, which undoes it; use 0"
        )
    for path, _ in classes_of(strategy):
        if "fsdp" in path.lower():
            raise UserError(
                f"trainer.strategy: {path} with {unit}: no device has whole rows; use ddp"
            )


def _check_callbacks(callbacks: Any) -> None:
    for path, arguments in classes_of(callbacks):
        check_named_callback(path)
        name = path.rpartition(".")[2]
        if name == "GradientAccumulationScheduler":
            for epoch, batches in (arguments.get("scheduling") or {}).items():
                if batches != 1:
                    raise UserError(
                        f"trainer.callbacks: GradientAccumulationScheduler with scheduling "
                        f"{{{epoch}: {batches}}}; every factor must be 1: the batch of a step is "
                        f"data.tokens_per_batch, so make data.tokens_per_batch larger instead"
                    )


_SPLITTING = ("fsdp", "deepspeed", "modelparallel", "model_parallel")


def check_whole(model: Any, strategy: Any, *, clips: bool = False) -> None:
    """Refuse optimizers, or QKClip (`clips`), that read whole parameters that a strategy splits.

    Raises:
        UserError: naming field and value.
    """
    paths = [path for path, _ in classes_of(strategy)]
    splits = [path for path in paths if any(each in path.lower() for each in _SPLITTING)]
    reads = [f"model.optimizer.kind: {model.optimizer.kind}"] * model.optimizer.is_own
    if model.schedule.warmup_of != "all":
        reads.append(f"model.schedule.warmup_of: {model.schedule.warmup_of}")
    reads += ["trainer.callbacks: QKClip"] * clips
    if splits and reads:
        raise UserError(
            f"{reads[0]} reads whole parameters, which trainer.strategy {splits[0]} splits; use ddp"
        )


_AVERAGES = ("WeightAveraging", "EMAWeightAveraging", "QKClip")


def check_averaged(
    model: Any, blocks: Sequence[Any], callbacks: Iterable[str], strategy: Any
) -> None:
    """Refuse what an optimizer that evaluates an average of its weights does not serve.

    Args:
        model: The section `model` as an object.
        blocks: The specification of each block.
        callbacks: The names of the callbacks, and of the classes that they extend.
        strategy: The field of that name, or the name of its class.

    Raises:
        UserError: naming the field.
    """
    kind = f"model.optimizer.kind: {model.optimizer.kind}, which evaluates an average of weights"
    if model.schedule.kind != "constant":
        raise UserError(
            f"model.schedule.kind: {model.schedule.kind} with {kind}, and which needs no decay of "
            "the rate; use constant"
        )
    for name in callbacks:
        if name in _AVERAGES:
            raise UserError(f"trainer.callbacks: {name} with {kind}; remove one of them")
    for path, _ in classes_of(strategy):
        if any(each in path.lower() for each in _SPLITTING):
            raise UserError(f"trainer.strategy: {path}, which splits models, with {kind}; use ddp")
    for block in blocks:
        span = block.self_attention.adaptive_span
        found = {
            "unit_matrices": block.unit_matrices,
            "sigma_reparam": block.sigma_reparam,
            "branch_ramp": block.around_self.branch.ramp or block.around_ff.branch.ramp,
            "adaptive_span": span is not None and span.dynamic_bias is None,
        }
        for name, present in found.items():
            if present:
                raise UserError(
                    f"model.block: {name} with {kind}: an average does not keep what the steps set "
                    "or follow; use another kind"
                )


def check_clipped(model: Any, blocks: Sequence[Any]) -> None:
    """Refuse QKClip where smaller queries and keys do not make logits smaller, or not as much.

    Args:
        model: The section `model` as an object.
        blocks: The specification of each block.

    Raises:
        UserError: naming the field.
    """
    usual = {"qk_norm": "none", "scores": "dot", "score_cap": None, "carry": "none"}
    usual["query_key_noise"] = 0.0
    found = [
        f"model.block: {name} {value}"
        for block in blocks
        for each in (block.self_attention, block.cross_attention)
        for name, wanted in usual.items()
        if (value := getattr(each, name)) != wanted
    ]
    # Others add terms to the scores that do not shrink, or, those of a plug-in, may do so.
    if model.architecture.positions not in ("sinusoidal", "learned", "learned_per_layer", "rope"):
        found.append(f"model.architecture.positions: {model.architecture.positions}")
    # Each restores the size of a matrix that was made smaller.
    for name in ("unit_matrices", "sigma_reparam"):
        if any(getattr(each, name) for each in blocks):
            found.append(f"model.block: {name} true")
    if not model.optimizer.form.from_zero:
        found.append(f"model.optimizer.kind: {model.optimizer.kind}")
    if model.compile != "none":
        found.append(f"model.compile: {model.compile}")
    if found:
        raise UserError(
            f"trainer.callbacks: QKClip scales queries and keys, which does not serve "
            f"{found[0]}; remove one of them"
        )


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


def _check_loggers(loggers: Any) -> None:
    for path, _ in classes_of(loggers):
        name = path.rpartition(".")[2]
        package = _PACKAGES.get(name)
        if package is not None and PathFinder.find_spec(package) is None:
            raise UserError(f"trainer.logger: {name} needs the package '{package}': pip install it")


def _leaves(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{field}.{key}" if field else str(key))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part, field)
    else:
        yield field, value


def check_accumulation(batches: int) -> None:
    """Refuse gradient accumulation, which would average the means of unequal batches.

    Nor could a run continue from a checkpoint in the middle of such a step.

    Raises:
        UserError: naming the field and the field to use instead.
    """
    if batches != 1:
        raise UserError(
            f"trainer.accumulate_grad_batches: {batches}; must be 1: the batch of a step is "
            f"data.tokens_per_batch, so make data.tokens_per_batch {batches} times as large"
        )
