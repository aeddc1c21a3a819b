"""Evaluate the policy of a run, watch it, record a video or demonstrations of it, or export it.

    python -m utils.play runs/HalfCheetah-v4/ppo/seed1
    python -m utils.play runs/HalfCheetah-v4/ppo/seed1 --render
    python -m utils.play runs/HalfCheetah-v4/ppo/seed1 --video cheetah.mp4
    python -m utils.play runs/HalfCheetah-v4/ppo/seed1 --record demos.npz
    python -m utils.play runs/HalfCheetah-v4/ppo/seed1 --export policy.onnx

If the run is still training, its last checkpoint is used. The weights act
through the present code of the algorithm. A warning says if it has changed
since the run. From Python:

    agent = load_agent("runs/HalfCheetah-v4/ppo/seed1")
    act = agent.predict(obs)    # one raw observation -> an action for env.step
"""

from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from utils.demos import record_demos
from utils.errors import UsageError
from utils.evaluate import evaluate
from utils.export import export
from utils.files import check_target
from utils.film import make_drawn, make_window, write_video
from utils.load import build_agent, load_agent, read_run
from utils.command import program, read_command
from utils.run.settings import check_range


MOST_FILMED = 10_000  # steps: 5 minutes at 30 frames per second
MOST_ENVS = 100  # at a time, each with a simulator of its own


@dataclass(frozen=True)
class Play:
    run: str  # a run directory, such as runs/HalfCheetah-v4/ppo/seed1
    episodes: int = 10  # number of episodes to evaluate
    render: bool = False  # play the episodes one by one in a window
    video: str = ""  # first draw one episode into this file, an .mp4, or the beginning as a .gif
    record: str = ""  # write the episodes as demonstrations into this .npz file (utils/demos.py)
    export: str = ""  # only write the policy as an ONNX graph into this file (docs/training.md)
    stochastic: bool = False  # sample actions as in training, instead of the most likely ones
    best: bool = False  # use the policy of the best evaluation (--eval-every), not the last one
    seed: int | None = None  # of the episodes (default: the run's; with --best, the next one)
    max_steps: int = 100_000  # stop with an error if an episode is longer than this

    def __post_init__(self):
        check_range(self, "episodes", 1, 1e3 if self.record else 1e5)  # recorded all at a time
        check_range(self, "max_steps", 1)
        check_range(self, "seed", 0)
        if bool(self.record) + bool(self.video) + bool(self.export) + self.render > 1:
            raise UsageError("--record, --video, --export and --render exclude each other")


def main(play: Play) -> np.ndarray | None:
    """Evaluate, print the result, write what is asked for, and return the returns [episodes].

    With --export, no environment is made and nothing is evaluated or returned.
    """
    if play.export:
        check_target("--export", play.export, (".onnx",))
        export(load_agent(play.run, play.best), play.export)
        return None
    if play.video:
        check_target("--video", play.video, (".mp4", ".gif"))
    if play.record:
        check_target("--record", play.record, (".npz",))
    module, cfg, policy = read_run(play.run, play.best)
    torch.set_num_threads(cfg.torch_threads)
    drawn = make_drawn(cfg, play.video) if play.video else None
    window = make_window(cfg) if play.render else None
    agent = build_agent(play.run, module, cfg, policy)
    # best.pt was chosen by its returns in the episodes of the run's own seed.
    seed = cfg.seed + play.best if play.seed is None else play.seed
    deterministic = not play.stochastic
    torch.manual_seed(seed)
    kind = "deterministic (if it gets stuck: --stochastic)" if deterministic else "stochastic"
    print(f"{cfg.env}, {play.run} at step {policy['step']:,}, {kind}, seed {seed}", flush=True)
    if play.record:
        shown = [record_demos(agent, cfg, play.record, play.episodes, seed, deterministic,
                              play.max_steps)]
        print(f"{play.record}: {shown[0][1].sum():,} steps")
    elif play.render:
        with closing(window):
            shown = [evaluate(agent, cfg, 1, seed + k, deterministic, max_steps=play.max_steps,
                              envs=window) for k in range(play.episodes)]
    else:
        if play.video:
            most = min(play.max_steps, MOST_FILMED)
            print(f"drawing an episode, or its first {most:,} steps", flush=True)
            with torch.random.fork_rng(devices=[]):  # so that it does not change the evaluation
                ret, length = write_video(agent, cfg, drawn, play.video, seed, deterministic, most)
            if not length:
                print(f"{play.video}: {most:,} steps; the episode goes on, so none is evaluated")
                return np.empty(0)
            print(f"{play.video}: an episode with return {ret:.2f} in {length} steps; now "
                  f"{play.episodes} that are not drawn", flush=True)
        shown = [evaluate(agent, cfg, min(MOST_ENVS, play.episodes - k), seed + k, deterministic,
                          max_steps=play.max_steps) for k in range(0, play.episodes, MOST_ENVS)]
    returns, lengths = np.concatenate(shown, axis=1)
    print(f"{play.episodes} episodes: return mean {returns.mean():.2f}  std {returns.std():.2f}  "
          f"min {returns.min():.2f}  max {returns.max():.2f}, length mean {lengths.mean():.1f}")
    if play.video and returns.std() > abs(returns.mean()) / 2:
        print(f"the returns differ much: --seed {seed + 1} films another episode" +
              ", --stochastic acts as in training" * deterministic)
    return returns


if __name__ == "__main__":
    with program():
        main(read_command(Play, __doc__, "python -m utils.play"))
