"""algos/dqn_per.py, where it is not algos/dqn.py: the priorities, the weights."""
from dataclasses import replace

import numpy as np
import torch

from algos import dqn_per
from tests.algos.test_buffers import make, transitions
from tests.helpers import close, noted, vec
from tests.offpolicy import dqn_quick as quick
from utils import mpi


def filled(size, steps, num_envs=3):
    """A buffer after so many steps of environments."""
    buffer = make(dqn_per, size)
    for step in range(steps):
        numbers = range(step * num_envs, (step + 1) * num_envs)
        buffer.add(**transitions(dqn_per, numbers))
    return buffer


def rate(buffer, rng):
    """Every filled row gets a priority of its own."""
    at = np.arange(buffer.num_stored)
    buffer.set_priorities(at, torch.tensor(rng.uniform(0.1, 2, len(at)), dtype=torch.float32))


def test_priority_by_hand():
    close(dqn_per.priority_of(vec(4, -9, 0), 0.5), vec(2, 3, 1e-3))
    close(dqn_per.priority_of(vec(4, -9, 1), 0.0), vec(1, 1, 1))


def test_a_batch_is_stratified():
    """One sample from each of as many equal pieces: a row with half of the sum has half of it."""
    buffer = filled(40, 20, 1)
    n = buffer.num_stored
    buffer.set_priorities(np.arange(n), torch.where(torch.arange(n) == 3, float(n - 1), 1.0))
    for _ in range(20):
        counts = np.bincount(buffer.sample(2 * n - 2, 0.5).rows, minlength=40)
        assert abs(counts[3] - (n - 1)) <= 1
        assert (counts[np.arange(40) != 3] <= 2).all()
    first = np.concatenate([buffer.sample(4, 0.5).rows for _ in range(200)])
    assert len(np.unique(first)) == n                           # and anything within a piece


def test_two_ranks_weigh_by_the_smallest_of_both(monkeypatch):
    buffer = filled(60, 30)
    rate(buffer, np.random.default_rng(2))
    torch.manual_seed(5)
    alone = buffer.sample(64, 1.0)
    monkeypatch.setattr(mpi, "gather", lambda mine: [mine, mine / 4])
    torch.manual_seed(5)
    close(buffer.sample(64, 1.0).weight, alone.weight / 4)


def test_every_update_rates_what_it_learned_from(monkeypatch):
    """At once, with |Q - y| from before its step."""
    learned, rated = [], []
    update, rating = dqn_per.update, dqn_per.PrioritizedBuffer.set_priorities
    at_once = noted(monkeypatch, dqn_per.PrioritizedBuffer, "sample",
                    lambda *_: len(rated) == len(learned))

    def noting_update(agent, optimizer, batch, lr):
        plain = replace(batch, weight=torch.ones_like(batch.weight))   # it rates unweighted errors
        error = dqn_per.critic_loss(agent, plain)[1]["td_error"]
        learned.append([batch.rows, (error.abs() + 1e-6) ** agent.cfg.omega])
        return update(agent, optimizer, batch, lr)

    def noting_rate(buffer, at, values):
        assert np.array_equal(at, learned[-1][0])
        close(values, learned[-1][1])
        rated.append(at)
        rating(buffer, at, values)
        last = dict(zip(at.tolist(), values.tolist()))          # of a row that was drawn twice
        close(buffer.priority[list(last)], torch.tensor(list(last.values())))

    monkeypatch.setattr(dqn_per.PrioritizedBuffer, "set_priorities", noting_rate)
    monkeypatch.setattr(dqn_per, "update", noting_update)
    dqn_per.train(quick(dqn_per, update_every=4, num_envs=2))
    assert len(rated) == len(learned) == len(at_once) == 20 and all(at_once)


def test_a_run_that_was_killed_before_its_first_step_resumes():
    make(dqn_per, 8).load_state_dict(make(dqn_per, 8).state_dict())
