"""One row for each algorithm: its parent, the environments that it takes, a tiny run's settings.

Tests that hold for every file of algos/ take its algorithms from here. A new algorithm needs a row;
if its settings have the names of others', the row is its parent and what it takes.
"""
import json
from dataclasses import dataclass, field, fields
from importlib import import_module

# What an environment gives and takes: vectors and a box of actions, ...
KINDS = {"box": {}, "discrete": {"act": "discrete"}, "image": {"obs": "image", "act": "discrete"},
         "goal": {}, "mask": {}, "text": {}}
# A scripted environment, and one whose episodes end together and depend on the actions alone.
SCRIPTED = dict.fromkeys(KINDS, "tests.envs:Counter-v0") | {
    "goal": "tests.envs:GoalCounter-v0", "mask": "tests.envs:MaskCounter-v0",
    "text": "tasks:Sums-v0"}
ENDS = dict.fromkeys(KINDS, "tests.envs:Ends-v0") | {
    "goal": "tests.envs:GoalEnds-v0", "mask": "tests.envs:MaskEnds-v0",
    "text": "tests.envs:OneSum-v0"}

# Only the settings that an algorithm's Config has are used.
TINY = {"device": "cpu", "run_dir": "run", "num_envs": 3, "total_steps": 72, "rollout_steps": 24,
        "minibatch_size": 12, "minibatch_envs": 1, "epochs": 2, "v_steps": 3, "hidden": (8, 8),
        "lstm_size": 8, "report_every": 24, "batch_size": 8, "buffer_size": 48, "start_steps": 12,
        "update_every": 4, "target_every": 8, "eps_steps": 60, "policy_delay": 1, "her_k": 0,
        "subsample": 1, "check_every": 24, "demos": "demos.npz"}


@dataclass(frozen=True)
class Row:
    """What the tests need to know about an algorithm."""

    parent: str                                                 # "" if it has none
    takes: str = "box discrete image"                           # those of KINDS, the quickest first
    tiny: dict = field(default_factory=dict)                    # on top of TINY
    learns: tuple = ("update",)                                 # its functions that take steps
    episodes: bool = False                                      # it learns from whole returns alone
    procs: bool = True                                          # several may train one agent
    fixed: str = ""                                             # a part that nothing trains


ALGOS = {
    "vpg": Row(""),
    "trpo": Row("vpg"),
    "a2c": Row("vpg"),
    "acer": Row("a2c", "discrete image", {"buffer_size": 72, "replay_ratio": 2}),
    "acktr": Row("a2c"),
    "ppo": Row("a2c"),
    "ppo_popart": Row("ppo"),
    "ppo_lstm": Row("ppo"),
    "ppo_mask": Row("ppo", "mask"),
    "ppo_rnd": Row("ppo", learns=("update", "update_predictor"), fixed="target"),
    "gail": Row("ppo", "box discrete", learns=("update_disc", "update")),
    "bc": Row(""),
    "ars": Row("", "box discrete", {"directions": 2}, episodes=True),
    "grpo": Row("", "text", {"group_size": 4, "epochs": 1, "pretrain_steps": 100, "width": 16,
                             "layers": 1}, episodes=True),
    "dqn": Row("", "discrete image"),
    "dqn_atari": Row("dqn", "image", {"anneal_lr": True}),
    "dqn_per": Row("dqn", "discrete image"),
    "c51": Row("dqn", "discrete image", {"num_atoms": 7}),
    "qr_dqn": Row("dqn", "discrete image", {"num_quantiles": 7}),
    "rainbow": Row("c51", "discrete image", {"num_atoms": 7, "n_step": 1}),
    "pqn": Row("dqn", "discrete image"),
    "ddpg": Row("", "box"),
    "td3": Row("ddpg", "box"),
    "sac": Row("td3", "box"),
    "sac_her": Row("sac", "goal"),
    "sac_discrete": Row("sac", "discrete image"),
    "crossq": Row("sac", "box", {"warm_up": 5, "critic_hidden": (8, 8)}, procs=False),
}


def module(name):
    return import_module(f"algos.{name}")


def config(name, envs=SCRIPTED, kind="", **settings):
    """Return the Config of a tiny run in one of these environments, by default of the first kind.

    Settings that the algorithm lacks are ignored. Demonstrations are written if it needs them.
    """
    row, known = ALGOS[name], {each.name for each in fields(module(name).Config)}
    kind = kind or row.takes.split()[0]
    env = {"env": envs[kind], "env_kwargs": json.dumps(KINDS[kind])}
    settings = TINY | env | row.tiny | settings
    if "demos" in known:
        from tests.helpers import write_demos

        write_demos(env=settings["env"], env_kwargs=settings["env_kwargs"], lengths=(9, 15))
    return module(name).Config(**{k: v for k, v in settings.items() if k in known})
