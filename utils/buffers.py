"""What replay buffers share: their part of a checkpoint, and whether they fit into memory."""

import math
import os
from pathlib import Path

import torch

from utils import mpi
from utils.errors import UsageError
from utils.run.launch import on_host


class SavedRows:
    """The state dict of a replay buffer: its first `num_stored` rows, and where the next goes.

    columns    the stored arrays, [capacity, ...] each, by name

    The rows are views, since copies would double the memory.
    """

    def state_dict(self) -> dict:
        rows = {name: torch.from_numpy(column[: self.num_stored])
                for name, column in self.columns.items()}
        return {"columns": rows, "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]
        for name, column in state["columns"].items():
            self.num_stored = len(column)
            self.columns[name][: len(column)] = column.numpy()


def check_memory(setting: str, count: int, num_bytes: int) -> None:
    """UsageError if `num_bytes` for `count` samples, of each rank, cannot fit into memory.

    setting    the flag that decides the size, such as "--buffer-size"
    """
    total, size = count * mpi.size(), num_bytes * mpi.size()
    shown = f"{size / 1e9:.2f} GB" if size > 1e8 else f"{size / 1e6:.3g} MB"
    mpi.say(f"replay buffer: {total:,} transitions, {shown} when full")
    need, have = num_bytes * on_host()[1], memory()
    if need > have:
        raise UsageError(f"{setting} is {total}, which takes {need / 1e9:.2f} GB; "
                         f"there are {have / 1e9:.2f} GB of memory")


def memory() -> float:
    """Return how many bytes the machine has, or the container."""
    if os.name != "posix":
        return math.inf  # unknown on Windows
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    text = limit.read_text().strip() if limit.exists() else "max"
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, int(text)) if text.isdecimal() else machine
