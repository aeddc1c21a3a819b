"""algos/dqn_per.py, where it is not algos/dqn.py: the priorities. test_buffers.py has the rest."""
import numpy as np
import torch

from algos import dqn_per
from tests.algos.test_buffers import make, transitions
from tests.helpers import close, vec


def test_priority_by_hand():
    close(dqn_per.priority_of(vec(4, -9, 0), 0.5), vec(2, 3, 1e-3))
    close(dqn_per.priority_of(vec(4, -9, 1), 0.0), vec(1, 1, 1))


def test_a_batch_is_stratified():
    """One sample from each of as many equal pieces: a row with half of the sum has half of it.

    However small the priorities are, empty rows have no piece.
    """
    buffer, n = make(dqn_per, 40), 20
    for step in range(n):
        buffer.add(**transitions(dqn_per, [step]))
    buffer.set_priorities(np.arange(n), 1e-6 * torch.where(torch.arange(n) == 3, n - 1.0, 1.0))
    for _ in range(20):
        counts = np.bincount(buffer.sample(2 * n - 2, 0.5).rows, minlength=40)
        assert abs(counts[3] - (n - 1)) <= 1
        assert (counts[np.arange(40) != 3] <= 2).all()
    first = np.concatenate([buffer.sample(4, 0.5).rows for _ in range(200)])
    assert len(np.unique(first)) == n                           # and anything within a piece
