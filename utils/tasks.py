"""Environments for experiments, made from others. Naming one imports this module, which registers
them:

    utils.tasks:Scaled-v0    rewards times a factor: --env-kwargs '{"env": "CartPole-v1",
                             "factor": 1000}'; further keys go to the environment
"""

import gymnasium as gym


def scaled(env: str = "CartPole-v1", factor: float = 1.0, **kwargs) -> gym.Env:
    """Return the environment `env` with all rewards multiplied by `factor`."""
    return gym.wrappers.TransformReward(gym.make(env, **kwargs), lambda rew: factor * rew)


gym.register("Scaled-v0", f"{__name__}:scaled")
