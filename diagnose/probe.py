"""Find the broken part of an algorithm with five environments, or by what a run has logged.

    python -m diagnose.probe --algo ppo                 # algos/ppo.py, 30 seconds
    python -m diagnose.probe --algo ppo --set lr=1e-3   # with your own settings
    python -m diagnose.probe --run RUN                  # compare it with known bugs

Each environment needs one more part to work than the one before. The right
values and the right actions, discrete and continuous, are known. The first
probe that fails says where to look. The exit status is 1 if one fails. The idea
comes from Andy Jones, "Debugging RL, Without the Agonizing Pain".
"""
import contextlib
import dataclasses
import io
import sys
import tempfile

import torch

from diagnose.envs import Probe
from utils import sweep
from utils.errors import UsageError
from utils.load import find_module
from utils.command import program, read_command
from utils.run.settings import parse as parse_command

GAMMA = 0.5
# Those that the algorithm's Config has. Plain rewards, so that values can be foretold.
SETTINGS = {"total_steps": 6144, "num_envs": 8, "gamma": GAMMA, "hidden": (32, 32), "lr": 1e-2,
            "rollout_steps": 256, "minibatch_size": 64, "epochs": 4, "scale_rew": False}
# Those with a replay buffer, on top: an update a step.
OFF_POLICY = {"total_steps": 1200, "num_envs": 2, "lr": 5e-3, "batch_size": 64, "start_steps": 200,
              "buffer_size": 2000, "report_every": 600, "tau": 0.05, "learn_alpha": False,
              "alpha": 0.01, "warm_up": 100, "critic_hidden": (32, 32)}
# Those of ACER, on top of both: as on-policy, and each rollout is replayed once.
ACER = {"total_steps": 10240, "num_envs": 8, "lr": 1e-2, "rollout_steps": 64, "replay_ratio": 1,
        "rmsprop_eps": 1e-3, "report_every": 2560}
# Those of DQN and its children, on top of both.
DQN = {"num_envs": 8, "total_steps": 2000, "start_steps": 64, "update_every": 4, "lr": 1e-2,
       "target_every": 40, "eps_steps": 1000, "hidden": (32,)}
# Those of one algorithm, on top of all.
OWN = {
    "vpg": {"lr": 3e-2, "v_lr": 1e-2, "v_steps": 10, "rollout_steps": 128, "minibatch_size": 128,
            "total_steps": 5120, "std_init": 0.3},
    "trpo": {"max_kl": 0.05, "v_lr": 1e-2, "v_steps": 20, "rollout_steps": 256,
             "minibatch_size": 256, "total_steps": 6144, "std_init": 0.3},
    "a2c": {"lr": 1e-2, "rollout_steps": 64, "rmsprop": "torch", "rmsprop_eps": 1e-3,
            "total_steps": 10240, "report_every": 2560},
    "acktr": {"lr": 0.25, "rollout_steps": 128, "max_kl": 0.003, "v_max_kl": 0.03, "momentum": 0.0,
              "std_init": 0.3, "total_steps": 10240, "report_every": 2560},
    "qr_dqn": {"total_steps": 3000}, "sac_discrete": {"learn_alpha": True, "alpha": 1.0},
}
NEAR = {"value": 0.05, "action": 0.2}                           # errors that still count as learned


@dataclasses.dataclass(frozen=True)
class Case:
    """An environment, its value per observation (None: check actions), observations, and a hint."""

    env: str
    vals: dict | None
    seen: tuple
    hint: str


CASES = [
    Case("ProbeValue", {0: 1}, (0,),
         "the value loss and the optimizer, which cannot learn a single number; on-policy also at "
         "the normalisation of advantages, which are all equal here"),
    Case("ProbeObs", {-1: -1, 1: 1}, (-1, 1),
         "how observations reach the critic: normalisation, rows of obs and ret mixed up"),
    Case("ProbeLate", {0: GAMMA, 1: 1}, (0, 1),
         "the value target: discount, next_obs, bootstrapping, ends of episodes"),
    Case("ProbeAct", None, (0,),
         "the policy loss (sign of the advantage, log-probability) and how actions are sent"),
    Case("ProbePolicy", None, (-1, 1),
         "the policy's input: rows of obs, act and adv mixed up, wrong observations while acting"),
]


def probe(algo, case, box, **settings):
    """Train `algo`, a module, on a case. Return rows (what, expected, got, tolerance).

    They are none if the case asks for values and the algorithm has no critic.
    """
    fields = {field.name for field in dataclasses.fields(algo.Config)}
    every = SETTINGS | (OFF_POLICY if "buffer_size" in fields else {})
    every |= ACER if "replay_ratio" in fields else {}
    every |= DQN if "target_every" in fields else {}
    quick = {name: value for name, value in every.items() if name in fields}
    kwargs = '{"box": true}' if box else "{}"
    with tempfile.TemporaryDirectory() as run_dir, contextlib.redirect_stdout(io.StringIO()):
        agent = algo.train(algo.Config(**{
            "env": f"diagnose.envs:{case.env}-v0", "env_kwargs": kwargs,
            "run_dir": f"{run_dir}/run", "device": "cpu", **quick, **settings}))
    rows = []
    for seen in case.seen if case.vals is None or hasattr(agent, "critic") else ():
        obs = torch.tensor([[float(seen)]])
        if case.env != "ProbeLate":                             # there, one episode shows both
            agent.forget()
        if case.vals is not None:
            got, want = value(agent, obs), case.vals[seen]
            rows.append((f"value of {seen}", want, got, NEAR["value"]))
        else:
            got, want = agent.predict(obs[0].numpy()).item(), Probe.right(seen)
            rows.append((f"action at {seen}", want, got, NEAR["action"]))
    return rows


@torch.no_grad()
def value(agent, obs):
    """Return V of one raw observation, [1, 1], or Q of the best action if the critic is a Q."""
    if not hasattr(agent, "actor"):  # DQN: a Q for each action; C51: log-probabilities of atoms
        q = agent.critic(obs)
        return (q.exp() @ agent.atoms if hasattr(agent, "atoms") else q).max().item()
    if hasattr(agent, "random_act"):  # DDPG and its children
        act = agent.act(obs, deterministic=True)
        if hasattr(agent, "num_acts"):  # SAC-Discrete: a Q for each action
            return agent.critic(obs)[0][0, act].item()
        q = agent.critic(obs, act)
        return (q[0] if isinstance(q, tuple) else q).item()
    obs = agent.normalize_obs(obs)
    if hasattr(agent, "lstm"):
        h, agent.memory = agent.remember(agent.embed(obs)[None], agent.memory_before(obs))
        features = h[0]
    else:
        features = agent.encoder(obs)
    if hasattr(agent, "policy_avg"):  # ACER: V is the mean of Q under the policy
        return (agent.actor(features).softmax(-1) * agent.critic(features)).sum().item()
    return (agent.value if hasattr(agent, "value") else agent.critic)(features).item()


def passed(rows):
    return all(abs(got - want) <= near for _, want, got, near in rows)      # NaN does not pass


@dataclasses.dataclass(frozen=True)
class Command:
    algo: str = "ppo"  # name of an algorithm: ppo for algos/ppo.py
    seed: int = 1  # seed of every run
    set: tuple[str, ...] = ()  # settings of the algorithm, such as lr=1e-3 norm_obs=False
    run: str = ""  # instead: the directory of a run, which diagnose/doctor.py examines


def parse(asked):
    """Return the name of an algorithm, its module, and the settings that were given."""
    algo = find_module(f"algos.{asked.algo}", f"--algo {asked.algo}")
    if hasattr(algo.Config, "demos"):
        raise UsageError(f"--algo {asked.algo}: it learns from demonstrations; probes have none")
    return asked.algo, algo, OWN.get(asked.algo, {}) | {"seed": asked.seed} | dict(
        read_set(algo, pair) for pair in asked.set)


def read_set(algo, pair):
    """"lr=1e-3" -> ("lr", 0.001). UsageError: the algorithm has no such setting, or value."""
    name, [value, *more] = sweep.parse_set(pair)
    if more:
        raise UsageError(f"--set {pair}: a probe takes one value")
    return name, getattr(parse_command(algo.Config, "", sweep.set_flags(algo, name, value)), name)


def quiet_probe(algo, case, box, settings):
    """Return the rows of `probe`, or the reason for which it was skipped."""
    try:
        rows = probe(algo, case, box, **settings)
        return rows, "" if rows else "skipped: no critic"
    except FloatingPointError as error:
        return [(str(error), 0.0, float("nan"), 0.0)], ""
    except UsageError as error:
        if "the action space" in str(error):
            return [], "skipped: continuous actions" if box else "skipped: discrete actions"
        raise


def main():
    """Run all probes, or examine a run. Return exit status 0 if all is well, else 1."""
    asked = read_command(Command, __doc__, "python -m diagnose.probe")
    if asked.run:
        from diagnose import doctor  # takes a second
        return doctor.ask(asked.run)
    name, algo, settings = parse(asked)
    print(f"{'probe':<12}{'actions':<11}{'':<14}{'expected':>9}{'got':>9}")
    failed, ran = [], set()
    for case in CASES:
        for box in (False, True):
            rows, skipped = quiet_probe(algo, case, box, settings)
            if skipped:
                print(f"{case.env:<12}{skipped}")
                continue
            ran.add(case.env)
            for what, want, got, near in rows:
                mark = "" if passed([(what, want, got, near)]) else "   FAILED"
                kind = "continuous" if box else "discrete"
                print(f"{case.env:<12}{kind:<11}{what:<14}{want:>9.2f}{got:>9.2f}{mark}")
            if not passed(rows) and case not in failed:
                failed.append(case)
    for case in failed:
        print(f"{case.env} failed: look at {case.hint}")
    if ran and not failed:
        print(f"all passed: {', '.join(case.env for case in CASES if case.env in ran)}")
    if not ran:
        print(f"algos/{name}.py takes neither kind of action")
    return int(bool(failed) or not ran)


if __name__ == "__main__":
    with program():
        sys.exit(main())
