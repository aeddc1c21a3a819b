"""Rewards of other goals, for hindsight (algos/sac_her.py): which part of an environment computes
them, and an `info` that cannot be read."""

import contextlib

import gymnasium as gym
import numpy as np

from utils.errors import UsageError
from utils.spaces import FlatBox


def goal_env(envs: gym.vector.VectorEnv) -> gym.Env:
    """Return the part of the first environment that has `compute_reward`, for other goals' rewards.

    That is the environment without its wrappers, or the outermost wrapper that has one. It also has
    `compute_terminated`; give both NO_INFO. UsageError: one is missing, `compute_reward` does not
    take batches, or a wrapper around it may change what it computes.
    """
    if isinstance(envs.unwrapped, gym.vector.AsyncVectorEnv):
        raise UsageError("--async-envs: hindsight needs an environment in its own process")
    env = envs.unwrapped.envs[0]
    wrong = f"--env is {env.spec.id}, "
    harmless = (gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker, gym.wrappers.TimeLimit,
                gym.wrappers.HumanRendering, gym.wrappers.RenderCollection)
    while isinstance(env.observation_space, FlatBox):
        env = env.env
    while isinstance(env, gym.Wrapper) and not hasattr(env, "compute_reward"):
        if type(env) not in harmless and type(env).step not in (
                gym.Wrapper.step, gym.ActionWrapper.step):
            raise UsageError(f"{wrong}whose wrapper {type(env).__name__} may change rewards or "
                             "goals; hindsight needs a compute_reward that returns the rewards of "
                             "the wrapped environment: define it in the wrapper")
        env = env.env
    for name, advice in ("compute_reward", ""), (
            "compute_terminated", ": where a goal ends no episode, it returns False"):
        if not hasattr(env, name):
            raise UsageError(f"{wrong}which has no {name}(achieved_goal, desired_goal, info); "
                             f"hindsight needs it, perhaps from a wrapper (docs/howto.md){advice}")
    goals = np.stack([env.observation_space["desired_goal"].sample() for _ in range(2)])
    with contextlib.suppress(AttributeError):  # perhaps of what the first reset makes
        env.compute_terminated(goals[0], goals[1], NO_INFO)
        if (shape := np.shape(env.compute_reward(goals, goals, NO_INFO))) != (2,):
            raise UsageError(f"{wrong}whose compute_reward returns {list(shape)} for 2 pairs of "
                             "goals; hindsight needs one that takes batches and returns [2]")
    return env


class NoInfo(dict):
    """The `info` of a step that was never taken. UsageError: somebody reads it."""

    def refuse(self, *args):
        raise UsageError("--env has a compute_reward or compute_terminated that reads its info; "
                         "hindsight has none, since nobody took a step towards the new goal")

    __getitem__ = __contains__ = __iter__ = get = keys = values = items = pop = refuse


NO_INFO = NoInfo()
