"""Environments for experiments. Naming one imports this module, which registers them:

    tasks:CartPoleNoVel-v0    CartPole-v1 that shows positions only
    tasks:PendulumNoVel-v0    Pendulum-v1 that shows the angle only
    tasks:Recall-v0           say at the end what the first observation was: --env-kwargs
                              '{"delay": 20}'
    tasks:Scaled-v0           rewards times a factor: --env-kwargs '{"env": "CartPole-v1",
                              "factor": 1000}'; further keys go to the environment
    tasks:BitFlip-v0          a goal environment: reach one of 2^bits states, with no hint before it
                              is reached: --env-kwargs '{"bits": 10}'
    tasks:Tour-v0             visit points, with action masks: --env-kwargs '{"points": 10}'
    tasks:Rooms-v0            find the way through rooms, without a hint: --env-kwargs
                              '{"rooms": 6, "size": 9}'
    tasks:Line-v0             ten steps along a line to 0
    tasks:Sums-v0             a text task: "3+5=" wants "8"
    tasks:Brackets-v0         a text task: "([" wants a text that closes them, such as "])"
"""

import re

import gymnasium as gym
import numpy as np


def masked(env: str, keep: list[int], **kwargs) -> gym.Env:
    """Return an environment that shows only the entries `keep` of its vector observations."""
    inner = gym.make(env, **kwargs)
    space = inner.observation_space
    box = gym.spaces.Box(space.low[keep], space.high[keep], dtype=space.dtype)
    return gym.wrappers.TransformObservation(inner, lambda obs: obs[keep], box)


def scaled(env: str = "CartPole-v1", factor: float = 1.0, **kwargs) -> gym.Env:
    """Return the environment `env` with all rewards multiplied by `factor`."""
    return gym.wrappers.TransformReward(gym.make(env, **kwargs), lambda rew: factor * rew)


class Line(gym.Env):
    """Ten steps along a line to 0. The reward is minus the distance that is left."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gym.spaces.Box(-0.2, 0.4, (1,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.time = float(self.np_random.uniform(-1, 1)), 0
        return np.float32([self.x]), {}

    def step(self, act):
        self.x, self.time = self.x + float(act[0]), self.time + 1
        return np.float32([self.x]), -abs(self.x), False, self.time == 10, {}


class Recall(gym.Env):
    """The first observation is -1 or 1. After `delay` observations of 0 the action has to name it.

    The last action earns 1 if it is right (0 for -1, 1 for 1), and else -1. No earlier action
    matters. Without memory all last steps look the same, so no policy has a mean return above 0.
    """

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, delay: int = 20):
        self.delay = delay

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.sign = int(self.np_random.choice([-1, 1]))
        self.time = 0
        return np.float32([self.sign]), {}

    def step(self, act):
        last = self.time == self.delay
        self.time += 1
        rew = self.sign * (2.0 * act - 1.0) if last else 0.0
        return np.zeros(1, np.float32), float(rew), last, False, {}


class BitFlip(gym.Env):
    """Flip one bit per step until the bits are those of the goal. It gives up after `bits` steps.

    The largest number of the action says which bit to flip. The reward is -1 for every step that
    does not reach the goal. The task is that of Andrychowicz et al. 2017, arXiv:1707.01495, section
    3.1, with continuous actions.
    """

    def __init__(self, bits: int = 10):
        box = gym.spaces.Box(0, 1, (bits,))
        self.observation_space = gym.spaces.Dict(
            observation=box, achieved_goal=box, desired_goal=box)
        self.action_space = gym.spaces.Box(-1, 1, (bits,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        shape = self.action_space.shape
        self.bits = self.np_random.integers(2, size=shape).astype(np.float32)
        self.goal = self.bits
        while (self.goal == self.bits).all():
            self.goal = self.np_random.integers(2, size=shape).astype(np.float32)
        self.time = 0
        return self.observe(), {}

    def step(self, act):
        i = np.argmax(act)
        self.bits[i] = 1 - self.bits[i]
        self.time += 1
        reached = self.compute_terminated(self.bits, self.goal, {})
        rew = self.compute_reward(self.bits, self.goal, {})
        truncated = not reached and self.time == len(self.bits)
        return self.observe(), float(rew), reached, truncated, {"is_success": float(reached)}

    def observe(self):
        return {"observation": self.bits.copy(), "achieved_goal": self.bits.copy(),
                "desired_goal": self.goal.copy()}

    def compute_reward(self, achieved_goal, desired_goal, info):
        """Goals [..., bits] -> rewards [...]."""
        return np.where((achieved_goal == desired_goal).all(-1), 0.0, -1.0)

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return bool((achieved_goal == desired_goal).all())


class Tour(gym.Env):
    """Visit each point once, on a short way. Observations tell how far each one is (visited: 0).
    Rewards are minus the distance, or -1 for a point that was visited, which is forbidden."""

    def __init__(self, points: int = 10):
        box, mask = gym.spaces.Box(0, 2, (points,)), gym.spaces.MultiBinary(points)
        self.observation_space = gym.spaces.Dict(observation=box, action_mask=mask)
        self.action_space = gym.spaces.Discrete(points)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.away = self.np_random.uniform(-0.5, 0.5, (self.action_space.n, 2))  # from here
        self.left = np.ones(len(self.away), np.int8)
        return self.observe(), {}

    def step(self, act):
        rew = -float(np.hypot(*self.away[act])) if self.left[act] else -1.0
        self.away, self.left[act] = self.away - self.left[act] * self.away[act], 0
        return self.observe(), rew, not self.left.any(), False, {}

    def observe(self):
        far = np.float32(self.left * np.hypot(*self.away.T))
        return {"observation": far, "action_mask": self.left.copy()}


class Rooms(gym.Env):
    """Walk through rooms in a row, of size x size cells, to the far corner of the last one.

    Walls divide the rooms. The first wall has a door in the top row, the second one in the bottom
    row, and so on. A door takes a step of its own. Actions are up, down, left and right; who walks
    into a wall stays. The observation is the column and the row, each one-hot. The reward is 1 at
    the goal, which ends the episode, and else 0, so nothing is learned before it is found.
    """

    moves = (0, -1), (0, 1), (-1, 0), (1, 0)  # of column and row

    def __init__(self, rooms: int = 6, size: int = 9):
        self.size, self.width = size, rooms * (size + 1) - 1  # one column per wall
        self.observation_space = gym.spaces.Box(0, 1, (self.width + size,))
        self.action_space = gym.spaces.Discrete(4)
        self.goal = self.width - 1, size - 1 if rooms % 2 == 0 else 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.y = 0, self.size - 1  # bottom left
        return self.observe(), {}

    def step(self, act):
        x, y = self.x + self.moves[act][0], self.y + self.moves[act][1]
        if 0 <= x < self.width and 0 <= y < self.size and y in self.open_rows(x):
            self.x, self.y = x, y
        found = (self.x, self.y) == self.goal
        return self.observe(), float(found), found, False, {}

    def open_rows(self, x):
        """Return which cells of a column are no wall."""
        number, place = divmod(x, self.size + 1)
        if place < self.size:
            return range(self.size)
        return [0] if number % 2 == 0 else [self.size - 1]

    def observe(self):
        obs = np.zeros(self.width + self.size, np.float32)
        obs[[self.x, self.width + self.y]] = 1
        return obs


class Text(gym.Env):
    """A prompt, to which one action is the whole answer. A right answer earns 1, another one 0.

    Both are tokens: places of characters in the alphabet. Token 0 ends an answer, and fills up what
    is shorter, prompts from the left. `careless` answers as somebody does who often errs.
    """

    def __init__(self):
        self.observation_space, self.action_space = (
            gym.spaces.Box(0, len(self.alphabet) - 1, (size,), np.int64) for size in self.sizes)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.prompt = self.draw(self.np_random)
        return self.tokens(self.prompt.rjust(self.sizes[0], "\n")), {}

    def step(self, act):
        answer, end, _ = self.read(act).partition("\n")
        rew = float(end != "" and self.is_right(self.prompt, answer))
        return np.zeros(self.sizes[0], np.int64), rew, True, False, {}

    def read(self, tokens):
        return "".join(self.alphabet[token] for token in tokens)

    def tokens(self, text):
        return np.array([self.alphabet.index(character) for character in text])

    def corpus(self, size, seed):
        """Return `size` prompts and careless answers to them, as tokens [size, length]."""
        rng = np.random.default_rng(seed)
        prompts = [self.draw(rng) for _ in range(size)]
        answers = [self.careless(prompt, rng).ljust(self.sizes[1], "\n") for prompt in prompts]
        return (np.stack([self.tokens(text.rjust(self.sizes[0], "\n")) for text in prompts]),
                np.stack([self.tokens(text) for text in answers]))


class Sums(Text):
    alphabet, sizes = "\n0123456789+=", (4, 3)

    def draw(self, rng):
        return "{}+{}=".format(*rng.integers(10, size=2))

    def is_right(self, prompt, answer):
        return answer == str(int(prompt[0]) + int(prompt[2]))

    def careless(self, prompt, rng):
        return str(abs(int(prompt[0]) + int(prompt[2]) + rng.integers(-2, 3)))


class Brackets(Text):
    """One to four open brackets are to be closed. An answer may open more and close them, too."""

    alphabet, sizes = "\n()[]{}", (4, 16)

    def draw(self, rng):
        return "".join(rng.choice(list("([{"), size=rng.integers(1, 5)))

    def is_right(self, prompt, answer):
        text = prompt + answer
        while text != (text := re.sub(r"\(\)|\[\]|\{\}", "", text)):
            pass
        return text == ""

    def careless(self, prompt, rng):
        close = dict(zip("([{", ")]}"))
        return "".join(rng.choice(["", "()"]) + rng.choice([close[opened], *")]}"])
                       for opened in reversed(prompt))


for name, keep in ("CartPole", [0, 2]), ("Pendulum", [0, 1]):
    kwargs = {"env": f"{name}-v1", "keep": keep}
    gym.register(f"{name}NoVel-v0", f"{__name__}:masked", kwargs=kwargs)
gym.register("Line-v0", f"{__name__}:Line")
gym.register("Recall-v0", f"{__name__}:Recall")
gym.register("Scaled-v0", f"{__name__}:scaled")
gym.register("BitFlip-v0", f"{__name__}:BitFlip")
gym.register("Tour-v0", f"{__name__}:Tour", max_episode_steps=40)
gym.register("Rooms-v0", f"{__name__}:Rooms", max_episode_steps=300)
gym.register("Sums-v0", f"{__name__}:Sums")
gym.register("Brackets-v0", f"{__name__}:Brackets")
