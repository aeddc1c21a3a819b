"""Play episodes with a policy: their returns, and how well its critic predicted them."""

import copy
import warnings

import gymnasium as gym
import numpy as np
import torch

from utils.envs import make_envs
from utils.errors import UsageError
from utils.seeds import seed_of


def evaluate(agent, cfg, episodes: int, seed: int, deterministic: bool = True,
             stop=lambda: False, max_steps: int = 100_000,
             envs: gym.vector.VectorEnv | None = None, steps: list | None = None
             ) -> tuple[np.ndarray, np.ndarray]:
    """Return (returns, lengths), each [episodes]: the first episode of as many new environments.

    stop    asked before every step: whether to end at once, with lengths of 0 where it did
    envs    the environments to play in, which stay open (default: new ones, by `make_envs`)
    steps   a list or deque that gets (obs, act, rew, terminated, truncated) of every step

    The same seed gives the same initial states. A copy of the agent acts, so a memory of the
    training environments stays as it is, and `play` gets the same returns (in float32), since
    rounding depends on how the weights lie in memory.
    """
    agent = copy.deepcopy(agent)
    agent.forget()
    mine, envs = envs is None, envs or make_envs(cfg, episodes)
    obs, _ = envs.reset(seed=seed_of(seed, 2))  # streams 0 and 1 belong to training
    returns = np.zeros(episodes)
    lengths = np.zeros(episodes, int)
    step = 0
    while not (lengths.all() or stop()):
        if step >= max_steps:
            raise UsageError(f"{sum(lengths == 0)} of {episodes} evaluated episodes of {cfg.env} "
                             f"did not end within {max_steps:,} steps (play: --max-steps"
                             + ", or act as in training, --stochastic" * deterministic
                             + """; train: --env-kwargs '{"max_episode_steps": N}')""")
        act = agent.act(obs, deterministic)
        new_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
        if steps is not None:
            steps.append((obs, act, rew, terminated, truncated))
        obs = new_obs
        agent.forget(terminated | truncated)
        if "episode" in infos:
            first = infos["_episode"] & (lengths == 0)  # later episodes do not count
            returns[first] = infos["episode"]["r"][first]
            lengths[first] = infos["episode"]["l"][first]
        step += 1
    if mine:
        close(envs)
    return returns, lengths


def close(envs: gym.vector.VectorEnv) -> None:
    """Close environments. One that fails to does not end a run."""
    try:
        envs.close()
    except Exception as error:
        warnings.warn(f"{envs.spec.id} could not be closed: {error!r}", stacklevel=2)


def q_and_return(agent, steps: list[tuple], lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Return Q(s, a) and the discounted return that followed, for the last `steps` of `evaluate`.

    At a time limit the rewards are cut off. So a state counts only if its episode terminated, or
    if what lies beyond the limit weighs less than 1%.
    """
    obs, act, rew, terminated, _ = zip(*steps)
    act = torch.stack(act)  # on the agent's device; [T, N, ...] like the others
    obs, rew, terminated = map(np.stack, (obs, rew, terminated))
    gamma = agent.cfg.gamma
    ends = lengths - lengths.max() + len(rew)  # as rows of `rew`
    left = ends - np.arange(len(rew))[:, None]  # steps until the end; the last one has 1
    returns = rew.copy()
    for t in reversed(range(len(rew) - 1)):
        returns[t] += gamma * (left[t] > 1) * returns[t + 1]
    whole = (terminated & (left == 1)).any(0) | (gamma ** np.maximum(left, 0) < 0.01)
    counts = whole & (left > 0)
    if not counts.any():
        return {}
    q = agent.q_value(obs[counts], act[torch.from_numpy(counts)])
    return {"eval_q": q.cpu().numpy(), "eval_discounted": returns[counts]}
