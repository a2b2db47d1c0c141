"""`sbatch`, `srun` and `scontrol` without a cluster, as strict about their arguments as SLURM.

The options and forms are those of the manual pages of SLURM 22.05; all others are refused in
SLURM's words. `install(folder)` makes the three commands; records of their calls are beside them.
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import NoReturn

JOB = "4242"

ANY = r".+"
NAME = r"[^,\s]+(,[^,\s]+)*"
NUMBER = r"[1-9]\d*"
SIZE = r"\d+[KMGT]?"
TIME = r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}"
GPUS = rf"([\w.-]+:)?{NUMBER}(,([\w.-]+:)?{NUMBER})*"
SIGNAL = r"(R:|B:)?([A-Z][A-Z0-9]*|\d+)(@\d{1,5})?"
MAIL = "NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT(_[589]0)?|ARRAY_TASKS"

# The form of an option's value; None for options without a value.
COMMON: dict[str, str | None] = {
    "account": NAME,
    "chdir": ANY,
    "comment": ANY,
    "constraint": ANY,
    "contiguous": None,
    "cpus-per-gpu": NUMBER,
    "cpus-per-task": NUMBER,
    "dependency": ANY,
    "error": ANY,
    "exclude": NAME,
    "export": ANY,
    "gpus": GPUS,
    "gpus-per-node": GPUS,
    "gpus-per-task": GPUS,
    "gres": NAME,
    "hold": None,
    "job-name": ANY,
    "licenses": NAME,
    "mail-type": rf"({MAIL})(,({MAIL}))*",
    "mail-user": NAME,
    "mem": SIZE,
    "mem-per-cpu": SIZE,
    "mem-per-gpu": SIZE,
    "nodelist": ANY,
    "nodes": rf"{NUMBER}(-{NUMBER})?",
    "ntasks": NUMBER,
    "ntasks-per-node": NUMBER,
    "open-mode": "append|truncate",
    "output": ANY,
    "overcommit": None,
    "oversubscribe": None,
    "partition": NAME,
    "prefer": ANY,
    "qos": NAME,
    "quiet": None,
    "reservation": NAME,
    "signal": SIGNAL,
    "time": TIME,
    "time-min": TIME,
    "tmp": SIZE,
    "wckey": NAME,
}
SBATCH = COMMON | {
    "array": r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%[1-9]\d*)?",
    "begin": ANY,
    "no-requeue": None,
    "parsable": None,
    "requeue": None,
    "test-only": None,
    "wait": None,
}
SRUN = COMMON | {
    "cpu-bind": NAME,
    "exact": None,
    "kill-on-bad-exit": "[01]",
    "label": None,
    "overlap": None,
    "unbuffered": None,
}
# The value of these options may be omitted.
OPTIONAL = {"exclusive": "user|mcs", "nice": r"-?\d+", "no-kill": "off"}
EXCLUSIVE = {"mem", "mem-per-cpu", "mem-per-gpu"}
VARIABLES = {"SBATCH_ARRAY_INX": "array", "SBATCH_MEM_PER_NODE": "mem", "SBATCH_TIMELIMIT": "time"}


def install(folder: Path) -> None:
    """Make executables of the three names in `folder`."""
    folder.mkdir(parents=True)
    for name in ("sbatch", "srun", "scontrol"):
        path = folder / name
        path.write_text(f"#!{sys.executable} -S\n{Path(__file__).read_text()}")
        path.chmod(0o755)


def told(folder: Path, name: str) -> list[dict]:
    """The arguments of each call of the command `name`."""
    record = folder / f"{name}.json"
    lines = record.read_text().splitlines() if record.exists() else []
    return [json.loads(line) for line in lines]


def main() -> None:
    name = Path(sys.argv[0]).name
    {"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[name](sys.argv[1:])


def sbatch(words: list[str]) -> None:
    given, rest = options("sbatch", words, SBATCH)
    if len(rest) != 1:
        fail("sbatch: error: expected one script")
    script = Path(rest[0])
    if not script.is_file():
        fail(f"sbatch: error: Unable to open file {script}")
    found, _ = options("sbatch", directives(script), SBATCH)
    for variable, value in os.environ.items():
        if variable.startswith("SBATCH_"):
            key = variable.removeprefix("SBATCH_").lower().replace("_", "-")
            found[VARIABLES.get(variable, key)] = value
    found |= given
    partition = found.get("partition")
    if partition == "nowhere":
        error = "Batch job submission failed: Invalid partition name specified"
        fail(f"sbatch: error: invalid partition specified: {partition}\nsbatch: error: {error}", 1)
    if len(EXCLUSIVE & found.keys()) > 1:
        fail("sbatch: error: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.")
    number, _, seconds = (found.get("signal") or "").rpartition(":")[2].partition("@")
    if seconds and (int(seconds) > 65535 or number not in ("USR1", "USR2", "TERM", "INT", "10")):
        fail("sbatch: error: Invalid --signal specification")
    log = Path(filename(found["output"] or ""))
    if not log.parent.is_dir():  # SLURM accepts the job, which then fails without a message
        fail(f"sbatch stand-in: no folder for {log}")
    keep({"options": found, "environment": dict(os.environ), "script": script.read_text()})
    print(f"{JOB};cluster" if "parsable" in given else f"Submitted batch job {JOB}")


def srun(words: list[str]) -> NoReturn:
    found, command = options("srun", words, SRUN)
    if not command:
        fail("srun: fatal: No command given to execute.")
    if "SLURM_JOB_ID" not in os.environ:
        fail("srun: error: Unable to allocate resources: no job")
    if len({"SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE"} & os.environ.keys()) > 1:
        fail("srun: fatal: SLURM_MEM_PER_CPU and SLURM_MEM_PER_NODE are mutually exclusive.")
    keep({"options": found, "command": command})
    if sys.platform == "linux":
        bind_to_cpus(int(found.get("cpus-per-task") or 1))
    # The environment of a step, also for programs without MPI.
    of_a_step = {"STEP_ID": "0", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    os.environ |= {f"SLURM_{key}": value for key, value in of_a_step.items()}
    os.environ |= {"PMI_RANK": "0", "PMI_SIZE": "2", "PMIX_RANK": "0", "PMI_FD": "7"}
    os.execvp(command[0], command)  # so the step's exit code and process are those of the command


def bind_to_cpus(count: int) -> None:
    """Give this process `count` CPUs, if possible other ones for each task of the array."""
    cpus = sorted(os.sched_getaffinity(0))
    first = count * int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
    os.sched_setaffinity(0, {cpus[each % len(cpus)] for each in range(first, first + count)})


def scontrol(words: list[str]) -> None:
    action, *rest = words
    jobs = rest[1:] if rest[0] == "Incomplete" else rest
    if action != "requeue" or len(jobs) != 1:
        fail(f"scontrol: invalid keyword: {' '.join(words)}")
    if not re.fullmatch(r"\d+(_\d+)?(,\d+(_\d+)?)*", jobs[0]):
        fail(f"Invalid job id specified for job {jobs[0]}")
    keep({"words": words})


def options(
    command: str, words: list[str], known: dict[str, str | None]
) -> tuple[dict[str, str | None], list[str]]:
    """Read long options until the first other word, as getopt does with `+`."""
    found: dict[str, str | None] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        key, given, value = word.removeprefix("--").partition("=")
        form = known.get(key) or OPTIONAL.get(key)
        if form is not None and not given and key not in OPTIONAL and rest:
            given, value = "=", rest.pop(0)
        if not word.startswith("--") or (key not in known and form is None):
            fail(f"{command}: unrecognized option '{word}'\nTry \"{command} --help\"")
        if form is None and given:
            fail(f"{command}: option '--{key}' doesn't allow an argument")
        if form is not None and not given and key not in OPTIONAL:
            fail(f"{command}: option '--{key}' requires an argument")
        if form is not None and given and not re.fullmatch(form, value):
            fail(f"{command}: error: Invalid --{key} specification")
        found[key] = value if given else None
    return found, rest


def directives(script: Path) -> list[str]:
    """The words of the #SBATCH lines, which end at the first line that is not a comment."""
    lines = script.read_text().splitlines()
    if not lines or not re.match(r"#!\s*/", lines[0]):
        fail("sbatch: error: This does not look like a batch script.")
    words: list[str] = []
    for line in lines:
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
    return words


def filename(pattern: str) -> str:
    """A name of a file for task 0 of the array."""
    if "\\" in pattern:
        return pattern.replace("\\", "")
    values = {"%": "%", "A": JOB, "a": "0", "j": JOB, "x": "name", "u": "user", "N": "host"}
    return re.sub(r"%\d*(.)", lambda match: values[match[1]], pattern)


def keep(call: dict) -> None:
    """Append a call to the record of this command."""
    record = Path(sys.argv[0]).with_suffix(".json")
    with record.open("a") as file:
        file.write(json.dumps(call) + "\n")


def fail(message: str, code: int = 255) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
