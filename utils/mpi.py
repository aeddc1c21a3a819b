"""Processes that train one agent together: how many there are, and averages over them.

Every process ("rank") runs the same program on its share of the environments. Gradients
(utils/optim.py) and statistics are averaged over ranks, so P ranks with 1/P of each batch take the
same step as one process with the whole batch. A single process never imports MPI.
"""

import functools
import os

import torch
from torch import Tensor, nn

# How many processes there are, by --num-procs or mpiexec. Slurm's PMIx tells the rank alone.
SIZES = ("PLAINRL_PROCS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def launched() -> int:
    """Return how many processes the launcher says that it has started; 0 if it does not say."""
    sizes = [int(os.environ[name]) for name in SIZES if name in os.environ]
    return sizes[0] if sizes else 0 if "PMIX_RANK" in os.environ else 1


@functools.cache
def comm():
    """Return MPI's communicator of all ranks, or None if no launcher has started several."""
    if launched() == 1:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


def rank() -> int:
    """Return this process's number, from 0 to size() - 1."""
    return comm().Get_rank() if comm() else 0


def size() -> int:
    """Return how many processes train together."""
    return comm().Get_size() if comm() else 1


def say(line: str) -> None:
    """Print on rank 0, at once."""
    if rank() == 0:
        print(line, flush=True)


say_once = functools.cache(say)  # the same line only once in a process


def share(total: int) -> int:
    """Return this rank's part of a total, which the ranks divide equally (`Run` checks it)."""
    return total // size()


def average(tensor: Tensor) -> Tensor:
    """Replace a float32 or float64 tensor, in place, by its mean over ranks, and return it."""
    if size() == 1:
        return tensor
    from mpi4py import MPI

    host = tensor.detach().cpu().contiguous()  # MPI reads host memory without gaps
    comm().Allreduce(MPI.IN_PLACE, host.numpy())
    tensor.detach().copy_(host.div_(size()))
    return tensor


def moments(rows: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return count, mean and variance (ddof 0) of the rows [B, ...] of all ranks, in float64.

    Each rank sums around its own mean: around zero, a large mean would drown a small variance.
    """
    rows = rows.double()
    mean, var = rows.mean(0), rows.var(0, correction=0)
    if size() == 1:
        return len(rows), mean, var
    parts = gather((len(rows), mean.cpu().numpy(), var.cpu().numpy()))  # tensors take 0.7 ms
    count = sum(n for n, _, _ in parts)
    mean = sum(n / count * part for n, part, _ in parts)
    var = sum(n / count * (part_var + (part - mean) ** 2) for n, part, part_var in parts)
    return count, *(torch.as_tensor(part, device=rows.device) for part in (mean, var))


class RunningStats(nn.Module):
    """Running mean and variance of all rows [*shape] that `update` has had, on all ranks.

    Buffers in float64, so they are part of a state dict. At first `mean` is 0 and `var` is 1.
    """

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    def normalize(self, x: Tensor) -> Tensor:
        """clip((x - mean) / sqrt(var + 1e-8), -10, 10): early on, a rare value can be huge."""
        return ((x.double() - self.mean) / torch.sqrt(self.var + 1e-8)).clamp(-10, 10).float()

    def scale(self, x: Tensor) -> Tensor:
        """clip(x / sqrt(var + 1e-8), -10, 10): unlike `normalize`, it keeps the sign."""
        return (x / torch.sqrt(self.var + 1e-8)).clamp(-10, 10).float()

    def update(self, rows: Tensor) -> None:
        """Merge the moments of rows [B, *shape] into the running ones (Chan et al. 1979)."""
        count, mean, var = moments(rows)  # of the rows of all ranks
        self.count += count
        new = count / self.count  # weight of the new rows among all rows so far
        delta = mean - self.mean
        self.var.copy_((1 - new) * self.var + new * var + new * (1 - new) * delta**2)
        self.mean += new * delta


def gather(value) -> list:
    """Return every rank's plain object, in the order of ranks, on every rank."""
    return [value] if size() == 1 else comm().allgather(value)
