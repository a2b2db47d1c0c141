"""The process group of one cell: one process for each device, all on this host."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

_TIMEOUT = timedelta(hours=24)  # the supervisor ends a rank that hangs much earlier


def join_process_group(rank: int, size: int, meeting: Path, accelerator: str) -> None:
    """Make this process rank `rank` of `size`; return when all processes have joined.

    They meet through a file and communicate on the loopback interface, so no port is open to other
    hosts, and no two cells need the same port. Lightning uses the existing group.
    """
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(size)}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    cuda = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{meeting.resolve()}",
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
    )
