"""Mean and variance over all processes: of a batch, and running ones."""

import torch
from torch import Tensor, nn

from utils import mpi


def moments(rows: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return count, mean and variance (ddof 0) of the rows [B, ...] of all ranks, in float64.

    Each rank sums around its own mean: around zero, a large mean would drown a small variance.
    """
    rows = rows.double()
    mean, var = rows.mean(0), rows.var(0, correction=0)
    if mpi.size() == 1:
        return len(rows), mean, var
    parts = mpi.gather((len(rows), mean.cpu().numpy(), var.cpu().numpy()))  # tensors take 0.7 ms
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
