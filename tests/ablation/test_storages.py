"""Storages by URL: what is read from one, how they are opened, and when they went away."""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
import psycopg
import pytest
from optuna.storages import BaseStorage, fail_stale_trials
from optuna.trial import TrialState
from sqlalchemy import exc, text

from lightning_app.ablation.queue.storages import (
    StorageSpec,
    close_storage,
    is_outage,
    open_storage,
    reason,
    storage_spec,
)
from lightning_app.errors import UserError
from tests.postgres import ROOT, Server, serve

pytestmark = pytest.mark.xdist_group("storages")  # what they share is made once

NOWHERE: dict[str, str] = {}
SECRET = "correct-horse"
URL = "postgresql://ablate@db:5433/ablate"


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("storage") / "db") as server:
        yield server


@pytest.fixture
def server(one_server: Server) -> Server:
    if not one_server.running:  # after a failed test
        one_server.start_again()
    return one_server


Opened = Callable[..., Any]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens storages, which are closed when the test has ended."""
    storages: list[BaseStorage] = []

    def call(spec: StorageSpec | str, lost_after: float = 120.0) -> BaseStorage:
        if isinstance(spec, str):
            spec = storage_spec(spec, Path("nowhere"), NOWHERE)
        storages.append(open_storage(spec, lost_after))
        return storages[-1]

    yield call
    for storage in storages:
        close_storage(storage)


def new_study(storage: BaseStorage, name: str, cells: int = 0) -> optuna.Study:
    study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
    for _ in range(cells):
        study.enqueue_trial({})
    return study


def several(code: str, url: str, count: int) -> list[str]:
    """Run `code` in `count` processes that are held until all have done their imports."""
    head = (
        "import sys; from pathlib import Path; import optuna, psycopg\n"
        "from optuna.trial import TrialState\n"
        "from lightning_app.ablation.queue.storages import open_storage, storage_spec\n"
        "spec = storage_spec(sys.argv[1], Path('nowhere'), {})\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", head + code, url],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ended = [process.communicate(timeout=120) for process in processes]
    assert [error for _, error in ended] == [""] * count
    return [output for output, _ in ended]


@pytest.mark.parametrize(
    ("text", "kind", "url"),
    [
        (None, "journal", "grid"),
        ("journal", "journal", "grid"),
        (URL, "postgresql", URL),
        ("postgres://ablate@db/ablate", "postgresql", "postgresql://ablate@db/ablate"),
        ("postgresql+psycopg://db/ablate", "postgresql", "postgresql://db/ablate"),
        ("postgresql://a%40b@[::1]:5/x", "postgresql", "postgresql://a%40b@[::1]:5/x"),
        (f"{URL}?sslmode=require", "postgresql", URL),
        ("sqlite:///study.db", "sqlite", "sqlite:///study.db"),
    ],
)
def test_each_kind_is_read(text: str | None, kind: str, url: str) -> None:
    spec = storage_spec(text, Path("grid"), NOWHERE)
    assert (spec.kind, spec.url, spec.shown) == (kind, url, url)
    assert spec.several == (kind == "postgresql")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "found nothing"),
        ("journl", "found 'journl'"),
        ("mysql://user@db/x", "found 'mysql'"),
        (f"ablate:{SECRET}@db", "found 'something else'"),
        (f"mysql://user:{SECRET}@db/x", "found 'mysql'"),
        (f"postgresql://ablate:{SECRET}@db/x", "list of processes"),
        (f"postgresql://ablate@db/x?password={SECRET}", "list of processes"),
        (f"postgresql://ablate@db/x?sslpassword={SECRET}", "list of processes"),
        (f"postgresql://ablate:p@{SECRET}@db/x", "%40"),
        (f"postgresql://ablate:{SECRET}@db:port/x", "cannot be read"),
        ("postgresql://db/x?sslmode=require&sslmode=allow", "'sslmode' is given twice"),
        ("postgresql://db/x?passfile=/nowhere/pgpass", "/nowhere/pgpass: No such file"),
        ("grpc://node7:13000", "found 'grpc'"),
        ("sqlite://", "sqlite:///FILE and nothing else"),
        ("sqlite:///:memory:", "sqlite:///FILE and nothing else"),
        ("sqlite:///study.db?mode=ro", "sqlite:///FILE and nothing else"),
        ("sqlite:////nowhere/study.db", "/nowhere: no such folder"),
    ],
)
def test_a_mistake_is_reported_without_the_password(text: str, expected: str) -> None:
    with pytest.raises(UserError) as mistake:
        storage_spec(text, Path("grid"), NOWHERE)
    assert expected in str(mistake.value)
    assert str(mistake.value).startswith("--storage: ")
    assert SECRET not in str(mistake.value)


def test_the_environment_is_asked_where_the_command_line_is_silent() -> None:
    environment = {"ABLATE_STORAGE": URL}
    assert storage_spec(None, Path("grid"), environment).url == URL
    assert storage_spec("sqlite:///a.db", Path("grid"), environment).kind == "sqlite"
    assert storage_spec("journal", Path("grid"), environment).kind == "journal"
    assert storage_spec(None, Path("grid"), {"ABLATE_STORAGE": ""}).kind == "journal"
    with pytest.raises(UserError, match="ABLATE_STORAGE: expected journal"):
        storage_spec(None, Path("grid"), {"ABLATE_STORAGE": "elsewhere"})


@pytest.mark.parametrize("part", [f"ablate:{SECRET}@db/x", f"ablate@db/x?password={SECRET}"])
def test_a_password_of_the_environment_is_taken_and_not_shown(part: str) -> None:
    spec = storage_spec(None, Path("grid"), {"ABLATE_STORAGE": f"postgresql://{part}"})
    assert spec.parameters["password"] == SECRET
    assert SECRET not in f"{spec!r} {spec} {spec.url} {spec.shown}"


def test_a_password_file_must_be_one_that_libpq_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pgpass"
    file.write_text(f"*:*:*:*:{SECRET}\n")
    file.chmod(0o644)
    with pytest.raises(UserError, match="other users can access it; run chmod 600"):
        storage_spec(f"{URL}?passfile={file}", Path("grid"), NOWHERE)
    file.chmod(0o600)
    monkeypatch.chdir(tmp_path)
    for name in (str(file), "pgpass"):
        spec = storage_spec(f"{URL}?passfile={name}", Path("grid"), NOWHERE)
        assert spec.parameters["passfile"] == str(file)
    with pytest.raises(UserError, match="not a file that can be read"):
        storage_spec(f"{URL}?passfile={tmp_path}", Path("grid"), NOWHERE)


@pytest.mark.parametrize("name", ["plain", "{curly} %41 ü"])
@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_a_storage_on_this_disk_keeps_a_study(
    kind: str, name: str, tmp_path: Path, opened: Opened
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    text = None if kind == "journal" else f"sqlite:///{quote(str(folder / 'study.db'))}"
    spec = storage_spec(text, folder / "study.journal", NOWHERE)
    new_study(opened(spec), "kept", cells=2)
    assert len(new_study(opened(spec), "kept").trials) == 2
    assert [path.suffix for path in folder.iterdir()] in ([".db"], [".journal"])


def test_a_database_keeps_a_study_and_heartbeats(server: Server, opened: Opened) -> None:
    storage = opened(server.url, lost_after=20.0)
    new_study(storage, "kept", cells=2)
    assert len(new_study(opened(server.url), "kept").trials) == 2
    assert storage.get_heartbeat_interval() == 5
    assert opened(server.url, lost_after=1.5).get_heartbeat_interval() == 1


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("/ablate?", "/other?", 'database "other"'),
        ("ablate@", "somebody@", 'user "somebody"'),
        ("127.0.0.1", "host.invalid", "failed to resolve host"),
        (":PORT/", ":1/", "Connection refused"),
    ],
)
def test_what_cannot_be_reached_is_reported_in_one_line(
    old: str, new: str, expected: str, server: Server, opened: Opened
) -> None:
    url = server.url.replace(old.replace("PORT", str(server.port)), new)
    with pytest.raises(UserError) as mistake:
        opened(url)
    assert expected in str(mistake.value)
    assert str(mistake.value).startswith(url.partition("?")[0])
    assert server.password not in str(mistake.value)


def test_a_wrong_password_is_reported_and_not_shown(server: Server) -> None:
    bare = server.url.partition("?")[0]
    environment = {"ABLATE_STORAGE": bare.replace("ablate@", f"ablate:{SECRET}@")}
    with pytest.raises(UserError, match="password authentication failed") as mistake:
        open_storage(storage_spec(None, Path("nowhere"), environment), 60.0)
    assert SECRET not in str(mistake.value)
    assert SECRET not in repr(mistake.value.__cause__)


def test_several_processes_may_use_an_empty_database_first(server: Server, opened: Opened) -> None:
    """Optuna alone dies of it: pitfall O8."""
    code = "optuna.create_study(storage=open_storage(spec), study_name='s', load_if_exists=True)"
    for _ in range(2):
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        several(code, server.url, count=4)
        assert new_study(opened(server.url), "s").trials == []


def test_one_of_several_processes_wins_each_trial(server: Server, opened: Opened) -> None:
    """Claims as the supervisor makes them; pitfall O7 is what SQLite does here."""
    cells = 20
    code = (
        "storage = open_storage(spec)\n"
        "study = optuna.load_study(study_name=spec.kind, storage=storage)\n"
        "for trial in study.get_trials(deepcopy=False):\n"
        "    if storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):\n"
        "        print(trial.number)\n"
    )
    new_study(opened(server.url), "postgresql", cells)
    winners = "".join(several(code, server.url, 8)).split()
    assert sorted(map(int, winners)) == list(range(cells))


def test_a_trial_without_heartbeats_is_lost_and_one_with_them_is_not(
    server: Server, opened: Opened
) -> None:
    storage = opened(server.url, lost_after=2)
    study = new_study(storage, "beats", cells=3)
    silent, beating, waiting = (trial._trial_id for trial in study.get_trials())
    for trial in (silent, beating):
        storage.record_heartbeat(trial)
        assert storage.set_trial_state_values(trial, TrialState.RUNNING)
    storage.record_heartbeat(waiting)
    states = lost(study)
    until = time.monotonic() + 60
    while states == [TrialState.RUNNING, TrialState.RUNNING, TrialState.WAITING]:
        assert time.monotonic() < until
        storage.record_heartbeat(beating)
        time.sleep(0.2)
        states = lost(study)
    assert states == [TrialState.FAIL, TrialState.RUNNING, TrialState.WAITING]


def lost(study: optuna.Study) -> list[TrialState]:
    """Fail the trials that are lost and return the states of all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        fail_stale_trials(study)
    return [trial.state for trial in study.get_trials()]


def test_heartbeats_do_not_depend_on_the_time_zones_of_hosts(
    server: Server, monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> None:
    monkeypatch.setenv("PGTZ", "Asia/Tokyo")
    east = opened(server.url)
    study = new_study(east, "zones", cells=1)
    (trial,) = study.get_trials()
    east.record_heartbeat(trial._trial_id)
    assert east.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
    monkeypatch.setenv("PGTZ", "America/Los_Angeles")
    west = opened(server.url)
    assert lost(new_study(west, "zones")) == [TrialState.RUNNING]
    west.record_heartbeat(trial._trial_id)
    assert lost(new_study(east, "zones")) == [TrialState.RUNNING]


def test_a_restart_of_the_database_is_an_outage_that_passes(server: Server, opened: Opened) -> None:
    storage = opened(server.url)
    study = new_study(storage, "restart", cells=1)
    (trial,) = study.get_trials()
    assert server.stop() == 0
    for call in (
        lambda: study.get_trials(),
        lambda: storage.record_heartbeat(trial._trial_id),
        lambda: storage.set_trial_user_attr(trial._trial_id, "a", 1),
        lambda: storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING),
    ):
        with pytest.raises(Exception) as outage:  # noqa: PT011
            call()
        assert is_outage(outage.value)
        assert "\n" not in reason(outage.value)
        assert server.password not in reason(outage.value)
    with pytest.raises(UserError, match="cannot be used"):
        opened(server.url)
    server.start_again()
    assert storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
    assert [trial.state for trial in study.get_trials()] == [TrialState.RUNNING]


def test_a_crash_of_the_database_is_an_outage_that_passes(server: Server, opened: Opened) -> None:
    """PostgreSQL ends all connections and restarts if one of its processes is killed."""
    storage = opened(server.url)
    study = new_study(storage, "crash", cells=1)
    (trial,) = study.get_trials()
    next(each for each in server.postmaster.children() if "ablate" in each.cmdline()[0]).kill()
    outages = 0
    until = time.monotonic() + 60
    while not claimed(storage, trial._trial_id):
        outages += 1
        assert time.monotonic() < until
        time.sleep(0.1)
    assert outages > 0


def claimed(storage: BaseStorage, trial: int) -> bool:
    """Claim a waiting trial; False where the storage is away."""
    try:
        return storage.set_trial_state_values(trial, TrialState.RUNNING)
    except Exception as error:
        if is_outage(error):
            return False
        raise


def test_other_errors_are_no_outages(server: Server, opened: Opened) -> None:
    storage = opened(server.url)
    study = new_study(storage, "errors", cells=1)
    (trial,) = study.get_trials()
    storage.set_trial_state_values(trial._trial_id, TrialState.COMPLETE, [1.0])
    for call in (
        lambda: storage.get_study_id_from_name("no such study"),
        lambda: storage.set_trial_user_attr(trial._trial_id, "a", 1),
        lambda: storage.set_trial_user_attr(10**6, "a", 1),
        lambda: optuna.create_study(storage=storage, study_name=study.study_name),
    ):
        with pytest.raises(Exception) as error:  # noqa: PT011
            call()
        assert not is_outage(error.value)
    assert not is_outage(UserError("a mistake"))


def test_a_link_that_breaks_inside_a_transaction_is_an_outage(tmp_path: Path) -> None:
    """Ended from outside between two statements, SQLAlchemy names another error than the loss."""
    with serve(tmp_path / "pg") as server:
        storage = open_storage(storage_spec(server.url, tmp_path, {}))
        try:
            engine = storage.engine  # pyright: ignore[reportAttributeAccessIssue]
            with engine.connect() as link:
                pid = link.scalar(text("select pg_backend_pid()"))
                with engine.connect() as other:
                    other.execute(text(f"select pg_terminate_backend({pid})"))
                found = []
                for _ in range(2):
                    with pytest.raises(exc.SQLAlchemyError) as error:
                        link.scalar(text("select 1"))
                    found.append(error.value)
        finally:
            close_storage(storage)
    assert isinstance(found[1], exc.PendingRollbackError)
    assert [is_outage(each) for each in found] == [True, True]
