"""Time whole training runs here and in stable-baselines3 or SBX, in turn, in pairs.

    python -m benchmarks.speed --num-envs 8 --pairs 5
    python -m benchmarks.speed --algo sac --num-envs 1 --steps 5000 [--peer sbx]
    python -m benchmarks.speed --algo dqn --env CartPole-v1 --num-envs 1
    python -m benchmarks.speed --algo ppo_lstm --env CartPole-v1 --steps 50000
    python -m benchmarks.speed --algo a2c --env ALE/Pong-v5 --num-envs 16 --steps 8000 [--bf16]

Both train with the same settings, those of our Config but for SETTINGS, without
evaluation: benchmarks/sb3.py gives them to the peer. Both processes count the
environment's and the optimizer's steps, and the comparison fails if the counts
differ (SBX's optimizer is not counted). Each library chooses its threads, as if
typed; --threads N gives each N cores. speed.jsonl keeps the last ratios of every
command, and table.py shows them.
"""

import argparse
import importlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.suite import HERE, ROOT
from utils.files import read_lines, write_lines

ENV = "HalfCheetah-v4"
# Not the defaults: a short run has to learn, and the peer's DQN is neither double nor dueling.
SETTINGS = {"dqn": {"double": False, "dueling": False},
            "dqn_atari": {"double": False, "dueling": False, "start_steps": 500,
                          "buffer_size": 20_000},
            **{algo: {"start_steps": 1000} for algo in ("ddpg", "td3", "sac", "sac_her")}}


def count_steps(library: str, env: str) -> dict[str, int]:
    """Return counts of environment and optimizer steps that this process updates from now on."""
    import gymnasium as gym
    from gymnasium.envs.registration import load_env_creator

    from utils.env_ids import is_game

    spec = gym.spec(env)  # all environments of a game take a step at once
    env_class = load_env_creator(spec.vector_entry_point if is_game(env, "ALE/")
                                 else spec.entry_point)
    counts = {"env": 0, "optimizer": 0}

    def counted(name, step):
        def wrapper(*inputs, **settings):
            counts[name] += 1
            return step(*inputs, **settings)
        return wrapper

    env_class.step = counted("env", env_class.step)
    if library == "sbx":
        del counts["optimizer"]  # it is compiled
    elif library == "sb3":
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(counted("optimizer", lambda *_: None))
    else:
        from utils.optim import Adam, RMSProp

        for optimizer in (Adam, RMSProp):
            optimizer.step = counted("optimizer", optimizer.step)
    return counts


def child(library: str, args: argparse.Namespace) -> None:
    """Train once. The last line has the counts of steps."""
    if args.threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    from utils import mpi
    from utils.env_ids import refusing_bad_env

    with refusing_bad_env(argparse.Namespace(env=args.env, env_kwargs="{}")):
        pass  # registers Atari's games and the robots
    counts = count_steps(library, args.env)
    if library != "plainrl":
        from benchmarks.sb3 import make_peer

        peers = importlib.import_module({"sb3": "stable_baselines3"}.get(library, library))
        if args.threads:
            importlib.import_module("torch").set_num_threads(args.threads)
        make_peer(args.algo, argparse.Namespace(**json.loads(args.settings)), peers,
                  own=False).learn(args.steps)
    else:
        module = importlib.import_module(f"algos.{args.algo}")
        given = {"torch_threads": args.threads} if args.threads else {}
        given |= {"bf16": True} if args.bf16 else {}
        with tempfile.TemporaryDirectory() as folder:
            module.train(config(args, args.steps, num_procs=args.num_procs,
                                run_dir=mpi.gather(f"{folder}/run")[0], **given))
        counts["env"] = sum(mpi.gather(counts["env"]))  # every rank takes every gradient step
    mpi.say("\n" + json.dumps(counts))


def config(args: argparse.Namespace, steps: int, **given):
    """Return the settings of our run, which are also the peer's."""
    return importlib.import_module(f"algos.{args.algo}").Config.for_env(
        args.env, total_steps=steps, num_envs=args.num_envs, **SETTINGS.get(args.algo, {}), **given)


def timed(library: str, args: argparse.Namespace, threads: int, steps: int) -> tuple[float, dict]:
    """Return the seconds of a whole process, start-up included, and its counts."""
    command = [sys.executable, "-m", "benchmarks.speed", "--child", library, "--algo", args.algo,
               "--env", args.env, "--num-envs", str(args.num_envs),
               "--threads", str(threads), "--steps", str(steps)]
    if library == "plainrl":
        command += ["--bf16"] * args.bf16 + ["--num-procs", str(args.num_procs)]
        if args.num_procs > 1:
            from utils.run.launch import find_mpiexec

            command = [find_mpiexec(), "-n", str(args.num_procs), *command]
    else:
        command += ["--settings", json.dumps(vars(config(args, steps)))]
    start = time.perf_counter()
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return time.perf_counter() - start, json.loads(out.splitlines()[-1])


def compare(args: argparse.Namespace) -> list[float]:
    """Return the peer's seconds over ours for each pair. Exit if the numbers of steps differ."""
    ratios = []
    for pair in range(args.pairs):
        (peer, theirs), (ours, counts) = (
            timed(library, args, args.threads, args.steps) for library in (args.peer, "plainrl"))
        if not theirs.items() <= counts.items():
            sys.exit(f"{args.algo}: numbers of steps differ: plainrl {counts}, "
                     f"{args.peer} {theirs}")
        ratios.append(round(peer / ours, 2))
        print(f"pair {pair + 1}: {args.peer} {peer:.1f} s, plainrl {ours:.1f} s, "
              f"ratio {ratios[-1]:.2f}", flush=True)
    print(f"{args.algo}, {counts}: median ratio {statistics.median(ratios):.2f}")
    return ratios


def keep(args: argparse.Namespace, command: str, ratios: list[float]) -> None:
    """Write a row of speed.jsonl, or replace the one of the same command."""
    path = HERE / "speed.jsonl"
    rows = {row["command"]: row for row in read_lines(path)}
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    rows[command] = {"algo": args.algo, "env": args.env, "peer": args.peer, "command": command,
                     "ratios": ratios, "commit": commit}
    write_lines(path, [rows[name] for name in sorted(rows)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", default="ppo",
                        help="ppo, ppo_lstm, a2c, trpo, ddpg, td3, sac, dqn or dqn_atari")
    parser.add_argument("--env", default=ENV, help="Gymnasium id")
    parser.add_argument("--num-envs", type=int, default=8, help="environments (1 to 16)")
    parser.add_argument("--pairs", type=int, default=5, help="repetitions (3 to 5)")
    parser.add_argument("--steps", type=int, default=200_000, help="environment steps per run")
    parser.add_argument("--threads", type=int, default=0,
                        help="cores and threads of each; 0: as each library chooses by itself")
    parser.add_argument("--peer", choices=("sb3", "sbx"), default="sb3",
                        help="stable-baselines3, or SBX: pip install -e '.[bench]'")
    parser.add_argument("--bf16", action="store_true", help="run ours with --bf16")
    parser.add_argument("--num-procs", type=int, default=1, help="processes of ours (1 to 2)")
    parser.add_argument("--child", choices=("plainrl", "sb3", "sbx"),
                        help="internal: one training run")
    parser.add_argument("--settings", help="internal: the peer's settings, as JSON")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments)
    else:
        keep(arguments, shlex.join(sys.argv[1:]), compare(arguments))
