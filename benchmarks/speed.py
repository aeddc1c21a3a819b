"""Time whole training runs here and in stable-baselines3 or SBX, in turn, in pairs.

    python benchmarks/speed.py --num-envs 8 --pairs 5
    python benchmarks/speed.py --algo sac --num-envs 1 --steps 5000 [--peer sbx]
    python benchmarks/speed.py --algo dqn --env CartPole-v1 --num-envs 1
    python benchmarks/speed.py --algo ppo_lstm --env CartPole-v1 --steps 50000
    python benchmarks/speed.py --algo a2c --env ALE/Pong-v5 --num-envs 16 --steps 8000 [--bf16]
    python benchmarks/speed.py --table [--quick]  # where the time goes
    python benchmarks/speed.py --scaling      # one process against two

Both train with the same environments, rollout steps, minibatch size, epochs and
network, without evaluation. On-policy algorithms normalise observations and
rewards. Both processes count the environment's and the optimizer's steps, and
the comparison fails if the counts differ (SBX's optimizer is not counted).
Each library chooses its threads, as if typed; --threads N gives each N cores.

--table has a row for each of fifteen files, with the peer where there is one. `start`,
`environment`, `acting`, `learning` and `rest` are shares of the whole process.
"""

import argparse
import csv
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENV = "HalfCheetah-v4"
# Of an algorithm of each family: the environment, and the counts that grow with weak scaling.
SCALED = {
    "ppo": (ENV, {"--num-envs": 8, "--rollout-steps": 2048, "--minibatch-size": 64,
                  "--total-steps": 40_960}),
    "a2c": (ENV, {"--num-envs": 16, "--rollout-steps": 160, "--report-every": 4000,
                  "--total-steps": 40_000}),
    "trpo": (ENV, {"--num-envs": 8, "--rollout-steps": 2048, "--minibatch-size": 256,
                   "--total-steps": 40_960}),
    "dqn": ("CartPole-v1", {"--num-envs": 4, "--update-every": 2, "--batch-size": 128,
                            "--start-steps": 500, "--report-every": 1000,
                            "--total-steps": 20_000}),
    "sac": (ENV, {"--num-envs": 2, "--update-every": 1, "--batch-size": 256, "--start-steps": 500,
                  "--report-every": 1000, "--total-steps": 3000})}


# PEER gives the peer the same work as our default settings, OURS gives us the peer's. sb3-contrib
# averages KL over the dimensions of an action, 6 for HalfCheetah, so its numbers are divided by 6.
PEER = {"trpo": {"n_critic_updates": 10, "batch_size": 256, "cg_max_steps": 15,
                 "target_kl": 0.04 / 6, "cg_damping": 0.1 / 6},
        "a2c": {"n_steps": 10},
        **{algo: {"learning_starts": 1000} for algo in ("ddpg", "td3", "sac")}}
# The peer has neither of these.
OURS = {**dict.fromkeys(("dqn", "dqn_atari"), {"double": False, "dueling": False}),
        **{algo: {"start_steps": 1000} for algo in ("ddpg", "td3", "sac")}}
# Of each file in --table: environment, number of environments, steps.
CASES = {
    "vpg": (ENV, 8, 100_000), "a2c": (ENV, 16, 100_000), "ppo": (ENV, 8, 100_352),
    "trpo": (ENV, 8, 100_352), "acktr": (ENV, 16, 100_000), "ppo_popart": (ENV, 8, 100_352),
    "ppo_lstm": ("CartPole-v1", 8, 25_600), "acer": ("CartPole-v1", 16, 40_000),
    "dqn": ("CartPole-v1", 1, 30_000), "dqn_per": ("CartPole-v1", 1, 30_000),
    "dqn_atari": ("ALE/Pong-v5", 1, 8_000), "ddpg": (ENV, 1, 5_000), "td3": (ENV, 1, 5_000),
    "sac": (ENV, 1, 5_000), "sac_her": ("FetchReach-v4", 1, 5_000)}
TABLE_PEERS = ("a2c", "ppo", "ppo_lstm", "trpo", "dqn", "ddpg", "td3", "sac")
TABLE_ONLY = {"dqn_atari": {"start_steps": 500, "buffer_size": 20_000},
              "sac_her": {"start_steps": 1000}}
PARTS = ("start", "environment", "acting", "learning", "rest")


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


def clock_parts(module) -> dict[str, float]:
    """Return the seconds that an algorithm file spends in its parts from now on."""
    seconds = dict.fromkeys(("environment", "acting", "learning"), 0.0)

    def clocked(part, function):
        def wrapper(*inputs, **settings):
            began = time.perf_counter()
            result = function(*inputs, **settings)
            seconds[part] += time.perf_counter() - began
            return result
        return wrapper

    make_envs = module.make_envs

    def make_clocked_envs(cfg, num_envs):
        envs = make_envs(cfg, num_envs)
        envs.step = clocked("environment", envs.step)
        return envs

    module.make_envs = make_clocked_envs
    module.update = clocked("learning", module.update)
    for part, name in (("acting", "act"), ("acting", "env_act"), ("learning", "update_stats")):
        if hasattr(module.Agent, name):
            setattr(module.Agent, name, clocked(part, getattr(module.Agent, name)))
    return seconds


def child(library: str, args: argparse.Namespace) -> None:
    """Train once. The last line has the counts of steps; ours also where the time went."""
    if args.threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    from utils import mpi
    from utils.env_ids import refusing_bad_env

    with refusing_bad_env(argparse.Namespace(env=args.env, env_kwargs="{}")):
        pass  # registers Atari's games and the robots
    counts = count_steps(library, args.env)
    seconds = {}
    if library != "plainrl":
        sys.path.insert(0, str(HERE))
        from sb3 import make_peer

        given = PEER.get(args.algo, {})
        if library == "sbx":
            given = given | {"library": importlib.import_module("sbx")}
        elif args.threads:
            importlib.import_module("torch").set_num_threads(args.threads)
        make_peer(args.algo, args.env, 1, args.num_envs, **given).learn(args.steps)
    else:
        module = importlib.import_module(f"algos.{args.algo}")
        seconds = clock_parts(module)
        given = {"torch_threads": args.threads} if args.threads else {}
        given |= {"bf16": True} if args.bf16 else {}
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            module.train(module.Config.for_env(
                args.env, total_steps=args.steps, num_envs=args.num_envs,
                num_procs=args.num_procs, run_dir=mpi.gather(f"{folder}/run")[0], **given,
                **OURS.get(args.algo, {}), **TABLE_ONLY.get(args.algo, {})))
        seconds["train"] = time.perf_counter() - began
        counts["env"] = sum(mpi.gather(counts["env"]))  # every rank takes every gradient step
    mpi.say("\n" + json.dumps({"counts": counts, "seconds": seconds}))


def timed(library: str, args: argparse.Namespace, threads: int,
          steps: int) -> tuple[float, dict, dict]:
    """Return the seconds of a whole process, start-up included, its counts, and where they went."""
    command = [sys.executable, __file__, "--child", library, "--algo", args.algo, "--env", args.env,
               "--num-envs", str(args.num_envs), "--threads", str(threads), "--steps", str(steps)]
    if library == "plainrl":
        command += ["--bf16"] * args.bf16 + ["--num-procs", str(args.num_procs)]
        if args.num_procs > 1:
            from utils.run.launch import find_mpiexec

            command = [find_mpiexec(), "-n", str(args.num_procs), *command]
    start = time.perf_counter()
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    took = time.perf_counter() - start
    told = json.loads(out.splitlines()[-1])
    parts = told["seconds"]
    if parts:
        train = parts.pop("train")
        parts |= {"start": took - train, "rest": train - sum(parts.values())}
    return took, told["counts"], parts


def timed_pair(args: argparse.Namespace, threads: int, steps: int
               ) -> tuple[float, float, dict, dict]:
    """Time the peer, then ours; return the seconds of both, the counts, and where ours went.

    The script ends if they made different numbers of steps.
    """
    peer, peer_counts, _ = timed(args.peer, args, threads, steps)
    ours, counts, parts = timed("plainrl", args, threads, steps)
    if not peer_counts.items() <= counts.items():
        sys.exit(f"{args.algo}: numbers of steps differ: plainrl {counts}, "
                 f"{args.peer} {peer_counts}")
    return peer, ours, counts, parts


def compare(args: argparse.Namespace) -> None:
    """Print each pair's seconds and ratio, and the median ratio."""
    ratios = []
    for pair in range(args.pairs):
        peer, ours, counts, parts = timed_pair(args, args.threads, args.steps)
        ratios.append(peer / ours)
        print(f"pair {pair + 1}: {args.peer} {peer:.1f} s, plainrl {ours:.1f} s, "
              f"ratio {ratios[-1]:.2f}; ours:",
              ", ".join(f"{part} {parts[part] / ours:.0%}" for part in PARTS), flush=True)
    print(f"{args.algo}, num_envs {args.num_envs}, num_procs {args.num_procs}, "
          f"bf16 {args.bf16}, {counts}: median ratio {statistics.median(ratios):.2f} "
          f"(min {min(ratios):.2f}, max {max(ratios):.2f})")


def table(args: argparse.Namespace) -> None:
    """Print a row of Markdown for each of CASES: medians over pairs of runs in turn."""
    pairs = 1 if args.quick else args.pairs
    print("| algorithm | environment | N | steps/s | over the peer | " + " | ".join(PARTS)
          + " |\n|---|---|---:|---:|---|" + "---:|" * len(PARTS), flush=True)
    for algo, (env, num_envs, steps) in CASES.items():
        case = argparse.Namespace(algo=algo, env=env, num_envs=num_envs, bf16=args.bf16,
                                  num_procs=1, peer="sb3")
        steps = steps // 4 if args.quick else steps
        if algo.startswith(("ppo", "trpo")):
            steps = -(-steps // 2048) * 2048  # whole rollouts
        times, ratios, shares = [], [], []
        for _ in range(pairs):
            if algo in TABLE_PEERS:
                peer, ours, _, parts = timed_pair(case, 1, steps)
                ratios.append(peer / ours)
            else:
                ours, _, parts = timed("plainrl", case, 1, steps)
            times.append(ours)
            shares.append([parts[part] / ours for part in PARTS])
        rate = steps / statistics.median(times)
        cells = [algo, env, str(num_envs), f"{rate:,.0f}",
                 " ".join(f"{ratio:.2f}" for ratio in ratios) or "no peer",
                 *(f"{statistics.median(column):.0%}" for column in zip(*shares))]
        print("| " + " | ".join(cells) + " |", flush=True)


def rate_of(algo: str, env: str, *flags) -> float:
    """Return the steps per second of a run as a user would start it, from its first report on."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", f"algos.{algo}", "--env", env, "--run-dir", str(run)]
        subprocess.run([*command, *map(str, flags)], check=True, capture_output=True,
                       cwd=HERE.parent)
        first, *_, last = csv.DictReader((run / "progress.csv").read_text().splitlines())
    return (int(last["step"]) - int(first["step"])) / (float(last["time"]) - float(first["time"]))


def scaling(args: argparse.Namespace) -> None:
    """Print rows of Markdown: what a second process gains, for an algorithm of each family.

    Weak scaling gives two processes twice every count in `SCALED`, strong scaling the same. The
    cases run in turn, `--pairs` times. Start-up does not count: time is taken from the first report
    on. Only `--pairs` matters here.
    """
    print("| algorithm | one process | two, weak | over one | two, strong | over one |\n"
          "|---|---|---|---|---|---|", flush=True)
    for algo, (env, counts) in SCALED.items():
        rates = {(1, 1): [], (2, 2): [], (2, 1): []}  # by processes and factor of the work
        for _ in range(args.pairs):
            for (procs, factor), found in rates.items():
                flags = ["--num-procs", procs]
                for flag, count in counts.items():
                    flags += [flag, count * factor]
                found.append(rate_of(algo, env, *flags))
        one, *others = rates.values()
        cells = [algo, " ".join(f"{rate:,.0f}" for rate in one)]
        for found in others:
            cells.append(" ".join(f"{rate:,.0f}" for rate in found))
            cells.append(" ".join(f"{rate / base:.2f}" for rate, base in zip(found, one)))
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python benchmarks/speed.py", description=__doc__,
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
    parser.add_argument("--table", action="store_true", help="a row for each of fifteen files")
    parser.add_argument("--quick", action="store_true",
                        help="--table with one pair of short runs each: five minutes")
    parser.add_argument("--scaling", action="store_true",
                        help="one process against two, for each family")
    parser.add_argument("--child", choices=("plainrl", "sb3", "sbx"),
                        help="internal: one training run")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments)
    elif arguments.table:
        table(arguments)
    elif arguments.scaling:
        scaling(arguments)
    else:
        compare(arguments)
