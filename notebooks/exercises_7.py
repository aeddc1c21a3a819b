"""Checks for 7_distributions_masks_language.ipynb. Answers: spoilers/answers_7.py."""
import numpy as np
import torch
from checking import close, exercise, true

from algos import c51, grpo, ppo_mask


@exercise
def projected(answer):
    atoms, sure = np.linspace(0.0, 10, 6), np.eye(6)
    close(answer(2.0, 0.0, sure[1], atoms, 0.5), [0, 0.5, 0.5, 0, 0, 0],
          "A reward of 2 and then surely 2, with gamma 0.5: x = 3 lies in the middle between two "
          "atoms, and each gets half.")
    close(answer(3.5, 1.0, sure[4], atoms, 0.5), [0, 0.25, 0.75, 0, 0, 0],
          "If s' is terminal, x is the reward, here 3.5. It lies closer to 4 than to 2, so 4 gets "
          "more: 0.75.")
    close(answer(2.0, 1.0, np.full(6, 1 / 6), atoms, 0.5), sure[1],
          "If s' is terminal, all probability moves to the reward, here the atom 2. Shares that "
          "reach the same atom are added. If index is an integer, l is that integer and f is 0.")
    for rew, end in ((9.0, 5), (-9.0, 0)):
        close(answer(rew, 0.0, sure[2], atoms, 0.5), sure[end],
              f"A reward of {rew:g} leads out of the support. Its probability counts as the end of "
              "the support.")
    prob, atoms = torch.tensor([[0.2, 0.1, 0.4, 0.1, 0.2]]), torch.linspace(-3, 5, 5)
    want, _ = c51.project(torch.tensor([0.7]), torch.tensor([0.9]), prob, atoms)
    close(answer(0.7, 0.0, prob[0].double().numpy(), atoms.double().numpy(), 0.9), want[0],
          "Wrong for the atoms -3, -1, 1, 3, 5: index = (x - z_0) / (z_{n-1} - z_0) * (n - 1).")


@exercise
def masked_probs(answer):
    got = answer(torch.log(torch.tensor([[0.2, 0.3, 0.5]])), torch.tensor([[1.0, 1.0, 0.0]]))
    close(got, [[0.4, 0.6, 0.0]], "Probabilities 0.2, 0.3 and 0.5, the last one forbidden: the "
                                  "others keep their ratio and sum to 1, so 0.4 and 0.6.")
    logits = torch.tensor([[1.0, -2, 0], [0, 0, 3], [-1, 2, 0.5]])
    mask = torch.tensor([[1.0, 1, 1], [0, 1, 0], [1, 0, 1]])
    close(answer(logits, mask), ppo_mask.mask_logits(logits, mask).softmax(-1),
          "Wrong for three rows: each row has its own mask, and its probabilities sum to 1.")


@exercise
def compared(answer):
    close(answer(torch.tensor([[1.0, 0, 0, 1]])), [[1, -1, -1, 1]],
          "Two of four answers are right: the mean is 0.5 and the standard deviation (with "
          "correction=0) 0.5 as well, so right ones get 1 and wrong ones -1.")
    close(answer(torch.tensor([[1.0, 1, 1, 1]])), [[0, 0, 0, 0]],
          "If all answers of a group are right, all advantages are 0, not NaN.")
    rew = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    close(answer(rew), grpo.group_advantages(rew, "std"),
          "Wrong for three groups: each row has its own mean and its own standard deviation.")


@exercise
def counted(answer):
    got = answer(torch.tensor([[2, 3, 0]]))
    true(torch.is_tensor(got) and got.shape == (1, 3), "The mask has the shape of the answers.")
    close(got, [[1, 1, 1]], 'The END of "12" counts: the policy chose to stop here.')
    close(answer(torch.tensor([[9, 0, 0]])), [[1, 1, 0]],
          'After "8" the policy chose the first END. The second one is padding.')
    close(answer(torch.tensor([[9, 0, 5]])), [[1, 1, 0]],
          "Nothing after the first END counts, whatever it is.")
    answers = torch.tensor([[0, 0, 0], [2, 2, 2], [5, 0, 0]])
    close(answer(answers), grpo.answer_mask(answers),
          "Wrong for the rows [0, 0, 0], [2, 2, 2] and [5, 0, 0].")
