"""Averages against NumPy, one flat vector that the module reads, `--compile`, and ranks that end
together."""
import copy
import dataclasses
import json
import math
import os
import platform
import signal
import subprocess
import sys
import timeit
import types
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers import (
    PATIENCE,
    mpiexec,
)
from utils import mpi, ranks

TWO_CORES = pytest.mark.skipif(os.cpu_count() < 2, reason="--num-procs 2 is refused on one core")

# What an algorithm file looks like to `mpi`; `--mode` says how it goes wrong.
TOY = '''
import dataclasses, os, signal, sys, time
import numpy as np, torch
from utils import mpi, ranks

@dataclasses.dataclass(frozen=True)
class Config:
    num_procs: int = 1

def train(cfg, mode):
    mpi.say("device: cpu")
    if mode == "refused":
        mpi.share(3, "num_envs")
    mpi.launch(cfg)
    mpi.say("run: here")
    rank = mpi.rank()
    print(f"rank {rank} of {mpi.size()}", flush=True)
    flat = mpi.flatten(torch.nn.Linear(3, 2))
    if mode == "damaged file" and rank == 1:
        raise mpi.UsageError("rank1.pt is damaged")
    got = []
    if mode == "signal":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: got.append(number))
        mpi.barrier()
        mpi.say("learning")
    while mode:
        mpi.average(flat.grad)
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
    train(Config(int(sys.argv[1])), sys.argv[2])
'''

# Data differ from rank to rank, so do the seeds.
COLLECTIVES = '''
import json, sys
import numpy as np, torch
from utils import mpi

rank = mpi.rank()
rng = np.random.default_rng(rank)
torch.manual_seed(rank)
out = {}

f64 = torch.from_numpy(rng.standard_normal((5, 4)))
f32 = f64.float()
strided = f64.clone().t()[::2]
kl = torch.tensor(float(rank))
big = torch.arange(200_000, dtype=torch.float32) + rank
for name in ("f64", "f32", "strided", "kl", "big"):
    mpi.average(globals()[name])
out |= {"f64": f64.tolist(), "f32": f32.double().tolist(), "strided": strided.tolist(),
        "kl": kl.item(), "big": (big - torch.arange(200_000)).unique().tolist()}
rows = torch.from_numpy(1e6 + rng.standard_normal((rank + 2, 4)))
count, mean, var = mpi.moments(rows)
out["moments"] = [count, mean.tolist(), var.tolist()]
out["gather"] = mpi.gather({"rank": rank})
out["bcast"] = mpi.bcast(f"from {rank}")
out["share"] = mpi.share(12, "num_envs")

net = torch.nn.Linear(3, 2)
flat = mpi.flatten(net)
out["weights"] = net(torch.ones(3)).tolist()
loss = net(torch.full((3,), float(rank))).sum()
loss.backward()
mpi.average(flat.grad)
out["grad"] = net.weight.grad.tolist()
mpi.check_equal(flat)
if rank == 2:
    flat.data[-1] = torch.nextafter(flat.data[-1], torch.tensor(9.0))
try:
    mpi.check_equal(flat)
except RuntimeError as error:
    out["differ"] = str(error)
mpi.say("said once")
everything = mpi.gather(out)
if rank == 0:
    print(json.dumps(everything))
'''


def run(tmp_path, program, *args, launcher=(), **env):
    """(status, stdout, stderr) of `python toy.py args`, in time."""
    file = tmp_path / "toy.py"
    file.write_text(program)
    done = subprocess.run([*launcher, sys.executable, file, *map(str, args)], timeout=PATIENCE,
                          capture_output=True, text=True, env=os.environ | env)
    return done.returncode, done.stdout, done.stderr


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


# ---------------------------------------------------------------------------- the flat vector
def test_module_follows_the_flat_vector_and_keeps_its_values():
    net, x = small_net(), torch.ones(3)
    before = net(x)
    flat = mpi.flatten(net)
    assert torch.equal(net(x), before) and flat.shape == (26,)
    flat.data.zero_()
    flat.data[-1] = 7.0
    assert net(x).tolist() == [0.0, 7.0]


def test_module_follows_the_flat_vector_after_a_load():
    net, other, x = small_net(0), small_net(1), torch.ones(3)
    flat = mpi.flatten(net)
    net.load_state_dict(other.state_dict())
    assert torch.equal(net(x), other(x))
    assert torch.equal(flat, nn.utils.parameters_to_vector(other.parameters()))
    flat.data.zero_()
    assert net(x).tolist() == [0.0, 0.0]


def test_gradients_land_in_the_flat_gradient_and_are_summed():
    net, twin, x = small_net(), small_net(), torch.ones(3)
    flat = mpi.flatten(net)
    for _ in range(2):
        net(x).square().sum().backward()
        twin(x).square().sum().backward()
    expected = torch.cat([param.grad.flatten() for param in twin.parameters()])
    assert torch.equal(flat.grad, expected) and expected.norm() > 0
    flat.grad.zero_()
    assert net[0].weight.grad.norm() == 0


@pytest.mark.parametrize("scale", [1.0, 1e-5])  # of the loss: where it is small, eps decides
def test_one_fused_step_equals_the_step_of_every_parameter(scale):
    net, twin, x = small_net(), small_net(), torch.ones(3)
    flat = mpi.flatten(net)
    ours, theirs = mpi.Adam(flat, eps=1e-5), torch.optim.Adam(twin.parameters(), eps=1e-5)
    for lr in (0.1, 0.1, 0.02, 0.0, 0.3):
        flat.grad.zero_()
        theirs.zero_grad()
        (scale * net(x).square().sum()).backward()
        (scale * twin(x).square().sum()).backward()
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        ours.step(lr)
    torch.testing.assert_close(net(x), twin(x))
    assert not torch.allclose(net(x), small_net()(x))


def test_adam_goes_on_from_its_state():
    """Its two averages and its count are saved, and what is loaded is a copy."""
    flats, gradients = [mpi.flatten(small_net()) for _ in range(2)], torch.randn(6, 1)
    whole, saved, resumed = mpi.Adam(flats[0]), mpi.Adam(flats[1]), mpi.Adam(flats[1])
    for i, gradient in enumerate(gradients):
        if i == 3:
            resumed.load_state_dict(saved.state_dict())
            saved.mean.fill_(math.nan)
        for flat, optimizer in zip(flats, (whole, saved if i < 3 else resumed)):
            flat.grad.copy_(gradient * (1 + torch.arange(len(flat))))
            optimizer.step(0.1)
    assert torch.equal(*flats)
    with pytest.raises(KeyError):
        resumed.load_state_dict({"mean": saved.mean, "square": saved.square})


def test_a_parameter_used_twice_stands_in_the_vector_once():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    assert mpi.flatten(net).shape == (15,)


def test_a_copy_has_parameters_of_its_own_until_flattened():
    net, x = small_net(), torch.ones(3)
    flat = mpi.flatten(net)
    target = copy.deepcopy(net)
    before = target(x)
    flat.data.zero_()
    assert torch.equal(target(x), before)
    mpi.flatten(target).data.fill_(1.0)
    assert net(x).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("change", [
    lambda flat: flat.copy_(flat.flip(0)),                      # the same sum, in another order
    lambda flat: flat.neg_(),                                   # of the same size
    lambda flat: flat[3].copy_(torch.nextafter(flat[3], flat[4])),  # less than a sum would see
    lambda flat: flat[2:4].copy_(flat[2:4].flip(0)),
], ids=["order", "sign", "a bit", "neighbours"])
def test_parameters_that_differ_in_any_way_are_found(change, monkeypatch):
    """Beside a rank 0 that holds the others."""
    flat = torch.linspace(-1000, 1001, 8)
    monkeypatch.setattr(mpi, "gather", lambda value: [value, value])
    mpi.check_equal(flat)
    held = []
    monkeypatch.setattr(mpi, "gather", lambda value: held.append(value) or [value])
    mpi.check_equal(flat.clone())
    other = flat.clone()
    change(other)
    monkeypatch.setattr(mpi, "gather", lambda value: [*held, value])
    with pytest.raises(RuntimeError, match=r"ranks \[1\]"):
        mpi.check_equal(other)


# ------------------------------------------------------------------------------- one process
def test_one_process_needs_no_mpi(tmp_path):
    program = '''
import sys
sys.modules["mpi4py"] = None    # an import of it raises
import numpy as np, torch
from utils import mpi
class Config: num_procs = 1
mpi.launch(Config)
flat = mpi.flatten(torch.nn.Linear(3, 2))
flat.grad.fill_(2.0)
mpi.average(flat.grad)
mpi.check_equal(flat)
mpi.barrier()
print(mpi.rank(), mpi.size(), flat.grad.mean().item(), mpi.gather(5), mpi.bcast(6),
      mpi.share(8, "num_envs"))
raise mpi.UsageError("and its refusals")
'''
    assert run(tmp_path, program) == (2, "0 1 2.0 [5] 6 8\n", "error: and its refusals\n")


def test_average_of_one_process_is_nearly_free():
    grad = torch.full((10_000,), 3.0)
    seconds = min(timeit.repeat(lambda: mpi.average(grad), number=10_000, repeat=5)) / 10_000
    assert seconds < 2e-6 and torch.equal(grad, torch.full((10_000,), 3.0))


def test_usage_error_is_a_system_exit_that_says_why(capsys):
    with pytest.raises(SystemExit) as caught:
        raise mpi.UsageError("--gamma is 7.0")
    assert caught.value.code == 2 and str(caught.value) == "--gamma is 7.0"
    assert capsys.readouterr().err == "error: --gamma is 7.0\n"


def test_usage_error_is_printed_by_rank_0_alone(capsys, monkeypatch):
    monkeypatch.setattr(ranks, "_rank", 1)
    mpi.UsageError("--gamma is 7.0")
    assert capsys.readouterr().err == ""


def test_moments_of_one_process_are_the_rows_own():
    rows = torch.randn(7, 3)
    count, mean, var = mpi.moments(rows)
    assert count == 7 and mean.dtype == var.dtype == torch.float64
    np.testing.assert_allclose(mean, rows.numpy().mean(0, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(var, rows.double().numpy().var(0), rtol=1e-12)
    assert mpi.moments(torch.full((1, 2), 3.0))[2].tolist() == [0.0, 0.0]   # of one row, not NaN


# ------------------------------------------------------------------------------- the settings
@pytest.mark.parametrize("size, procs, expected", [(1, 1, 12), (1, 4, 3), (4, 1, 3), (4, 4, 3)])
def test_share_divides_by_the_ranks_there_are_or_will_be(monkeypatch, size, procs, expected):
    monkeypatch.setattr(ranks, "_size", size)
    assert mpi.share(12, "num_envs", procs) == expected


@pytest.mark.parametrize("size, procs", [(1, 5), (5, 1)])
def test_share_names_the_flag_that_does_not_divide(monkeypatch, size, procs):
    monkeypatch.setattr(ranks, "_size", size)
    monkeypatch.setattr(ranks.atexit, "register", lambda *args: None)
    with pytest.raises(mpi.UsageError, match="--num-envs is 12.* 5 "):
        mpi.share(12, "num_envs", procs)


def settings(device, torch_threads=1):
    return types.SimpleNamespace(device=device, torch_threads=torch_threads)


@pytest.mark.parametrize("name, images, gpus, rank, expected", [
    ("auto", False, 2, 0, "cpu"), ("auto", True, 0, 0, "cpu"), ("auto", True, 2, 3, "cuda:1"),
    ("cuda", False, 2, 2, "cuda:0"), ("cpu", True, 2, 0, "cpu"),
])
def test_choose_device(monkeypatch, capsys, name, images, gpus, rank, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(ranks, "_rank", rank)
    assert mpi.choose_device(settings(name), images) == torch.device(expected)
    said = f"device: {expected.split(':')[0]} (--device {name})\n"
    assert capsys.readouterr().out == (said if rank == 0 else "")


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(mpi.UsageError, match="--device.* cuda"):
        mpi.choose_device(settings("cuda"), images=True)


def test_choose_device_sets_the_threads():
    before = torch.get_num_threads()
    try:
        for threads in (2, 1, 3):
            mpi.choose_device(settings("cpu", torch_threads=threads), images=False)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about this C library")
def test_after_choose_device_a_step_gets_no_new_memory():
    """Arrays of 640 kB, made and dropped. Without the call most processes fetch all their pages."""
    code = """if True:
        import resource, torch
        from types import SimpleNamespace
        from utils import mpi
        mpi.choose_device(SimpleNamespace(device="cpu", torch_threads=1), images=False)
        def faults(steps):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(steps):
                arrays = [torch.ones(400, 400) for _ in range(12)]
                del arrays
            return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps
        faults(20)
        print(faults(50))"""
    for _ in range(4):  # it depends on where the system has put the heap
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              check=True, timeout=PATIENCE)
        assert float(done.stdout.split()[-1]) < 5


def test_seeds_differ_by_run_rank_stream_and_step_and_leave_room_to_count(monkeypatch):
    seeds = []
    for number in (0, 1):
        monkeypatch.setattr(ranks, "_rank", number)
        seeds += [mpi.seed(run, stream, step) for run in (1, 2) for stream in (0, 1, 2)
                  for step in (0, 2048)]
    # Two environments of one vector are one apart: so near must no other seed be.
    assert len(seeds) == 24 and min(np.diff(sorted(seeds))) > 1000
    assert mpi.seed(2, 1, 2048) == seeds[21] and max(seeds) + 1000 < 2**32


def learner():
    """A network, its flat vector, and its gradient, which does not depend on all of it."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

    def gradient(module, flat, x):
        loss = module[:2](x).square().mean()        # the last layer has no part in it
        flat.grad.zero_()
        loss.backward()
        return loss.detach()

    return module, mpi.flatten(module), gradient


def test_compiled_falls_back_with_one_line(monkeypatch, capsys):
    def broken(*inputs):
        raise RuntimeError("no C++ compiler\nwith a long story")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: broken)
    module, flat, gradient = learner()
    assert mpi.compiled(gradient, False) is gradient and capsys.readouterr().out == ""
    fast = mpi.compiled(gradient, True)
    for x in torch.randn(2, 5, 3):
        assert fast(module, flat, x) == gradient(module, flat, x)
    assert fast.fast is gradient
    (line,) = capsys.readouterr().out.splitlines()
    assert "--compile" in line and "no C++ compiler" in line


def test_compiled_is_called_from_the_first_call_on(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: lambda *x: function(*x) + 1)
    module, flat, gradient = learner()
    fast = mpi.compiled(gradient, True)
    for x in torch.randn(2, 5, 3):
        assert fast(module, flat, x) == gradient(module, flat, x) + 1


def test_many_functions_may_be_compiled_in_one_process(monkeypatch):
    """PyTorch stops at 8 programs of one code object, and all of them are `in_one_piece`."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    mpi.compiled(torch.neg, True)
    assert torch._dynamo.config.recompile_limit >= 64


def test_an_error_of_the_compiled_function_is_its_own(monkeypatch):
    def wrong(module, flat):
        raise ZeroDivisionError("mine")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    module, flat, _ = learner()
    with pytest.raises(ZeroDivisionError, match="mine"):
        mpi.compiled(wrong, True)(module, flat)


@pytest.mark.parametrize("error", [RuntimeError("out of memory\nand more"), AssertionError()])
def test_what_fails_half_way_goes_on_as_it_is_with_its_views(monkeypatch, capsys, error):
    """A graph break, then no compiler: by then the parameters' gradients have been taken away."""
    calls = []

    def breaks_once(module, flat, x):
        calls.append(x)
        if len(calls) == 1:
            raise error
        return gradient(module, flat, x)

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    module, flat, gradient = learner()
    fast = mpi.compiled(breaks_once, True)
    for x in torch.randn(2, 5, 3):
        fast(module, flat, x)
        found = flat.grad.clone()
        gradient(module, flat, x)
        assert torch.equal(found, flat.grad) and found.any()
    (line,) = capsys.readouterr().out.splitlines()
    assert type(error).__name__ in line and "and more" not in line


def test_what_is_compiled_fills_the_vector_and_leaves_the_views(monkeypatch):
    """The parts of flat.grad are no inputs of what is compiled; afterwards they are there again."""
    seen = []

    def compile_(function, dynamic):
        assert not dynamic
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    module, flat, gradient = learner()
    other = torch.nn.Linear(2, 2)                   # of the agent, but of another vector
    agent, kept = torch.nn.ModuleList([other, module]), mpi.flatten(other)
    kept.grad.fill_(7.0)
    parts = [param.grad for param in agent.parameters()]

    def watched(agent, flat, x):
        seen.append([param.grad is None for param in agent.parameters()])
        return gradient(agent[1], flat, x)

    fast = mpi.compiled(watched, True)
    for x in torch.randn(2, 5, 3):                  # twice: nothing of the first call is left
        loss = fast(agent, flat, x)
        found = flat.grad.clone()
        assert loss == gradient(module, flat, x) and torch.equal(found, flat.grad)
        assert found.ne(0).sum() == 16 and not found[16:].any()
    assert seen == [[False] * 2 + [True] * 4] * 2 and kept.grad.eq(7).all()
    assert all(param.grad is part for param, part in zip(agent.parameters(), parts, strict=True))


def test_a_compiled_function_may_fill_the_vector_itself(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    module, flat, _ = learner()

    def fill(module, flat):
        flat.grad.fill_(3.0)
        return torch.zeros(())

    mpi.compiled(fill, True)(module, flat)
    assert flat.grad.eq(3).all() and module[0].weight.grad.eq(3).all()


def test_together_passes_results_and_failures_on(monkeypatch):
    assert mpi.together(max, 1, 2) == 2
    assert mpi.together(None, 1) is None
    with pytest.raises(ZeroDivisionError):
        mpi.together(divmod, 1, 0)
    monkeypatch.setattr(mpi, "gather", lambda value: [value, (True, "no such run")])
    with pytest.raises(mpi.UsageError, match="no such run"):
        mpi.together(partial(max, 1, 2))


def test_clean_env_drops_the_launchers_variables_and_no_other(monkeypatch):
    names = ["PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "HYDI_CONTROL_FD",
             "HYDRA_LAUNCHER", "PLAINRL_PROCS"]
    for name in [*names, "MUJOCO_GL", "IMPI"]:
        monkeypatch.setenv(name, "1")
    env = ranks.clean_env()
    assert not set(names) & set(env) and {"PATH", "MUJOCO_GL", "IMPI"} <= set(env)


# ------------------------------------------------------------------------------- the launcher
@pytest.fixture
def typed(monkeypatch):
    """A Config as the command line gives it, on two cores; what would start is returned."""
    @dataclasses.dataclass(frozen=True)
    class Config:
        num_procs: int = 2

    started = []
    Config.__module__ = "__main__"
    for name in ranks._SIZES:
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
    mpi.launch(Config(2))
    (file, command, env), = started
    assert file == mpiexec()
    assert command == [mpiexec(), "-n", "2", sys.executable, "-m", "algos.ppo", "--num-procs", "2"]
    assert env["PLAINRL_PROCS"] == "2" and "PMIX_RANK" not in env


def test_launch_refuses_where_there_is_no_program_to_start(typed, monkeypatch):
    Config, started = typed
    monkeypatch.delattr(sys.modules["__main__"], "__file__")     # a notebook
    with pytest.raises(mpi.UsageError, match="num_procs is 2"):
        mpi.launch(Config(2))
    assert started == []


@pytest.mark.parametrize("procs, module, path, message", [
    (3, "__main__", None, "--num-procs is 3.* 1 to 2"),
    (2, "algos.ppo", None, "num_procs is 2.* command line"),
    (2, "__main__", "/nowhere", "--num-procs is 2.* mpiexec"),
])
def test_launch_refuses(typed, monkeypatch, procs, module, path, message):
    Config, started = typed
    Config.__module__ = module
    if path:
        monkeypatch.setattr(sys, "executable", f"{path}/python")
        monkeypatch.setenv("PATH", path)
    with pytest.raises(mpi.UsageError, match=message):
        mpi.launch(Config(procs))
    assert started == []


def test_launch_refuses_another_number_than_the_launchers(typed, monkeypatch):
    Config, started = typed
    monkeypatch.setenv("PMI_SIZE", "1")
    with pytest.raises(mpi.UsageError, match="--num-procs is 2.* started 1"):
        mpi.launch(Config(2))
    assert started == []


# -------------------------------------------------------------------------------- real ranks
def test_three_ranks_compute_what_numpy_does(tmp_path):
    status, stdout, stderr = run(tmp_path, COLLECTIVES, launcher=[mpiexec(), "-n", "3"])
    assert status == 0, stderr
    said, printed = stdout.splitlines()
    assert said == "said once"
    outs = json.loads(printed)
    rngs = [np.random.default_rng(k) for k in range(3)]
    data = np.stack([rng.standard_normal((5, 4)) for rng in rngs])
    rows = np.concatenate([1e6 + rng.standard_normal((k + 2, 4)) for k, rng in enumerate(rngs)])
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
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
        assert out["bcast"] == "from 0" and out["share"] == 4
        assert out["weights"] == net(torch.ones(3)).tolist()    # rank 0's, whatever the seed
        assert out["grad"] == [[1.0] * 3] * 2                   # the mean of 0, 1 and 2
        assert out["differ"] == "the parameters of ranks [2] differ from those of rank 0"


@TWO_CORES
def test_num_procs_starts_two_ranks_and_speaks_once(tmp_path):
    status, stdout, stderr = run(tmp_path, TOY, 2, "")
    assert (status, stderr) == (0, "")
    # Two ranks may write into each other's line, so these are no lines but parts of one text.
    for words in ("device: cpu", "rank 0 of 2", "rank 1 of 2", "run: here"):
        assert stdout.count(words) == 1
    assert len(stdout.splitlines()) == 4


def test_a_refusal_by_all_ranks_is_one_line_and_status_2(tmp_path):
    status, stdout, stderr = run(tmp_path, TOY, 1, "refused", launcher=[mpiexec(), "-n", "2"])
    assert status == 2 and stdout == "device: cpu\n"
    assert stderr == "error: --num-envs is 3; it takes a multiple of the 2 processes\n"


@pytest.mark.parametrize("mode, expected, last_words", [
    ("nan", 1, ["rank 1 of 2: Traceback", "FloatingPointError: pi_loss is nan"]),
    ("damaged file", 2, ["rank 1 of 2: error: rank1.pt is damaged"]),
    ("killed", 9, []),
])
def test_one_rank_dies_and_takes_the_other_with_it(tmp_path, mode, expected, last_words):
    status, _, stderr = run(tmp_path, TOY, 2, mode, launcher=[mpiexec(), "-n", "2"])
    assert status == expected
    for words in last_words:
        assert stderr.count(words) == 1


@TWO_CORES
@pytest.mark.parametrize("send, number, expected", [
    (os.killpg, signal.SIGINT, 130),    # Ctrl-C goes to everybody in the terminal
    (os.kill, signal.SIGTERM, 143),     # `kill PID` to the one process that the user started
])
def test_a_signal_leaves_every_rank_the_time_to_save(tmp_path, send, number, expected):
    (tmp_path / "toy.py").write_text(TOY)
    with subprocess.Popen([sys.executable, "toy.py", "2", "signal"], stdout=subprocess.PIPE,
                          start_new_session=True, text=True) as process:
        assert any("learning" in line for line in process.stdout)
        send(process.pid, number)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == expected
    assert sorted(tmp_path.glob("saved*")) == [tmp_path / "saved0", tmp_path / "saved1"]


def test_a_world_of_another_size_is_refused(tmp_path):
    """As where mpiexec belongs to another MPI: three processes, each of them alone."""
    status, stdout, stderr = run(tmp_path, TOY, 1, "", PLAINRL_PROCS="3", PMI_SIZE="1")
    assert status == 2 and "rank" not in stdout
    assert stderr.startswith("error: 3 processes were started, but MPI connects 1")
