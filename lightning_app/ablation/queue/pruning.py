"""Pruning, seen from the supervisor: what cells report, and the word to stop.

A cell appends a line to `attempts/<k>/reports.jsonl` at each validation and ends when it finds
`attempts/<k>/stop`. No process of a cell knows the study, so cells of several processes are pruned
in the same way as others.
"""

from dataclasses import dataclass, field
from pathlib import Path

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_app.ablation.runs import STOP, ReportReader
from lightning_app.files import write_whole

_STARTUP = 5  # complete cells that have reported at a step before the median rule prunes there


def make_pruner(name: str | None) -> BasePruner:
    """The pruner of a grid; None never prunes.

    `median` ends a cell whose best value so far is worse than the median of the complete cells at
    the same step, where five or more are known. `hyperband` compares cells at a few steps, three
    times as far each time, lets the best third go on, and prunes none before one is complete.
    """
    if name is None:
        return NopPruner()
    if name == "median":
        return MedianPruner(n_startup_trials=_STARTUP, n_min_trials=_STARTUP)
    return _Hyperband()


class _Hyperband(BasePruner):
    """Optuna's Hyperband, from the first to the last validation of a complete cell.

    Optuna would compare from step 1 on: the first report, at some hundred steps, would then have
    to win several comparisons at once.
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
    """Tells steps that the storage knows from those that the pruner has judged, too."""

    reported: set[int] = field(default_factory=set)


class Reports:
    """Carries the reports of running cells over to their trials."""

    def __init__(self) -> None:
        self._readers: dict[int, _Reader] = {}

    def look(self, trial: Trial, folder: Path, attempt: int) -> bool:
        """Report what is new, and tell the cell to stop where its trial should be pruned.

        Returns whether it was told to, now or before. What earlier attempts reported counts, as
        the cell goes on from them. A cell may come to its end before it sees the word; what it
        leaves in its folder says what happened. Where the storage fails, the next look goes on
        where this one ended.
        """
        stop = folder / "attempts" / str(attempt) / STOP
        if stop.is_file():
            return True
        reader = self._readers.get(trial.number)
        if reader is None:
            known = trial.storage.get_trial(trial._trial_id).intermediate_values
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
            pass  # another supervisor has taken the cell over; ours is about to hear of it
        return False

    def forget(self, trial: Trial) -> None:
        """Drop what is remembered of a cell that has ended."""
        self._readers.pop(trial.number, None)
