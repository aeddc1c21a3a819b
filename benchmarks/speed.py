"""Time whole training runs here and in stable-baselines3, in turn, in pairs.

    python benchmarks/speed.py --num-envs 8 --pairs 5 [--compile]
    python benchmarks/speed.py --algo sac --num-envs 1 --steps 20000
    python benchmarks/speed.py --algo dqn --env CartPole-v1 --num-envs 1
    python benchmarks/speed.py --algo ppo_lstm --env CartPole-v1 --steps 50000
    python benchmarks/speed.py --num-envs 8 --profile    # where the time goes
    python benchmarks/speed.py --scaling      # one process against two
    python benchmarks/speed.py --start        # time to the first report, memory

Both train with the same environments, rollout steps, minibatch size, epochs and
network, without evaluation. On-policy algorithms normalise observations and
rewards. Both processes count the environment's and the optimizer's steps, and
the comparison fails if the counts differ. Unless --threads is given, a short
trial picks the faster thread count for each library.
"""

import argparse
import csv
import importlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENV = "HalfCheetah-v4"
# Processes, environments, rollout steps, minibatch size.
SIZES = {"one process": (1, 8, 2048, 64), "weak, two": (2, 16, 4096, 128),
         "strong, two": (2, 8, 2048, 64)}


# PEER gives the peer the same work as our default settings, OURS gives us the peer's. sb3-contrib
# averages KL over the dimensions of an action, 6 for HalfCheetah, so its numbers are divided by 6.
PEER = {"trpo": {"n_critic_updates": 10, "batch_size": 256, "cg_max_steps": 15,
                 "target_kl": 0.04 / 6, "cg_damping": 0.1 / 6},
        "a2c": {"n_steps": 10},
        **{algo: {"learning_starts": 1000} for algo in ("ddpg", "td3", "sac")}}
OURS = {"dqn": {"double": False, "dueling": False},     # the peer has neither
        **{algo: {"start_steps": 1000} for algo in ("ddpg", "td3", "sac")}}


def count_steps(library: str, env: str) -> dict[str, int]:
    """Return counts of environment and optimizer steps that this process updates from now on."""
    import gymnasium as gym
    from gymnasium.envs.registration import load_env_creator

    env_class = load_env_creator(gym.spec(env).entry_point)
    counts = {"env": 0, "optimizer": 0}

    def counted(name, step):
        def wrapper(*inputs):
            counts[name] += 1
            return step(*inputs)
        return wrapper

    env_class.step = counted("env", env_class.step)
    if library == "sb3":
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(counted("optimizer", lambda *_: None))
    else:
        from utils import mpi

        for optimizer in (mpi.Adam, mpi.RMSProp):
            optimizer.step = counted("optimizer", optimizer.step)
    return counts


def child(library: str, args: argparse.Namespace) -> None:
    """Train once, and print the counts of steps as the last line."""
    counts = count_steps(library, args.env)
    if library == "sb3":
        sys.path.insert(0, str(HERE))
        import torch
        from sb3 import make_peer

        torch.set_num_threads(args.threads)
        given = PEER.get(args.algo, {})
        make_peer(args.algo, args.env, 1, args.num_envs, **given).learn(args.steps)
    else:
        module = importlib.import_module(f"algos.{args.algo}")
        with tempfile.TemporaryDirectory() as folder:
            module.train(module.Config(
                env=args.env, total_steps=args.steps, num_envs=args.num_envs,
                torch_threads=args.threads, compile=args.compile, run_dir=f"{folder}/run",
                **OURS.get(args.algo, {})))
    print("\n" + json.dumps(counts))


def timed(library: str, args: argparse.Namespace, threads: int, steps: int) -> tuple[float, dict]:
    """Return the seconds of a whole process, start-up included, and its counts."""
    command = [sys.executable, __file__, "--child", library, "--algo", args.algo, "--env", args.env,
               "--num-envs", str(args.num_envs),
               "--threads", str(threads), "--steps", str(steps)]
    command += ["--compile"] * (args.compile and library == "plainrl")
    start = time.perf_counter()
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return time.perf_counter() - start, json.loads(out.splitlines()[-1])


def compare(args: argparse.Namespace) -> None:
    """Print each pair's seconds and ratio, and the median ratio."""
    threads = {}
    for library in ("plainrl", "sb3"):
        if args.threads:
            threads[library] = args.threads
            continue
        trial = {n: timed(library, args, n, args.steps // 5)[0] for n in (1, 2)}
        threads[library] = min(trial, key=trial.get)
        times = ", ".join(f"{n}: {seconds:.1f} s" for n, seconds in trial.items())
        print(f"{library}: trial by number of threads: {times}", flush=True)
    ratios = []
    for pair in range(args.pairs):
        peer, peer_counts = timed("sb3", args, threads["sb3"], args.steps)
        ours, counts = timed("plainrl", args, threads["plainrl"], args.steps)
        if counts != peer_counts:
            sys.exit(f"numbers of steps differ: plainrl {counts}, stable-baselines3 {peer_counts}")
        ratios.append(peer / ours)
        print(f"pair {pair + 1}: stable-baselines3 {peer:.1f} s, plainrl {ours:.1f} s, "
              f"ratio {ratios[-1]:.2f}", flush=True)
    print(f"{args.algo}, num_envs {args.num_envs}, compile {args.compile}, {counts}: median ratio "
          f"{statistics.median(ratios):.2f} (min {min(ratios):.2f}, max {max(ratios):.2f})")


def profile(args: argparse.Namespace) -> None:
    """Print where the time of a PPO run goes, and the speed of the bare environments."""
    import torch

    from algos import ppo
    from utils import mpi
    from utils.envs import make_envs

    seconds = dict.fromkeys(("environment", "policy while acting", "update"), 0.0)

    def clocked(name, function):
        def wrapper(*inputs, **settings):
            start = time.perf_counter()
            result = function(*inputs, **settings)
            seconds[name] += time.perf_counter() - start
            return result
        return wrapper

    cfg = ppo.Config(env=ENV, num_envs=args.num_envs, torch_threads=args.threads or 1)
    torch.set_num_threads(cfg.torch_threads)
    envs = make_envs(cfg, cfg.num_envs)
    agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    optimizer = mpi.Adam(agent, eps=1e-5)
    bare, actions = time.perf_counter(), envs.action_space.sample()
    obs, _ = envs.reset(seed=1)
    for _ in range(4000 // cfg.num_envs):
        envs.step(actions)
    bare = 4000 / (time.perf_counter() - bare)
    envs.step = clocked("environment", envs.step)
    agent.act = clocked("policy while acting", agent.act)
    start, steps = time.perf_counter(), 0
    while steps < args.steps:
        rollout, obs = ppo.collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
        clocked("update", ppo.update)(agent, optimizer, rollout, cfg.lr)
        agent.update_stats(rollout)
        steps += cfg.rollout_steps
    total = time.perf_counter() - start
    seconds["the rest"] = total - sum(seconds.values())
    print(f"num_envs {cfg.num_envs}: {steps / total:.0f} steps/s, bare environments {bare:.0f} "
          f"steps/s ({bare * total / steps:.1f} times as many)")
    for name, part in seconds.items():
        print(f"  {name:20s} {part / total:6.1%}")


def run_ppo(folder: str, *flags: str) -> Path:
    """Run PPO as a user would, wait for its end, and return the path of progress.csv."""
    command = [sys.executable, "-m", "algos.ppo", "--env", ENV, "--run-dir", folder, *flags]
    subprocess.run(command, check=True, capture_output=True, cwd=HERE.parent)
    return Path(folder, "progress.csv")


def measured_rate(updates: int, procs: int, num_envs: int, batch: int, minibatch: int) -> float:
    """Return the steps per second of a PPO run, from its first report on."""
    with tempfile.TemporaryDirectory() as folder:
        path = run_ppo(f"{folder}/run", "--num-procs", str(procs), "--num-envs", str(num_envs),
                       "--rollout-steps", str(batch), "--minibatch-size", str(minibatch),
                       "--total-steps", str(updates * batch))
        rows = list(csv.DictReader(path.open()))
    first, last = ({key: float(row[key]) for key in ("step", "time")}
                   for row in (rows[0], rows[-1]))
    return (last["step"] - first["step"]) / (last["time"] - first["time"])


def scaling(args: argparse.Namespace) -> None:
    """Print steps per second of one process, and of two with twice the work and with the same.

    The cases run in turn, `--pairs` times. Start-up does not count: time is taken from the first
    report on.
    """
    rates = {name: [] for name in SIZES}
    for _ in range(args.pairs):
        for name, size in SIZES.items():
            rates[name].append(measured_rate(args.steps // 2048, *size))
    for name, found in rates.items():
        ratios = [rate / one for rate, one in zip(found, rates["one process"])]
        print(f"{name}: steps/s {' '.join(f'{rate:.0f}' for rate in found)}, over one process "
              f"{' '.join(f'{ratio:.2f}' for ratio in ratios)}, "
              f"median {statistics.median(ratios):.2f}")


def start(args: argparse.Namespace) -> None:
    """Print the seconds of a run of one report, and the peak memory of a longer run."""
    for _ in range(args.pairs):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            run_ppo(f"{folder}/run", "--total-steps", "2048")
            print(f"a run of one report: {time.perf_counter() - began:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        run_ppo(f"{folder}/run", "--total-steps", str(args.steps))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"peak memory in {args.steps} steps: {peak:.0f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python benchmarks/speed.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", default="ppo",
                        help="ppo, ppo_lstm, a2c, trpo, ddpg, td3, sac or dqn")
    parser.add_argument("--env", default=ENV, help="Gymnasium id")
    parser.add_argument("--num-envs", type=int, default=8, help="environments (1 to 16)")
    parser.add_argument("--pairs", type=int, default=5, help="repetitions (3 to 5)")
    parser.add_argument("--steps", type=int, default=200_000, help="environment steps per run")
    parser.add_argument("--threads", type=int, default=0,
                        help="threads of PyTorch; 0: the faster of 1 and 2")
    parser.add_argument("--compile", action="store_true", help="run ours with --compile")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--scaling", action="store_true", help="compare one process with two")
    parser.add_argument("--start", action="store_true", help="time a short run, measure memory")
    parser.add_argument("--child", choices=("plainrl", "sb3"), help="internal: one training run")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments)
    elif arguments.profile:
        profile(arguments)
    elif arguments.scaling:
        scaling(arguments)
    elif arguments.start:
        start(arguments)
    else:
        compare(arguments)
