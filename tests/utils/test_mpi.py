"""Optimizers against PyTorch's, `--compile`, averages against NumPy, ranks that end together."""
import copy
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests import toy
from tests.helpers import PATIENCE, close, mpiexec, run
from tests.onpolicy import Descent, parameters as params
from utils import mpi
from utils.run import Run, RunConfig
from utils.run.run import choose_device

SLOW = pytest.mark.slow

# What an algorithm file looks like to `mpi`; `--mode` says how it goes wrong.
TOY = '''
import dataclasses, os, signal, sys, time
import numpy as np, torch
from utils import mpi
from utils.run.command import program
from utils.mpi import launch

@dataclasses.dataclass(frozen=True)
class Config:
    num_procs: int = 1

def train(cfg, mode):
    launch(cfg)
    mpi.say("device: cpu")
    if mode == "refused":
        raise mpi.UsageError("--num-envs is 3")
    mpi.say("run: here")
    rank = mpi.rank()
    print(f"rank {rank} of {mpi.size()}", flush=True)
    grad = torch.zeros(8)
    if mode == "damaged file" and rank == 1:
        raise mpi.UsageError("rank1.pt is damaged")
    got = []
    if mode == "signal":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: got.append(number))
        mpi.together(None)
        mpi.say("learning")
    while mode:
        mpi.average(grad)
        if mode == "nan" and rank == 1:
            raise FloatingPointError("pi_loss is nan")
        if mode == "killed" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if any(mpi.gather(got)):
            time.sleep(0.5)     # a checkpoint takes its time
            open(f"saved{rank}", "w").close()
            raise SystemExit(128 + max(map(max, filter(None, mpi.gather(got)))))
        time.sleep(0.01)

if __name__ == "__main__":
    with program():
        train(Config(int(sys.argv[1])), sys.argv[2])
'''

# Data differ from rank to rank.
COLLECTIVES = '''
import json, sys
import numpy as np, torch
from utils import mpi

rank = mpi.rank()
rng = np.random.default_rng(rank)
torch.manual_seed(0)

f64 = torch.from_numpy(rng.standard_normal((5, 4)))
many = torch.arange(200_000.0)
tensors = {"f64": f64, "f32": f64.float(), "strided": f64.clone().t()[::2],
           "kl": torch.tensor(float(rank)), "big": many + rank}
for tensor in tensors.values():
    mpi.average(tensor)
tensors["big"] = (tensors["big"] - many).unique()
out = {name: tensor.tolist() for name, tensor in tensors.items()}
rows = torch.from_numpy(1e6 + rng.standard_normal((rank + 2, 4)))
count, mean, var = mpi.moments(rows)
out["moments"] = [count, mean.tolist(), var.tolist()]
out["gather"] = mpi.gather({"rank": rank})
out["share"] = mpi.share(12)

net = torch.nn.Linear(3, 2)

class Descent(mpi.Optimizer):
    def move(self, lr):
        self.flat.sub_(self.grad, alpha=lr)

optimizer = Descent(net)

def step(**settings):
    before = net.weight.detach().clone()
    optimizer.zero_grad()
    net(torch.full((3,), float(rank))).sum().backward()
    norm = optimizer.step(1.0, **settings).item()
    return (before - net.weight.detach()).tolist(), norm

out["grad"], out["norm"] = step()
out["clipped"], _ = step(max_grad_norm=0.5)
mpi.check_equal(optimizer.flat)
flat = torch.linspace(-1000, 1001, 8)
if rank == 1:
    flat = flat.flip(0)                                         # the same sum, in another order
if rank == 2:
    flat[3] = torch.nextafter(flat[3], flat[4])                 # less than a sum would see
try:
    mpi.check_equal(flat)
except RuntimeError as error:
    out["differ"] = str(error)
everything = mpi.gather(out)
if rank == 0:
    print(json.dumps(everything))
'''


def run_ranks(count, program, *args, code=0):
    """Run a program in so many processes. Return (stdout, stderr)."""
    Path("toy.py").write_text(program)
    done = run([mpiexec(), "-n", count, sys.executable, "toy.py", *args], code)
    return done.stdout, done.stderr


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


# ------------------------------------------------------------------------------ optimizers
def square_loss(net, x, target=0.0):
    """A loss with the metrics of one, as algorithm files write them."""
    out = net(x)
    loss = (out - target).square().mean()
    return loss, {"loss": loss.detach(), "out": out.detach()}


def take_step(optimizer, loss_fn, *args, lr, inputs=None, **settings):
    """Take a step as algorithm files do. Return the metrics."""
    loss, metrics = compiled(loss_fn)(*args)
    optimizer.zero_grad()
    loss.backward(inputs=inputs)
    return metrics | {"grad_norm": optimizer.step(lr, **settings)}


compiled = functools.cache(mpi.compilable)                      # one decorated loss per loss


def gradient_of(net, x):
    """By PyTorch alone, of a copy."""
    twin = copy.deepcopy(net)
    square_loss(twin, x)[0].backward()
    return torch.cat([param.grad.flatten() for param in twin.parameters()])


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def compiling(request, monkeypatch):
    """Both ways to the gradient; torch.compile itself is left out, since it takes a minute."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(mpi, "COMPILE", request.param)


def test_a_gradient_is_of_its_own_call_alone(compiling):
    """Nothing of the one before is left in it."""
    net = small_net()
    optimizer = Descent(net)
    for x in torch.randn(3, 5, 3):
        before, expected = params(net), gradient_of(net, x)
        take_step(optimizer, square_loss, net, x, lr=0.1)
        torch.testing.assert_close(params(net), before - 0.1 * expected)
        grads = torch.cat([param.grad.flatten() for param in net.parameters()])
        torch.testing.assert_close(grads, expected)             # views of the optimizer's


def test_the_gradients_of_losses_before_a_step_add_up(compiling):
    net, x = small_net(), torch.randn(5, 3)
    optimizer, expected = Descent(net), gradient_of(net, x)
    optimizer.zero_grad()
    for _ in range(3):                                          # the first may find its optimizer
        compiled(square_loss)(net, x)[0].backward()
    torch.testing.assert_close(optimizer.grad, 3 * expected)


def test_only_its_own_parameters_change(compiling):
    """Though the loss depends on others: an actor's loss cannot train the critic."""
    agent, x = nn.ModuleDict({"actor": small_net(0), "critic": nn.Linear(2, 1)}), torch.randn(5, 3)
    actor_opt, critic_opt = mpi.Adam(agent["actor"]), mpi.Adam(agent["critic"])
    learn = list(agent["actor"].parameters())

    def actor_loss(agent, x):
        return -agent["critic"](agent["actor"](x)).mean(), {}

    for _ in range(3):                                          # the first call differs
        before = params(agent["actor"]), params(agent["critic"])
        take_step(actor_opt, actor_loss, agent, x, lr=0.1, inputs=learn)
        assert not torch.equal(params(agent["actor"]), before[0])
        assert torch.equal(params(agent["critic"]), before[1])
        assert not critic_opt.grad.any()                        # nor is time spent on others'


def test_what_is_optimized_may_be_a_module_a_parameter_or_several():
    net, x = small_net(), torch.randn(5, 3)
    one = nn.Parameter(torch.tensor(2.0))
    optimizer = Descent(one)
    optimizer.zero_grad()
    one.square().backward()
    optimizer.step(0.25)
    assert one.item() == 1.0 and optimizer.flat.shape == (1,)
    before = params(net)
    some = Descent([net[0].weight, net[2].bias])
    take_step(some, square_loss, net, x, lr=0.1)
    changed = params(net) != before
    assert changed[:12].any() and not changed[12:24].any() and changed[24:].any()


def test_what_is_frozen_has_no_part_in_an_optimizer():
    net = small_net()
    net[0].requires_grad_(False)
    optimizer, frozen = mpi.Adam(net), list(net[0].parameters())
    assert not any(each is param for each in optimizer.params for param in frozen)
    assert len(optimizer.params) == len(list(net.parameters())) - len(frozen)


@pytest.mark.parametrize("again", [lambda net: net, lambda net: net[0].weight,
                                   lambda net: [net[2].bias]])
def test_a_parameter_belongs_to_one_optimizer_only(again):
    """Two would take turns to tear it out of each other's vector."""
    net, x = small_net(), torch.randn(5, 3)
    first = mpi.Adam(net)
    take_step(first, square_loss, net, x, lr=0.1)
    with pytest.raises(ValueError, match="one optimizer only"):
        mpi.Adam(again(net))
    mpi.Adam(copy.deepcopy(net))                                # its parameters are its own
    del first
    before = params(net)
    take_step(mpi.Adam(again(net)), square_loss, net, x, lr=0.1)    # nobody else has it now
    assert not torch.equal(params(net), before)


@pytest.mark.parametrize("limit,scale", [(0.0, 1.0), (0.25, None), (1e9, 1.0)])
def test_a_long_gradient_is_clipped(compiling, limit, scale):
    net, x = small_net(), 3 * torch.randn(5, 3)
    before, expected = params(net), gradient_of(net, x)
    scale = scale or limit / expected.norm()
    assert expected.norm() > 0.25
    metrics = take_step(Descent(net), square_loss, net, x, lr=1.0, max_grad_norm=limit)
    torch.testing.assert_close(before - params(net), scale * expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics["grad_norm"], expected.norm())   # as it was before


@pytest.mark.parametrize("scale", [1.0, 1e-5])  # of the loss: where it is small, eps decides
@pytest.mark.parametrize("beta1", [0.9, 0.5])
def test_adam_is_pytorchs(scale, beta1):
    net, twin, x = small_net(), small_net(), torch.ones(3)
    ours = mpi.Adam(net, eps=1e-5, beta1=beta1)
    theirs = torch.optim.Adam(twin.parameters(), eps=1e-5, betas=(beta1, 0.999))

    def loss_fn(net):
        return scale * net(x).square().sum(), {}

    for lr in (0.1, 0.1, 0.02, 0.0, 0.3):
        theirs.zero_grad()
        loss_fn(twin)[0].backward()
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        take_step(ours, loss_fn, net, lr=lr)
    torch.testing.assert_close(net(x), twin(x))
    assert not torch.allclose(net(x), small_net()(x))


@pytest.mark.parametrize("make", [mpi.Adam, mpi.RMSProp])
def test_an_optimizer_goes_on_from_its_state(make):
    """What is saved is all that it needs, and what is loaded is a copy."""
    nets, inputs = [small_net(), small_net()], torch.randn(6, 5, 3)
    whole, saved = (make(net) for net in nets)
    for i, x in enumerate(inputs):
        if i == 3:
            state = saved.state_dict()
            nets[1] = copy.deepcopy(nets[1])
            saved = make(nets[1])
            saved.load_state_dict(state)
            state["square"].fill_(math.nan)
        for net, optimizer in zip(nets, (whole, saved)):
            take_step(optimizer, square_loss, net, x, lr=0.1)
    assert torch.equal(params(nets[0]), params(nets[1]))
    with pytest.raises(KeyError):
        saved.load_state_dict({})


# ------------------------------------------------------------------------------- one process

@pytest.mark.parametrize("cuts", [[], [100], [1, 2, 3], [10, 50, 51, 190]])
@pytest.mark.parametrize("offset,scale", [(5, 2), (0, 1e-3), (1e6, 1 / 16), (-1e4, 100)])
def test_running_statistics_are_numpys_wherever_the_rows_are_cut(offset, scale, cuts):
    # Whole multiples, since at 1e6 float32 has steps of 1/16.
    rows = offset + scale * np.round(np.random.default_rng(0).normal(0, 3, (200, 2)))
    rows = rows.astype(np.float32)
    stats = mpi.RunningStats((2,))
    for part in np.split(rows, cuts):
        stats.update(torch.from_numpy(part))
    rows = rows.astype(np.float64)
    close(stats.count, 200.0)
    close(stats.mean, rows.mean(0), rtol=1e-12, atol=1e-9)
    close(stats.var, rows.var(0), rtol=1e-9, atol=0)
    assert {buffer.dtype for buffer in stats.buffers()} == {torch.float64}


@pytest.mark.parametrize("value,mean,var,normal,scaled", [
    (5, 2, 4, 1.5, 2.5), (1e-4, 0, 0, 1, 1), (21, 0, 4, 10, 10), (-1e9, 1, 4, -10, -10),
    (1e6, 1e6 + 0.2, 0.04, -1, 10)])                            # float32 has no such mean
def test_normalize_and_scale_by_hand(value, mean, var, normal, scaled):
    """The 1e-8 stands in the root, and the difference is taken before it is rounded."""
    stats = mpi.RunningStats((1,))
    stats.mean.fill_(mean), stats.var.fill_(var)
    value = torch.tensor([float(value)])
    close(stats.normalize(value), [normal])
    close(stats.scale(value), [scaled])
    assert stats.normalize(value).dtype == stats.scale(value).dtype == torch.float32


# ------------------------------------------------------------------------------- the settings
@pytest.mark.parametrize("name, env, gpus, rank, expected", [
    ("auto", "CartPole-v1", 2, 0, "cpu"), ("auto", "tests.envs:Bright-v0", 0, 0, "cpu"),
    ("auto", "tests.envs:Bright-v0", 2, 3, "cuda:1"), ("cuda", "CartPole-v1", 2, 2, "cuda:0"),
    ("cpu", "tests.envs:Bright-v0", 2, 0, "cpu"),
])
def test_choose_device(monkeypatch, name, env, gpus, rank, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(mpi, "_rank", rank)
    assert choose_device(RunConfig(env=env, device=name)) == torch.device(expected)


def test_a_run_sets_the_threads_and_ends_compiling():
    environ = dict(os.environ)
    for threads in (2, 1, 3):
        with Run(toy.Config(torch_threads=threads, compile=threads == 2)):
            assert torch.get_num_threads() == threads and mpi.COMPILE == (threads == 2)
        assert not mpi.COMPILE and dict(os.environ) == environ


def test_seeds_differ_by_run_rank_stream_and_step_and_leave_room_to_count(monkeypatch):
    seeds = []
    for number in (0, 1):
        monkeypatch.setattr(mpi, "_rank", number)
        seeds += [mpi.seed(run, stream, step) for run in (1, 2) for stream in (0, 1, 2)
                  for step in (0, 2048)]
    # Two environments of one vector are one apart: so near must no other seed be.
    assert len(seeds) == 24 and min(np.diff(sorted(seeds))) > 1000
    assert mpi.seed(2, 1, 2048) == seeds[21] and max(seeds) + 1000 < 2**32


# ---------------------------------------------------------------------------------- --compile
def noisy_loss(net, x):
    """One with random numbers, and a layer that has no part in it."""
    out = net[:2](x + torch.randn_like(x))
    loss = (out * torch.rand(out.shape)).square().mean()
    return loss, {"loss": loss}


def trained(steps=3, optimizer=mpi.Adam):
    """Parameters and metrics of a few steps, and the state of the generator after them."""
    net = small_net()
    optimizer = optimizer(net)
    torch.manual_seed(1)
    metrics = [take_step(optimizer, noisy_loss, net, x, lr=0.1, max_grad_norm=0.5)
               for x in torch.randn(steps, 5, 3)]
    metrics = {name: torch.stack([row[name] for row in metrics]) for name in metrics[0]}
    return params(net), metrics, torch.get_rng_state()


def assert_same_training(a, b, exact=True):
    for one, two in ((a[0], b[0]), *((a[1][name], b[1][name]) for name in a[1] | b[1])):
        torch.testing.assert_close(one, two, **({"rtol": 0, "atol": 0} if exact else {}))
    assert torch.equal(a[2], b[2])


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_compiled_equals_eager_with_the_same_random_numbers(dynamo_env):
    program = ("from tests.utils.test_mpi import *; eager = trained(); mpi.COMPILE = True; "
               "assert_same_training(eager, trained(), exact=False)")
    out = run([sys.executable, "-c", program], env=dynamo_env).stdout
    assert "--compile failed" not in out


@pytest.mark.parametrize("error, said", [
    (RuntimeError("no C++ compiler\nwith a long story"), "RuntimeError: no C++ compiler"),
    (AssertionError(), "AssertionError")])      # a bare assert has no message
def test_compiling_falls_back_with_one_line(error, said, monkeypatch, capsys):
    def broken(*inputs):
        torch.randn(7)                          # part of the graph may have run by then
        raise error

    eager = trained()
    monkeypatch.setattr(mpi, "COMPILE", True)
    monkeypatch.setattr(torch, "compile", lambda function, **how: broken)
    assert_same_training(trained(), eager)
    (line,) = capsys.readouterr().out.splitlines()
    assert "--compile failed" in line and said in line and "long story" not in line


def test_what_is_compiled_is_called_from_the_first_call_on(monkeypatch):
    def compiled(function, dynamic, options):
        assert not dynamic and options["fallback_random"] and options["cpp.threads"] == 1
        calls.append("compiled")
        return lambda *inputs: calls.append("called") or function(*inputs)

    calls, eager = [], trained()
    monkeypatch.setattr(torch, "compile", compiled)
    assert_same_training(trained(), eager)
    assert not calls                                            # --compile was not given
    monkeypatch.setattr(mpi, "COMPILE", True)
    assert_same_training(trained(), eager, exact=False)
    assert calls == ["compiled", "called", "called"]  # the first step is eager


def test_many_losses_may_be_compiled_in_one_process(monkeypatch):
    """PyTorch stops at 8 programs of one code object, and all of them are the same one."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    mpi.compile_gradient(square_loss, [])
    assert torch._dynamo.config.recompile_limit >= 64


def test_together_passes_results_and_failures_on(monkeypatch):
    assert mpi.together(max, 1, 2) == 2
    assert mpi.together(None, 1) is None
    with pytest.raises(ZeroDivisionError):
        mpi.together(divmod, 1, 0)
    monkeypatch.setattr(mpi, "gather", lambda value: [value, (True, "no such run")])
    with pytest.raises(mpi.UsageError, match="no such run"):
        mpi.together(max, 1, 2)


def test_clean_env_drops_the_launchers_variables_and_no_other(monkeypatch):
    names = ["PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "HYDI_CONTROL_FD",
             "HYDRA_LAUNCHER", "PLAINRL_PROCS"]
    for name in [*names, "MUJOCO_GL", "IMPI"]:
        monkeypatch.setenv(name, "1")
    env = mpi.clean_env()
    assert not set(names) & set(env) and {"PATH", "MUJOCO_GL", "IMPI"} <= set(env)


# ------------------------------------------------------------------------------- the launcher
@pytest.fixture
def typed(monkeypatch):
    """A Config as the command line gives it, on two cores; what would start is returned."""
    class Config(SimpleNamespace):
        __module__ = "__main__"

    started = []
    for name in mpi.SIZES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "ppo.py", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "execve", lambda *args: started.append(args))
    monkeypatch.setattr(os, "dup2", lambda *args: None)
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "algos.ppo", "--num-procs", "2"])
    return Config, started


def test_launch_starts_the_same_command_under_mpiexec(typed, monkeypatch):
    Config, started = typed
    monkeypatch.setenv("PMIX_RANK", "3")
    mpi.launch(Config(num_procs=2))
    (file, command, env), = started
    assert file == mpiexec()
    assert command == [mpiexec(), "-n", "2", sys.executable, "-m", "algos.ppo", "--num-procs", "2"]
    assert env["PLAINRL_PROCS"] == "2" and "PMIX_RANK" not in env


@pytest.mark.parametrize("procs, module, path, message", [
    (3, "__main__", None, "--num-procs is 3.* 1 to 2"),
    (2, "__main__", "a launcher", "--num-procs is 2.* started 1"),
    (2, "__main__", "a notebook", "num_procs is 2"),
    (2, "algos.ppo", None, "num_procs is 2.* command line"),
    (2, "__main__", "/nowhere", "--num-procs is 2.* mpiexec"),
])
def test_launch_refuses(typed, monkeypatch, procs, module, path, message):
    Config, started = typed
    Config.__module__ = module
    if path == "a launcher":
        monkeypatch.setenv("PMI_SIZE", "1")
    elif path == "a notebook":
        monkeypatch.delattr(sys.modules["__main__"], "__file__")
    elif path:
        monkeypatch.setattr(sys, "executable", f"{path}/python")
        monkeypatch.setenv("PATH", path)
    with pytest.raises(mpi.UsageError, match=message):
        mpi.launch(Config(num_procs=procs))
    assert started == []


# -------------------------------------------------------------------------------- real ranks
def test_three_ranks_compute_what_numpy_does():
    outs = json.loads(run_ranks(3, COLLECTIVES)[0])
    rngs = [np.random.default_rng(k) for k in range(3)]
    data = np.stack([rng.standard_normal((5, 4)) for rng in rngs])
    rows = np.concatenate([1e6 + rng.standard_normal((k + 2, 4)) for k, rng in enumerate(rngs)])
    for out in outs:
        np.testing.assert_allclose(out["f64"], data.mean(0), rtol=1e-14)
        np.testing.assert_allclose(out["f32"], data.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(out["strided"], data.mean(0).T[::2], rtol=1e-14)
        assert out["kl"] == 1.0 and out["big"] == [1.0]
        count, mean, var = out["moments"]
        assert count == 9
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-14)
        np.testing.assert_allclose(var, rows.var(0), rtol=1e-6)     # of an average of 1e6
        assert out["gather"] == [{"rank": k} for k in range(3)]
        assert out["share"] == 4
        np.testing.assert_allclose(out["grad"], np.ones((2, 3)), rtol=1e-5)     # of 0, 1 and 2
        assert out["norm"] == pytest.approx(8 ** 0.5)               # 6 weights, 2 biases
        np.testing.assert_allclose(out["clipped"], np.full((2, 3), 0.5 / 8 ** 0.5), rtol=1e-4)
        assert out["differ"] == "the parameters of ranks [1, 2] differ from those of rank 0"


def test_a_refusal_by_all_ranks_is_one_line_and_status_2():
    said = run_ranks(2, TOY, 1, "refused", code=2)
    assert said == ("device: cpu\n", "error: --num-envs is 3\n")


@pytest.mark.parametrize("mode, expected, last_words", [
    ("nan", 1, ["rank 1 of 2: Traceback", "FloatingPointError: pi_loss is nan"]),
    pytest.param("damaged file", 2, ["rank 1 of 2: error: rank1.pt is damaged"], marks=SLOW),
    ("killed", 9, []),
])
def test_one_rank_dies_and_takes_the_other_with_it(mode, expected, last_words):
    _, stderr = run_ranks(2, TOY, 2, mode, code=expected)
    for words in last_words:
        assert stderr.count(words) == 1


@pytest.mark.skipif(mpi.cores() < 2, reason="--num-procs 2 is refused on one core")
@pytest.mark.parametrize("send, number, expected", [
    pytest.param(os.killpg, signal.SIGINT, 130, marks=SLOW),  # Ctrl-C: to all in the terminal
    (os.kill, signal.SIGTERM, 143),     # `kill PID` to the one process that the user started
])
def test_a_signal_leaves_every_rank_the_time_to_save(send, number, expected):
    Path("toy.py").write_text(TOY)
    with subprocess.Popen([sys.executable, "toy.py", "2", "signal"], stdout=subprocess.PIPE,
                          start_new_session=True, text=True) as process:
        assert any("learning" in line for line in process.stdout)
        send(process.pid, number)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == expected
    assert sorted(map(str, Path().glob("saved*"))) == ["saved0", "saved1"]


def test_a_world_of_another_size_is_refused():
    """As where mpiexec belongs to another MPI: three processes, each of them alone."""
    Path("toy.py").write_text(TOY)
    done = run([sys.executable, "toy.py", 1, ""], 2,
               env=os.environ | {"PLAINRL_PROCS": "3", "PMI_SIZE": "1"})
    assert "rank" not in done.stdout
    assert done.stderr.startswith("error: 3 processes were started, but MPI connects 1")
