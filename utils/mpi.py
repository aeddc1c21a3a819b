"""Ranks: several processes that train one agent together, and optimizers that average over them.

Every process ("rank") runs the same program on its share of the environments. Gradients and
statistics are averaged over ranks, so P ranks with 1/P of each batch take the same step as one
process with the whole batch. A single process never imports MPI.

An algorithm file needs only this much of it: `Adam` or `RMSProp`, `share` for its part of a total,
`moments` and `RunningStats` for statistics over the samples of all ranks, and `compilable`.

`--num-procs P` starts the program again, P times, under mpiexec. On a cluster the user calls
mpiexec, which does the same.
"""

import functools
import hashlib
import os
import shutil
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

# How many ranks there are, and which one this is. --num-procs comes first: MPI must connect as
# many ranks as it promised.
SIZES = ("PLAINRL_PROCS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
LAUNCHERS = ("PLAINRL_", "PMI_", "PMIX_", "OMPI_", "MPI_", "MPIEXEC_", "HYDRA_", "HYDI_")
_size = next((int(os.environ[name]) for name in SIZES if name in os.environ), 1)
_rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0)))

COMPILE = False  # --compile; Run sets it for the duration of a run
COMPILABLE = set()  # the modules that have losses which can be compiled


class UsageError(ValueError):
    """Bad input. The message names the flag, what it got and what it takes."""


# ---- optimizers

Optimizable = nn.Module | nn.Parameter | Iterable[nn.Parameter]


class Optimizer:
    """Takes gradient steps, the same on all ranks.

    of    what it optimizes; of a module, what requires a gradient

    `move(lr)` of a subclass changes the parameters, from `grad`, by its rule.
    The parameters become views of one vector, and their gradients views of another, so one message
    averages over ranks, one call computes the norm and one call takes the step. Create an optimizer
    after `.to(device)`: a module that is moved or copied later has parameters of its own again.
    """

    def __init__(self, of: Optimizable):
        if isinstance(of, nn.Module):
            of = [param for param in of.parameters() if param.requires_grad]
        self.params = [of] if isinstance(of, nn.Parameter) else list(of)
        if any(owner(param) for param in self.params):
            raise ValueError("a parameter belongs to one optimizer only")
        self.flat = torch.cat([param.detach().flatten() for param in self.params])
        self.grad = torch.zeros_like(self.flat)
        sizes = [param.numel() for param in self.params]
        views = zip(self.params, self.flat.split(sizes), self.grad.split(sizes), strict=True)
        for param, value, grad in views:
            param.data = value.view_as(param)
            param.grad = grad.view_as(param)
            param.optimizer = weakref.ref(self)

    def zero_grad(self) -> None:
        """Set all gradients to zero. `loss.backward()` adds to them."""
        self.grad.zero_()

    @torch.no_grad()
    def step(self, lr: float, max_grad_norm: float = 0.0) -> Tensor:
        """Average the gradient over ranks, clip it, and take one step down it.

        lr               learning rate of this step
        max_grad_norm    a longer gradient is scaled to this length; 0 disables clipping

        Return the gradient's norm before clipping, over all ranks.
        """
        average(self.grad)
        norm = torch.linalg.vector_norm(self.grad)
        if max_grad_norm > 0:
            self.grad.mul_((max_grad_norm / (norm + 1e-6)).clamp(max=1))
        self.move(lr)
        return norm

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a state dict into this optimizer, in place."""
        for name, value in self.state_dict().items():
            value.copy_(state[name])


class Adam(Optimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980, Algorithm 1).

    The arithmetic is PyTorch's own fused kernel. It is called without the bookkeeping of
    torch.optim, which would cost 6% of a run of PPO.
    """

    def __init__(self, of: Optimizable, eps: float = 1e-8, beta1: float = 0.9):
        super().__init__(of)
        self.eps = eps
        self.beta1 = beta1
        self.mean = torch.zeros_like(self.flat)
        self.square = torch.zeros_like(self.flat)
        self.steps = torch.zeros((), device=self.flat.device)

    def move(self, lr: float) -> None:
        self.steps.add_(1)
        torch._fused_adam_([self.flat], [self.grad], [self.mean], [self.square], [], [self.steps],
                           lr=lr, beta1=self.beta1, beta2=0.999, eps=self.eps, weight_decay=0.0,
                           amsgrad=False, maximize=False)

    def state_dict(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "square": self.square, "steps": self.steps}


class RMSProp(Optimizer):
    """RMSProp by PyTorch's rule or, with `tf_style`, by that of TensorFlow 1.

        m <- 0.99 m + 0.01 g^2,  m = 0 at first;  step = lr g / (sqrt(m) + eps)      PyTorch
        m <- 0.99 m + 0.01 g^2,  m = 1 at first;  step = lr g / sqrt(m + eps)        TensorFlow 1

    With the same eps = 1e-5 these are different algorithms: where gradients are small, TensorFlow
    divides by at least 3e-3 and PyTorch by at least 1e-5, so its step is up to 300 times as long.
    """

    def __init__(self, of: Optimizable, eps: float = 1e-5, tf_style: bool = False):
        super().__init__(of)
        self.eps = eps
        self.tf_style = tf_style
        self.square = torch.full_like(self.flat, float(tf_style))

    def move(self, lr: float) -> None:
        self.square.lerp_(self.grad.square(), 0.01)
        if self.tf_style:
            root = (self.square + self.eps).sqrt()
        else:
            root = self.square.sqrt() + self.eps
        self.flat.addcdiv_(self.grad, root, value=-lr)

    def state_dict(self) -> dict[str, Tensor]:
        return {"square": self.square}


def owner(param: nn.Parameter) -> Optimizer | None:
    """Return the optimizer that a parameter belongs to, if it is still in use."""
    return getattr(param, "optimizer", lambda: None)()


def flat_gradient(loss_fn: Callable, params: list[nn.Parameter]) -> Callable:
    """Return the function `(*args) -> (loss, its gradient as one vector, metrics, ...)`."""

    def gradient(*args):
        loss, *rest = loss_fn(*args)
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        parts = [torch.zeros_like(param) if grad is None else grad
                 for param, grad in zip(params, grads, strict=True)]
        return loss.detach(), torch.cat([part.flatten() for part in parts]), *rest

    return gradient


def compile_gradient(loss_fn: Callable, params: list[nn.Parameter]) -> Callable:
    """`flat_gradient` as one compiled graph, which draws the same random numbers as eager code."""
    dynamo = torch._dynamo.config
    if hasattr(dynamo, "trace_autograd_ops"):
        dynamo.trace_autograd_ops = True  # torch.autograd.grad is part of the graph
    dynamo.recompile_limit = max(dynamo.recompile_limit, 64)  # for all losses of a process
    options = {"fallback_random": True,  # PyTorch's generator, in the order of the eager calls
               "cpp_wrapper": True,  # calls its products from C++, in a fifth less time
               "cpp.threads": 1}  # else a graph keeps the number of threads that it began with
    return torch.compile(flat_gradient(loss_fn, params), dynamic=False,  # shapes never change
                         options=options)


def compilable(loss_fn: Callable) -> Callable:
    """Decorate a loss of (agent, batch): with --compile, one graph computes it and its gradient.

    loss_fn    returns (loss, metrics, ...): a scalar tensor, a dict of detached tensors, and
               whatever other detached tensors its caller needs

    The first call runs eagerly; its `backward` tells which parameters learn. From then on
    `loss.backward()` only adds the gradient of the graph to that of the parameters' optimizer. If
    compilation fails on this machine, the loss stays eager.
    """
    COMPILABLE.add(loss_fn.__module__)
    compiled = weakref.WeakKeyDictionary()  # agent -> its CompiledLoss

    @functools.wraps(loss_fn)
    def call(agent, *batch):
        if not COMPILE or not torch.is_grad_enabled():
            return loss_fn(agent, *batch)
        if agent not in compiled:
            compiled[agent] = CompiledLoss(loss_fn)
        return compiled[agent](agent, *batch)

    return call


class CompiledLoss:
    """A loss of one agent: eager in its first call, then a graph with its gradient."""

    def __init__(self, loss_fn: Callable):
        self.loss_fn = loss_fn
        self.optimizer = None  # that of the parameters that learn, from the first `backward` on
        self.graph = None

    def __call__(self, agent: nn.Module, *batch) -> tuple:
        if self.optimizer is None:
            loss, *rest = self.loss_fn(agent, *batch)
            loss.backward = functools.partial(self.first_backward, loss, agent)
            return loss, *rest
        compute = self.graph or self.first_compute
        loss, grad, *rest = compute(agent, *batch)
        loss = loss.detach()  # the graph may return the same tensor as a metric, which is kept
        # Nothing is left to compute: the graph has returned the gradient of this optimizer.
        loss.backward = lambda inputs=None: self.optimizer.grad.add_(grad)
        return loss, *rest

    def first_backward(self, loss: Tensor, agent: nn.Module, inputs: list | None = None) -> None:
        """Differentiate eagerly, and note whose parameters learn."""
        params = inputs or [param for param in agent.parameters() if param.requires_grad]
        grads = zip(params, torch.autograd.grad(loss, params, allow_unused=True))
        learn = [(param, grad) for param, grad in grads if grad is not None]
        self.optimizer = owner(learn[0][0])
        if any(owner(param) is not self.optimizer for param, _ in learn):
            raise ValueError("with --compile, one optimizer has all parameters of a loss")
        for param, grad in learn:
            param.grad = grad if param.grad is None else param.grad.add_(grad)

    def first_compute(self, agent: nn.Module, *batch) -> tuple:
        """Make the graph, and return loss, gradient, metrics, ... by it; eagerly if that fails."""
        rng = torch.get_rng_state()
        try:
            self.graph = compile_gradient(self.loss_fn, self.optimizer.params)
            return self.graph(agent, *batch)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            say(f"--compile failed, continuing without it ({reason[:100]})")
            self.graph = flat_gradient(self.loss_fn, self.optimizer.params)
            torch.set_rng_state(rng)  # part of the graph may have run already
            return self.graph(agent, *batch)  # raises the loss's own error again


# ---- ranks


def rank() -> int:
    """Return this process's number, from 0 to size() - 1."""
    return _rank


def size() -> int:
    """Return how many processes train together."""
    return _size


@functools.cache
def comm():
    """Return MPI's communicator of all ranks. UsageError: it connects fewer than were started."""
    global _size
    from mpi4py import MPI

    expected, found = _size, MPI.COMM_WORLD.Get_size()
    if found != expected:
        _size = 1  # there is nobody to wait for at the end
        raise UsageError(f"{expected} processes were started, but MPI connects {found}: this "
                         "mpiexec belongs to another MPI than mpi4py. Use the one beside "
                         f"{sys.executable}, or --num-procs")
    return MPI.COMM_WORLD


def say(line: str) -> None:
    """Print on rank 0, at once."""
    if _rank == 0:
        print(line, flush=True)


def share(total: int) -> int:
    """Return this rank's part of a total, which the ranks divide equally (`Run` checks it)."""
    return total // size()


def seed(run_seed: int, stream: int, step: int = 0) -> int:
    """Return a seed for one stream of random numbers of this rank, independent of all others.

    Streams: 0 PyTorch, 1 training environments, 2 evaluation. A vector environment adds 0, 1, ...
    to it, one for each of its environments. `step` is where a resumed run starts again.
    """
    sequence = np.random.SeedSequence([run_seed, rank()], spawn_key=(stream, step))
    return int(sequence.generate_state(1)[0]) >> 1  # room to add in 32 bits


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
        return ((x - self.mean) / torch.sqrt(self.var + 1e-8)).clamp(-10, 10).float()

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


def together(action, *args):
    """Return `action(*args)`, or fail on every rank if it failed on one. With None, only wait.

    A rank that failed alone would leave the others waiting for its next message.
    """
    result = failure = None
    try:
        result = action(*args) if action else None
    except Exception as error:
        failure = error
    told = gather(failure and (isinstance(failure, UsageError), str(failure)))
    if failure:
        raise failure
    for refused, message in filter(None, told):
        raise (UsageError if refused else OSError)(message)
    return result


def check_equal(flat: Tensor) -> None:
    """RuntimeError naming the ranks whose parameters differ from rank 0's, in any bit."""
    sums = gather(hashlib.sha256(flat.detach().cpu().numpy().tobytes()).digest())
    if others := [k for k, digest in enumerate(sums) if digest != sums[0]]:
        raise RuntimeError(f"the parameters of ranks {others} differ from those of rank 0")


# ---- how ranks start, and how they end together


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def clean_env() -> dict[str, str]:
    """Return the environment without a launcher's variables, for a program that is not a rank."""
    return {key: val for key, val in os.environ.items() if not key.startswith(LAUNCHERS)}


def find_mpiexec() -> str | None:
    """Return the path of mpiexec, of the one beside this Python if there is one, or None."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    return shutil.which("mpiexec", path=path)


def launch(cfg) -> None:
    """Start this program again as `cfg.num_procs` ranks. Ranks and single processes return.

    This process becomes mpiexec, which passes SIGINT and SIGTERM on to the ranks and ends with
    their exit status.
    """
    procs = cfg.num_procs
    if _size > 1:
        comm()
    if procs in (1, _size):
        return
    if any(name in os.environ for name in SIZES):
        raise UsageError(f"--num-procs is {procs}, but the launcher started {_size}")
    if type(cfg).__module__ != "__main__" or not hasattr(sys.modules["__main__"], "__file__"):
        raise UsageError(f"num_procs is {procs}, which would start the running program again: use "
                         f"--num-procs {procs} on the command line, or num_procs=1 from Python")
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


def leave(text: str, status: int) -> None:
    """End in order with ranks that fail too; abort those that go on.

    They would wait for the next message of this rank for ever.
    """
    world, tag = comm(), 2**14
    others = set(range(_size)) - {_rank}
    notes = [world.isend(None, other, tag) for other in others]
    deadline = time.monotonic() + 3
    while others and time.monotonic() < deadline:
        time.sleep(0.01)
        others = {other for other in others if not world.iprobe(other, tag)}
    if others:
        if _rank > 0:  # rank 0 has printed it already
            print(f"rank {_rank} of {_size}: {text}", file=sys.stderr, flush=True)
        time.sleep(0.5)  # mpiexec loses output that it has not passed on when it ends
        world.Abort(status)
    del notes  # MPI reads them until here


def die(kind, error, trace) -> None:
    """Replaces `sys.excepthook` where there are other ranks."""
    text = "".join(traceback.format_exception(kind, error, trace))
    if _rank == 0:
        print(text, file=sys.stderr, flush=True)
    if kind is KeyboardInterrupt:
        comm().Abort(130)
    leave(text, 1)


if _size > 1:
    sys.excepthook = die
