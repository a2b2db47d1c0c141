"""What the folder of a run says about it, for `ablate show` and `ablate diff`. Needs no torch."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_app.commands.named_run import find_run
from lightning_app.errors import UserError, named
from lightning_app.grid_axes import BLOCK, PRESET
from lightning_app.identity.record import Record, read_record
from lightning_app.identity.relevant import completed, leaves, relevant
from lightning_app.records import Unsound, is_sealed, read_json, read_yaml
from lightning_app.run_folder import NAMED, RunFolder
from lightning_app.run_state import DamagedRun, RunState, read_progress, read_state
from lightning_app.task_facts import task_facts

_OF_RESULT = (
    *("outcome_rule", "diverged", "steps", "steps_asked", "tokens", "parameters", "seconds"),
    *("device", "devices", "precision", "peak_memory_bytes", "started", "finished"),
)
_MADE = ("device", "devices", "precision")
PARENT = "init_from"  # an id has the digest of the parent in its place


class Recorded(NamedTuple):
    """A run as its folder describes it.

    Attributes:
        folder: Its folder.
        config: Its config, with the fields that later versions have added at their defaults.
        id: The id of its experiment.
        record: What the id is made of.
        state: How far it is, and its result.
    """

    folder: RunFolder
    config: Mapping[str, Any]
    id: str
    record: Record
    state: RunState

    @property
    def outcome(self) -> Mapping[str, Any]:
        """The content of `result.json` or `pruned.json`; empty for a run that has not ended."""
        state = self.state
        return state.result or state.pruned or state.short or {}

    @property
    def made(self) -> dict[str, Any]:
        """What made the result, by dotted name, without the command line."""
        made = dict(self.outcome.get("provenance") or {})
        made.pop("command", None)
        return {
            **{name: self.outcome.get(name) for name in _MADE},
            **dict(leaves(made)),
        }


def read_run(given: str) -> Recorded:
    """Read the folder of a run, as `find_run` finds it.

    Raises:
        UserError: if there is no such run, or one of its files is damaged.
    """
    folder = find_run(given, "RUN")
    record = read_record(folder.path)
    path = folder.config
    try:
        with named(path):
            config = completed(read_yaml(path))
        found_in_config = relevant(config)
        path = folder.identity
        identity = str(read_json(path).get("id"))
        state = read_state(folder, identity)
    except FileNotFoundError as error:
        raise UserError(f"{folder}: {path.name} is missing") from error
    except Unsound as error:
        raise UserError(f"{path}: {error}") from error
    except DamagedRun as error:
        raise UserError(f"{error.path}: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged: not the config of a run") from error
    assert record is not None  # its file was read
    trained = record.config
    # What is at its default is in no record, and in the config with the rest.
    whole = {key: value for key, value in leaves(config) if key in trained}
    for key, value in {**whole, **found_in_config}.items():
        if not key.endswith(PARENT) and trained.get(key) != json.loads(json.dumps(value)):
            raise UserError(
                f"{folder.config}: {key} was changed after the run: {folder.identity} says that it "
                "was trained otherwise"
            )
    return Recorded(folder, config, identity, record, state)


def described_run(run: Recorded) -> dict[str, Any]:
    """Return what a run is, how it ended and what made it, by name."""
    model, data = run.config["model"], run.config["data"]
    kind = model["objective"]["kind"]
    result = run.outcome
    progress = read_progress(run.folder, run.state.attempts) if not result else None
    return {
        "folder": str(run.folder),
        "name": run.folder.name,
        "grid": run.folder.grid,
        "id": run.id,
        "task": kind,
        "task_title": task_facts(kind).title,
        "preset": model["block"]["preset"],
        "block": {
            key.removeprefix(BLOCK): value
            for key, value in relevant(run.config).items()
            if key.startswith(BLOCK) and key != PRESET
        },
        "data": {"name": data["name"], **(result.get("data") or {})},
        "seed": run.config["seed_everything"],
        "max_steps": run.config["trainer"]["max_steps"],
        "state": "cut short" if run.state.short else run.state.word,
        "error": run.state.error,
        "step": progress.get("step") if progress else result.get("step"),
        **{name: result.get(name) for name in _OF_RESULT},
        "attempts": run.state.attempts,
        "sealed": is_sealed(result) if result else None,
        "checkpoints": [name for name in NAMED if run.folder.checkpoint(name).is_file()],
        "metrics": dict(result.get("metrics") or {}),
        "provenance": dict(result.get("provenance") or {}),
    }
