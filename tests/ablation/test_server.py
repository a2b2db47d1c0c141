"""The database that `ablate storage serve` runs."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import psutil
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lightning_app.ablation.queue.postgres import Cluster, free_port, is_loopback, reachable_name
from lightning_app.ablation.queue.storages import close_storage, open_storage, storage_spec
from lightning_app.errors import UserError
from tests.postgres import ROOT, Command, Server, serve

pytestmark = pytest.mark.xdist_group("server")  # what they share is made once


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serve(tmp_path / "db") as server:
        yield server


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that tests leave as it is."""
    with serve(tmp_path_factory.mktemp("server") / "db") as server:
        yield server


def refused(*words: str) -> str:
    """Run an `ablate storage` command that is a mistake, and return what it says of it."""
    done = subprocess.run(
        [sys.executable, "-m", "lightning_app", "storage", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "ABLATE_STORAGE": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"ablate: [^\n]+\n", done.stderr)
    return done.stderr


def study_names(url: str, make: str | None = None) -> list[str]:
    """The studies of a storage, after making one of the name `make`."""
    storage = open_storage(storage_spec(url, Path("nowhere"), {}))
    try:
        if make is not None:
            optuna.create_study(storage=storage, study_name=make)
        return [study.study_name for study in storage.get_all_studies()]
    finally:
        close_storage(storage)


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=60)[1]


def addresses(processes: list[psutil.Process]) -> list[str]:
    """Where processes listen, and the Unix sockets that they serve."""
    found = []
    for process in processes:
        for each in process.net_connections("inet"):
            if each.status == psutil.CONN_LISTEN:
                found.append(each.laddr.ip)
        found += [each.laddr for each in process.net_connections("unix") if each.laddr]
    return found


def test_nothing_but_loopback_is_listened_on(running: Server) -> None:
    found = addresses(running.processes())
    assert len(found) == 1
    assert set(found) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_the_password_lies_in_one_file_and_shows_nowhere(server: Server) -> None:
    password = server.password
    assert len(password) >= 32
    with psycopg.connect(server.url, autocommit=True) as connection:
        with pytest.raises(psycopg.Error):
            connection.execute(f"ALTER ROLE nobody_such PASSWORD '{password}'")  # pyright: ignore
        shown = [word for process in server.processes() for word in process.cmdline()]
        shown += [word for process in server.processes() for word in process.environ().values()]
    server.restart()
    shown.append(server.output)
    assert not [word for word in shown if password in word]
    files = [path for path in server.folder.rglob("*") if path.is_file()]
    assert [path.name for path in files if password.encode() in path.read_bytes()] == ["pgpass"]
    assert stat.S_IMODE((server.folder / "pgpass").stat().st_mode) == 0o600
    assert stat.S_IMODE((server.folder / "data").stat().st_mode) == 0o700


def test_there_is_no_other_way_in(running: Server) -> None:
    good = {"passfile": str(running.folder / "pgpass"), "user": "ablate", "dbname": "ablate"}
    place = {"host": "127.0.0.1", "port": str(running.port)}
    psycopg.connect(make_conninfo(**place, **good)).close()
    for change in (
        {"password": "wrong"},
        {"passfile": "/dev/null"},
        {"user": "postgres"},
        {"dbname": "postgres"},
    ):
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(make_conninfo(**place, **{**good, **change})).close()


def test_a_grid_leaves_no_trace_of_the_password(world: Any, running: Server) -> None:
    """Given in the environment; one cell fails, so that its error is written too."""
    password, before = running.password, study_names(running.url)
    bare = running.url.partition("?")[0]
    world.environment["ABLATE_STORAGE"] = bare.replace("ablate@", f"ablate:{password}@")
    world.write(seeds=1, delay=0.1, axes={"data.behaviour": ["ok", "crash"]})
    process = subprocess.Popen(  # a process that is forked has the arguments of its parent
        [sys.executable, *world.arguments()],
        env=world.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    world.wait_for(lambda: world.lines("start"), seconds=120)
    shown = [word for each in world.processes() for word in each.cmdline()]
    assert any("stand_in.py" in word for word in shown)
    shown += process.communicate(timeout=120)
    assert process.returncode == 0
    assert sum(run.state == "failed" for run in world.runs().values()) == 4
    assert not [word for word in shown if password in word]
    files = [path for path in world.root.rglob("*") if path.is_file()]
    assert "result.json" in {path.name for path in files}
    assert [path for path in files if password.encode() in path.read_bytes()] == []
    assert len(study_names(running.url)) == len(before) + 1


def test_what_it_prints_can_be_pasted(server: Server) -> None:
    assert study_names(server.url, make="pasted") == ["pasted"]
    assert server.url.endswith(f"/ablate?passfile={server.folder / 'pgpass'}")
    server.stop()
    assert f"ablate run GRID --storage '{server.url}'\n" in server.output
    assert f"export ABLATE_STORAGE='{server.url}'\n" in server.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly_and_the_next_goes_on(number: int, server: Server) -> None:
    password = server.password
    study_names(server.url, make="kept")
    processes = server.processes()
    with psycopg.connect(server.url):  # which does not keep it from ending
        assert server.stop(number) == 0
    assert "stopped; the data is kept" in server.output
    assert gone(processes)
    server.start_again()
    assert server.password == password
    assert study_names(server.url) == ["kept"]


def test_killing_the_command_ends_the_database_and_keeps_the_data(server: Server) -> None:
    study_names(server.url, make="kept")
    server.kill()
    server.start_again()
    assert study_names(server.url) == ["kept"]


def test_killing_everything_keeps_the_data(server: Server) -> None:
    study_names(server.url, make="kept")
    processes = server.processes()
    for end in (psutil.Process.suspend, psutil.Process.kill):  # so that none of them can tidy up
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # those that tidy tables come and go
                end(process)
    server.stop()
    assert gone(processes)
    assert (server.folder / "data" / "postmaster.pid").is_file()
    server.start_again()
    assert study_names(server.url) == ["kept"]


def test_a_database_that_ends_by_itself_is_reported(server: Server) -> None:
    server.postmaster.kill()
    assert server.stop(0) == 1
    assert "PostgreSQL ended by itself" in server.output
    server.start_again()
    assert study_names(server.url) == []


@pytest.mark.parametrize(
    "stage",
    [
        *("data.new/global", "data"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("data.new", "data.new/PG_VERSION")
        ),
    ],
)
def test_a_command_killed_at_its_first_start_leaves_nothing_half_made(
    stage: str, tmp_path: Path
) -> None:
    folder = tmp_path / "db"
    words = ["-m", "lightning_app", "storage", "serve", "--dir", str(folder), "--port", "0"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, cwd=ROOT) as process:
        while not (folder / stage).exists():
            assert process.poll() is None
        process.kill()
    with serve(folder) as server:
        assert study_names(server.url, make="first") == ["first"]
        assert not (folder / "data.new").exists()


def test_a_folder_that_is_served_is_refused(running: Server) -> None:
    said = refused("serve", "--dir", str(running.folder), "--port", "0")
    assert said == f"ablate: {running.folder}: process {running.pid} is serving this folder\n"
    study_names(running.url)  # it serves on


def test_a_taken_port_is_refused(running: Server, tmp_path: Path) -> None:
    port = str(running.port)
    said = refused("serve", "--dir", str(tmp_path / "other"), "--port", port)
    assert said == f"ablate: 127.0.0.1:{port}: cannot listen there: Address already in use\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["serve", "--host", "no.such.invalid"], "--host: 'no.such.invalid' is not an address"),
        (["serve", "--host", "192.0.2.7"], "192.0.2.7:5433: cannot listen there"),
        (["serve", "--port", "99999"], "--port: expected 0 to 65535, found 99999"),
    ],
)
def test_mistakes_are_reported_in_one_line(words: list[str], expected: str, tmp_path: Path) -> None:
    assert expected in refused(*words, "--dir", str(tmp_path / "db"))


def test_a_cluster_of_another_version_is_refused(server: Server) -> None:
    server.stop()
    (server.folder / "data" / "PG_VERSION").write_text("16\n")
    with pytest.raises(UserError, match="made by PostgreSQL 16, not by 18"):
        Cluster(server.folder).prepare()


def test_a_lost_password_is_replaced(server: Server) -> None:
    old = server.password
    study_names(server.url, make="kept")
    (server.folder / "pgpass").unlink()
    server.restart()
    assert server.password != old
    assert study_names(server.url) == ["kept"]


def test_a_damaged_cluster_is_reported_in_one_line(server: Server) -> None:
    server.stop()
    (server.folder / "data" / "global" / "pg_control").unlink()
    said = refused("serve", "--dir", str(server.folder), "--port", "0")
    assert "PostgreSQL did not start: " in said
    assert "pg_control" in said


def test_a_free_port_is_free_on_every_address_of_a_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: cannot listen there"):
            free_port("127.0.0.1", port)
        assert free_port("127.0.0.1", 0) != port
    assert free_port("127.0.0.1", port) == port


def test_other_hosts_get_a_name_that_is_not_loopback() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert reachable_name("192.0.2.7") == "192.0.2.7"
    name = reachable_name("0.0.0.0")
    assert name not in ("0.0.0.0", "127.0.0.1", "localhost")


def test_a_command_that_serves_says_where_at_once(tmp_path: Path) -> None:
    """The line with the URL is there as soon as the storage can be used, not when it ends."""
    command = Command("serve", "--dir", str(tmp_path / "db"), "--port", "0", "--host", "127.0.0.2")
    assert re.match(r"storage: postgresql://ablate@127\.0\.0\.2:\d+/ablate\?", command.output)
    assert study_names(command.url) == []
    assert command.stop() == 0
