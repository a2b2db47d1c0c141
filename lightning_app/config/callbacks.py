"""Checks of the callbacks in a config, besides those of every run. Slow to import: Lightning."""

import json
from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_app.config.bounds import check_callback
from lightning_app.config.classes import entries, made_object
from lightning_app.core.errors import UserError
from lightning_app.runs.folder import NAMED
from lightning_app.scores.task_facts import TASKS, Monitored


def check_callbacks(tree: dict[str, Any]) -> None:
    """Refuse callbacks of a complete config that cannot be used, or not together with ours.

    Raises:
        UserError: naming the callback, and what would be right.
    """
    given = tree["trainer"]["callbacks"]
    monitored = TASKS[tree["model"]["objective"]["kind"]].monitored
    _check_callbacks(json.dumps(entries(given)), monitored)


@lru_cache(maxsize=64)  # cells of a grid share them
def _check_callbacks(given: str, monitored: Monitored) -> None:
    own = {
        ModelCheckpoint(monitor=monitored.metric, mode=monitored.mode).state_key: "best",
        ModelCheckpoint().state_key: "last",
    }
    seen: set[str] = set()
    for each in json.loads(given):
        name = str(each["class_path"]).rpartition(".")[2]
        # A class outside the tables was imported when the config was completed.
        made = made_object("trainer.callbacks", each, imports=True)
        check_callback(name, (kind.__name__ for kind in type(made).__mro__))
        if type(made).state_dict is pl.Callback.state_dict:
            continue
        if isinstance(made, ModelCheckpoint):
            _check_own_checkpoints(name, each.get("init_args") or {}, own.get(made.state_key))
        if made.state_key in seen:
            raise UserError(
                f"trainer.callbacks: {name}: two of the same settings, of which Lightning stores "
                "one in a checkpoint; remove one"
            )
        seen.add(made.state_key)


def _check_own_checkpoints(name: str, given: dict[str, Any], same: str | None) -> None:
    """Refuse a ModelCheckpoint that duplicates `same`, one of ours, or writes one of its files."""
    if same is not None:
        which = f"monitor: {given.get('monitor') or 'null'}, mode: {given.get('mode')}"
        raise UserError(
            f"trainer.callbacks: {name} with {which} and no every_n_train_steps is the callback "
            f"that already keeps checkpoints/{same}.ckpt of each run; remove it, or give it "
            "every_n_train_steps or another monitor"
        )
    if given.get("dirpath") is None and (given.get("filename") in NAMED or given.get("save_last")):
        field = "save_last" if given.get("save_last") else f"filename: {given['filename']}"
        raise UserError(
            f"trainer.callbacks: {name} with {field} would write checkpoints/best.ckpt or "
            "last.ckpt, which each run keeps already; remove it, or give it another filename"
        )
