"""Write the report of a grid with its figures, publish a study as a small folder, and serve a
report with the TensorBoard of its grid, only on this machine.

One server on 127.0.0.1: `/tensorboard/NAME/` is the TensorBoard of the grid in the folder NAME, and
`runs/` below it the folders of its runs, to which its texts link. Any other address is a file in
the folder of the report or of the grid. Its path is relative to their common folder, so that the
relative links of a page lead to the same files as without a server. The `html` element of a served
page gets the class `served`.
"""

import hashlib
import io
import mimetypes
import os
import re
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole
from lightning_app.core.project import recompute_program
from lightning_app.core.strict_yaml import dump_yaml
from lightning_app.report.bibliography import references
from lightning_app.report.comparisons import comparison_document
from lightning_app.report.facts import earlier_runs
from lightning_app.report.figures import need, stable, training
from lightning_app.report.figures.sheet import (
    POINTS,
    FigureFiles,
    Part,
    Question,
    Sketch,
    darken,
    drawn_slices,
    pdf,
    read_log,
    save,
    styled,
    svg,
)
from lightning_app.report.frames import validations_frame
from lightning_app.report.packed import PACKED, pack, packed_name
from lightning_app.report.page import RECOMPUTE, Report, page, render
from lightning_app.report.pairs import scores_frame
from lightning_app.report.results import GridResults, scales
from lightning_app.report.statistics import row_document
from lightning_app.report.table import latex, markdown
from lightning_app.report.tables import loss_by_warmup, task_tables, verdict_table
from lightning_app.report.tasks import bleu_scores, failed_runs, failure_tests, task_scores
from lightning_app.report.tensorboard import tensorboard_path
from lightning_app.report.warmup import sensitivity_scores
from lightning_app.runs.folder import PRUNED, RESULT, STORE, VOUCHED, GridFolder

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from werkzeug.wrappers import Request, Response


FILE = "reported_grid.yaml"
"""The grid file by which tables were made, if it is not that of the last run."""


def publish(grid: GridResults, out: Path, file: Mapping[str, Any] | None = None) -> None:
    """Write `results.parquet`, the table of the runs, `runs.tar.xz`, which restores them, the
    tables of the scores (`write_scores`), the grid `file` as it is now, and the figure that the
    report opens with, `headline-light.svg` and `headline-dark.svg`.

    Raises `UserError` for a folder that holds another study.

    The test of differences in BLEU over sentences needs the translations, which are not packed: its
    p values are only in `sensitivity.csv`.
    """
    if (out / PACKED).is_file() and (other := packed_name(out / PACKED)) != grid.name:
        raise UserError(f"--publish: {out}: holds the study {other}; name another folder")
    report = Report(grid, [*sensitivity_scores(grid), *bleu_scores(grid)], out)
    pack(grid, out / PACKED)
    _write_file(out / FILE, file)
    _write_parquet(report.results, out / "results.parquet")
    write_scores(report)
    with styled():
        for look in ("light", "dark"):
            path, figure = out / f"headline-{look}.svg", first_figure(grid)
            path.unlink(missing_ok=True)
            if figure is not None:
                if look == "dark":
                    darken(figure)
                save(figure, path)


def _write_file(path: Path, file: Mapping[str, Any] | None) -> None:
    if file is None:
        path.unlink(missing_ok=True)
    else:
        write_whole(path, dump_yaml(file))


_HEAD = 1000  # characters of a page that hold the digest of its inputs


def write(grid: GridResults, out: Path, file: Mapping[str, Any] | None = None) -> Path:
    """Write the report of a grid, by its `file` as it is now, and return the path of its page.

    Writes `report.html` and the files that its last section lists into the folder `out`. Raises
    `UserError` for a folder that cannot be written.
    """
    digest = inputs_digest(grid)  # first, since runs may end meanwhile
    report = Report(grid, [*sensitivity_scores(grid), *bleu_scores(grid)], out)
    write_exports(report)
    _write_file(out / FILE, file)
    drawings = write_figures(report.grid, out / "figures")
    write_whole(out / RECOMPUTE, recompute_program().read_bytes())
    text = page(report, drawings, digest)
    write_whole(out / "report.html", text)
    return out / "report.html"


def is_current(grid: GridResults, path: Path) -> bool:
    """Whether a page was made from the present files of a grid, whatever their times are."""
    try:
        with path.open(encoding="utf-8") as file:
            return inputs_digest(grid) in file.read(_HEAD)
    except (OSError, ValueError):
        return False


def inputs_digest(grid: GridResults) -> str:
    """A digest of what a report is made from: the plan, which has that of the code, the content of
    the grid file that was read, and the state and the files of every run."""
    digest = hashlib.sha256()
    files = [GridFolder(grid.folder).plan]
    digest.update(f"{grid.source}\n".encode())
    for cell in grid.cells:
        files += [cell.folder / name for name in (RESULT, PRUNED, *VOUCHED)]
        digest.update(f"{cell.name} {cell.state} {cell.error}\n".encode())
    for path in filter(Path.is_file, files):
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    digest.update(f"{earlier_runs(grid)}\n".encode())
    return digest.hexdigest()


def write_exports(report: Report) -> None:
    """Write the exports of a report.

    `results` and `validations` as `.csv` and `.parquet`, `sensitivity.csv`, the tables of other
    questions as `.csv` if they have rows (`write_scores`), `tables/*.tex` and `.md`, and
    `references.bib`.
    """
    grid, scores, out = report.grid, report.scores, report.out
    for name, frame in (("results", report.results), ("validations", validations_frame(grid))):
        write_whole(out / f"{name}.csv", frame.to_csv(index=False))
        _write_parquet(frame, out / f"{name}.parquet")
    removes = write_scores(report)
    tables = task_tables(grid)
    if scores and grid.finished:
        tables += [
            t for t in (verdict_table(grid, scores), loss_by_warmup(grid, scores)) if t.bodies
        ]
    for name in {*TABLES} - {table.name for table in tables} if removes else ():
        for ending in ("tex", "md"):
            (out / "tables" / f"{name}.{ending}").unlink(missing_ok=True)
    for table in tables:
        write_whole(out / "tables" / f"{table.name}.tex", latex(table))
        write_whole(out / "tables" / f"{table.name}.md", markdown(table))
    write_whole(out / "references.bib", references(grid))


def _write_parquet(frame: "pd.DataFrame", path: Path) -> None:
    parquet = io.BytesIO()
    frame.to_parquet(parquet, index=False)
    write_whole(path, parquet.getvalue())


TABLES = ("headline", "loss_by_warmup", "failure_tests", "failed_runs", "task_scores")
"""The tables that may be in the folder `tables` of a report."""


def write_scores(report: Report) -> bool:
    """Write `sensitivity.csv`, and the tables of other questions if they have rows.

    Those are `effects`, `comparisons`, `failed_runs`, `failure_tests` and `task_scores.csv`; one
    of an earlier report is removed if there are no rows now. Returns whether there was one.
    """
    import pandas as pd

    scores = report.out / "sensitivity.csv"
    removes = scores.is_file()  # in another folder, files of these names are somebody's own
    write_whole(scores, scores_frame(report.scores).to_csv(index=False))
    tables: dict[str, list[dict[str, Any]]] = {
        "effects": [row_document(row) for row in report.effects],
        "comparisons": [comparison_document(row) for row in report.comparisons],
        "failed_runs": [asdict(row) for row in failed_runs(report.grid)],
        "failure_tests": [asdict(row) for row in failure_tests(report.grid)],
        "task_scores": [asdict(row) for row in task_scores(report.grid)],
    }
    for name, rows in tables.items():
        path = report.out / f"{name}.csv"
        if rows:
            write_whole(path, pd.DataFrame(rows).to_csv(index=False))
        elif removes:
            path.unlink(missing_ok=True)
    return removes


ALL_POINTS, FEWEST_POINTS = 60_000, 20  # of all single curves of one loss, and at least of each
FIGURES = 3  # figures of a kind with one for each variant; each takes a second
TOGETHER = 12  # panels of the figure that puts groups with common rates side by side, at most


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure: the name of its files, its question, and the function that draws it."""

    name: str
    question: Question
    draw: Callable[[Part], list[Sketch]]


OF_A_RATE = (
    FigureKind("warmup_effect", "need", need.warmup_effect),
    FigureKind("loss_by_warmup", "need", need.final_loss),
    FigureKind("quality_by_warmup", "need", need.final_quality),
    FigureKind("training", "need", training.during_training),
)
FOREST = FigureKind("forest", "need", need.forest)
OF_TASKS = FigureKind("scores_by_task", "need", need.scores_by_task)
OF_RATES = FigureKind("loss_by_rate", "need", need.loss_by_rate)
OF_A_GROUP = (
    FigureKind("rate_by_warmup", "need", stable.rate_by_warmup),
    FigureKind("resources", "cost", training.resources),
    FigureKind("probes", "inside", stable.twins),
    FigureKind("explanations", "inside", stable.explanations),
)
KINDS = (FOREST, OF_TASKS, OF_RATES, *OF_A_GROUP[:1], *OF_A_RATE, *OF_A_GROUP[1:])
"""A report opens with what decides, else with scores of tasks, or the loss over the rates."""


def write_figures(grid: GridResults, folder: Path) -> list[FigureFiles]:
    """Write SVG, PDF and CSV of each figure, a set for each group and rate.

    With many groups and rates, only the first slices, as chosen by `drawn_slices`, are drawn. The
    order is by question, kind and slice. Files of figures that only earlier reports had are
    removed.
    """
    drawings: dict[str, list[FigureFiles]] = {kind.name: [] for kind in KINDS}
    slices = drawn_slices(grid)
    groups = list(dict.fromkeys(group for group, _ in slices))
    points = min(POINTS, max(FEWEST_POINTS, ALL_POINTS // max(1, len(grid.finished))))
    most = {"points": points, "figures": FIGURES}
    with styled():
        drawings[FOREST.name] += _draw(FOREST, _of_all(grid), folder, "")
        if grid.scored:
            drawings[OF_TASKS.name] += _draw(OF_TASKS, _of_all(grid), folder, "")
        for (group, lr), suffix in zip(slices, _numbers(len(slices)), strict=True):
            if grid.trials:
                break  # each seed has rates of its own
            cells = slices[group, lr]
            logs = {cell.id: read_log(cell) for cell in cells}
            part = Part(grid=grid, group=group, lr=lr, cells=cells, logs=logs, **most)
            for kind in OF_A_RATE:
                drawings[kind.name] += _draw(kind, part, folder, suffix)
        alike = _of_common_rates(grid, groups)
        for together, suffix in zip(alike, _numbers(len(alike)), strict=True):
            part = _over_rates(grid, together, 1)
            drawings[OF_RATES.name] += _draw(OF_RATES, part, folder, suffix)
        # Of a kind with a figure for each variant few; one where there are maps of rates too.
        few = max(1, FIGURES // max(1, len(groups))) if len(grid.rates) < 2 else 1
        for group, suffix in zip(groups, _numbers(len(groups)), strict=True):
            part = _over_rates(grid, [group], few)
            for kind in OF_A_GROUP:
                drawings[kind.name] += _draw(kind, part, folder, suffix)
    drawn = [drawing for kind in KINDS for drawing in drawings[kind.name]]
    paths = [path for drawing in drawn for path in (drawing.path, drawing.narrow) if path]
    _remove_others(folder, {path.stem for path in paths})
    return drawn


def first_figure(grid: GridResults) -> "Figure | None":
    """The figure that a report opens with, to be drawn again in another look."""
    drawn = dict.fromkeys(group for group, _ in drawn_slices(grid))
    parts = [_over_rates(grid, together, 1) for together in _of_common_rates(grid, list(drawn))]
    of_all = _of_all(grid)
    sketches = [*need.forest(of_all), *need.scores_by_task(of_all)]
    sketches = sketches or [sketch for part in parts for sketch in need.loss_by_rate(part)]
    return sketches[0].figure if sketches else None


def _of_common_rates(grid: GridResults, groups: Sequence[str]) -> list[list[str]]:
    """The groups, those with common rates together if that is no more than `TOGETHER` panels.

    Groups whose losses count other things share no figure.
    """
    rulers = scales(grid.finished, grid.monitored.loss)
    counted = {cell.group: name for cell, name in zip(grid.finished, rulers, strict=True)}
    shared: list[tuple[set[float | None], list[str]]] = []
    panels: dict[str, int] = {}
    for group in groups:
        cells = [cell for cell in grid.finished if cell.group == group]
        panels[group] = len({cell.variant for cell in cells})
        own, alike = {cell.lr for cell in cells}, [group]
        same = [each for each in shared if counted[each[1][0]] == counted[group]]
        for there in [each for each in same if each[0] & own]:
            own, alike = own | there[0], there[1] + alike
            shared.remove(there)
        shared.append((own, alike))
    parts: list[list[str]] = []
    for _, alike in shared:
        few = sum(panels[group] for group in alike) <= TOGETHER
        parts += [alike] if few else [[group] for group in alike]
    return parts


def _over_rates(grid: GridResults, groups: Sequence[str], figures: int) -> Part:
    """The runs of some groups at all rates; their curves are not read."""
    cells = [cell for cell in grid.finished if cell.group in groups]
    need = {cell.lr for cell in cells}
    return Part(
        grid=grid,
        group=groups[0] if len(groups) == 1 else "all",
        lr=need.pop() if len(need) == 1 else None,
        cells=cells,
        figures=figures,
    )


def _of_all(grid: GridResults) -> Part:
    return _over_rates(grid, list(dict.fromkeys(cell.group for cell in grid.finished)), 1)


NARROW = 2  # panels in a row on a small screen


def _draw(kind: FigureKind, part: Part, folder: Path, suffix: str) -> list[FigureFiles]:
    sketches = kind.draw(part)
    several = kind is OF_RATES and sketches and len(sketches[0].figure.axes) > NARROW
    if several or (kind is FOREST and sketches):
        drawn = need.loss_by_rate(part, columns=NARROW) if several else None
        (narrow,) = drawn or need.forest(part, narrow=True)
        path = folder / f"{kind.name}{suffix}-narrow.svg"
        write_whole(path, narrow.links.into(svg(narrow.figure), folder))
        files = _write(folder / f"{kind.name}{suffix}.svg", kind.question, part, sketches[0])
        return [replace(files, narrow=path)]
    return [
        _write(folder / f"{kind.name}{suffix}{inner}.svg", kind.question, part, sketch)
        for sketch, inner in zip(sketches, _numbers(len(sketches)), strict=True)
    ]


def _numbers(count: int) -> list[str]:
    return [f"-{number}" for number in range(1, count + 1)] if count > 1 else [""] * count


def _write(path: Path, question: Question, part: Part, sketch: Sketch) -> FigureFiles:
    need = {cell.lr for cell in sketch.cells}
    write_whole(path, sketch.links.into(svg(sketch.figure), path.parent))
    write_whole(path.with_suffix(".pdf"), pdf(sketch.figure))
    write_whole(path.with_suffix(".csv"), sketch.table.to_csv(index=False))
    return FigureFiles(
        path=path,
        question=question,
        title=sketch.title,
        text=sketch.text,
        limits=sketch.limits,
        group=part.group,
        lr=need.pop() if len(need) == 1 else None,
        cells=tuple(sketch.cells),
    )


def _remove_others(folder: Path, kept: set[str]) -> None:
    names = "|".join(kind.name for kind in KINDS)
    ours = re.compile(rf"(?:{names})(?:-\d+)*(?:-narrow)?\.(?:svg|pdf|csv)")
    for path in folder.glob("*"):
        if ours.fullmatch(path.name) and path.stem not in kept:
            path.unlink()


Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")  # a request for another host name comes from another site
PAGE, SERVED = b'<html lang="en">', b'<html lang="en" class="served">'
TEXT = frozenset({".yaml", ".jsonl", ".tex", ".bib", ".md", ".csv"})  # the browser shows these


def claim(port: int) -> socket.socket:
    """Open a port of this machine for `serve_report`; 0 takes any free one.

    Raises `UserError` for a port that is in use or not allowed.
    """
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        hint = "give another --port, or 0 for any free one"
        raise UserError(f"--port: {port}: {os.strerror(error.errno or 0)}; {hint}") from error


def serve_report(page: Path, folder: Path, claimed: socket.socket) -> None:
    """Serve a report, and the TensorBoard of the grid in `folder`, until SIGINT or SIGTERM.

    Prints the address.
    """
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            """Print nothing: a line for each file of a page would hide the address."""

    with suppress(KeyboardInterrupt), _stopped_by_signals():
        site = Site(page, folder, _tensorboard(folder))
        port, number = claimed.getsockname()[1], claimed.fileno()
        server = make_server(HOST, port, site, threaded=True, request_handler=Quiet, fd=number)
        print(f"serving http://{HOST}:{port}/ to this machine only; Ctrl-C ends it")
        print(f"curves: http://{HOST}:{port}{tensorboard_path(folder)}", flush=True)
        server.serve_forever()


class Site:
    """The served site: TensorBoard by its path, else files of the report and its grid."""

    def __init__(self, page: Path, folder: Path, board: Application) -> None:
        self._page, here = page.resolve(), folder.resolve()
        self._roots = [self._page.parent, here]
        self._top = Path(os.path.commonpath(self._roots))
        # Links of the grid lead into the store; no address names a hidden folder.
        self._roots.append(GridFolder(folder).experiments.resolve() / STORE)
        self._path, self._board = tensorboard_path(folder), board
        self._runs = "/".join(("", *here.relative_to(self._top).parts, "runs/"))

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        from werkzeug.sansio.utils import host_is_trusted
        from werkzeug.wrappers import Request, Response

        if not host_is_trusted(environ.get("HTTP_HOST"), NAMES):
            return Response("wrong host name\n", status=403)(environ, start)
        request = Request(environ)
        prefix = f"{self._path}runs/"
        if request.path.startswith(prefix):
            address = self._runs + request.path.removeprefix(prefix)
            return self._file(request, address)(environ, start)
        if f"{request.path}/".startswith(self._path):
            return self._board(environ, start)
        return self._file(request, request.path)(environ, start)

    def _file(self, request: "Request", address: str) -> "Response":
        from werkzeug.utils import redirect, send_file
        from werkzeug.wrappers import Response

        if request.method not in ("GET", "HEAD"):
            return Response("read-only\n", status=405)
        if address == "/":
            return redirect(self._address(self._page))
        path = self._inside(address)
        if path is None:
            return Response("no such file in the report or its grids\n", status=404)
        if path.is_dir():
            if not address.endswith("/"):
                return redirect(f"{self._address(path)}/")
            return Response(_listing(path), mimetype="text/html")
        if path.name == self._page.name:
            text = path.read_bytes().replace(PAGE, SERVED, 1)
            return Response(text, mimetype="text/html")
        kind = "text/plain" if path.suffix in TEXT else mimetypes.guess_type(path.name)[0]
        found = send_file(path, request.environ, mimetype=kind or "application/octet-stream")
        found.headers["X-Content-Type-Options"] = "nosniff"
        return found

    def _inside(self, asked: str) -> Path | None:
        """The file or folder at an address, if it is in a served folder or in the store of runs."""
        parts = [part for part in asked.split("/") if part]
        if any(part.startswith(".") for part in parts):
            return None
        try:
            path = self._top.joinpath(*parts)
            there = path.resolve(strict=True)
        except (OSError, ValueError):  # ValueError: a null byte
            return None
        return path if any(there.is_relative_to(root) for root in self._roots) else None

    def _address(self, path: Path) -> str:
        return f"/{quote(path.relative_to(self._top).as_posix())}"


def _listing(folder: Path) -> str:
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    shown = ["../", *(name for name in names if not name.startswith("."))]
    return render("listing.html", folder=folder.name, names=shown)


def _tensorboard(folder: Path) -> Application:
    """The TensorBoard of one grid, which keeps reading the files of the runs."""
    from tensorboard.program import TensorBoard, TensorBoardServer

    made: list[Application] = []

    class Kept(TensorBoardServer):
        """Keeps the application, so that our own server can serve it."""

        def __init__(self, app: Application, flags: object) -> None:
            made.append(app)

        def serve_forever(self) -> None:
            pass

        def get_url(self) -> str:
            return ""

    board = TensorBoard(server_class=Kept)
    prefix = tensorboard_path(folder).rstrip("/")
    board.configure(("", "--logdir", str(folder.resolve()), "--path_prefix", prefix))
    with redirect_stderr(io.StringIO()):  # it prints an advertisement for its fast reader
        board.launch()
    return made[0]


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM act like Ctrl-C, and SIGINT too if the shell had set it to be ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
