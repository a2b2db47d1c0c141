"""The object that commands and the supervisor receive for a grid."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_app import strict_yaml
from lightning_app.ablation.cells import Cell, Waiting, cell_tree
from lightning_app.ablation.grid_spec import GridSpec
from lightning_app.ablation.parent_cells import placed
from lightning_app.ablation.plan import Plan, save_plan
from lightning_app.atomic_write import write_whole
from lightning_app.errors import UserError
from lightning_app.grid_axes import named_values, variant
from lightning_app.grid_folder import GridFolder
from lightning_app.parent import FIELD
from lightning_app.records import Unsound, check_plan, read_json
from lightning_app.run_folder import RunFolder
from lightning_app.run_state import DamagedRun, RunState, read_state


@dataclass(frozen=True)
class Grid:
    """The content of the grid file, the grid's folder, and its plan, each read once."""

    spec: GridSpec
    folder: GridFolder
    plan: Plan

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.plan.cells

    @property
    def data(self) -> tuple[Mapping[str, Any], ...]:
        """The distinct data configs of the cells."""
        if self.spec.init_from is None:
            return self.plan.data
        experiments = self.folder.path.parent
        return tuple(placed(data, experiments) for data in self.plan.data)

    @cached_property
    def by_id(self) -> dict[str, Cell]:
        """The cells by their ids."""
        return {cell.id: cell for cell in self.cells}

    @property
    def prunes(self) -> bool:
        """Whether the grid has a pruner."""
        return self.spec.pruner is not None

    def run(self, cell: Cell) -> RunFolder:
        """The folder of a cell's run."""
        return self.folder.run(cell.name)

    def state(self, cell: Cell, *, with_metric: bool = True) -> RunState:
        """The state of a cell on disk; `with_metric`: a trained run must report the grid's metric.

        Raises:
            UserError: if its result is damaged, not the cell's, or of another version.
        """
        metric = self.plan.metric if with_metric else None
        try:
            return read_state(self.run(cell), cell.id, metric, prunes=self.prunes)
        except DamagedRun as error:
            fix = (
                f"; `ablate doctor {self.folder.name} --fix` moves it, so that the cell runs again"
            )
            raise UserError(f"{error.path}: {error}{'' if error.other_version else fix}") from error

    def tree(self, cell: Cell) -> dict[str, Any]:
        """The config of a cell as the grid file gives it: without defaults."""
        parent = {FIELD: str(self.folder.path.parent / cell.parent)} if cell.parent else {}
        return cell_tree(self.spec.base_config, {**cell.axes, **parent})

    def variant(self, cell: Cell | Waiting) -> str:
        """The variant of a cell: the block that its axes describe."""
        labels = named_values(self.spec.labels, self.spec.axes)
        return variant(cell.axes, self.spec.base_config, labels)

    def is_saved(self) -> bool:
        """Whether `grid.yaml` has the content that `save` would write, and `plan.json` seals it."""
        try:
            check_plan(read_json(self.folder.plan), self.folder.path)
            return self.folder.specification.read_text(encoding="utf-8") == self._text()
        except (OSError, ValueError, Unsound):
            return False

    def save(self) -> None:
        """Write `grid.yaml` and `plan.json`, the plan last."""
        write_whole(self.folder.specification, self._text())
        save_plan(self.folder.plan, self.plan)

    def _text(self) -> str:
        return strict_yaml.dump_yaml(self.spec.tree(), allow_unicode=True, width=100)
