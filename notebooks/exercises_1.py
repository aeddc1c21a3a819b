"""Checks for 1_policy_gradient_to_ppo.ipynb. Answers: spoilers/answers_1.py."""
import torch
from checking import close, exercise, true

from algos import ppo, vpg


@exercise
def exact_gradient(answer):
    probs, rew = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([4.0, 1.0, 3.0])
    logits = probs.log().requires_grad_()
    (want,) = torch.autograd.grad(logits.softmax(-1) @ rew, logits)
    got = answer(probs, rew)
    got, better = torch.as_tensor(got), rew - probs @ rew
    true(got.shape != rew.shape or not torch.allclose(got, better),
         "The comparison is right, but a factor is missing: the probability of the action.")
    hint = "Compare the reward of each action with the policy's expected reward"
    close(got, want, f"{hint}. Here, for pi = 0.2, 0.3, 0.5, it is {probs @ rew:.1f}.")
    close(answer(probs, rew + 10), want,
          "Adding the same amount to all rewards should change nothing.")


@exercise
def returns_to_go(answer):
    rew = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    none = torch.zeros(5)
    case = "Rewards 1, 2, 4, 8, 16 and done = [0, 0, 0, 0, 0], a mask: no episode ends. "
    whole = answer(rew, none, 1.0)
    close(whole[-1], 16.0, case + "Nothing follows the last step, so its return is its reward.")
    close(whole, [31, 30, 28, 24, 16],
          case + "With gamma = 1 each return is the sum of its own reward and all later ones.")
    close(answer(rew, none, 0.5), [5, 8, 12, 16, 16],
          case + "With gamma = 0.5 a reward k steps later counts gamma ** k times. Go backwards: "
          "each return follows from one reward and the next return.")
    done = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    close(answer(rew, done, 0.5), [3, 4, 4, 16, 16],
          "With done = [0, 0, 1, 0, 0] an episode ends with step 2. The reward of step 2 still "
          "belongs to it; the rewards of steps 3 and 4 belong to the next episode.")


@exercise
def advantages(answer):
    delta, done = torch.tensor([1.0, -2.0, 3.0, 4.0, -1.0]), torch.tensor([0.0, 0, 1, 0, 0])
    close(answer(delta, done, 0.9, 0.0), delta, "With lam = 0 an advantage is its own delta.")
    close(answer(delta, 0 * done, 1.0, 1.0), [5, 4, 6, 3, -1],
          "With gamma = lam = 1 and done all 0, an advantage is the sum of its own delta and all "
          "later ones.")
    close(answer(delta, 0 * done, 0.5, 1.0), [1.1875, 0.375, 4.75, 3.5, -1],
          "With lam = 1 and done all 0, a delta k steps later counts gamma ** k times.")
    zeros, column = torch.zeros(5, 1), done[:, None]
    # With values of 0, delta is the reward.
    want = vpg.gae(delta[:, None], zeros, zeros, column, column, 0.8, 0.5)
    close(answer(delta, done, 0.8, 0.5), want[:, 0],
          "A delta k steps later counts (gamma lam) ** k times, but only within the episode.")


@exercise
def clip_slope(answer):
    ratio = torch.tensor([0.5, 0.9, 1.1, 1.5])
    ones = torch.ones(4)
    close(answer(ratio, ones, 0.2), [1, 1, 1, 0],
          "For adv = 1 the curve rises until ratio = 1 + clip and is flat beyond. Look at the left "
          "panel of the figure.")
    close(answer(ratio, -ones, 0.2), [0, -1, -1, -1],
          "For adv = -1 the curve is flat until ratio = 1 - clip and falls beyond. Look at the "
          "right panel of the figure.")
    adv = torch.tensor([2.0, -3.0, -0.5, 4.0])
    ratio.requires_grad_()
    loss = ppo.clipped_policy_loss(ratio.log(), torch.zeros(4), adv, 0.3)
    (slope,) = torch.autograd.grad(-4 * loss, ratio)
    close(answer(ratio.detach(), adv, 0.3), slope,
          "Where the curve is not flat, its slope is that of ratio * adv, which is adv.")


@exercise
def kl(answer):
    old = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    new = torch.tensor([[0.8, 0.2], [0.9, 0.1]])
    close(answer(old.log(), old.log()), 0.0, "The KL of a policy from itself is 0.")
    want = (old * (old / new).log()).sum(-1).mean()
    got = answer(old.log(), new.log())
    other = (new * (new / old).log()).sum(-1).mean()
    true(abs(float(torch.as_tensor(got).sum()) - other) > 1e-4,
         "That is KL(pi || pi_old). Average over the actions of pi_old, which collected the data.")
    close(got, want, "Sum pi_old * (log pi_old - log pi) over actions, then average over "
                     "observations.")
    close(answer(old.log() + 3, new.log() - 1), want,
          "Logits are not log-probabilities yet. Use log_softmax.")
