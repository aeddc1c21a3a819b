"""Checks for 2_q_learning_to_sac.ipynb. Answers: spoilers/answers_2.py."""
import math

import torch
from checking import close, exercise

from algos import dqn, sac


@exercise
def bellman_target(answer):
    rew, next_q = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([[1.0, 4.0], [6.0, 2.0], [-3, -8]])
    on, off = torch.zeros(3), torch.ones(3)
    close(answer(rew, off, next_q, 0.5), rew,
          "If the action ended the episode, only the reward counts.")
    close(answer(rew, on, next_q, 0.0), rew, "With gamma = 0 only the reward counts.")
    close(answer(rew, on, next_q, 0.5), [3, 5, -2.5],
          "Add gamma times the best next value to the reward. Each row has its own best value; the "
          "best of -3 and -8 is -3.")
    close(answer(rew, torch.tensor([0.0, 1.0, 0.0]), next_q, 0.5), [3, 2, -2.5],
          "Each row has its own `terminated`.")


@exercise
def double_value(answer):
    q = torch.tensor([[1.0, 5.0, 2.0], [3.0, -1.0, 0.0], [0.0, 1.0, 2.0]])
    q_targ = torch.tensor([[9.0, 4.0, 7.0], [2.0, 8.0, 8.0], [-1.0, -2.0, -3.0]])
    got = answer(q, q_targ)
    close(got, [4, 2, -3], "In the first row q prefers action 1, with value 5. What does q_targ "
                           "say about action 1?")
    close(answer(q_targ, q), dqn.at_action(q, q_targ.argmax(-1)),
          "The two have different roles: the first argument chooses, the second evaluates.")


@exercise
def updates_to_follow(answer):
    close(answer(0.5, 0.75), 2, "With tau = 0.5, half of the way is left after one update and a "
                                "quarter after two. So a share of 0.75 takes 2.", tol=1e-3)
    close(answer(0.005, 0.5), 138.28, "Solve (1 - tau)^n = 1 - share for n: take the logarithm on "
                                      "both sides.", tol=1e-3)
    close(answer(0.01, 0.9), 229.1, "What is left is 1 - share.", tol=1e-3)


@exercise
def squashed_logp(answer):
    mean, std = torch.tensor([[0.0], [0.5]]), torch.tensor([[1.0], [0.3]])
    eps = torch.tensor([[0.0], [-1.0]])
    normal = (-eps.square() / 2 - std.log() - math.log(2 * math.pi) / 2).sum(-1)
    close(answer(mean[:1], std[:1], eps[:1]), normal[:1],
          "At u = 0 the slope of tanh is 1, so only the normal part is left: -0.919 for std = 1.")
    close(answer(mean, std, eps), normal - (1 - (mean + std * eps).tanh().square()).log().sum(-1),
          "Check the signs: where tanh is flat, its slope is below 1, the logarithm is negative, "
          "and the density is higher. Also, the standard deviation counts: -log std.")
    mean, std = torch.randn(5, 3), torch.rand(5, 3) + 0.2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        eps = torch.randn_like(mean)
        torch.manual_seed(0)  # so that the file draws the same eps
        _, want = sac.sample_squashed_gaussian(torch.cat([mean, std.log()], -1))
    close(answer(mean, std, eps), want, "Sum over the dimensions of the action, the last axis.",
          tol=1e-3)


@exercise
def soft_target(answer):
    rew, on, off = torch.tensor([1.0, -1.0]), torch.zeros(2), torch.ones(2)
    q1, q2, logp = torch.tensor([4.0, 2.0]), torch.tensor([3.0, 6.0]), torch.tensor([-1.0, 2.0])
    close(answer(rew, off, q1, q2, logp, 0.5, 0.9), rew,
          "Nothing follows a true end, neither value nor entropy.")
    close(answer(rew, on, q1, q2, 0 * logp, 0.5, 0.5), [2.5, 0],
          "Take the lower critic, separately in each row.")
    close(answer(rew, on, q1, q2, logp, 0.5, 0.5), [2.75, -0.5],
          "An unlikely action (a low logp) earns a bonus: minus alpha times logp. It belongs to "
          "the next state, so it is discounted by gamma too.")
