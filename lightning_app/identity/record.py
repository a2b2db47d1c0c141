"""`identity.json` of a run's folder: what its id is made of, so that two ids can be compared."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_app.atomic_write import write_whole
from lightning_app.errors import UserError
from lightning_app.identity.ids import SCHEMA, experiment_id
from lightning_app.identity.relevant import Tree, pins, relevant, relevant_blocks
from lightning_app.run_folder import IDENTITY

CONTINUED = "continued_from"
"""The field of a record for the checkpoints of other experiments from which the run went on."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What can change the result of a run.

    `config` and `blocks` hold the fields that differ from the pinned defaults, `corpus` is the
    digest of what the corpus holds.
    """

    config: Mapping[str, Any]
    blocks: Mapping[str, Any]
    corpus: str | None

    @classmethod
    def of(cls, config: Tree, stacks: Tree, corpus: str | None) -> "Record":
        """Return the record of a resolved config and its resolved blocks."""
        return cls(config=relevant(config), blocks=relevant_blocks(stacks), corpus=corpus)

    @property
    def id(self) -> str:
        """The id of the experiment: 16 hexadecimal digits."""
        return experiment_id(self.config, self.blocks, self.corpus)

    def with_config(self, fields: Mapping[str, Any]) -> "Record":
        """Return the record with other values of some fields of the config."""
        return replace(self, config={**self.config, **fields})

    def apart(self) -> "Record":
        """Return the record without the checkpoints that the run began with."""
        rest = {key: value for key, value in self.config.items() if key != CONTINUED}
        return replace(self, config=rest)

    def going_on(self, there: "Record | None", checkpoint: str) -> "Record":
        """Return the record of a run that goes on from a checkpoint.

        It is another experiment than a run from step 0, unless the checkpoint is its own: of a run
        with the same record, in the same folder.

        Args:
            there: The record of the run in whose folder the checkpoint lies, if there is one.
            checkpoint: The digest of the checkpoint.
        """
        before = [] if there is None else list(there.config.get(CONTINUED, ()))
        is_own = there is not None and there.apart().id == self.id
        begun = before if is_own else [*before, checkpoint]
        return self.with_config({CONTINUED: begun}) if begun else self

    def difference(self, other: "Record") -> str:
        """Say in words how two records differ, with the first field of the config that does."""
        known = {**pins()["config"], **pins()["added"]}
        for key in sorted({*self.config, *other.config}):
            mine, theirs = (each.config.get(key, known.get(key)) for each in (self, other))
            if mine != theirs:
                return f"{key} is {json.dumps(mine)} there and {json.dumps(theirs)} here"
        if self.corpus != other.corpus:
            return "it was trained on other files of the corpus"
        return "its blocks are defined otherwise"


def write_record(folder: Path, record: Record) -> None:
    """Write `identity.json` into a run's folder."""
    tree = {"schema": SCHEMA, "id": record.id, **asdict(record)}
    write_whole(folder / IDENTITY, json.dumps(tree, indent=1))


def read_record(folder: Path) -> Record | None:
    """Read `identity.json` of a run's folder, None if it does not exist.

    Raises:
        UserError: where it is damaged.
    """
    path = folder / IDENTITY
    if not path.is_file():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return Record(config=tree["config"], blocks=tree["blocks"], corpus=tree["corpus"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged; move the run's folder away") from error
