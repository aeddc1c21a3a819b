"""Worked answers to the exercises in 2_q_learning_to_sac.ipynb."""
import math

import torch


def bellman_target(rew, terminated, next_q, gamma):
    return rew + gamma * (1 - terminated) * next_q.max(-1).values


def double_value(q, q_targ):
    pick = q.argmax(-1)
    return q_targ[torch.arange(len(q)), pick]  # q_targ.gather(-1, pick[:, None])[:, 0] is the same


def updates_to_follow(tau, share):
    return math.log(1 - share) / math.log(1 - tau)


def squashed_logp(mean, std, eps):
    u = mean + std * eps
    normal = -eps.square() / 2 - std.log() - math.log(2 * math.pi) / 2
    return (normal - (1 - u.tanh().square()).log()).sum(-1)


def soft_target(rew, terminated, q1, q2, logp, alpha, gamma):
    next_value = torch.min(q1, q2) - alpha * logp
    return rew + gamma * (1 - terminated) * next_value
