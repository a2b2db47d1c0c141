"""The curves of an attempt as a table that a kill cannot empty."""

import csv
import io
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_app.atomic_write import write_whole


class Curves(CSVLogger):
    """`metrics.csv` of an attempt, in which a new column appears together with all earlier rows.

    Lightning empties the file before it writes a longer header. A kill in between would lose rows
    older than the checkpoint, which no later attempt logs again.
    """

    @rank_zero_only
    def save(self) -> None:
        writer = self.experiment
        path = Path(writer.metrics_file_path)
        columns = sorted({*writer.metrics_keys, *(key for row in writer.metrics for key in row)})
        if columns != writer.metrics_keys and path.is_file():
            text = io.StringIO(newline="")
            table = csv.DictWriter(text, columns)
            table.writeheader()
            with path.open(newline="", encoding="utf-8") as file:
                table.writerows(csv.DictReader(file))
            write_whole(path, text.getvalue().encode())
            writer.metrics_keys = columns
        super().save()
