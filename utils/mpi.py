"""Several processes that take one step together, through MPI.

Every process ("rank") runs the same program on its share of the environments; gradients and
statistics are averaged, so P ranks with 1/P of each batch take the step that one process with
the whole batch would take. A single process never touches MPI: mpi4py is imported only where a
launcher says that there are others.

    mpi.launch(cfg)              --num-procs P: this program again, P times, under mpiexec
    flat = mpi.flatten(agent)    all parameters in one vector, equal on all ranks
    optimizer = mpi.Adam(flat)
    loss.backward()
    mpi.average(flat.grad)       one message a step
    optimizer.step(lr)
"""

import hashlib

import numpy as np
import torch
from torch import nn
from torch.optim.adam import adam

from utils.compiled import compiled
from utils.ranks import UsageError, comm, launch, rank, say, size

# What an algorithm file and the other helpers find here, with the names imported above.
__all__ = ["Adam", "UsageError", "average", "barrier", "bcast", "check_equal", "choose_device",
           "comm", "compiled", "flatten", "gather", "launch", "moments", "rank", "say", "seed",
           "share", "size", "together"]


def share(total: int, name: str, procs: int = 1) -> int:
    """This rank's part of the setting `name`; UsageError if it does not divide by the ranks.

    With `procs` (`--num-procs`) the process that will launch them refuses already.
    """
    ranks = max(size(), procs)
    if total % ranks:
        flag = "--" + name.replace("_", "-")
        raise UsageError(f"{flag} is {total}; it takes a multiple of the {ranks} processes")
    return total // ranks


def choose_device(cfg, images: bool) -> torch.device:
    """`--device`: auto takes CUDA for images where there is one; says so in one line.

    Sets the threads of `--torch-threads` too.
    """
    torch.set_num_threads(cfg.torch_threads)
    # The C library of Linux gives back what a step has freed, and the next step waits for each page
    # of it; once a block of this size was freed, twice as much is kept. SAC and TD3 feel it.
    torch.empty(30 << 20, dtype=torch.uint8)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cfg.device == "cuda" and gpus == 0:
        raise UsageError("--device cuda: PyTorch finds no CUDA GPU here; it takes auto or cpu")
    if cfg.device == "cuda" or (cfg.device == "auto" and images and gpus > 0):
        device = torch.device("cuda", rank() % gpus)
    else:
        device = torch.device("cpu")
    say(f"device: {device.type} (--device {cfg.device})")
    return device


def seed(run_seed: int, stream: int, step: int = 0) -> int:
    """A seed for one stream of random numbers of this rank, independent of all others.

    Streams: 0 PyTorch, 1 training environments, 2 evaluation. A vector environment adds 0, 1, ...
    to it, one for each of its environments. `step` is where a resumed run goes on.
    """
    sequence = np.random.SeedSequence([run_seed, rank()], spawn_key=(stream, step))
    return int(sequence.generate_state(1)[0]) >> 1  # room to add in 32 bits


def flatten(module: nn.Module) -> nn.Parameter:
    """All parameters of `module` as one vector, rank 0's values on every rank, `.grad` zero.

    Each parameter becomes a view of the vector and its `.grad` a view of the vector's: one
    message, one norm and one optimizer call serve them all. The traps:
    - flatten last, after `.to(device)`: a module that is moved, converted or copied has
      parameters of its own again, and the optimizer moves a vector that nobody reads;
    - never `zero_grad()`, of optimizer or module, which drops the gradients' views:
      `flat.grad.zero_()`;
    - while a function of `--compile` runs there are no such views (utils/compiled.py).
    """
    params = list(module.parameters())
    values = torch.cat([param.detach().flatten() for param in params])
    flat = nn.Parameter(values.copy_(torch.from_numpy(bcast(values.cpu().numpy()))))
    flat.grad = torch.zeros_like(flat)
    sizes = [param.numel() for param in params]
    for param, value, grad in zip(params, flat.data.split(sizes), flat.grad.split(sizes)):
        param.data, param.grad = value.view_as(param), grad.view_as(param)
    return flat


class Adam:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980, Algorithm 1) on the vector of `flatten`.

    The arithmetic is PyTorch's own, fused. What is left out is the bookkeeping of torch.optim.Adam,
    which on one small vector takes several times longer than the step, and a second to import.
    """

    def __init__(self, flat: nn.Parameter, eps: float = 1e-8):
        self.flat, self.eps = flat, eps
        self.mean, self.square = torch.zeros_like(flat.data), torch.zeros_like(flat.data)
        self.steps = torch.zeros((), device=flat.device)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Moves `flat` against `flat.grad`."""
        adam([self.flat], [self.flat.grad], [self.mean], [self.square], [], [self.steps],
             fused=True, lr=lr, beta1=0.9, beta2=0.999, eps=self.eps, weight_decay=0.0,
             amsgrad=False, maximize=False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean, "square": self.square, "steps": self.steps}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in self.state_dict().items():
            value.copy_(state[name])


def average(tensor: torch.Tensor) -> torch.Tensor:
    """Replace a float32 or float64 tensor, in place, by its mean over ranks; it is returned."""
    if size() == 1:
        return tensor
    host = tensor.detach().cpu().contiguous()  # MPI reads host memory without gaps
    comm().Allreduce(host.numpy().copy(), host.numpy())
    tensor.detach().copy_(host.div_(size()))
    return tensor


def moments(rows: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Count, mean and variance (ddof 0) of the rows [B, ...] of all ranks, in float64.

    Each rank sums about its own mean: about zero, a large mean would drown a small variance.
    """
    rows = rows.double()
    mean, var = rows.mean(0), rows.var(0, correction=0)
    if size() == 1:
        return len(rows), mean, var
    parts = gather((len(rows), mean.cpu(), var.cpu()))
    count = sum(part[0] for part in parts)
    mean = sum(n / count * part for n, part, _ in parts)
    var = sum(n / count * (part_var + (part - mean).square()) for n, part, part_var in parts)
    return count, mean.to(rows.device), var.to(rows.device)


def gather(value) -> list:
    """Every rank's plain object, in the order of ranks, on every rank."""
    return [value] if size() == 1 else comm().allgather(value)


def bcast(value):
    """Rank 0's plain object, on every rank."""
    return value if size() == 1 else comm().bcast(value)


def together(action, *args):
    """Return `action(*args)`, or fail on every rank if it failed on one; None: nothing to do here.

    A rank that failed alone would leave the others waiting for its next message.
    """
    result = failure = None
    try:
        result = action(*args) if action else None
    except (Exception, UsageError) as error:
        failure = error
    told = gather(failure and (isinstance(failure, UsageError), str(failure)))
    if failure:
        raise failure
    for refused, message in filter(None, told):
        raise (UsageError if refused else OSError)(message)
    return result


def barrier() -> None:
    """Wait until every rank is here."""
    if size() > 1:
        comm().Barrier()


def check_equal(flat: torch.Tensor) -> None:
    """RuntimeError naming the ranks whose parameters differ from rank 0's, in any bit."""
    sums = gather(hashlib.sha256(flat.detach().cpu().numpy().tobytes()).digest())
    others = [k for k, digest in enumerate(sums) if digest != sums[0]]
    if others:
        raise RuntimeError(f"the parameters of ranks {others} differ from those of rank 0")
