"""Environments whose every number is known beforehand, and small ones that are learned in seconds.

Importing this module registers them, so that any algorithm runs on them:

    python -m algos.ppo --env tests.envs:Counter-v0
    python -m algos.ppo --env tests.envs:ProbeAct-v0 --env-kwargs '{"box": true}'
"""
import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from utils.mpi import rank

LENGTHS = (3,), (7,), (1, 5, 2)         # of the episodes of environments 0, 1, 2; 3 is as 0 again
ENDS = ("terminated", "truncated", "both")
LOW, HIGH = np.float32([0, -3]), np.float32([5, 3])
IMAGE = (36, 40, 3)                     # height, width, colours: the smallest that is taken


# ---- Scripted: nothing depends on the actions

def length(number, episode):
    """Steps of this episode of this environment."""
    return LENGTHS[number % 3][episode % len(LENGTHS[number % 3])]


def end(number, episode):
    """How it ends: terminated, truncated or both."""
    return ENDS[(number + episode) % 3]


def reward(number, episode, time):
    """Of the step that leads to `time`; a whole number and a half, so exact in float32."""
    return 100 * number + 10 * episode - time + 0.5


class Counter(gym.Env):
    """Observes (environment, episode, time) and follows the script above.

    With every trap that a loop may step into: one array serves for all observations, that of
    `reset` too; lengths and ends differ; the box of actions is as wide on no two sides. Keeps
    what it was sent: actions in `acts`, seeds in `seeds`. Environments are numbered as they are
    made; `Counter.made.clear()` starts anew.
    """

    made = []

    def __init__(self, obs="vector", act="box", scale=1):
        image = obs == "image"
        self.observation_space = (Box(0, 255, IMAGE, np.uint8) if image
                                  else Box(-np.inf, np.inf, (3,), np.float32))
        self.action_space = Box(scale * LOW, scale * HIGH) if act == "box" else Discrete(5)
        self.obs = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        self.number, self.episode, self.time = len(self.made), -1, 0
        self.acts, self.seeds = [], []
        self.made.append(self)

    def observe(self):
        self.obs[...] = self.number, self.episode, self.time    # of an image: its colours
        return self.obs

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.time = self.episode + 1, 0
        return self.observe(), {}

    def step(self, act):
        self.acts.append(np.copy(act))
        self.time += 1
        how = end(self.number, self.episode) if self.time == self.length() else ""
        rew = reward(self.number, self.episode, self.time)
        return self.observe(), rew, how in ("terminated", "both"), how in ("truncated", "both"), {}

    def length(self):
        return length(self.number, self.episode)


class Faulty(Counter):
    """Goes wrong at its step `at`: raises, or gives a reward or an observation of no use."""

    def __init__(self, fault="raise", at=5, **kwargs):
        super().__init__(**kwargs)
        self.fault, self.at = fault, at

    def step(self, act):
        obs, rew, terminated, truncated, info = super().step(act)
        if len(self.acts) == self.at:
            if self.fault == "raise":
                raise RuntimeError("the motor of joint 3 is too hot")
            bad = float(self.fault.split()[1])                  # "obs nan", "rew inf"
            obs, rew = (np.full_like(obs, bad), rew) if "obs" in self.fault else (obs, bad)
        return obs, rew, terminated, truncated, info


# ---- Runs that are stopped

class Ends(gym.Env):
    """Sixteen steps along a line, from the same place each time: all chance is in the actions.

    At step 64 in its life (of 128 in two environments) it asks for what `Ends.then` says.
    """

    observation_space = Box(-np.inf, np.inf, (2,))
    action_space = Box(-0.2, 0.4, (1,))
    then = staticmethod(lambda: None)

    def __init__(self):
        self.life = 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.time = 0.5, 0
        return np.float32([self.x, 3]), {}

    def step(self, act):
        self.x, self.time, self.life = self.x + float(act[0]), self.time + 1, self.life + 1
        if self.life == 64:
            self.then()
        return np.float32([self.x, 3]), -abs(self.x), False, self.time == 16, {}


class Hot(Ends):
    """Raises in the third update, on rank 1 alone."""

    def step(self, act):
        if self.life == 70 and rank() == 1:
            raise RuntimeError("the motor of joint 3 is too hot")
        return super().step(act)


# ---- Learned in seconds

class Constant(gym.Env):
    """One state and reward 1 for ever, or until it terminates after `length` steps."""

    observation_space, action_space = Box(-1, 1, (1,)), Discrete(2)

    def __init__(self, length=0):
        self.length, self.time = length, 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, act):
        self.time += 1
        return np.zeros(1, np.float32), 1.0, self.time == self.length, False, {}


class Probe(gym.Env):
    """An episode of one step in which all is left out that is not tested.

    sees    the observation is -1 or 1, as the fall of a coin, and the reward is the same;
            else it is 0, and the reward 1
    late    the reward comes one step later, after an observation of 1; the action is that of
            the first step
    acts    the reward is 1 for the one right action instead, and falls with the square of the
            distance to it. After -1 that is 1, otherwise 3; of 0 to 3, or in a box from -1 to 4
    """

    def __init__(self, sees=False, late=False, acts=False, box=False):
        self.observation_space = Box(-1, 1, (1,))
        self.action_space = Box(-1, 4, (1,)) if box else Discrete(4)
        self.sees, self.late, self.acts = sees, late, acts

    @staticmethod
    def right(seen):
        return 3 if seen >= 0 else 1

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = int(self.np_random.choice([-1, 1])) if self.sees else 0
        self.rew = None
        return np.float32([self.seen]), {}

    def step(self, act):
        if self.rew is not None:                                # the second step
            return np.float32([1]), self.rew, True, False, {}
        wrong = float(np.square(act - self.right(self.seen)).sum())
        rew = 1 - wrong if self.acts else self.seen if self.sees else 1
        self.rew = float(rew)
        return np.float32([1]), 0.0 if self.late else self.rew, not self.late, False, {}


class Reach(gym.Env):
    """Ten steps along a line to 0: the cost of each is the distance that is left."""

    observation_space = Box(-np.inf, np.inf, (1,))
    action_space = Box(-0.2, 0.4, (1,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.time = float(self.np_random.uniform(-1, 1)), 0
        return np.float32([self.x]), {}

    def step(self, act):
        self.x, self.time = self.x + float(act[0]), self.time + 1
        return np.float32([self.x]), -abs(self.x), False, self.time == 10, {}


class Bright(gym.Env):
    """A dark or a bright image, of which the action is to say which it is."""

    observation_space, action_space = Box(0, 255, IMAGE, np.uint8), Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.bright = int(self.np_random.integers(2))
        return self.np_random.integers(40, 90, IMAGE, np.uint8) + np.uint8(120 * self.bright), {}

    def step(self, act):
        return np.zeros(IMAGE, np.uint8), float(act == self.bright), True, False, {}


def register(name, kind, quiet=False, **kwargs):
    gym.register(f"{name}-v0", f"{__name__}:{kind.__name__}", kwargs=kwargs,
                 disable_env_checker=quiet)


register("Counter", Counter, quiet=True)                        # the checker points out the traps
register("Faulty", Faulty, quiet=True)
register("Ends", Ends)
register("Hot", Hot)
register("Constant", Constant)
register("ProbeValue", Probe)
register("ProbeObs", Probe, sees=True)
register("ProbeLate", Probe, late=True)
register("ProbeAct", Probe, acts=True)
register("ProbePolicy", Probe, sees=True, acts=True)
register("Reach", Reach)
register("Bright", Bright)
