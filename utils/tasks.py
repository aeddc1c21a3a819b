"""Environments that test one ability. An id such as utils.tasks:CartPoleNoVel-v0 imports this file.

    CartPoleNoVel-v0    CartPole-v1 that shows positions only: velocities must be remembered
    PendulumNoVel-v0    Pendulum-v1 that shows the angle only
"""

import gymnasium as gym


def masked(env: str, keep: tuple[int, ...], **kwargs) -> gym.Env:
    """Return an environment that shows only the entries `keep` of its vector observations."""
    inner = gym.make(env, **kwargs)
    space = inner.observation_space
    shown = list(keep)
    box = gym.spaces.Box(space.low[shown], space.high[shown], dtype=space.dtype)
    return gym.wrappers.TransformObservation(inner, lambda obs: obs[shown], box)


CARTPOLE = {"env": "CartPole-v1", "keep": (0, 2)}
PENDULUM = {"env": "Pendulum-v1", "keep": (0, 1)}
gym.register("CartPoleNoVel-v0", f"{__name__}:masked", kwargs=CARTPOLE)
gym.register("PendulumNoVel-v0", f"{__name__}:masked", kwargs=PENDULUM)
