"""How many processes pay: a model of PPO's update, fitted here, tried on two, then extrapolated.

P ranks share N environments, batches of B steps and minibatches of M samples, E epochs of them. An
update takes, in seconds,

    t(P) = B/N (a + b N/P)            the rollout: a step of the vector, and of each environment
         + E B/N h                    advantages, anew each epoch, go back step by step
         + E B/M (c + d M/P)          gradient steps: each one's own cost, and that of its samples
         + log2(P) E B/M (f + g W)    messages: gradients of W bytes, halves of the ranks at once,
         + (P - 1) E k                and each epoch's moments, of which every rank hears all

a and b are fitted (least squares) to rollouts of one process with several N; c and d to its updates
with several M, without h, which is measured; f, g and k to messages between two processes, k
without what one process does alone. Left out: reports, checkpoints, statistics, ranks that wait for
the slowest, cores that share their memory.

    python benchmarks/scaling.py            fit, predict two processes, measure them, extrapolate
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

ENVS = (1, 2, 4, 8, 16)
MINIBATCHES = (4, 16, 64, 256)
NUMBERS = (1_000, 10_000, 100_000)
# Not measured: what a 10 Gbit/s network adds to a message, seconds and seconds a byte.
NETWORK = 30e-6, 1 / 1.25e9


@dataclass(frozen=True)
class Costs:
    """Seconds: a, b, h, c, d, f, k of the model; g in seconds a byte; the gradient's bytes."""

    vector_step: float
    env_step: float
    gae_step: float
    gradient_step: float
    sample: float
    message: float
    byte: float
    moments: float
    gradient_bytes: int


def line(x, y):
    """Least squares: (intercept, slope) of y over x."""
    slope, intercept = np.polyfit(x, y, 1)
    return float(intercept), float(slope)


def update_seconds(costs, procs, num_envs, batch, minibatch, epochs=10):
    """t(P) of the model. One process sends no messages."""
    steps = epochs * batch / minibatch
    rollout = batch / num_envs * (costs.vector_step + costs.env_step * num_envs / procs)
    learning = epochs * batch / num_envs * costs.gae_step
    learning += steps * (costs.gradient_step + costs.sample * minibatch / procs)
    message = costs.message + costs.byte * costs.gradient_bytes
    moments = (procs - 1) * epochs * costs.moments
    return rollout + learning + math.log2(procs) * steps * message + moments


def rate(costs, procs, num_envs, batch, minibatch):
    """Environment steps per second by the model."""
    return batch / update_seconds(costs, procs, num_envs, batch, minibatch)


def weak(procs):
    """P, N, B, M where each process has the work of one."""
    return procs, 8 * procs, 2048 * procs, 64 * procs


def strong(procs):
    """P, N, B, M where all of them share the work of one."""
    return procs, 64, 8192, 256


def quickest(function, *inputs, repeats=3):
    """The least seconds of several calls: what it takes when nothing comes between."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(*inputs)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def one_process():
    """a, b, h, c, d in seconds, and the gradient's bytes."""
    from algos import ppo
    from utils import mpi

    mpi.choose_device(ppo.Config(), images=False)   # sets threads and memory as a run does
    rollouts, updates = [], []
    for num_envs in ENVS:
        cfg = ppo.Config(num_envs=num_envs)
        envs = ppo.make_envs(cfg, num_envs)
        agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
        obs, _ = envs.reset(seed=1)
        ppo.collect(agent, envs, obs, 20)
        rollouts.append(quickest(ppo.collect, agent, envs, obs, 100) / 100)
    rollout, *_ = ppo.collect(agent, envs, obs, 2048 // num_envs)
    row, rest = rollout.rew, (rollout.terminated, rollout.done, 0.99, 0.95)
    gae = quickest(ppo.gae, row, row, row, *rest) / len(row)
    for minibatch in MINIBATCHES:
        cfg = ppo.Config(num_envs=num_envs, minibatch=minibatch)
        agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
        flat = mpi.flatten(agent)
        optimizer = mpi.Adam(flat)
        seconds = quickest(ppo.update, agent, flat, optimizer, rollout, 1e-4)
        seconds -= cfg.epochs * len(row) * gae
        updates.append(seconds / (cfg.epochs * 2048 / minibatch))
    gradient_bytes = flat.numel() * flat.element_size()
    return *line(ENVS, rollouts), gae, *line(MINIBATCHES, updates), gradient_bytes


def child():
    """One of two ranks that send each other messages; rank 0 prints f, g and k."""
    from utils import mpi

    torch.set_num_threads(1)

    def seconds(function, *inputs, repeats=200):
        def many():
            for _ in range(repeats):
                function(*inputs)

        mpi.barrier()
        return quickest(many, repeats=5) / repeats

    averages = [seconds(mpi.average, torch.zeros(numbers)) for numbers in NUMBERS]
    rows = torch.randn(64, 32)
    alone = seconds(lambda: (rows.double().mean(0), rows.double().var(0)))
    moments = seconds(mpi.moments, rows) - alone
    if mpi.rank() == 0:
        print(json.dumps([*line([4 * numbers for numbers in NUMBERS], averages), moments]))


def two_processes():
    """f, g, k between two processes of this machine."""
    from utils import launch

    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [shutil.which("mpiexec", path=path), "-n", "2", sys.executable, __file__, "--child"]
    env = launch.clean_env() | {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    return json.loads(out.splitlines()[-1])


def main():
    from speed import SIZES, measured_rate

    *alone, gradient_bytes = one_process()
    costs = Costs(*alone, *two_processes(), gradient_bytes)
    print(f"a step of the vector {costs.vector_step * 1e6:.0f} us and {costs.env_step * 1e6:.0f} "
          f"us an environment; a step of GAE {costs.gae_step * 1e6:.1f} us;\na gradient step "
          f"{costs.gradient_step * 1e6:.0f} us and {costs.sample * 1e6:.2f} us a sample; a message "
          f"between two {costs.message * 1e6:.0f} us\nand {costs.byte * 1e9:.2f} ns a byte, the "
          f"gradient has {gradient_bytes:,}; moments {costs.moments * 1e6:.0f} us", flush=True)
    for name, size in SIZES.items():
        print(f"{name}: predicted {rate(costs, *size):.0f} steps/s", flush=True)
    for name, size in SIZES.items():
        rates = [measured_rate(20, *size) for _ in range(3)]
        print(f"{name}: measured {' '.join(f'{rate:.0f}' for rate in rates)}, "
              f"median {statistics.median(rates):.0f}", flush=True)
    over_network = replace(costs, message=costs.message + NETWORK[0],
                           byte=costs.byte + NETWORK[1], moments=costs.moments + NETWORK[0])
    print("extrapolated, never measured: steps/s (over one process)")
    print("procs | weak: 8 environments, minibatch 64 each | strong: 64 environments, batch 8192, "
          "minibatch 256 | the same over a 10 Gbit/s network")
    cases = (costs, weak), (costs, strong), (over_network, strong)
    one = [rate(model, *size(1)) for model, size in cases]
    for procs in (1, 2, 4, 8, 16, 32, 64):
        rates = [rate(model, *size(procs)) for model, size in cases]
        cells = [f"{of:.0f} ({of / single:.1f})" for of, single in zip(rates, one)]
        print(" | ".join([f"{procs:5}", *cells]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true")
    if parser.parse_args().child:
        child()
    else:
        main()
