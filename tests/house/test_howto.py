"""The Python in docs/training.md and docs/howto.md runs as it stands, with fewer steps."""
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary

from tests.helpers import steps
from tests.house.tree import ROOT


class Echo(gym.Env):
    """It observes the action."""

    observation_space = action_space = MultiBinary(20)

    def step(self, act):
        return act, 0.0, False, False, {}


class Unbounded(Echo):
    observation_space = action_space = Box(-np.inf, np.inf, (2,))


def test_the_python_of_the_pages_runs(capsys):
    pages = "training", "howto"
    text = "\n".join((ROOT / f"docs/{name}.md").read_text("utf-8") for name in pages)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
    few = code.replace("1e5", "4096").replace("2e5", "6144")
    assert few.count("4096") == few.count("6144") == 1
    names = {}
    exec(compile(few, "pages", "exec"), names)
    assert names["steps"] == [2048, 4096] and len(names["losses"]) == 2
    assert steps("runs/mine") == [2048, 4096, 6144]
    assert Path(names["agent"].cfg.run_dir) == Path("runs/mine")
    env = gym.make("Point-v0")
    env.reset(seed=0)
    ends = [env.step(env.action_space.sample())[3] for _ in range(50)]
    assert ends == [False] * 49 + [True]
    wrapped = names["with_bounds"](Unbounded())
    assert wrapped.action_space == Box(-1, 1, (2,))
    assert wrapped.step(np.ones(2))[0].tolist() == [1, 1]
    wrapped = names["OnePart"](Echo())
    assert wrapped.action_space == Discrete(21)
    taken = [wrapped.step(act)[0] for act in range(21)]
    assert all(act in wrapped.unwrapped.action_space for act in taken)
    assert [np.flatnonzero(act).tolist() for act in taken] == [[i] for i in range(20)] + [[]]
    small = names["smaller"](Echo())
    obs = small.step(np.array([1000, 1100]))[0]
    assert obs.tolist() == [0, 2] and obs.dtype == small.observation_space.dtype
    seen = names["with_bytes"](Echo())
    assert seen.step(np.float32([0, 0.5, 1]))[0].tolist() == [0, 127, 255]
