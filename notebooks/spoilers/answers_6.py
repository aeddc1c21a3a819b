"""Worked answers to the exercises in 6_memory_goals_demonstrations.ipynb."""
import numpy as np


def next_memory(memory, done):
    return memory * (1 - done)[None, :, None]  # the same factor for h and c, and for all numbers


def same_values(w, b, loc_old, scale_old, loc, scale):
    # loc_old + scale_old (w h + b) = loc + scale (w' h + b') for every h.
    return w * scale_old / scale, (scale_old * b + loc_old - loc) / scale


def relabel(achieved, t, j):
    goal = achieved[t + 1 + j]
    reached = np.array_equal(achieved[t + 1], goal)  # what the step achieved, not what was before
    return goal, 0 if reached else -1


def best_d(p_expert, p_policy):
    return p_expert / (p_expert + p_policy)
