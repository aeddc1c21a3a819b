"""The patients of 4_bug_clinic.ipynb. Reading on tells every diagnosis: go to the notebook first.

    patient = plant("A")        one of our algorithm files as a module, with a bug in it
    print(difference("A"))      what was changed, as `diff -u` shows it

A bug is planted by exact text: what is to be replaced must stand in the file once, else ValueError.
So a patient is today's file but for these lines, and a file that changes says so here.
"""
import difflib
import importlib.util
import sys
import types
from typing import NamedTuple

import gymnasium as gym
import lab
import matplotlib.pyplot as plt
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete


class Bug(NamedTuple):
    algo: str                           # algos/<algo>.py
    swaps: tuple[tuple[str, str], ...]  # (what stands there, what takes its place)


BUGS = {
    "A": Bug("ppo", ((
        "        rows.append((obs, act.cpu(), rew, true_next_obs(next_obs, done, infos), ",
        "        rows.append((next_obs, act.cpu(), rew, true_next_obs(next_obs, done, infos), "),)),
    "B": Bug("ppo", ((
        "        return self.actor(features), self.critic(features).squeeze(-1)",
        "        return self.actor(features), self.critic(features)"), (
        "    assert val.shape == ret.shape"
        "  # [B] against [B, 1] would compare each with all\n", ""))),
    "C": Bug("ddpg", ((
        "    critic_opt.step(cfg.lr)\n", ""), (
        "    grads = torch.autograd.grad(loss, list(agent.actor.parameters()))"
        "  # none for the critic\n"
        "    flat.grad.copy_(torch.cat([grad.flatten() for grad in grads]))\n",
        "    flat.grad.zero_()\n    loss.backward()\n"), (
        "    actor_opt.step(cfg.lr)\n",
        "    actor_opt.step(cfg.lr)\n    critic_opt.step(cfg.lr)\n"))),
    "D": Bug("a2c", ((
        "        self.square = torch.full_like(flat.data, float(tf))\n",
        "        self.square = torch.zeros_like(flat.data)\n"), (
        "root = (self.square + self.eps).sqrt() if self.tf else self.square.sqrt() + self.eps",
        "root = self.square.sqrt() + self.eps"))),
    "E": Bug("ppo", ((
        "true_next_obs(next_obs, done, infos), terminated, done))",
        "true_next_obs(next_obs, done, infos), done, done))"),)),
    "F": Bug("ppo", ((
        "self.register_buffer(name, torch.full(shape, start, dtype=torch.float64))",
        "self.register_buffer(name, torch.full(shape, start, dtype=torch.float64), False)"),)),
}

# Settings that would tell too much in the notebook.
WARD_D = {"env": "CartPole-v1", "total_steps": 24e3, "batch": 80, "lr": 0.03, "rmsprop": "tf"}


# ---- Planting

def texts(name):
    """The file's text and the patient's."""
    bug = BUGS[name]
    before = (lab.ROOT / "algos" / f"{bug.algo}.py").read_text(encoding="utf-8")
    after = before
    for old, new in bug.swaps:
        if after.count(old) != 1:
            raise ValueError(f"algos/{bug.algo}.py has this {after.count(old)} times, "
                             f"and once is needed:\n{old}")
        after = after.replace(old, new)
    return before, after


def plant(name):
    """The patient as a module of its own; the file and the true module stay as they are."""
    module = types.ModuleType(f"patient_{name}")
    sys.modules[module.__name__] = module  # a dataclass asks for the module that it stands in
    exec(compile(texts(name)[1], f"<patient {name}>", "exec"), vars(module))
    return module


def difference(name):
    """What was changed."""
    before, after = (text.splitlines() for text in texts(name))
    lines = difflib.unified_diff(before, after, f"algos/{BUGS[name].algo}.py", f"patient {name}",
                                 n=1, lineterm="")
    return "\n".join(lines)


# ---- Environments

def scripted():
    """tests/envs.py, with the counter that our tests use; it is not installed, so by its path."""
    if "tests.envs" not in sys.modules:
        spec = importlib.util.spec_from_file_location("tests.envs", lab.ROOT / "tests" / "envs.py")
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)  # registers its environments: "tests.envs:Counter-v0", ...
    return sys.modules["tests.envs"]


class Orchard(gym.Env):
    """Five trees in a row: a step left or right. The first tree pays 1 a step, the last one 3.

    The work has no end, and begins at any of the trees.
    """

    observation_space, action_space = Box(0, 1, (5,)), Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.tree = int(self.np_random.integers(5))
        return self.observe(), {}

    def observe(self):
        return np.eye(5, dtype=np.float32)[self.tree]

    def step(self, act):
        self.tree = min(max(self.tree + 2 * int(act) - 1, 0), 4)
        return self.observe(), {0: 1.0, 4: 3.0}.get(self.tree, 0.0), False, False, {}


class Thermostat(gym.Env):
    """Keep a room at 293 kelvin for 20 steps: heat or cool. Each step costs an eighth of the error.

    The thermometer shows kelvin.
    """

    observation_space, action_space = Box(0, 500, (1,)), Box(-1, 1, (1,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.kelvin, self.time = 293 + self.np_random.uniform(-8, 8), 0
        return np.float32([self.kelvin]), {}

    def step(self, act):
        self.kelvin += 2 * float(act[0]) + self.np_random.normal(0, 0.3)
        self.time += 1
        return np.float32([self.kelvin]), -abs(self.kelvin - 293) / 8, False, self.time == 20, {}


Counter = scripted().Counter
for kind in (Orchard, Thermostat):
    gym.register(f"{kind.__name__}-v0", kind)


# ---- What the doctor uses

def counter_rollout(algo, steps=12):
    """A rollout of the scripted counter, three environments: [T, 3]; obs is (env, episode, time).

    Environment 0 has episodes of 3 steps, 1 of 7 steps, 2 of 1, 5 and 2 steps in turn. They end
    terminated, truncated and both, in turn; environment 1 begins with a truncated one.
    """
    Counter.made.clear()  # they are numbered as they are made
    cfg = algo.Config(env="tests.envs:Counter-v0")
    envs = algo.make_envs(cfg, 3)
    agent = algo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    return algo.collect(agent, envs, envs.reset(seed=1)[0], steps)[0]


def new_agent(algo, env, **settings):
    """An agent as it is before training."""
    cfg = algo.Config(env=env, **settings)
    envs = algo.make_envs(cfg, 1)
    agent = algo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    envs.close()
    return agent


def train(name, seeds, algo, true=None, **settings):
    """The same runs by the true file, unless they are given, and by the patient."""
    def runs(module):
        return [lab.run(module, seed=seed, device="cpu", **settings) for seed in seeds]

    return {"true": true or runs(algo), f"patient {name}": runs(plant(name))}


def chart(runs, columns):
    """A panel for each column of progress.csv; a line a run, the true ones blue."""
    fig, axes = plt.subplots(1, len(columns), figsize=(4.2 * len(columns), 3), squeeze=False,
                             layout="constrained")
    for ax, column in zip(axes[0], columns):
        for (who, found), look in zip(runs.items(), ("-", "--")):
            for k, run in enumerate(found):
                there = np.isfinite(run.progress[column])
                ax.plot(run.progress["step"][there], run.progress[column][there], look,
                        color="tab:blue" if who == "true" else "tab:red",
                        label=who if k == 0 else None)
        ax.set(title=column, xlabel="step")
        if column == "explained_variance":  # once nothing is left to explain it can be anything
            ax.set_ylim(-1, 1.1)
        if column in ("v_loss", "q_loss"):
            ax.set_yscale("log")
        ax.grid(alpha=0.25)
    axes[0, 0].legend()
    plt.show()


def verdict(name, true, patient):
    """One line: what a test says of both. AssertionError if it does not tell them apart."""
    words = ["passes" if bool(ok) else "FAILS" for ok in (true, patient)]
    print(f"the true file {words[0]}, patient {name} {words[1]}")
    assert words == ["passes", "FAILS"]


@torch.no_grad()
def actions(agent, obs):
    """Of the deterministic policy."""
    return agent.act(obs, deterministic=True)
