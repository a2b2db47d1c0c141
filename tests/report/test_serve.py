"""The server of a report: only to this machine, only these folders, and it ends on a signal."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from werkzeug.test import Client

from lightning_app.report.tensorboard import write_index
from lightning_app.report.write import PAGE, Site, tensorboard_path
from tests.report.conftest import SEED, write_report

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from lightning_app.report.write import claim, serve_report
with claim(0) as claimed:
    serve_report(Path(sys.argv[1]), Path(sys.argv[2]), claimed)
print("ended")
"""


def board(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    """In place of a TensorBoard: says what it was asked for."""
    start("200 OK", [("Content-Type", "text/plain")])
    return [f"board {environ['PATH_INFO']}".encode()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Something like a grid's folder, with a secret beside it and links into and out of it."""
    demo = tmp_path / "experiments" / "demo"
    run = demo / "runs" / "pre_ln-1"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("a: 1\n")
    (run / "last.ckpt").write_bytes(b"\0")
    (run / ".lock").write_text("hidden")
    (demo / "report.html").write_bytes(b"<!DOCTYPE html>\n" + PAGE + b"<body>hello</body></html>")
    (tmp_path / "experiments" / "secret.txt").write_text("secret")
    (run / "out.txt").symlink_to(tmp_path / "experiments" / "secret.txt")
    (run / "in.txt").symlink_to(run / "config.yaml")
    return demo


@pytest.fixture
def client(folder: Path) -> Client:
    return Client(Site(folder / "report.html", folder, board))


def test_a_real_page_begins_as_the_server_expects(make_grid: Any) -> None:
    written = write_report(make_grid(lambda axes: "waiting", {SEED: [1]}).folder)
    assert written.read_bytes().count(PAGE) == 1


def test_folders_are_listed_files_shown_and_the_root_leads_to_the_page(client: Client) -> None:
    assert client.get("/runs/pre_ln-1").location == "/runs/pre_ln-1/"
    listed = client.get("/runs/pre_ln-1/").text
    names = ["../", "config.yaml", "in.txt", "last.ckpt", "out.txt"]
    assert re.findall(r'href="([^"]+)"', listed) == names
    shown = client.get("/runs/pre_ln-1/config.yaml", buffered=True)
    assert (shown.mimetype, shown.text) == ("text/plain", "a: 1\n")
    assert client.get("/runs/pre_ln-1/in.txt", buffered=True).text == "a: 1\n"
    binary = client.get("/runs/pre_ln-1/last.ckpt", buffered=True)
    assert binary.mimetype == "application/octet-stream"
    assert client.post("/runs/pre_ln-1/config.yaml").status_code == 405
    answer = client.get("/", follow_redirects=True)
    assert answer.request.path == "/report.html"
    assert answer.mimetype == "text/html"
    assert '<html lang="en" class="served"><body>hello' in answer.text


@pytest.mark.parametrize(
    "path",
    [
        *("/../secret.txt", "/runs/../../secret.txt", "/runs/%2e%2e/%2e%2e/secret.txt"),
        *("/..%2fsecret.txt", "/runs/pre_ln-1/out.txt", "/runs/pre_ln-1/.lock", "//etc/passwd"),
        *("/%00", "/" + "x" * 5000, "/nothing"),
    ],
)
def test_what_lies_outside_is_not_there(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "secret" not in answer.text


def test_of_folders_apart_only_these_are_served(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "elsewhere" / "out"
    out.mkdir(parents=True)
    (out / "report.html").write_bytes(PAGE)
    (out.parent / "other.txt").write_text("other")
    client = Client(Site(out / "report.html", folder, board))
    assert client.get("/").location == "/elsewhere/out/report.html"
    link = os.path.relpath(folder / "runs" / "pre_ln-1" / "config.yaml", out)
    address = os.path.normpath(f"/elsewhere/out/{link}")  # as a browser resolves the page's link
    assert client.get(address, buffered=True).text == "a: 1\n"
    for path in ("/", "/elsewhere/other.txt", "/experiments/secret.txt", "/experiments/"):
        assert client.get(path).status_code in (302, 404)


def test_another_site_cannot_ask_through_a_browser(client: Client) -> None:
    for name in ("localhost:6006", "127.0.0.1:1", "localhost"):
        assert client.get("/report.html", headers={"Host": name}).status_code == 200
    for name in ("evil.example", "evil.example:6006", "127.0.0.1.evil.example"):
        assert client.get("/report.html", headers={"Host": name}).status_code == 403
        assert client.get("/tensorboard/demo/", headers={"Host": name}).status_code == 403


def test_boards_answer_below_their_own_paths_with_files_of_runs(client: Client) -> None:
    assert client.get("/tensorboard/demo/data/runs").text == "board /tensorboard/demo/data/runs"
    assert client.get("/tensorboard/demo").text == "board /tensorboard/demo"
    assert client.get("/tensorboard/demo2/").status_code == 404
    board_path = tensorboard_path(Path("demo"))
    drawing = f"{board_path}runs/pre_ln-1/config.yaml"
    assert client.get(drawing, buffered=True).text == "a: 1\n"
    assert client.get(f"{board_path}runs/pre_ln-1/out.txt").status_code == 404
    assert client.get(f"{board_path}runs/../../secret.txt").status_code == 404
    assert client.get(f"{board_path}data/runs").text == f"board {board_path}data/runs"


@pytest.fixture
def served(make_grid: Any) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """A grid, and a process that serves it."""
    fake = make_grid(lambda axes: 2.0, {SEED: [1, 2]})
    write_index(fake.folder)
    report = fake.folder / "report.html"
    report.write_bytes(PAGE)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(report), str(fake.folder)],
        cwd=fake.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield fake, process
    process.kill()
    process.communicate()


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=240) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_report_and_tensorboard_are_served_to_loopback_until_a_signal(served, number: int) -> None:
    fake, process = served
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    address = re.findall(r"serving (http://127.0.0.1:\d+)/", lines[0])[0]
    assert lines[1] == f"curves: {address}/tensorboard/demo/\n"
    assert 'class="served"' in get(f"{address}/")
    assert "<title>TensorBoard</title>" in get(f"{address}/tensorboard/demo/")
    names, until = {f"runs/{cell['name']}" for cell in fake.cells}, time.monotonic() + 240
    while not names <= set(json.loads(get(f"{address}/tensorboard/demo/data/runs"))):
        assert time.monotonic() < until
        time.sleep(0.1)
    us = psutil.Process(process.pid)
    family = [us, *us.children(recursive=True)]
    open_at = [
        connection.laddr.ip
        for each in family
        for connection in each.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert open_at
    assert set(open_at) <= {"127.0.0.1", "::1"}
    process.send_signal(number)
    out, error = process.communicate(timeout=240)
    assert (process.returncode, out, error) == (0, "ended\n", "")
    assert psutil.wait_procs(family, timeout=5)[1] == []
