"""Find the broken part of an algorithm with five environments. Each needs one more part to work.

    python -m tests.probe --algo ppo                    # algos/ppo.py, half a minute
    python -m tests.probe --algo ppo --set lr=1e-3      # with your own settings

The right values and the right actions, discrete and continuous, are known. The first probe that
fails says where to look. The exit status is 1 if one fails. The idea comes from Andy Jones,
"Debugging RL, Without the Agonizing Pain".
"""
import argparse
import contextlib
import dataclasses
import importlib
import io
import sys
import tempfile

import torch

from tests.envs import Probe
from utils.envs import forget
from utils.mpi import UsageError

GAMMA = 0.5
# Those that the algorithm's Config has. Plain rewards, so that values can be foretold.
SETTINGS = {"total_steps": 6144, "num_envs": 8, "gamma": GAMMA, "hidden": (32, 32), "lr": 1e-2,
            "rollout_steps": 256, "minibatch_size": 64, "epochs": 4, "scale_rew": False}
# Those with a replay buffer, on top: an update a step.
OFF_POLICY = {"total_steps": 1200, "num_envs": 2, "lr": 5e-3, "batch_size": 64, "start_steps": 200,
              "buffer_size": 2000, "report_every": 600, "tau": 0.05, "learn_alpha": False,
              "alpha": 0.01}
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
         "the value loss and the optimizer: they cannot learn a single number"),
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
    """Train `algo`, a module, on a case. Return rows (what, expected, got, tolerance)."""
    fields = {field.name for field in dataclasses.fields(algo.Config)}
    both = SETTINGS | (OFF_POLICY if "buffer_size" in fields else {})
    quick = {name: value for name, value in both.items() if name in fields}
    kwargs = '{"box": true}' if box else "{}"
    with tempfile.TemporaryDirectory() as run_dir, contextlib.redirect_stdout(io.StringIO()):
        agent = algo.train(algo.Config(**{
            "env": f"tests.envs:{case.env}-v0", "env_kwargs": kwargs, "run_dir": f"{run_dir}/run",
            "device": "cpu", **quick, **settings}))
    rows = []
    for seen in case.seen:
        obs = torch.tensor([[float(seen)]])
        if case.env != "ProbeLate":                             # there, one episode shows both
            forget(agent)
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
    if hasattr(agent, "critic_targ"):
        q = agent.critic(obs, agent.act(obs, deterministic=True))
        return (q[0] if isinstance(q, tuple) else q).item()
    features = agent.encoder(agent.normalize_obs(obs))
    if hasattr(agent, "lstm"):
        h, agent.memory = agent.remember(features[None], agent.memory_before(obs))
        features = h[0]
    return agent.critic(features).item()


def passed(rows):
    return all(abs(got - want) <= near for _, want, got, near in rows)      # NaN does not pass


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", required=True, help="name of an algorithm: ppo for algos/ppo.py")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER")
    args = parser.parse_args(argv)
    sets = dict(pair.split("=") for pair in args.set)
    return args.algo, {"seed": args.seed} | {
        name: int(text) if text.isdigit() else float(text) for name, text in sets.items()}


def main(argv=None):
    """Run all probes. Return exit status 0 if every one is learned, else 1."""
    name, settings = parse(argv)
    algo = importlib.import_module(f"algos.{name}")
    print(f"{'probe':<12}{'actions':<11}{'':<14}{'expected':>9}{'got':>9}")
    failed, ran = [], set()
    for case in CASES:
        for box in (False, True):
            try:
                rows = probe(algo, case, box, **settings)
            except UsageError:                                  # it prints why
                continue
            except FloatingPointError as error:
                rows = [(str(error), 0.0, float("nan"), 0.0)]
            ran.add(case.env)
            for what, want, got, near in rows:
                mark = "" if passed([(what, want, got, near)]) else "   FAILED"
                kind = "continuous" if box else "discrete"
                print(f"{case.env:<12}{kind:<11}{what:<14}{want:>9.2f}{got:>9.2f}{mark}")
            if not passed(rows) and case not in failed:
                failed.append(case)
    for case in failed:
        print(f"{case.env} failed: look at {case.hint}")
    if len(ran) < len(CASES):
        print(f"algos/{name}.py takes neither kind of action, or refuses a setting")
    return int(bool(failed) or len(ran) < len(CASES))


if __name__ == "__main__":
    sys.exit(main())
