"""One cell of the notebook in the appendix."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NotebookCell:
    """At most ten lines of code. `table` is the name of the table that they define, or "".

    A table has the columns of `sensitivity.csv` that it fills; an undefined score has no row. Cells
    run in their order, in the folder of the report.
    """

    title: str
    table: str
    code: str
