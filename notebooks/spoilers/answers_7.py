"""Worked answers to the exercises in 7_distributions_masks_language.ipynb."""
import numpy as np


def projected(rew, terminated, prob, atoms, gamma):
    last = len(atoms) - 1
    m = np.zeros(len(atoms))
    for p, z in zip(prob, atoms):
        moved = rew + gamma * (1 - terminated) * z
        x = np.clip(moved, atoms[0], atoms[-1])
        index = (x - atoms[0]) / (atoms[-1] - atoms[0]) * last
        low = int(index)
        f = index - low
        m[low] += (1 - f) * p
        m[min(low + 1, last)] += f * p  # if low is the last atom, f is 0
    return m


def masked_probs(logits, mask):
    allowed = logits.softmax(-1) * mask
    return allowed / allowed.sum(-1, keepdim=True)


def compared(rew):
    mean = rew.mean(1, keepdim=True)
    std = rew.std(1, correction=0, keepdim=True)
    return (rew - mean) / (std + 1e-6)


def counted(answer):
    is_end = (answer == 0).long()
    ends_before = is_end.cumsum(-1) - is_end
    return (ends_before == 0).float()
