"""Plausible wrong answers to the exercises of notebook 1. The checks must reject each."""
import torch


def never_ends(rew, done, gamma):
    ret, last = torch.zeros_like(rew), 0.0
    for t in reversed(range(len(rew))):
        ret[t] = last = rew[t] + gamma * last
    return ret


def ends_a_step_early(rew, done, gamma):
    ret, last = torch.zeros_like(rew), 0.0
    for t in reversed(range(len(rew))):
        last = (1 - done[t]) * (rew[t] + gamma * last)
        ret[t] = last
    return ret


def mask_for_a_list(rew, done, gamma):
    ends, ret, last = done.int().tolist(), torch.zeros_like(rew), 0.0
    for t in reversed(range(len(rew))):
        ret[t] = last = rew[t] + (0.0 if t in ends else gamma * last)
    return ret


def lam_alone(delta, done, gamma, lam):
    adv, last = torch.zeros_like(delta), 0.0
    for t in reversed(range(len(delta))):
        adv[t] = last = delta[t] + lam * (1 - done[t]) * last
    return adv


def over_episodes(delta, done, gamma, lam):
    adv, last = torch.zeros_like(delta), 0.0
    for t in reversed(range(len(delta))):
        adv[t] = last = delta[t] + gamma * lam * last
    return adv


def clipped_whatever_the_sign(ratio, adv, clip):
    return torch.where((ratio - 1).abs() > clip, 0.0, adv)


def kl_summed(logits_old, logits):
    logp_old, logp = logits_old.log_softmax(-1), logits.log_softmax(-1)
    return (logp_old.exp() * (logp_old - logp)).sum()


def kl_of_logits(logits_old, logits):
    return (logits_old.exp() * (logits_old - logits)).sum(-1).mean()


def kl_turned(logits_old, logits):
    logp_old, logp = logits_old.log_softmax(-1), logits.log_softmax(-1)
    return (logp.exp() * (logp - logp_old)).sum(-1).mean()


WRONG = {
    "exact_gradient": [lambda probs, rew: probs * rew, lambda probs, rew: rew - probs @ rew,
                       lambda probs, rew: probs * (rew - rew.mean())],
    "returns_to_go": [never_ends, ends_a_step_early, mask_for_a_list,
                      lambda rew, done, gamma: rew.cumsum(0)],
    "advantages": [lam_alone, over_episodes, lambda delta, done, gamma, lam: delta],
    "clip_slope": [clipped_whatever_the_sign, lambda ratio, adv, clip: adv,
                   lambda ratio, adv, clip: ratio.clamp(1 - clip, 1 + clip) * adv],
    "kl": [kl_summed, kl_of_logits, kl_turned],
}
