"""Run a supervisor on each of HOSTS hosts of a Ray cluster, with all CPUS and GPUS of its host.

    ray job submit --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "180"}}' \
        -- python ray_job.py HOSTS CPUS GPUS \
        ablate run /shared/grid.yaml --experiments /shared/experiments --no-wait

`ray job stop` then waits until the cells have saved their state.
"""

import signal
import subprocess
import sys
import time

import ray

hosts, cpus, gpus = map(int, sys.argv[1:4])
command = sys.argv[4:]


@ray.remote(num_cpus=cpus, num_gpus=gpus, scheduling_strategy="SPREAD")
def supervise() -> int:
    process = subprocess.Popen(command)
    try:
        while process.poll() is None:
            time.sleep(1)  # Ray's interrupt does not end a call that waits
    except KeyboardInterrupt:
        process.terminate()
    return process.wait()


def stop(number: int, frame: object) -> None:
    for task in tasks:
        ray.cancel(task)


ray.init()
tasks = [supervise.remote() for _ in range(hosts)]
signal.signal(signal.SIGTERM, stop)
sys.exit(max(ray.get(tasks)))
