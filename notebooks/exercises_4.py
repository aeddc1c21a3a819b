"""Checks for 4_bug_clinic.ipynb. Answers: spoilers/answers_4.py."""
from dataclasses import replace

import clinic
import numpy as np
import torch
from checking import Unanswered, Wrong, close, exercise, true

from algos import ppo
from utils.optim import RMSProp

# From the list in the notebook.
RIGHT = {"A": 8, "B": 3, "C": 6, "D": 7, "E": 5, "F": 2}


def yes(got):
    """Return the result of a reader's test; raise Wrong unless it is a single True or False."""
    if isinstance(got, torch.Tensor | np.generic) and got.ndim == 0:
        got = got.item()
    if not isinstance(got, bool):
        raise Wrong("It has to return a single True or False. `.all()` combines many into one.")
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
        raise Wrong(f"Right so far. Still open: {', '.join(open_)}.")


@exercise
def in_step(answer):
    good = clinic.counter_rollout(ppo)
    true(yes(answer(good)), "It rejects a rollout of the true file. (After the end of an episode, "
                            "the next row belongs to another one. Compare within a row.)")
    true(not yes(answer(clinic.counter_rollout(clinic.plant("A")))),
         "It accepts a rollout of patient A.")
    # At the end of an episode, the first observation of the next one.
    mixed = replace(good, next_obs=torch.cat([good.obs[1:], good.next_obs[-1:]]))
    true(not yes(answer(mixed)), "It accepts rows that lead into the next episode.")
    for shift, where in [((1.0, 0, 0), "into another environment"),
                         ((0.0, 1, 0), "into another episode"), ((0.0, 0, 1), "two steps ahead")]:
        shifted = replace(good, next_obs=good.next_obs + torch.tensor(shift))
        true(not yes(answer(shifted)), f"It accepts rows that lead {where}.")


@exercise
def first_step(answer):
    for grad, eps in ((1.0, 1e-5), (-0.5, 0.1), (1e-3, 1e-5), (0.2, 0.1)):
        for tf_style in (True, False):
            weight = torch.nn.Parameter(torch.zeros(1))
            optimizer = RMSProp([weight], eps=eps, tf_style=tf_style)
            (grad * weight.sum()).backward()
            optimizer.step(lr=0.02)
            start = "TensorFlow's rule starts with m = 1" if tf_style else (
                "PyTorch's rule starts with m = 0")
            close(answer(grad, 0.02, eps, tf_style), -weight.item(),
                  f"{start}. First m becomes 0.99 m + 0.01 g^2, here with g = {grad}; then comes "
                  f"the step. Where does eps = {eps} belong?", tol=1e-6)


@exercise
def limit_is_no_end(answer):
    good = clinic.counter_rollout(ppo)
    true(yes(answer(good)), "It rejects a rollout of the true file, in which some episodes are "
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
             f"It says {got} for {name}. Load agent.state_dict() into fresh, then compare their "
             "deterministic actions.")
