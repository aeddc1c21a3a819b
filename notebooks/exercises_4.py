"""Checks of the exercises in 4_bug_clinic.ipynb; worked answers are in answers_4.py."""
from dataclasses import replace

import clinic
import numpy as np
import torch
from checking import Unanswered, Wrong, close, exercise, true

from algos import a2c, ppo

# From the list in the notebook.
RIGHT = {"A": 8, "B": 3, "C": 6, "D": 7, "E": 5, "F": 2}


def yes(got):
    """What a test of the reader says; Wrong unless it is one True or False."""
    if isinstance(got, torch.Tensor | np.generic) and got.ndim == 0:
        got = got.item()
    if not isinstance(got, bool):
        raise Wrong("It has to return one True or False; `.all()` makes one of many.")
    return got


@exercise
def diagnosis(answer):
    got = answer()
    if not isinstance(got, dict):
        raise Wrong("It has to return the dict of patients and numbers.")
    given = {name: got[name] for name in RIGHT if got.get(name) is not None}
    if not given:
        raise Unanswered
    wrong = [name for name in given if given[name] != RIGHT[name]]
    open_ = [name for name in RIGHT if name not in given]
    if wrong:
        raise Wrong(f"Look again at {', '.join(wrong)}.")
    if open_:
        raise Wrong(f"Right so far; still open: {', '.join(open_)}.")


@exercise
def in_step(answer):
    good = clinic.counter_rollout(ppo)
    true(yes(answer(good)), "It refuses a rollout of the true file. (Where an episode ends, the "
                            "next row is of another one: compare within a row.)")
    true(not yes(answer(clinic.counter_rollout(clinic.plant("A")))),
         "It accepts a rollout of patient A.")
    # The first observation of the next episode, where one ends.
    mixed = replace(good, next_obs=torch.cat([good.obs[1:], good.next_obs[-1:]]))
    true(not yes(answer(mixed)), "It accepts rows that lead into the next episode.")
    for shift, where in [((1.0, 0, 0), "into another environment"),
                         ((0.0, 1, 0), "into another episode"), ((0.0, 0, 1), "two steps ahead")]:
        shifted = replace(good, next_obs=good.next_obs + torch.tensor(shift))
        true(not yes(answer(shifted)), f"It accepts rows that lead {where}.")


@exercise
def first_step(answer):
    for grad, eps in ((1.0, 1e-5), (-0.5, 0.1), (1e-3, 1e-5), (0.2, 0.1)):
        for tf in (True, False):
            flat = torch.nn.Parameter(torch.zeros(1))
            flat.grad = torch.tensor([grad])
            a2c.RMSProp(flat, eps, tf).step(0.02)
            rule = "TensorFlow's rule: m is 1 at first" if tf else "PyTorch's rule: m is 0 at first"
            close(answer(grad, 0.02, eps, tf), -flat.item(),
                  f"{rule}. It becomes 0.99 m + 0.01 g^2, here with g = {grad}, and only then "
                  f"comes the step. Where does eps = {eps} stand?", tol=1e-6)


@exercise
def limit_is_no_end(answer):
    good = clinic.counter_rollout(ppo)
    true(yes(answer(good)), "It refuses a rollout of the true file, in which some episodes are "
                            "terminated and some are truncated.")
    true(not yes(answer(clinic.counter_rollout(clinic.plant("E")))),
         "It accepts a rollout of patient E.")
    never = replace(good, done=good.terminated)
    true(not yes(answer(never)), "It accepts a rollout in which a time limit ends no episode.")


@exercise
def same_policy(answer):
    for name, algo in (("the true file", ppo), ("patient F", clinic.plant("F"))):
        torch.manual_seed(1)
        agent, fresh = (clinic.new_agent(algo, "Thermostat-v0", hidden=(8,)) for _ in range(2))
        agent.obs_stats.update(293 + torch.randn(100, 1))
        got = yes(answer(agent, fresh, torch.tensor([[290.0], [294.0]])))
        true(got == (algo is ppo),
             f"It says {got} of {name}. Load agent.state_dict() into fresh, then compare what both "
             "do without chance.")
