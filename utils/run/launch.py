"""How ranks start, fail together and end together."""

import os
import platform
import shutil
import sys
import traceback

from utils import mpi
from utils.command import leave
from utils.errors import UsageError

# How the names of the variables begin that launchers set.
LAUNCHERS = ("PLAINRL_", "PMI_", "PMIX_", "OMPI_", "MPI_", "MPIEXEC_", "HYDRA_", "HYDI_")


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def on_host() -> tuple[int, int]:
    """Return this rank's number among those on its machine, and their number. All ranks call it."""
    hosts = mpi.gather(platform.node())
    mine = hosts[mpi.rank()]
    return hosts[:mpi.rank()].count(mine), hosts.count(mine)


def clean_env() -> dict[str, str]:
    """Return the environment without a launcher's variables, for a program that is not a rank."""
    return {key: val for key, val in os.environ.items() if not key.startswith(LAUNCHERS)}


def find_mpiexec() -> str | None:
    """Return the path of mpiexec, of the one beside this Python if there is one, or None."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    return shutil.which("mpiexec", path=path)


def start_ranks(procs: int) -> None:
    """Start this command again as `procs` ranks, unless a launcher has started it as a rank.

    This process becomes mpiexec, which passes SIGINT and SIGTERM on to the ranks and ends with
    their exit status.
    """
    if procs == 1 or mpi.launched() != 1:
        return
    if procs > cores():
        raise UsageError(f"--num-procs is {procs}; it takes 1 to {cores()}, the cores that this "
                         "process may use")
    if (mpiexec := find_mpiexec()) is None:
        raise UsageError(f"--num-procs is {procs}, but there is no mpiexec here: pip install mpich")
    command = [mpiexec, "-n", str(procs), sys.executable, *sys.orig_argv[1:]]
    # Inside a Slurm job mpiexec would ask Slurm for machines; fork means this machine.
    env = {"PLAINRL_PROCS": str(procs), "HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
    sys.stdout.flush()
    # A terminal stops a background job that reads from it.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execve(mpiexec, command, clean_env() | env)


def check_ranks(procs: int) -> None:
    """UsageError unless there are as many ranks as the launcher started and --num-procs asks for.

    From here on, an exception that ends one rank ends all. So collective calls need no `try`.
    """
    size, launched = mpi.size(), mpi.launched()
    if launched not in (0, size):
        raise UsageError(f"{launched} processes were started, but MPI connects {size}: this "
                         "mpiexec belongs to another MPI than mpi4py. Use the one beside "
                         f"{sys.executable}, or --num-procs")
    if procs not in (1, size):
        raise UsageError(f"--num-procs is {procs}, but " + (
            f"the launcher started {size}" if size > 1 else "Python runs one process: start "
            f"python -m algos.NAME --num-procs {procs}, or this script by mpiexec -n {procs}"))
    if size > 1:
        sys.excepthook = die


def die(kind, error, trace) -> None:
    """Replaces `sys.excepthook` where there are other ranks."""
    stopped = issubclass(kind, KeyboardInterrupt)
    text = "".join(traceback.format_exception(kind, error, trace))
    leave(text, getattr(error, "status", 130) if stopped else 1)


def from_root(action, *args):
    """Return rank 0's `action(*args)` on every rank, when rank 0 has done it.

    Only rank 0 looks into a folder that it is about to change: a network file system tells the
    other machines for half a minute what they saw first.
    """
    told = action(*args) if mpi.rank() == 0 else None
    return mpi.comm().bcast(told) if mpi.size() > 1 else told
