"""Environments for experiments, made from others. Naming one imports this module, which registers
them:

    utils.tasks:CartPoleNoVel-v0    CartPole-v1 that shows positions only
    utils.tasks:PendulumNoVel-v0    Pendulum-v1 that shows the angle only
    utils.tasks:Scaled-v0           rewards times a factor: --env-kwargs '{"env": "CartPole-v1",
                                    "factor": 1000}'; further keys go to the environment
"""

import gymnasium as gym


def masked(env: str, keep: tuple[int, ...], **kwargs) -> gym.Env:
    """Return an environment that shows only the entries `keep` of its vector observations."""
    inner = gym.make(env, **kwargs)
    space = inner.observation_space
    shown = list(keep)
    box = gym.spaces.Box(space.low[shown], space.high[shown], dtype=space.dtype)
    return gym.wrappers.TransformObservation(inner, lambda obs: obs[shown], box)


def scaled(env: str = "CartPole-v1", factor: float = 1.0, **kwargs) -> gym.Env:
    """Return the environment `env` with all rewards multiplied by `factor`."""
    return gym.wrappers.TransformReward(gym.make(env, **kwargs), lambda rew: factor * rew)


CARTPOLE = {"env": "CartPole-v1", "keep": (0, 2)}
PENDULUM = {"env": "Pendulum-v1", "keep": (0, 1)}
gym.register("CartPoleNoVel-v0", f"{__name__}:masked", kwargs=CARTPOLE)
gym.register("PendulumNoVel-v0", f"{__name__}:masked", kwargs=PENDULUM)
gym.register("Scaled-v0", f"{__name__}:scaled")
