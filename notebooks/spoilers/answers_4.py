"""Worked answers to the exercises in 4_bug_clinic.ipynb."""
import math

import torch


def diagnosis():
    return {"A": 8, "B": 3, "C": 6, "D": 7, "E": 5, "F": 2}


def in_step(rollout):
    one_step = torch.tensor([0.0, 0.0, 1.0])  # the same environment and episode, time + 1
    return (rollout.next_obs - rollout.obs == one_step).all()


def first_step(grad, lr, eps, tf_style):
    m = 0.99 * (1 if tf_style else 0) + 0.01 * grad**2
    return lr * grad / (math.sqrt(m + eps) if tf_style else math.sqrt(m) + eps)


def limit_is_no_end(rollout):
    # At some step an episode ends (done) without a termination.
    return ((rollout.done == 1) & (rollout.terminated == 0)).any()


def same_policy(agent, fresh, obs):
    fresh.load_state_dict(agent.state_dict())
    return torch.equal(agent.act(obs, deterministic=True), fresh.act(obs, deterministic=True))
