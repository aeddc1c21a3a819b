"""The patients of 4_bug_clinic.ipynb. This file gives away every diagnosis: do the notebook first.

    patient = plant("A")        an algorithm file as a module, with a bug planted into it
    print(difference("A"))      what was changed, as `diff -u` shows it

A bug replaces text that occurs exactly once in its file; otherwise ValueError is raised. So a
patient is the current file except for these lines, and a change of the file that affects them is
noticed.
"""
import difflib
import sys
import types
from typing import NamedTuple

import gymnasium as gym
import lab
import matplotlib.pyplot as plt
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from diagnose.catalogue import edited
from tasks import Line  # noqa: F401  it registers Line-v0
from utils.envs import make_envs


class Bug(NamedTuple):
    algo: str                           # the patient is algos/<algo>.py ...
    swaps: tuple[tuple[str, str], ...]  # (text in the file, text that replaces it)
    file: str = ""                      # ... but this file has the bug, if it is another one


BUGS = {
    "A": Bug("ppo", ((
        'steps.append({"obs": obs,', 'steps.append({"obs": next_obs,'),)),
    "B": Bug("ppo", ((
        "    val = agent.value(features)\n", "    val = agent.critic(features)\n"), (
        "    assert val.shape == batch.ret.shape  # [B] minus [B, 1] would be [B, B]\n", ""))),
    "C": Bug("ddpg", ((
        "    critic_opt.zero_grad()\n"
        "    loss.backward()\n",
        "    more, actor_metrics = actor_loss(agent, batch)\n"
        "    critic_opt.zero_grad()\n"
        "    actor_opt.zero_grad()\n"
        "    (loss + more).backward()\n"), (
        "    loss, actor_metrics = actor_loss(agent, batch)\n"
        "    actor_opt.zero_grad()\n"
        "    # The gradient goes through Q, but only the actor's weights receive it.\n"
        "    loss.backward(inputs=list(agent.actor.parameters()))\n", ""))),
    "D": Bug("a2c", ((
        "        self.register_buffer(\"square\", torch.full_like(self.flat, float(tf_style)))\n",
        "        self.register_buffer(\"square\", torch.zeros_like(self.flat))\n"), (
        "        if self.tf_style:\n"
        "            root = (self.square + self.eps).sqrt()\n"
        "        else:\n"
        "            root = self.square.sqrt() + self.eps\n",
        "        root = self.square.sqrt() + self.eps\n")), "utils/optim.py"),
    "E": Bug("ppo", ((
        '"terminated": terminated, "done": done})', '"terminated": done, "done": done})'),)),
    "F": Bug("ppo", ((
        "        self.obs_stats = ObsStats(obs_space)  # of vectors\n",
        '        self.__dict__["obs_stats"] = ObsStats(obs_space)  # of vectors\n'),)),
}

# Settings that would reveal too much in the notebook.
WARD_D = {"env": "CartPole-v1", "total_steps": 24e3, "rollout_steps": 80, "report_every": 2000,
          "lr": 0.03, "rmsprop": "tf"}


# ---- Planting

def file_of(name):
    """Return the path of the file that has the bug, from the root of the project."""
    return BUGS[name].file or f"algos/{BUGS[name].algo}.py"


def texts(name):
    """Return the file's text without and with the bug."""
    before = (lab.ROOT / file_of(name)).read_text(encoding="utf-8")
    return before, edited(before, BUGS[name].swaps)


def plant(name):
    """Return the patient as a new module; the file and the true module stay as they are."""
    if not BUGS[name].file:
        return module_of(f"patient_{name}", texts(name)[1])
    algo = lab.ROOT / "algos" / f"{BUGS[name].algo}.py"
    patient = module_of(f"patient_{name}", algo.read_text(encoding="utf-8"))
    spoiled = module_of(f"patient_{name}_utils", texts(name)[1])
    true = sys.modules[BUGS[name].file.removesuffix(".py").replace("/", ".")]
    for key, value in list(vars(patient).items()):  # what it has imported from the true module
        if value is true:
            setattr(patient, key, spoiled)
        elif getattr(value, "__module__", "") == true.__name__:
            setattr(patient, key, getattr(spoiled, key))
    return patient


def module_of(name, text):
    module = types.ModuleType(name)
    sys.modules[name] = module  # a dataclass looks up the module that defines it
    exec(compile(text, f"<{name}>", "exec"), vars(module))
    return module


def difference(name):
    """Return what was changed, as `diff -u` shows it."""
    before, after = (text.splitlines() for text in texts(name))
    lines = difflib.unified_diff(before, after, file_of(name), f"patient {name}", n=1,
                                 lineterm="")
    return "\n".join(lines)


# ---- Environments

class Scripted(gym.Env):
    """Observe (environment, episode, time), whatever the action. `counter_rollout` says how
    episodes end. Environments are numbered in the order of creation.
    """

    observation_space, action_space = Box(-np.inf, np.inf, (3,)), Box(-1, 1, (2,))
    made = 0
    lengths = (3,), (7,), (1, 5, 2)  # of the episodes in environments 0, 1 and 2

    def __init__(self):
        self.number, self.episode = Scripted.made, -1
        Scripted.made += 1

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        return np.float32([self.number, self.episode, 0]), {}

    def step(self, act):
        self.time += 1
        lengths, how = self.lengths[self.number], (self.number + self.episode) % 3
        end = self.time == lengths[self.episode % len(lengths)]
        return (np.float32([self.number, self.episode, self.time]), 1.0, end and how != 1,
                end and how != 0, {})


class Orchard(gym.Env):
    """Five trees in a row; actions go left or right. A step to the first tree has reward 1, to the
    last one 3.

    An episode starts at a random tree and never ends.
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
    """Keep a room at 293 kelvin for 20 steps by heating and cooling. Observations are in kelvin.

    A step costs an eighth of the error in kelvin.
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


for kind in (Scripted, Orchard, Thermostat):
    gym.register(f"{kind.__name__}-v0", kind)


# ---- Instruments

def counter_rollout(algo, steps=12):
    """Return a rollout [T, 3] of three scripted counters, whose obs is (env, episode, time).

    Episodes have 3 steps in environment 0, 7 in environment 1, and 1, 5 and 2 in turn in
    environment 2. They end terminated, truncated and both, in turn. The first one of environment 1
    is truncated.
    """
    Scripted.made = 0
    cfg = algo.Config(env="Scripted-v0")
    envs = make_envs(cfg, 3)
    agent = algo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    return algo.collect(agent, envs, envs.reset(seed=1)[0], steps)[0]


def new_agent(algo, env, **settings):
    """Return an untrained agent."""
    cfg = algo.Config(env=env, **settings)
    envs = make_envs(cfg, 1)
    agent = algo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    envs.close()
    return agent


def train(name, seeds, algo, true=None, **settings):
    """Return runs of the true file (unless given) and of the patient, with the same seeds."""
    def runs(module):
        return [lab.run(module, seed=seed, device="cpu", **settings) for seed in seeds]

    return {"true": true or runs(algo), f"patient {name}": runs(plant(name))}


def chart(runs, columns):
    """Plot a panel per column of progress.csv, with one line per run; the true file is blue."""
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
        if column == "explained_variance":  # arbitrary if all targets are equal
            ax.set_ylim(-1, 1.1)
        if column in ("v_loss_mean", "critic_loss"):
            ax.set_yscale("log")
        ax.grid(alpha=0.25)
    axes[0, 0].legend()
    plt.show()


def verdict(name, true, patient):
    """Print what a test says about both. AssertionError if it does not tell them apart."""
    words = ["passes" if bool(ok) else "FAILS" for ok in (true, patient)]
    print(f"the true file {words[0]}, patient {name} {words[1]}")
    assert words == ["passes", "FAILS"]


@torch.no_grad()
def actions(agent, obs):
    """Return the deterministic policy's actions."""
    return agent.act(obs, deterministic=True)
