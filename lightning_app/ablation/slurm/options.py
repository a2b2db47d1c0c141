"""What `ablate submit` may ask of sbatch: values checked, as its manual page says, before it runs.

Options are those of SLURM 19.05 to 24.05. Each function raises `UserError`.
"""

import re
from collections.abc import Iterable

from lightning_app.errors import UserError, nearest

NOTICE = 180  # seconds between the signal and the end of a job's time
_EARLY = 60  # seconds by which SLURM may send the signal too soon

# The options of sbatch that this command leaves to its user.
_VALUED = """
    acctg-freq batch bb bbf begin cluster-constraint clusters comment container container-id
    core-spec cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot dependency distribution
    error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gres gres-flags
    hint input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem-bind
    mem-per-cpu mem-per-gpu mincpus network nodefile nodelist power prefer priority profile
    reservation segment sockets-per-node switches thread-spec threads-per-core time-min tmp
    tres-bind tres-per-task uid wait-all-nodes wckey
"""
_OPTIONAL = "exclusive get-user-env nice no-kill oom-kill-step propagate resv-ports"
_FLAGS = """
    contiguous hold ignore-pbs overcommit oversubscribe reboot spread-job stepmgr use-min-nodes
"""
# Those that it decides about, and where its user says them instead.
_SAID_ELSEWHERE = {
    "array": "--array and --concurrent",
    "partition": "--partition",
    "time": "--time",
    "account": "--account",
    "qos": "--qos",
    "constraint": "--constraint",
    "gpus": "--gpus",
    "gpus-per-node": "--gpus",
    "cpus-per-task": "--cpus",
    "mem": "--mem",
    "no-requeue": "--no-requeue",
    "test-only": "--dry-run",
}
_FIXED = """
    chdir gpus-per-socket gpus-per-task help nodes ntasks ntasks-per-core ntasks-per-gpu
    ntasks-per-node ntasks-per-socket open-mode output parsable quiet requeue signal usage verbose
    version wait wrap
"""


def array_of(array: int, concurrent: int | None) -> str:
    """The indices of `array` tasks, of which at most `concurrent` run at once."""
    if array < 1:
        raise UserError(f"--array: expected 1 or more supervisors, found {array}")
    limit = count_of("--concurrent", concurrent)
    return f"0-{array - 1}" + (f"%{limit}" if limit else "")


def count_of(option: str, value: int | None) -> str | None:
    if value is not None and value < 1:
        raise UserError(f"{option}: expected 1 or more, found {value}")
    return None if value is None else str(value)


def name_of(option: str, value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise UserError(f"{option}: expected a name, found nothing")
    return value


def time_of(text: str | None) -> str | None:
    """Check a limit of time. SLURM's MM:SS is refused: people mean hours and minutes by it."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d\d))?(?::(\d\d))?", text)
    if match is None:
        raise UserError(f"--time: expected minutes, HH:MM:SS or D-HH:MM:SS, found '{text}'")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    first = first or 0
    if days is not None:
        minutes = 60 * (24 * days + first) + (second or 0)
    elif second is None:
        minutes = first
    elif third is None:
        raise UserError(
            f"--time: SLURM reads '{text}' as minutes and seconds; write {text}:00 for hours and "
            f"minutes, or {first} for minutes"
        )
    else:
        minutes = 60 * first + second
    last = (NOTICE + _EARLY) // 60
    if minutes <= last and (minutes or third or days):  # 0 alone asks for no limit
        raise UserError(
            f"--time: '{text}' is too short: the last {last} minutes of a job are for saving "
            "its state"
        )
    return text


def gpus_of(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"(?:[A-Za-z0-9_.-]+:)?[1-9]\d*", text):
        raise UserError(f"--gpus: expected a number such as 2, or a100:2, found '{text}'")
    return text


def memory_of(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"\d+[KMGT]?", text):
        raise UserError(f"--mem: expected a size such as 32G (K, M, G or T), found '{text}'")
    return text


def further_options(options: Iterable[str]) -> dict[str, str | None]:
    """Read ``KEY=VALUE`` and ``KEY``, each checked against the options of sbatch."""
    valued, optional, flags = _VALUED.split(), _OPTIONAL.split(), _FLAGS.split()
    found: dict[str, str | None] = {}
    for option in options:
        key, given, value = option.strip().removeprefix("--").partition("=")
        if key in _SAID_ELSEWHERE:
            raise UserError(f"--sbatch: {key}: use {_SAID_ELSEWHERE[key]} of this command")
        if key in _FIXED.split():
            raise UserError(f"--sbatch: {key}: this command decides about it")
        known = [*valued, *optional, *flags]
        if key not in known:
            raise UserError(f"--sbatch: '{key}' is no option of sbatch{nearest(key, known)}")
        if key in found:
            raise UserError(f"--sbatch: {key} is given twice")
        if key in flags and given:
            raise UserError(f"--sbatch: {key} takes no value, found '{value}'")
        if not value and (given or key in valued):
            raise UserError(f"--sbatch: {key} needs a value: --sbatch {key}=...")
        found[key] = value if given else None
    return found
