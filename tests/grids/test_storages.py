"""Storages: how they are read and opened, and outages."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
import psutil
import pytest

from lightning_app.core.errors import UserError
from lightning_app.grids.storages import StorageSpec, close_storage, open_storage, storage_spec
from tests.postgres import PASSWORD, Server, serve
from tests.told import told

pytestmark = pytest.mark.xdist_group("postgres")  # one server for all

ROOT = Path(__file__).parents[2]
NOWHERE: dict[str, str] = {}
GRID = Path("grid")
SECRET = "staple-battery"
URL = "postgresql+psycopg://ablate@db:5433/ablate"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture
def spec_of(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], StorageSpec]:
    def spec(kind: str) -> StorageSpec:
        if kind == "journal":
            return storage_spec(None, tmp_path / "study.journal", NOWHERE)
        if kind == "sqlite":
            return storage_spec(f"sqlite:///{tmp_path}/study.db", GRID, NOWHERE)
        server = request.getfixturevalue("server")
        empty(server)
        return storage_spec(server.url, GRID, NOWHERE)

    return spec


def empty(server: Server) -> None:
    with server.connect() as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")


Opened = Callable[..., Any]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens storages, which are closed when the test has ended."""
    storages = []

    def call(spec: StorageSpec | str) -> Any:
        if isinstance(spec, str):
            spec = storage_spec(spec, GRID, NOWHERE)
        storages.append(open_storage(spec))
        return storages[-1]

    yield call
    for storage in storages:
        close_storage(storage)


def new_study(storage: Any, name: str = "study", cells: int = 0) -> optuna.Study:
    study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
    for _ in range(cells):
        study.enqueue_trial({})
    return study


def several(code: str, spec: StorageSpec, count: int) -> list[str]:
    """Run `code` in `count` processes that are held until all have done their imports."""
    head = (
        "import sys; from pathlib import Path; import optuna\n"
        "from lightning_app.grids.storages import StorageSpec, open_storage\n"
        "journal, url = sys.argv[1:]\n"
        "spec = StorageSpec('shown', Path(journal) if journal else None, url)\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
    )
    processes: list[Any] = [
        subprocess.Popen(
            [sys.executable, "-c", head + code, str(spec.journal or ""), spec.url],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    ended = [process.communicate(timeout=120) for process in processes]
    assert [error for _, error in ended] == [""] * count
    return [output for output, _ in ended]


def test_a_path_is_a_journal_and_that_of_the_grid_the_default(tmp_path: Path, monkeypatch) -> None:
    for words in (None, "journal"):
        assert storage_spec(words, GRID, NOWHERE) == StorageSpec("grid", GRID)
    monkeypatch.chdir(tmp_path)
    assert storage_spec("queue", GRID, NOWHERE).journal == tmp_path / "queue"
    assert storage_spec(f"{tmp_path}/b@c", GRID, NOWHERE).journal == tmp_path / "b@c"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "found nothing"),
        ("no/such/folder", "there is no"),
        (".", "is a folder"),
        (f"ablate:{SECRET}@db", "expected 'journal', … URL"),
        (f"postgresql+psycopg://ablate:p@{SECRET}@nowhere.invalid/x", "cannot be used"),
        (f"postgresql+psycopg://ablate:{SECRET}@db:port/x", "cannot be used"),
        (f"postgresql+psycopg://ablate:{SECRET}@127.0.0.1:1/x", "cannot be used"),
        (f"mysql+{SECRET}://ablate:{SECRET}@db/x", "cannot be used"),
        (f"sqlite:///nowhere/study.db?password={SECRET}", "cannot be used"),
        ("sqlite:////nowhere/study.db", "unable to open"),
        ("postgresql+psycopg3000://db/x", "psycopg3000"),
        ("grpc://node7:13000", "grpc"),
    ],
)
def test_a_mistake_is_reported_in_one_line_without_the_password(given: str, expected: str) -> None:
    with pytest.raises(UserError, match=told(expected)) as mistake:
        open_storage(storage_spec(given, GRID, NOWHERE))
    assert str(mistake.value).startswith("--storage: ")
    assert SECRET not in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_the_environment_is_asked_where_the_command_line_is_silent() -> None:
    environment = {"ABLATE_STORAGE": URL}
    assert storage_spec(None, GRID, environment) == StorageSpec("ABLATE_STORAGE", url=URL)
    assert storage_spec("sqlite:///a.db", GRID, environment).url == "sqlite:///a.db"
    assert storage_spec("journal", GRID, environment).journal == GRID
    assert storage_spec(None, GRID, {"ABLATE_STORAGE": ""}).journal == GRID
    with pytest.raises(UserError, match="ABLATE_STORAGE: expected 'journal', a path"):
        storage_spec(None, GRID, {"ABLATE_STORAGE": "no/such/folder"})


@pytest.mark.parametrize("name", ["plain", "{curly} %41 ü"])
@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_a_storage_on_this_disk_keeps_a_study(kind: str, name: str, tmp_path, opened) -> None:
    folder = tmp_path / name
    folder.mkdir()
    given = None if kind == "journal" else f"sqlite:///{quote(str(folder / 'study.db'))}"
    spec = storage_spec(given, folder / "study.journal", NOWHERE)
    new_study(opened(spec), cells=2)
    assert len(new_study(opened(spec)).trials) == 2
    assert {path.suffix for path in folder.glob("[!.]*")} in ({".db"}, {".journal"})


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("/postgres?", "/other?", 'database "other"'),
        ("ablate@", "somebody@", "password"),
        ("127.0.0.1", "host.invalid", "resolve"),
        ("127.0.0.1:", "127.0.0.1:1", "port"),
        ("?", "?no_such_option=1&", "no_such_option"),
    ],
)
def test_what_cannot_be_opened_is_reported_in_one_line(old, new, expected, server, opened) -> None:
    url = server.url.replace(old, new)
    with pytest.raises(UserError, match=told(expected)) as mistake:
        opened(url)
    assert str(mistake.value).startswith("--storage: ")
    assert "\n" not in str(mistake.value)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UserError, match=r"psycopg.*transformer-ablations\[postgres\]"):
        opened(URL)


def test_a_wrong_password_is_reported_and_not_shown(server: Server) -> None:
    environment = {"ABLATE_STORAGE": server.with_password.replace(PASSWORD, SECRET)}
    with pytest.raises(UserError, match="password authentication failed") as mistake:
        open_storage(storage_spec(None, GRID, environment))
    assert SECRET not in str(mistake.value)


@pytest.mark.slow
def test_several_processes_may_use_an_empty_database_first(spec_of, opened: Opened) -> None:
    """Optuna alone dies of it."""
    code = "optuna.create_study(storage=open_storage(spec), study_name='s', load_if_exists=True)"
    spec = spec_of("postgresql")
    several(code, spec, count=3)
    assert new_study(opened(spec), "s").trials == []


def test_a_writer_that_is_killed_in_a_line_leaves_no_half_and_no_lock(spec_of, opened, capsys):
    spec = spec_of("journal")
    storage = opened(spec)
    study = new_study(storage, cells=1)
    code = (
        "import os, signal\n"
        "storage = open_storage(spec)\n"
        "storage._backend._lock.acquire()\n"
        "open(spec.journal, 'ab').write(b'{\"op_code\":6,\"wor')\n"
        "print('half', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert several(code, spec, 1) == ["half\n"]
    assert len(study.get_trials()) == 1  # a reader does not mind
    study.enqueue_trial({})
    assert "a torn last" in capsys.readouterr().out
    assert len(new_study(opened(spec)).trials) == 2


# Over 5 s: PostgreSQL restarts while cells run.
@pytest.mark.slow
def test_supervisors_share_a_database_that_restarts(world, server, tmp_path_factory) -> None:
    """And leave no trace of its password; one cell fails, so that its error is written too."""
    empty(server)
    world.environment["ABLATE_STORAGE"] = server.with_password
    world.write(seeds=2, delay=0.2, axes={"data.behaviour": ["ok", "crash"]})
    outputs = [tmp_path_factory.mktemp("shown") / "stdout" for _ in range(2)]
    handles = [path.open("w") for path in outputs]
    pair = [
        subprocess.Popen(  # a process that is forked has the arguments of its parent
            [sys.executable, *world.arguments()],
            env=world.environment,
            stdout=handle,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for handle in handles
    ]
    for handle in handles:
        handle.close()

    opened: set[int] = set()

    def both_run_cells() -> bool:
        """A supervisor that has opened the storage runs cells; it has other children from its first
        moment on."""
        cells = {int(line[3]) for line in world.lines("start")}
        opened.update(
            process.pid
            for process in pair
            if cells & {each.pid for each in psutil.Process(process.pid).children(recursive=True)}
        )
        return len(opened) == len(pair)

    world.wait_for(lambda: both_run_cells() and world.lines("end"), seconds=120)
    server.stop()
    shown = [word for each in world.processes() for word in each.cmdline()]
    assert any("stand_in.py" in word for word in shown)
    outage = "the study is caught up later"
    world.wait_for(lambda: all(outage in path.read_text() for path in outputs), seconds=120)
    server.start()
    for process, path in zip(pair, outputs, strict=True):
        shown += process.communicate(timeout=120)[1:]
        assert process.returncode == 0, shown[-1] + path.read_text()
    said = [path.read_text() for path in outputs]
    assert all(out.count(outage) == out.count("ABLATE_STORAGE: ") == 1 for out in said)
    shown += said
    storage = open_storage(storage_spec(server.url, GRID, NOWHERE))
    study = optuna.load_study(study_name=world.plan().study, storage=storage)
    states = Counter(trial.state.name for trial in study.get_trials(deepcopy=False))
    close_storage(storage)
    assert states == {"COMPLETE": 8, "FAIL": 8}
    assert sum(run.state == "failed" for run in world.runs().values()) == 8
    assert sum(run.state == "done" for run in world.runs().values()) == 8
    assert len(world.lines("start")) == 16
    assert not [word for word in shown if PASSWORD in word]
    files = [path for path in world.root.rglob("*") if path.is_file()]
    assert "result.json" in {path.name for path in files}
    assert [path for path in files if PASSWORD.encode() in path.read_bytes()] == []
    world.assert_nothing_left()
