"""Checks for 6_memory_goals_demonstrations.ipynb. Answers: spoilers/answers_6.py."""
import numpy as np
import torch
from checking import Wrong, close, exercise, true


@exercise
def next_memory(answer):
    memory = torch.arange(1.0, 13).view(2, 3, 2)  # h and c of three environments, two numbers each
    got = answer(memory, torch.tensor([0.0, 1.0, 0.0]))
    true(torch.is_tensor(got) and got.shape == memory.shape,
         "The memory keeps its shape, [2, N, size].")
    close(got[:, [0, 2]], memory[:, [0, 2]],
          "Environments 0 and 2 are in the middle of an episode: their memory stays.")
    close(got[:, 1], np.zeros((2, 2)), "The episode of environment 1 ended: both h and c are 0.")
    close(answer(memory, torch.ones(3)), np.zeros((2, 3, 2)), "All ended, so nothing is left.")


@exercise
def same_values(answer):
    got = answer(torch.tensor([1.0, -2.0]), 0.5, 0.0, 1.0, 0.0, 2.0)
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Wrong("Return two things: the new w and the new b.")
    close(got[0], [0.5, -1.0], "If scale doubles and loc stays, w is half as large.")
    close(got[1], 0.25, "If scale doubles and loc stays 0, b is half as large too.")
    got = answer(torch.tensor([1.0, -2.0]), 0.5, 0.0, 1.0, 3.0, 1.0)
    close(got[0], [1.0, -2.0], "If only loc changes, w stays.")
    close(got[1], -2.5, "loc grew by 3 and scale is 1: n has to become smaller by 3.")
    w, b, old, new = torch.tensor([0.3, 2.0]), -0.7, (5.0, 4.0), (-2.0, 0.5)
    w_new, b_new = answer(w, b, *old, *new)
    for h in torch.eye(2):
        close(new[0] + new[1] * (w_new @ h + b_new), old[0] + old[1] * (w @ h + b),
              "Set loc_old + scale_old (w h + b) equal to loc + scale (w' h + b') and solve.")


@exercise
def relabel(answer):
    achieved = np.array([[0, 0], [0, 1], [1, 1], [1, 0], [1, 1]])
    got = answer(achieved, 0, 0)
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Wrong("Return two things: the goal and the reward.")
    close(got[0], [0, 1], "Step 0 leads to achieved[1]. With j = 0 this is its goal.")
    close(got[1], 0, "With j = 0 the step reaches its goal, so the reward is 0.")
    goal, rew = answer(achieved, 0, 2)
    close(goal, [1, 0], "Step 0, j = 2: the goal is what was achieved two steps after step 0.")
    close(rew, -1, "Step 0 achieves [0, 1], and the goal is [1, 0]: the reward is -1.")
    goal, rew = answer(achieved, 1, 2)
    close(goal, [1, 1], "Step 1, j = 2: the goal is what was achieved two steps after step 1.")
    close(rew, 0, "Step 1 achieves [1, 1], and this is the goal. It is reached, although j is "
                  "not 0: compare what the step achieved with the goal.")
    for t, j in ((0, 1), (1, 1)):
        close(answer(achieved, t, j)[1], -1, "One switch is right and one is wrong: a goal is "
                                             "reached only if all of its bits are.")
    close(answer(achieved, 2, 1)[1], -1,
          "Step 2 starts at [1, 1], its goal, and leaves it: what the step achieved counts.")


@exercise
def best_d(answer):
    close(answer(0.2, 0.2), 0.5, "If both do it equally often, D cannot tell who it was.")
    close(answer(0.6, 0.2), 0.75, "Set the derivative with respect to D to 0: "
                                  "p_expert / D = p_policy / (1 - D).")
    close(answer(0.1, 0.3), 0.25, "One of four such pairs is the expert's.")
    close(answer(0.3, 1e-9), 1.0, "Nearly only the expert does it, so D is nearly sure.")
