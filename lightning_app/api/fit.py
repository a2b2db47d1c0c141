"""`fit`: one run, as `ablate fit` makes it, and its result."""

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.api.trained import TrainedRun, load_run, result_of
from lightning_app.config.sources import CHECKPOINT, FIELDS_OF, Written, read_tree
from lightning_app.config.tree import SECTIONS, SEED, replaced
from lightning_app.core.errors import UserError
from lightning_app.runs.folder import RunFolder
from lightning_app.training.launcher import LAUNCH, check_launcher

if TYPE_CHECKING:
    from lightning_app.training.run import Run


class RunResult:
    """The result of a finished run, read from its folder once.

    Attributes:
        folder: The folder, as `ablate fit` leaves it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"RunResult({str(self.folder)!r})"

    @cached_property
    def record(self) -> dict[str, Any]:
        """What `result.json` holds: times, device, data, provenance and the rest."""
        return result_of(RunFolder(self.folder))

    @property
    def id(self) -> str:
        """The id of the experiment; equal ids are equal experiments."""
        return self.record["id"]

    @property
    def status(self) -> str:
        """`ok`, `diverged` if the run stalled or its loss became non-finite, or `cut_short`."""
        return self.record["status"]

    @property
    def outcome(self) -> str:
        """`trained`, `not_yet_learned`, `stalled`, `non_finite` or `cut_short`."""
        return self.record["outcome"]

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics at the end of the run by name, None where one was not finite."""
        return dict(self.record["metrics"])

    def load(self, checkpoint: str | Path = "best") -> TrainedRun:
        """Return the trained model of the run: see `load_run`."""
        return load_run(self.folder, checkpoint)


def fit(
    config: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    ckpt_path: str | Path | None = None,
    again: bool = False,
    **settings: Any,
) -> RunResult:
    """Train one run in this process, as `ablate fit --config FILE` does, and return its result.

    ::

        from lightning_app import fit

        result = fit(
            "ablations/base/synthetic.yaml",
            {"trainer.max_steps": 20, "model.schedule.warmup_steps": 5},
            seed_everything=2,
        )
        result.outcome, result.metrics["val/nll"], result.folder

    The folder, the id and all numbers are those of the command. A run that stalls or diverges is a
    result too: look at `outcome`. Without `trainer.default_root_dir` the folder is in
    `experiments/fit/runs`. The folder of a finished run is refused without `again`, and that of a
    run which another process trains.

    Args:
        config: The path of a config, or its content as a mapping.
        overrides: Values by dotted key, as on the axes of a grid: each replaces the value there,
            and a mapping replaces all of a mapping.
        ckpt_path: `last`, `best` or a file to go on from.
        again: Whether to train a finished run again, whose result is then replaced.
        settings: Overrides whose key has no dot: ``seed_everything=2``.

    Raises:
        UserError: for a mistake in the config, in one line.
        KeyboardInterrupt: if the run was interrupted; ``ckpt_path="last"`` continues it.
    """
    given = {**(overrides or {}), **settings}
    _check_overrides(overrides or {}, settings)
    if isinstance(config, Mapping):
        tree, source = dict(config), "config"
    else:
        tree, source = read_tree(config), str(config)
    tree = reduce(lambda under, key: replaced(under, key, given[key]), given, tree)
    check_launcher(os.environ)
    written = Written.of(tree, f"{source} with overrides" if given else source, FIELDS_OF["fit"])
    checkpoint = written.fields.get(CHECKPOINT) if ckpt_path is None else str(ckpt_path)
    from lightning_app.config.config import load_config

    complete = load_config(written)
    with written.located():
        run = _run(complete, checkpoint, again)
    result = RunResult(run.folder.path)
    if run.trainer.is_global_zero:
        with suppress(UserError):  # raised again where it is used
            _ = result.record  # read now: a run that goes on in this folder writes another one
    return result


def _run(tree: dict[str, Any], checkpoint: str | None, again: bool) -> "Run":
    from lightning_app.training.run import Run

    before = dict(os.environ)
    try:
        run = Run(tree, command="fit", ckpt_path=checkpoint, again=again)
        run.fit()
        return run
    except SystemExit as ending:
        # Lightning ends the process on Ctrl-C and on SIGTERM, which a caller does not expect.
        raise KeyboardInterrupt('interrupted; fit(..., ckpt_path="last") continues') from ending
    finally:  # Lightning leaves the variables of the processes that it started
        for name in LAUNCH & os.environ.keys() - before.keys():
            del os.environ[name]


def _check_overrides(overrides: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse overrides of which one would silently undo another."""
    if both := sorted(overrides.keys() & settings.keys()):
        raise UserError(f"{both[0]}: is given twice, in overrides and as a keyword")
    every = {**overrides, **settings}
    for key in every:
        if key in SECTIONS and key != SEED:
            raise UserError(f"{key}: would replace a whole section; name its fields: '{key}.NAME'")
        if inner := next((other for other in every if other.startswith(f"{key}.")), None):
            raise UserError(f"{inner}: lies inside of another override, {key}")
