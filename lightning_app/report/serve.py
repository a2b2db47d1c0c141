"""Serve a report and the TensorBoard of its grids together, only on this machine.

One server on 127.0.0.1: `/tensorboard/NAME/` is the TensorBoard of the grid in the folder NAME, and
`runs/` below it the folders of its runs, to which its texts link. Any other address is a file in
the folder of the report or of a grid. Its path is relative to their common folder, so that the
relative links of a page lead to the same files as without a server. The `html` element of a served
page gets the class `served`.
"""

import io
import mimetypes
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lightning_app.core.errors import UserError
from lightning_app.report.page import render
from lightning_app.report.tensorboard import tensorboard_path
from lightning_app.runs.folder import STORE, GridFolder

if TYPE_CHECKING:
    from werkzeug.wrappers import Request, Response


Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")  # a request for another host name comes from another site
PAGE, SERVED = b'<html lang="en">', b'<html lang="en" class="served">'
TEXT = frozenset({".yaml", ".jsonl", ".tex", ".bib", ".md", ".csv"})  # the browser shows these


def claim(port: int) -> socket.socket:
    """Open a port of this machine for `serve`; 0 takes any free one.

    Raises `UserError` for a port that is in use or not allowed.
    """
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        hint = "give another --port, or 0 for any free one"
        raise UserError(f"--port: {port}: {os.strerror(error.errno or 0)}; {hint}") from error


def serve(page: Path, folders: Sequence[Path], claimed: socket.socket) -> None:
    """Serve a report, and the TensorBoards of the grids in `folders`, until SIGINT or SIGTERM.

    Prints the address.
    """
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            """Print nothing: a line for each file of a page would hide the address."""

    with suppress(KeyboardInterrupt), _stopped_by_signals():
        boards = {tensorboard_path(folder): _tensorboard(folder) for folder in folders}
        site = Site(page, folders, boards)
        port, number = claimed.getsockname()[1], claimed.fileno()
        server = make_server(HOST, port, site, threaded=True, request_handler=Quiet, fd=number)
        print(f"serving http://{HOST}:{port}/ to this machine only; Ctrl-C ends it")
        for path in boards:
            print(f"curves: http://{HOST}:{port}{path}", flush=True)
        server.serve_forever()


class Site:
    """The served site: TensorBoards by their paths, else files of the report and its grids."""

    def __init__(self, page: Path, folders: Sequence[Path], boards: dict[str, Application]) -> None:
        self._page = page.resolve()
        self._roots = [self._page.parent, *(folder.resolve() for folder in folders)]
        self._top = Path(os.path.commonpath(self._roots))
        # Links of the grids lead into the store; no address names a hidden folder.
        stores = (GridFolder(folder).experiments.resolve() / STORE for folder in folders)
        self._roots += dict.fromkeys(stores)
        self._boards = boards
        places = {folder: folder.resolve().relative_to(self._top) for folder in folders}
        self._runs = {
            f"{tensorboard_path(folder)}runs/": "/".join(("", *place.parts, "runs/"))
            for folder, place in places.items()
        }

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        from werkzeug.sansio.utils import host_is_trusted
        from werkzeug.wrappers import Request, Response

        if not host_is_trusted(environ.get("HTTP_HOST"), NAMES):
            return Response("wrong host name\n", status=403)(environ, start)
        request = Request(environ)
        for prefix, runs in self._runs.items():
            if request.path.startswith(prefix):
                address = runs + request.path.removeprefix(prefix)
                return self._file(request, address)(environ, start)
        for prefix, board in self._boards.items():
            if f"{request.path}/".startswith(prefix):
                return board(environ, start)
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
    """A page with links to the files of a folder, without hidden ones."""
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
