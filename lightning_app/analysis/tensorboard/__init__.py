"""The TensorBoard index of a grid: one HParams table with all cells, three custom-scalars pages.

The trainer's event files hold the curves, the pictures and the histograms. This package adds one
event file in each run folder: the cell's parameters and status, and a text with the question, the
config and the resolved block; once finished also its final metrics, at its last step, and its loss
curves once more under tags that name variant and warm-up. The second copy is needed because a chart
of the custom-scalars plugin picks tags by a regular expression over all runs and cannot pick runs:
only through the tag can a chart show one variant.

The columns of the table and the layout of the pages are in the file of the first run that has
begun. In a file at the root of the grid they would count as one more run, and with more than 40
TensorBoard shows none in most of its tabs until runs are ticked.

Writing again replaces only files whose content has changed. TensorBoard keeps the first parameters
that it reads of a session, so the `status` column stays
empty until the run has finished (its state is in the session status at all times), and a server
that was open when a failed cell was run again shows the old status until it is restarted.
"""

from lightning_app.analysis.tensorboard.index import write_index
from lightning_app.analysis.tensorboard.links import run_url
from lightning_app.analysis.tensorboard.table import metric_tags

__all__ = ["metric_tags", "run_url", "write_index"]
