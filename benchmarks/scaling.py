"""Model how PPO's speed scales with processes.

    python benchmarks/scaling.py     fit, predict two processes, measure them,
                                     extrapolate

P ranks share N environments, rollouts of B steps, minibatches of M samples, and
E epochs. One update takes t(P) seconds:

    t(P) = B/N (a + b N/P)          rollout: a per vector step, b per
                                    environment step
         + E B/N h                  advantages: h per step of GAE, recomputed
                                    every epoch
         + E B/M (c + d M/P)        gradient steps: c per step, d per sample
         + log2(P) E B/M (f + g W)  averaging gradients of W bytes, in log2(P)
                                    rounds: f per message, g per byte
         + (P - 1) E k              moments for each epoch: k per other rank

a and b are least-squares fits to rollouts of one process with several N. h is
measured. c and d are fits to updates of one process with several M, after the
time for h is subtracted. f, g and k come from messages between two processes; k
excludes the work that one process would do alone. The model leaves out reports,
checkpoints, statistics, waiting for the slowest rank, and shared memory
bandwidth.
"""

import argparse
import json
import math
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
# What is measured: processes, environments, rollout steps, minibatch size.
SIZES = {"one process": (1, 8, 2048, 64), "weak, two": (2, 16, 4096, 128),
         "strong, two": (2, 8, 2048, 64)}
# Assumed, not measured: what a 10 Gbit/s network adds, in seconds per message and per byte.
NETWORK = 30e-6, 1 / 1.25e9


@dataclass(frozen=True)
class Costs:
    """The model's a, b, h, c, d, f, g, k in seconds (g: seconds per byte), and W in bytes."""

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
    """Return (intercept, slope) of the least-squares line of y over x."""
    slope, intercept = np.polyfit(x, y, 1)
    return float(intercept), float(slope)


def update_seconds(costs, procs, num_envs, batch, minibatch, epochs=10):
    """Return t(P) of the model. One process sends no messages."""
    steps = epochs * batch / minibatch
    rollout = batch / num_envs * (costs.vector_step + costs.env_step * num_envs / procs)
    learning = epochs * batch / num_envs * costs.gae_step
    learning += steps * (costs.gradient_step + costs.sample * minibatch / procs)
    message = costs.message + costs.byte * costs.gradient_bytes
    moments = (procs - 1) * epochs * costs.moments
    return rollout + learning + math.log2(procs) * steps * message + moments


def rate(costs, procs, num_envs, batch, minibatch):
    """Return the environment steps per second that the model predicts."""
    return batch / update_seconds(costs, procs, num_envs, batch, minibatch)


def weak(procs):
    """Return P, N, B, M for weak scaling: each process has the work of a single one."""
    return procs, 8 * procs, 2048 * procs, 64 * procs


def strong(procs):
    """Return P, N, B, M for strong scaling: all processes share a fixed amount of work."""
    return procs, 64, 8192, 256


def quickest(function, *inputs, repeats=3):
    """Return the shortest time of several calls, which other programs disturb least."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(*inputs)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def one_process():
    """Return a, b, h, c, d in seconds, and the gradient's size W in bytes."""
    from algos import ppo
    from utils import mpi
    from utils.envs import make_envs

    torch.set_num_threads(1)
    torch.empty(30 << 20, dtype=torch.uint8)    # memory as in a run, see utils/run.py
    rollouts, updates = [], []
    for num_envs in ENVS:
        cfg = ppo.Config(num_envs=num_envs)
        envs = make_envs(cfg, num_envs)
        agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
        obs, _ = envs.reset(seed=1)
        ppo.collect(agent, envs, obs, 20)
        rollouts.append(quickest(ppo.collect, agent, envs, obs, 100) / 100)
    rollout, *_ = ppo.collect(agent, envs, obs, 2048 // num_envs)
    row = rollout.rew
    gae = quickest(ppo.compute_advantages, rollout, row, row, 0.99, 0.95) / len(row)
    for minibatch in MINIBATCHES:
        cfg = ppo.Config(num_envs=num_envs, minibatch_size=minibatch)
        agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
        optimizer = mpi.Adam(agent)
        seconds = quickest(ppo.update, agent, optimizer, rollout, 1e-4)
        seconds -= cfg.epochs * len(row) * gae
        updates.append(seconds / (cfg.epochs * 2048 / minibatch))
    gradient_bytes = optimizer.flat.numel() * optimizer.flat.element_size()
    return *line(ENVS, rollouts), gae, *line(MINIBATCHES, updates), gradient_bytes


def child():
    """Exchange messages as one of two ranks; rank 0 prints f, g and k."""
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
    """Return f, g, k, measured between two processes on this machine."""
    from utils import launch

    command = [launch.find_mpiexec(), "-n", "2", sys.executable, __file__, "--child"]
    env = launch.clean_env() | {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    return json.loads(out.splitlines()[-1])


def measured_rate(updates: int, procs: int, num_envs: int, batch: int, minibatch: int) -> float:
    from speed import rate_of

    return rate_of("--num-procs", procs, "--num-envs", num_envs, "--rollout-steps", batch,
                   "--minibatch-size", minibatch, "--total-steps", updates * batch)


def main():
    *alone, gradient_bytes = one_process()
    costs = Costs(*alone, *two_processes(), gradient_bytes)
    print(f"vector step: {costs.vector_step * 1e6:.0f} us, and {costs.env_step * 1e6:.0f} us per "
          f"environment; GAE: {costs.gae_step * 1e6:.1f} us per step\ngradient step: "
          f"{costs.gradient_step * 1e6:.0f} us, and {costs.sample * 1e6:.2f} us per sample\n"
          f"message between two processes: {costs.message * 1e6:.0f} us, "
          f"and {costs.byte * 1e9:.2f} ns per byte of {gradient_bytes:,}\n"
          f"moments: {costs.moments * 1e6:.0f} us", flush=True)
    for name, size in SIZES.items():
        print(f"{name}: predicted {rate(costs, *size):.0f} steps/s", flush=True)
    for name, size in SIZES.items():
        rates = [measured_rate(20, *size) for _ in range(3)]
        print(f"{name}: measured {' '.join(f'{rate:.0f}' for rate in rates)}, "
              f"median {statistics.median(rates):.0f}", flush=True)
    over_network = replace(costs, message=costs.message + NETWORK[0],
                           byte=costs.byte + NETWORK[1], moments=costs.moments + NETWORK[0])
    print("extrapolated, not measured: steps/s (ratio to one process)")
    print("procs | weak: 8 environments, minibatch size 64 each | strong: 64 environments, "
          "8192 rollout steps, minibatch size 256 | strong, over a 10 Gbit/s network")
    cases = (costs, weak), (costs, strong), (over_network, strong)
    one = [rate(model, *size(1)) for model, size in cases]
    for procs in (1, 2, 4, 8, 16, 32, 64):
        rates = [rate(model, *size(procs)) for model, size in cases]
        cells = [f"{of:.0f} ({of / single:.1f})" for of, single in zip(rates, one)]
        print(" | ".join([f"{procs:5}", *cells]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python benchmarks/scaling.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help="internal: one of two ranks")
    if parser.parse_args().child:
        child()
    else:
        main()
