"""Pruning: the supervisor passes the cells' reports to Optuna, and stops the cells that it prunes.

A cell appends a line to `attempts/<k>/reports.jsonl` at each validation and ends when it finds
`attempts/<k>/stop`. No process of a cell opens the study, so cells of several processes are pruned
in the same way as others.
"""

from dataclasses import dataclass, field

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_app.core.files import write_whole
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.run import ReportReader

_STARTUP = 5  # complete cells that have reported at a step before the median rule prunes there


def make_pruner(name: str | None) -> BasePruner:
    """The pruner of a grid; None never prunes.

    `median` ends a cell whose best value so far is worse than the median of the complete cells at
    the same step, if there are at least five. `hyperband` compares cells at a few steps, each three
    times the one before, and lets the best third continue. It prunes none before one is complete.
    """
    if name is None:
        return NopPruner()
    if name == "median":
        return MedianPruner(n_startup_trials=_STARTUP, n_min_trials=_STARTUP)
    return _Hyperband()


class _Hyperband(BasePruner):
    """Optuna's Hyperband, from the first to the last validation of a complete cell.

    Optuna would compare from step 1 on: the first report, after some hundred steps, would then
    have to win several comparisons at once.
    """

    def __init__(self) -> None:
        self._pruner: HyperbandPruner | None = None

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        if self._pruner is None:
            complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            steps = [step for each in complete for step in each.intermediate_values]
            if not steps:
                return False
            self._pruner = HyperbandPruner(max(1, min(steps)), max(steps))
        return self._pruner.prune(study, trial)


@dataclass
class _Reader(ReportReader):
    """Also keeps the steps that are in the storage, whether the pruner has used them or not."""

    reported: set[int] = field(default_factory=set)


class Reports:
    """Copy the reports of running cells to their trials."""

    def __init__(self) -> None:
        self._readers: dict[int, _Reader] = {}

    def look(self, trial: Trial, folder: RunFolder, attempt: int) -> bool:
        """Pass on new reports, and write the file that stops the cell if Optuna prunes its trial.

        Returns whether the file exists. Reports of earlier attempts count, since the cell continues
        from them. A cell may end before it finds the file; the files in its folder then show how
        it ended. If the storage fails, the next call continues where this one stopped.
        """
        stop = folder.attempt(attempt).stop
        if stop.is_file():
            return True
        reader = self._readers.get(trial.number)
        if reader is None:
            known = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
            reader = self._readers[trial.number] = _Reader(reported=set(known))
        try:
            for each in range(1, attempt + 1):
                for step, value in reader.new(folder, each):
                    if step not in reader.reported:
                        trial.report(value, step)
                        reader.reported.add(step)
                    if trial.should_prune():
                        write_whole(stop, "pruned\n")
                        return True
        except UpdateFinishedTrialError:
            pass  # another supervisor has taken the cell over; ours will notice at `Queue.tend`
        return False

    def forget(self, trial: Trial) -> None:
        """Forget the reports of a cell that has ended."""
        self._readers.pop(trial.number, None)
