"""Plausible wrong answers to the exercises of notebook 2. The checks must reject each."""
import math

import torch


def best_of_all(rew, terminated, next_q, gamma):
    return rew + gamma * (1 - terminated) * next_q.max()


def no_end(rew, terminated, next_q, gamma):
    return rew + gamma * next_q.max(-1).values


def on_average(rew, terminated, next_q, gamma):
    return rew + gamma * (1 - terminated) * next_q.mean(-1)


def turned(q, q_targ):
    return q.gather(-1, q_targ.argmax(-1, keepdim=True)).squeeze(-1)


def uncorrected(mean, std, eps):
    return (-eps.square() / 2 - std.log() - math.log(2 * math.pi) / 2).sum(-1)


def wrong_sign(mean, std, eps):
    squash = 1 - (mean + std * eps).tanh().square()
    return uncorrected(mean, std, eps) + squash.log().sum(-1)


def no_deviation(mean, std, eps):
    squash = 1 - (mean + std * eps).tanh().square()
    return uncorrected(mean, std, eps) + std.log().sum(-1) - squash.log().sum(-1)


def averaged(mean, std, eps):
    squash = 1 - (mean + std * eps).tanh().square()
    return (uncorrected(mean, std, eps) - squash.log().sum(-1)) / mean.shape[-1]


def entropy_after_the_end(rew, terminated, q1, q2, logp, alpha, gamma):
    return rew + gamma * ((1 - terminated) * torch.min(q1, q2) - alpha * logp)


def malus(rew, terminated, q1, q2, logp, alpha, gamma):
    return rew + gamma * (1 - terminated) * (torch.min(q1, q2) + alpha * logp)


def higher(rew, terminated, q1, q2, logp, alpha, gamma):
    return rew + gamma * (1 - terminated) * (torch.max(q1, q2) - alpha * logp)


def undiscounted_entropy(rew, terminated, q1, q2, logp, alpha, gamma):
    return rew + (1 - terminated) * (gamma * torch.min(q1, q2) - alpha * logp)


WRONG = {
    "bellman_target": [best_of_all, no_end, on_average],
    "double_value": [turned, lambda q, q_targ: q_targ.max(-1).values,
                     lambda q, q_targ: torch.min(q.max(-1).values, q_targ.max(-1).values)],
    "updates_to_follow": [lambda tau, share: share / tau,
                          lambda tau, share: math.log(share) / math.log(1 - tau),
                          lambda tau, share: -math.log(1 - share) / tau],
    "squashed_logp": [uncorrected, wrong_sign, no_deviation, averaged],
    "soft_target": [entropy_after_the_end, malus, higher, undiscounted_entropy],
}
