"""The files of `docs/recipes` for Kubernetes and Ray, without either of them."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from conftest import World, wait_for  # pyright: ignore[reportMissingImports]

from benchmarks.chaos_hosts import Host, Job, has_namespaces, open_hosts
from lightning_app.commands.grid import INTERRUPTED
from lightning_app.grids.supervisor import _GRACE
from tests import warm
from tests.small import tiny_config

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes"
CELLS = 4
SLACK = 30.0  # seconds to kill what is left, to put the cells back and to end


@pytest.fixture
def job() -> dict[str, Any]:
    tree = yaml.safe_load((RECIPES / "kubernetes_job.yaml").read_text())
    assert (tree["apiVersion"], tree["kind"]) == ("batch/v1", "Job")
    return tree["spec"]


def action(job: dict[str, Any], code: int) -> str:
    """What Kubernetes does about a pod that ends with `code`: the first rule that fits counts."""
    for rule in job["podFailurePolicy"]["rules"]:
        on = rule.get("onExitCodes", {"values": []})
        if code in on["values"]:
            assert on["operator"] == "In"
            return rule["action"]
    return "Count"


def test_a_pod_is_replaced_only_if_another_one_can_go_on(job: dict[str, Any]) -> None:
    codes = {1: "FailIndex", 2: "FailIndex", INTERRUPTED: "Ignore", 137: "Count"}
    assert {code: action(job, code) for code in codes} == codes
    rules = job["podFailurePolicy"]["rules"]
    evicted = [{"type": "DisruptionTarget", "status": "True"}]
    assert {"action": "Ignore", "onPodConditions": evicted} in rules
    # What the API demands of these fields.
    assert all(("onExitCodes" in rule) != ("onPodConditions" in rule) for rule in rules)
    for values in (rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule):
        assert values == sorted({*values} - {0})
    assert job["completionMode"] == "Indexed"
    assert job["backoffLimitPerIndex"] >= 1
    assert job["completions"] == job["parallelism"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"


def test_a_pod_has_the_time_to_save_its_cells_and_the_volume(job: dict[str, Any]) -> None:
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= _GRACE + SLACK
    (container,) = pod["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    assert mounts["memory"] == "/dev/shm"
    assert container["command"][:2] == ["ablate", "run"]
    paths = [word for word in container["command"] if word.startswith("/")]
    paths += [each["value"] for each in container["env"]]
    assert all(Path(path).is_relative_to(mounts["shared"]) for path in paths)


def write_grid(path: Path, steps: int) -> None:
    trainer = {"max_steps": steps, "val_check_interval": steps, "limit_val_batches": 2}
    base = tiny_config(trainer, width=12, data__tokens_per_batch=128)
    axes = {"seed_everything": list(range(CELLS))}
    path.write_text(yaml.safe_dump({"name": "tiny", "base_config": base, "axes": axes}))


@pytest.mark.slow
def test_pods_share_a_grid_and_one_that_is_stopped_is_replaced(job: dict[str, Any]) -> None:
    """Each pod is a network, a host name and process numbers of its own."""
    if not has_namespaces():
        pytest.skip("network namespaces are not allowed here")
    (container,) = job["template"]["spec"]["containers"]
    with tempfile.TemporaryDirectory() as name:  # short: hosts keep their sockets in it
        root, said = Path(name), Path(name, "log")
        shared = root / "shared"
        shared.mkdir()
        write_grid(shared / "grid.yaml", steps=80)

        def here(word: str) -> str:
            return word.replace("/shared", str(shared))

        def start(host: Host, index: int) -> Job:
            cores = sorted(os.sched_getaffinity(0))
            first = ["taskset", "--cpu-list", str(cores[index % len(cores)])]  # one cell at once
            first += ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
            given = {each["name"]: here(each["value"]) for each in container["env"]}
            # What Kubernetes sets: for the API, for a service named "master", and for the index.
            given |= {"KUBERNETES_PORT": "tcp://10.0.0.1:443", "KUBERNETES_SERVICE_PORT": "443"}
            given |= {"MASTER_PORT": "tcp://10.0.0.9:80", "JOB_COMPLETION_INDEX": str(index)}
            given["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            return host.start([*first, *map(here, container["command"])], said, **given)

        def running() -> int:
            found = shared.glob("experiments/tiny/runs/*/attempts/1/progress.json")
            return sum(not (each.parents[2] / "result.json").exists() for each in found)

        names = ["ablate-0", "ablate-1"]
        with open_hosts(root, names, namespaces=True) as hosts:
            pods = [start(hosts[name], index) for index, name in enumerate(names)]
            wait_for(lambda: running() == 2, lambda: True, said)  # one cell of each pod
            launcher = pods[0].pid
            assert launcher is not None
            psutil.Process(launcher).children()[0].terminate()
            code = pods[0].wait(120.0)
            assert action(job, code) == "Ignore", said.read_text()
            pods[0] = start(hosts[names[0]], 0)
            assert [pod.wait(120.0) for pod in pods] == [0, 0], said.read_text()
        runs = list(shared.glob("experiments/tiny/runs/*"))
        assert len(runs) == CELLS
        assert all((run / "result.json").is_file() for run in runs)
        attempts = sorted(len(list((run / "attempts").iterdir())) for run in runs)
        assert attempts[0] == 1
        assert attempts[-1] == 2


# Over 5 s: four cells of 1 s, which are interrupted and run again.
def test_ray_starts_supervisors_and_stops_them_gently(world: World) -> None:
    world.write(seeds=1, delay=0.1, steps=10)
    path = [world.environment["PYTHONPATH"], str(ROOT / "tests" / "stand_ins")]
    world.environment["PYTHONPATH"] = os.pathsep.join(path)
    words = [str(RECIPES / "ray_job.py"), "2", "8", "1"]
    words += [sys.executable, *world.arguments("nowait", workers=1)]

    def submit() -> warm.Process:
        process = warm.start(words, environment=world.environment, modules=warm.WITHOUT_TORCH)
        world.supervisors.append(process)
        return process

    driver = submit()
    world.wait_for(lambda: len(world.lines("start")) == 2)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(60) == INTERRUPTED
    options = json.loads(driver.printed().splitlines()[0])
    assert options == {"num_cpus": 8, "num_gpus": 1, "scheduling_strategy": "SPREAD"}
    assert world.lines("end") == []
    assert [trial.state.name for trial in world.study().trials].count("FAIL") == 2
    world.assert_nothing_left()
    assert submit().wait(60) == 0
    world.assert_finished()
