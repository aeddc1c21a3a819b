"""Worked answers to the exercises in 1_policy_gradient_to_ppo.ipynb."""
import torch


def exact_gradient(probs, rew):
    # d pi_b / d logit_a = pi_b ((a == b) - pi_a). Summed over b with weights rew_b, this remains:
    return probs * (rew - probs @ rew)


def returns_to_go(rew, done, gamma):
    ret, last = torch.zeros_like(rew), 0.0
    for t in reversed(range(len(rew))):
        last = rew[t] + gamma * (1 - done[t]) * last  # done[t]: `last` belongs to another episode
        ret[t] = last
    return ret


def advantages(delta, done, gamma, lam):
    adv, last = torch.zeros_like(delta), 0.0
    for t in reversed(range(len(delta))):
        last = delta[t] + gamma * lam * (1 - done[t]) * last
        adv[t] = last
    return adv


def clip_slope(ratio, adv, clip):
    flat_above = (adv > 0) & (ratio > 1 + clip)  # the action is already much more likely
    flat_below = (adv < 0) & (ratio < 1 - clip)  # the action is already much less likely
    return torch.where(flat_above | flat_below, 0.0, adv)


def kl(logits_old, logits):
    logp_old, logp = logits_old.log_softmax(-1), logits.log_softmax(-1)
    return (logp_old.exp() * (logp_old - logp)).sum(-1).mean()
