"""Scripted environments, whose every number is known, and small ones that are learned in seconds.

Importing this module registers them, so any algorithm can run on them:

    python -m algos.ppo --env tests.envs:Constant-v0 --env-kwargs '{"length": 5}'
"""
import os
import signal

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from tasks import Sums

LENGTHS = (3,), (7,), (1, 5, 2)         # of episodes in environments 0, 1, 2; then again from 0
ENDS = ("terminated", "truncated", "both")
LOW, HIGH = np.float32([0, -3]), np.float32([5, 3])
IMAGE = (36, 40, 3)                     # height, width, colours: the smallest for Atari's network
SMALL = (10, 12, 3)                     # for MinAtar's


# ---- Scripted: actions change nothing

def length(number, episode):
    """Return the number of steps of an episode of an environment."""
    return LENGTHS[number % 3][episode % len(LENGTHS[number % 3])]


def end(number, episode):
    """Return how an episode ends: terminated, truncated or both."""
    return ENDS[(number + episode) % 3]


def reward(number, episode, time):
    """Return the reward of the step that leads to `time`, a number that float32 holds exactly."""
    return 100 * number + 10 * episode - time + 0.5


class Counter(gym.Env):
    """An environment that observes (environment, episode, time) and follows the script above.

    All observations share one array, that of `reset` included. Lengths and ends of episodes vary.
    The action box has different bounds on every side. It records `acts` and `seeds`. Environments
    are numbered in the order in which they are made; `Counter.made.clear()` starts again at 0.
    """

    made = []

    def __init__(self, obs="vector", act="box", scale=1):
        image = obs == "image"
        self.observation_space = (Box(0, 255, SMALL, np.uint8) if image
                                  else Box(-np.inf, np.inf, (3,), np.float32))
        self.action_space = Box(scale * LOW, scale * HIGH) if act == "box" else Discrete(5)
        self.obs = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        self.number, self.episode, self.time = len(self.made), -1, 0
        self.acts, self.seeds = [], []
        self.made.append(self)

    def observe(self):
        self.obs[...] = self.number, self.episode, self.time    # an image: as its three colours
        return self.obs

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.time = self.episode + 1, 0
        return self.observe(), self.info()

    def info(self):
        """What Gymnasium's vector environments cannot join, or keep for others."""
        return {"episode": 7, "final_obs": 3, "_is_success": 1, "path": np.zeros(self.number)}

    def step(self, act):
        self.acts.append(np.copy(act))
        if isinstance(act, np.ndarray):
            act += 99                   # as by clipping in place
        self.time += 1
        how = end(self.number, self.episode) if self.time == self.length() else ""
        rew = reward(self.number, self.episode, self.time)
        terminated, truncated = how in ("terminated", "both"), how in ("truncated", "both")
        return self.observe(), rew, terminated, truncated, self.info()

    def length(self):
        return length(self.number, self.episode)


class Faulty(Counter):
    """A Counter that fails at its step `at`: it raises, or returns an observation of NaN."""

    def __init__(self, fault="raise", at=5, **kwargs):
        super().__init__(**kwargs)
        self.fault, self.at = fault, at

    def step(self, act):
        obs, rew, terminated, truncated, info = super().step(act)
        if len(self.acts) == self.at:
            if self.fault == "raise":
                raise RuntimeError("the motor of joint 3 is too hot")
            obs = np.full_like(obs, np.nan)
        return obs, rew, terminated, truncated, info


class GoalCounter(Counter):
    """A Counter with goals. Rewards are the script's; those of other goals are `compute_reward`'s.

    An episode of an even number succeeds. Steps before its end, and resets, tell the opposite.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        box = self.observation_space
        self.observation_space = gym.spaces.Dict(
            observation=box, achieved_goal=box, desired_goal=box)

    def observe(self):
        obs = super().observe()
        goal = np.float32([50 + self.number, 50 + self.episode, 50])
        return {"observation": obs, "achieved_goal": -1 - obs, "desired_goal": goal}

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs, info | {"is_success": self.episode % 2 == 0}

    def step(self, act):
        *rest, terminated, truncated, info = super().step(act)
        even, ended = self.episode % 2 == 0, terminated or truncated
        return *rest, terminated, truncated, info | {"is_success": even == ended}

    def compute_reward(self, achieved_goal, desired_goal, info):
        """It takes batches, and each number of each goal counts on its own."""
        return achieved_goal @ [1, 16, 256] + desired_goal @ [2, 32, 512]

    def compute_terminated(self, achieved_goal, desired_goal, info):
        """Like those of gymnasium-robotics, it takes one pair of goals."""
        assert achieved_goal.shape == desired_goal.shape == (3,)
        return bool(achieved_goal.sum() - desired_goal.sum() > 1)


class MaskCounter(Counter):
    """A Counter with masks: two of five actions are allowed, others in every step and environment.

    It stops at a forbidden one. A last observation forbids everything.
    """

    def __init__(self):
        super().__init__(act="discrete")
        self.observation_space = with_mask(self.observation_space, 5)

    def allowed(self):
        if self.time == self.length():
            return np.zeros(5, np.int8)
        return np.isin((np.arange(5) + self.number + self.time) % 5, (0, 2)).astype(np.int8)

    def observe(self):
        return {"observation": super().observe(), "action_mask": self.allowed()}

    def step(self, act):
        assert self.allowed()[act], f"action {act} is forbidden"
        return super().step(act)


def with_mask(box, num_acts):
    """Return the space of observations in a box, followed by the mask of so many actions."""
    return gym.spaces.Dict(observation=box, action_mask=Box(0, 1, (num_acts,), np.int8))


# ---- For runs that are stopped

class Ends(gym.Env):
    """Sixteen steps along a line from a fixed start, so only the actions are random.

    At its 64th step since it was made, an environment calls `Ends.then`. Actions and observations
    are of the kinds that Counter has.
    """

    then = staticmethod(lambda: None)

    def __init__(self, obs="vector", act="box"):
        self.life, self.image = 0, obs == "image"
        self.observation_space = (Box(0, 255, IMAGE, np.uint8) if self.image
                                  else Box(-np.inf, np.inf, (2,)))
        self.action_space = Box(-0.2, 0.4, (1,)) if act == "box" else Discrete(4)

    def observe(self, obs):
        if self.image:
            return np.full(IMAGE, 128 + 40 * np.clip(obs[0], -3, 3), np.uint8)
        return obs

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.time = 0.5, 0
        return self.observe(np.float32([self.x, 3])), {}

    def step(self, act):
        move = 0.2 * act - 0.2 if np.ndim(act) == 0 else act[0]
        self.x, self.time, self.life = self.x + float(move), self.time + 1, self.life + 1
        if self.life == 64:
            self.then()
        obs = self.observe(np.float32([self.x, 3]))
        return obs, -abs(self.x), False, self.time == 16, {}


class Flaky(Ends):
    """Ends whose process dies once, where a file asks for it."""

    def step(self, act):
        if self.life > 200 and os.path.exists("kill"):
            os.remove("kill")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(act)


class GoalEnds(Ends):
    """Ends that should stay at 0.7. If `joined`, the observation is what sac_her's networks see."""

    def __init__(self, joined=False):
        super().__init__()
        self.joined = joined
        vector = Box(-np.inf, np.inf, (1,))
        self.observation_space = gym.spaces.Dict(achieved_goal=vector, desired_goal=vector,
                                                 observation=self.observation_space)
        if joined:
            self.observation_space = Box(-np.inf, np.inf, (3,))

    def observe(self, obs):
        if self.joined:
            return np.append(obs, np.float32(0.7))
        return {"observation": obs, "achieved_goal": obs[:1], "desired_goal": np.float32([0.7])}

    def step(self, act):
        obs, _, *ends, info = super().step(act)
        rew = self.compute_reward(np.float32([self.x]), np.float32([0.7]), {})
        return obs, float(rew), *ends, info

    def compute_reward(self, achieved_goal, desired_goal, info):
        return np.where(np.abs(achieved_goal - desired_goal)[..., 0] < 0.1, 0.0, -1.0)

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return False


class MaskEnds(Ends):
    """Ends of which every other action is allowed. Gymnasium sorts a dict: the mask is first."""

    def __init__(self):
        super().__init__(act="discrete")
        self.observation_space = gym.spaces.Dict({"observation": self.observation_space,
                                                  "action_mask": gym.spaces.MultiBinary(4)})

    def observe(self, obs):
        allowed = (np.arange(4) + self.time) % 2
        return {"observation": obs, "action_mask": allowed.astype(np.int8)}


class Uneven(gym.Env):
    """It takes and shows whatever a test asks for, and refuses other actions. Ten steps."""

    def __init__(self, obs, act):
        self.observation_space, self.action_space = obs, act

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, act):
        assert act in self.action_space, act
        assert isinstance(act, (np.ndarray, np.integer, dict, tuple)), act
        self.time += 1
        return self.observation_space.sample(), 1.0, self.time == 10, False, {}


class Idle(gym.Wrapper):
    """A user's wrapper, of which nobody knows that it changes nothing."""

    def step(self, act):
        return super().step(act)


# ---- Learned in seconds

class Constant(gym.Env):
    """One state and reward 1, forever or until it terminates after `length` steps."""

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


class Bright(gym.Env):
    """A bright square somewhere in a noisy image. Reward 1 for naming its quarter."""

    observation_space, action_space = Box(0, 255, IMAGE, np.uint8), Discrete(4)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        image = self.np_random.integers(100, size=IMAGE, dtype=np.uint8)
        self.quarter = int(self.np_random.integers(4))          # of the image: 2 by 2
        y, x = self.np_random.integers([13, 15]) + np.array([18, 20]) * divmod(self.quarter, 2)
        image[y:y + 5, x:x + 5] += np.uint8(150)
        return image, {}

    def step(self, act):
        return np.zeros(IMAGE, np.uint8), float(act == self.quarter), True, False, {}


def all_allowed(env="CartPole-v1", **kwargs):
    """Return an environment with masks that forbid nothing."""
    inner = gym.make(env, **kwargs)
    num_acts = int(inner.action_space.n)
    return gym.wrappers.TransformObservation(
        inner, lambda obs: {"observation": obs, "action_mask": np.ones(num_acts, np.int8)},
        with_mask(inner.observation_space, num_acts))


class Parts(gym.Env):
    """A Dict of a vector, which is (time, -time), and a number of three (2, 0, 1, 2, 0, ...)."""

    observation_space = gym.spaces.Dict(place=Box(-np.inf, np.inf, (2,)), kind=Discrete(3))
    action_space = Discrete(2)

    def observe(self):
        place = np.float32([self.time, -self.time])
        return {"kind": np.int64((self.time + 2) % 3), "place": place}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, act):
        self.time += 1
        return self.observe(), 1.0, self.time == 4, False, {}


class OneSum(Sums):
    """A text task with one prompt, so only the answers are random."""

    def draw(self, rng):
        return "2+3="


for kind in (Counter, Faulty, GoalCounter, MaskCounter, Ends, Flaky, GoalEnds, MaskEnds, Uneven,
             Constant, Bright, Parts, OneSum):
    gym.register(f"{kind.__name__}-v0", f"{__name__}:{kind.__name__}",
                 disable_env_checker=issubclass(kind, Counter))     # which warns of its traps
gym.register("AllAllowed-v0", f"{__name__}:all_allowed")
