"""algos/dqn_per.py, where it is not algos/dqn.py: the tree, the priorities, the weights.

Run as a program, this file is one of the processes that a test at its end starts.
"""
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from algos import dqn, dqn_per
from tests import probe
from tests.algos.test_dqn import PROBE, QUICK, check, fill
from tests.helpers import (
    DQN_SPACES as SPACES,
    close,
    copies,
    dqn_agent as make_agent,
    dqn_batch as make_batch,
    two_ranks,
    vec,
)
from utils import checkpoint, mpi
from utils.mpi import UsageError


def new_buffer(kind="film", num_envs=3, rows=20):
    obs = torch.zeros(SPACES[kind].shape, dtype=torch.float32 if kind == "vector" else torch.uint8)
    stack = 4 if kind == "film" else 1
    return dqn_per.PriorityBuffer(rows * num_envs, 1, num_envs, stack, obs)


def leaves(buffer):
    """The priority of each row."""
    return buffer.tree.nodes[buffer.tree.leaves:][:len(buffer.columns["live"])]


def rate(buffer, rng):
    """Every live row gets a priority of its own -> its rows, these."""
    at = np.flatnonzero(buffer.columns["live"])
    buffer.rate(at, torch.tensor(rng.uniform(0.1, 2, len(at)), dtype=torch.float32))
    return at


def weighted(seed=0, size=32):
    """A batch of random numbers, weights too."""
    batch = make_batch(dqn_per, seed=seed, size=size)
    return dqn_per.Weighted(**vars(batch), at=np.arange(size),
                            weight=torch.rand(size, generator=torch.Generator().manual_seed(seed)))


# ---- Equations

@pytest.mark.eq("dqn_per", 7)
def test_priority_by_hand():
    close(dqn_per.priority(vec(4, -9, 0), 0.5), vec(2, 3, 1e-3))
    close(dqn_per.priority(vec(4, -9, 1), 0.0), vec(1, 1, 1))


@pytest.mark.eq("dqn_per", 8)
def test_rows_are_found_by_hand():
    """Laid end to end 1, 0, 3, 0, 4: row 0 to 1, row 2 from there to 4, row 4 from there to 8."""
    tree = dqn_per.SumTree(5)
    tree.set(np.arange(5), np.array([1.0, 0, 3, 0, 4]))
    assert tree.nodes[1] == 8
    mass = np.array([0, 0.99, 1, 3.9, 4, 7.9, 8])               # the last by rounding alone
    assert tree.find(mass).tolist() == [0, 0, 2, 2, 4, 4, 4]


@pytest.mark.eq("dqn_per", 9)
def test_weights_by_hand():
    """Of four transitions, two in the batch: (4/2)^-1 and (4/8)^-1, by the larger of the two."""
    prob = torch.tensor([1 / 2, 1 / 8], dtype=torch.float64)
    close(dqn_per.importance(prob, 1 / 8, 1.0), [(1 / 2) / 2, 1])
    close(dqn_per.importance(prob, 1 / 8, 0.5), [1 / 2, 1])
    close(dqn_per.importance(prob, 1 / 8, 0.0), [1, 1])


@pytest.mark.eq("dqn_per", 10)
def test_beta_by_hand():
    assert [dqn_per.anneal_beta(step, 0.4, 100) for step in (0, 50, 100, 120)] == [0.4, 0.7, 1, 1]


@pytest.mark.eq("dqn_per", 3)
def test_the_loss_is_weighted():
    """The gradient is that of DQN for each sample alone, by its weight; with weights 1 the same."""
    agent, batch = make_agent(dqn_per), weighted()
    flat, parts = mpi.flatten(agent.critic), list(vars(batch).values())[:5]
    losses, grads, errors = [], [], []
    for k in range(32):
        one = [column[k:k + 1] for column in parts]
        loss, _, error = dqn_per.per_gradient(agent, flat, *one, torch.ones(1))
        losses.append(loss), grads.append(flat.grad.clone()), errors.append(error)
    loss, q, error = dqn_per.per_gradient(agent, flat, *parts, batch.weight)
    close(loss, (batch.weight * torch.stack(losses)).mean())
    close(flat.grad, (batch.weight[:, None] * torch.stack(grads)).mean(0))
    close(error, torch.cat(errors))
    dqn_per.per_gradient(agent, flat, *parts, torch.ones(32))
    plain = make_agent(dqn)
    own = mpi.flatten(plain.critic)
    dqn.dqn_gradient(plain, own, *parts)
    assert torch.equal(own, flat) and torch.equal(own.grad, flat.grad)


def test_the_error_is_that_of_the_target_by_hand():
    agent = make_agent(dqn_per, num_acts=2, hidden=(), dueling=False, gamma=0.5)
    for net, bias in ((agent.critic, (3, 2)), (agent.critic_targ, (1, 5))):
        net.head[0].weight.data.zero_(), net.head[0].bias.data.copy_(vec(*bias))
    obs, act = torch.zeros(2, 3), torch.tensor([1, 0])
    _, _, error = dqn_per.per_gradient(agent, mpi.flatten(agent.critic), obs, act, vec(1, 1), obs,
                                       vec(0, 1), vec(1, 1))
    close(error, vec(2 - (1 + 0.5 * 1), 3 - 1))


# ---- The tree

@pytest.mark.parametrize("size", [1, 2, 5, 64, 100])
def test_every_node_is_the_sum_of_its_children(size):
    rng, tree, plain = np.random.default_rng(size), dqn_per.SumTree(size), np.zeros(size)
    for _ in range(30):
        at = rng.integers(size, size=7)                         # some twice
        priority = rng.uniform(size=size)[at]
        tree.set(at, priority)
        plain[at] = priority
    nodes, n = tree.nodes, tree.leaves
    assert np.array_equal(nodes[n:n + size], plain) and nodes[n + size:].sum() == 0
    assert np.array_equal(nodes[1:n], nodes[2:2 * n:2] + nodes[3:2 * n:2])
    assert nodes[1] == pytest.approx(plain.sum(), rel=1e-12)


@pytest.mark.parametrize("size", [1, 5, 100])
def test_found_are_the_rows_of_brute_force(size):
    rng, tree = np.random.default_rng(0), dqn_per.SumTree(size)
    priority = rng.uniform(size=size) * (rng.uniform(size=size) < 0.6) + (np.arange(size) == 0)
    tree.set(np.arange(size), priority)
    mass = rng.uniform(size=2000) * priority.sum()
    expected = np.searchsorted(priority.cumsum(), mass, side="right")
    found = tree.find(mass)
    assert (found != expected).mean() < 0.001                   # sums in another order may differ
    assert (priority[found] > 0).all()


def test_the_end_of_the_line_is_no_row_without_priority():
    tree = dqn_per.SumTree(6)
    tree.set(np.arange(6), np.array([0, 0.1, 0.2, 0, 0, 0]))
    total = tree.nodes[1]
    assert tree.find(np.array([0, total, 2 * total])).tolist() == [1, 2, 2]


# ---- The buffer

@pytest.mark.parametrize("kind", ["film", "image", "vector"])
@pytest.mark.parametrize("rows", [100, 20], ids=["part", "wrapped"])
def test_live_rows_have_priorities_and_no_others(kind, rows):
    """From its first step to one and a half times around; new ones have the highest so far."""
    buffer, rng = new_buffer(kind, 3, rows), np.random.default_rng(0)
    for k in range(4):
        fill(buffer, 10, 3, kind)                               # environments anew each time ...
        buffer.begins = [True] * 3                              # ... and so episodes
        assert np.array_equal(leaves(buffer) > 0, buffer.columns["live"])
        if k == 0:
            assert set(leaves(buffer)) == {0, 1}                # nothing was rated: all are alike
        else:
            assert buffer.highest in leaves(buffer)
        highest = buffer.highest
        at = rate(buffer, rng)
        assert buffer.highest == max(highest, leaves(buffer)[at].max())
        before = leaves(buffer).copy()
    fill(buffer, 1, 3, kind)
    assert (leaves(buffer) == buffer.highest).sum() >= 3 > (before == buffer.highest).sum()


@pytest.mark.parametrize("kind", ["film", "image", "vector"])
def test_transitions_are_those_of_the_parent(kind):
    buffer = new_buffer(kind, 3, 20)
    check(buffer, fill(buffer, 30, 3, kind))
    sample = buffer.sample(16, 0.5)
    rows = buffer.gather(sample.at)
    for field in fields(dqn_per.Transitions):
        assert torch.equal(getattr(sample, field.name), getattr(rows, field.name))


def test_rows_are_drawn_as_often_as_their_priorities_say():
    buffer = new_buffer()
    fill(buffer, 30, 3)
    at = rate(buffer, np.random.default_rng(1))
    n = 40_000
    drawn = buffer.tree.find(torch.rand(n, dtype=torch.float64).numpy() * buffer.tree.nodes[1])
    sampled = np.concatenate([buffer.sample(1, 0.5).at for _ in range(600)])
    for found in (drawn, sampled):
        counts = np.bincount(found, minlength=len(leaves(buffer)))
        expected = len(found) * leaves(buffer) / leaves(buffer).sum()
        assert (counts[expected == 0] == 0).all()
        assert stats.chisquare(counts[at], expected[at]).pvalue > 1e-3


def test_a_batch_is_stratified():
    """One sample from each of as many equal pieces: a row with half of the sum has half of it."""
    buffer = new_buffer("vector", 1, 40)
    fill(buffer, 20, 1, "vector")
    at = np.flatnonzero(buffer.columns["live"])
    buffer.rate(at, torch.where(torch.arange(len(at)) == 3, float(len(at) - 1), 1.0))
    for _ in range(20):
        counts = np.bincount(buffer.sample(2 * len(at) - 2, 0.5).at, minlength=40)
        assert abs(counts[at[3]] - (len(at) - 1)) <= 1
        assert (counts[at[np.arange(len(at)) != 3]] <= 2).all()
    first = np.concatenate([buffer.sample(4, 0.5).at for _ in range(200)])
    assert len(np.unique(first)) == len(at)                     # and anything within a piece


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_at_most_1_and_undo_the_sampling(beta):
    buffer = new_buffer()
    fill(buffer, 30, 3)
    rate(buffer, np.random.default_rng(2))
    sample = buffer.sample(256, beta)
    share = leaves(buffer)[sample.at] / leaves(buffer).sum()
    n = int(buffer.columns["live"].sum())
    expected = (n * share) ** -beta
    close(sample.weight, torch.tensor(expected / expected.max(), dtype=torch.float32))
    assert sample.weight.max() == 1 and sample.weight.min() > 0
    assert sample.weight.dtype == torch.float32 and sample.weight.shape == (256,)


def test_weights_are_on_the_device_of_the_networks():
    """"meta" stands for a GPU: nothing can be read from there."""
    buffer = new_buffer()
    fill(buffer, 5, 3)
    buffer.device = torch.device("meta")
    sample = buffer.sample(8, 0.5)
    assert sample.weight.device.type == sample.obs.device.type == "meta"


def test_two_ranks_weigh_by_the_smallest_of_both(monkeypatch):
    buffer = new_buffer()
    fill(buffer, 30, 3)
    rate(buffer, np.random.default_rng(2))
    torch.manual_seed(5)
    alone = buffer.sample(64, 1.0)
    prob = leaves(buffer)[alone.at] / leaves(buffer).sum()
    monkeypatch.setattr(mpi, "gather", lambda mine: [mine, mine / 4])
    torch.manual_seed(5)
    close(buffer.sample(64, 1.0).weight, alone.weight / 4)
    assert prob.min() > 0


def test_it_goes_on_after_a_resume(tmp_path):
    buffer = new_buffer()
    before = fill(buffer, 13, 3)
    rate(buffer, np.random.default_rng(3))
    buffer.highest = 7.0
    checkpoint.save_file(tmp_path / "a.pt", buffer.state_dict())
    other = new_buffer()
    other.load_state_dict(checkpoint.load_file(tmp_path / "a.pt"))
    check(other, before)
    assert np.array_equal(other.tree.nodes, buffer.tree.nodes) and other.highest == 7
    after = fill(other, 7, 3)
    check(other, [one + two for one, two in zip(before, after)])
    assert np.array_equal(leaves(other) > 0, other.columns["live"])
    assert (leaves(other) == 7).sum() >= 3


# ---- The loop

@pytest.mark.parametrize("settings", [{"omega": -0.1}, {"omega": 1.1}, {"beta_start": 1.5}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(UsageError):
        dqn_per.Config(**settings)


def test_every_update_rates_what_it_learned_from(monkeypatch):
    """At once, with |Q - y| from before its step; beta grows to 1."""
    betas, learned, rated = [], [], []
    sample, rating = dqn_per.PriorityBuffer.sample, dqn_per.PriorityBuffer.rate
    update = dqn_per.update

    def noting_sample(buffer, batch, beta):
        assert len(rated) == len(learned)
        betas.append(beta)
        return sample(buffer, batch, beta)

    def noting_update(agent, optimizer, batch, lr, gradient):
        columns = list(vars(batch).values())[:5]
        error = dqn_per.per_gradient(agent, optimizer.flat, *columns, batch.weight)[2]
        learned.append([batch.at, (error.abs() + 1e-6) ** agent.cfg.omega])
        return update(agent, optimizer, batch, lr, gradient)

    def noting_rate(buffer, at, values):
        assert np.array_equal(at, learned[-1][0])
        close(values, learned[-1][1])
        rated.append(at)
        rating(buffer, at, values)
        close(leaves(buffer)[at], values.double())

    monkeypatch.setattr(dqn_per.PriorityBuffer, "sample", noting_sample)
    monkeypatch.setattr(dqn_per.PriorityBuffer, "rate", noting_rate)
    monkeypatch.setattr(dqn_per, "update", noting_update)
    dqn_per.train(dqn_per.Config(**QUICK | {"env": "CartPole-v1", "update_every": 4,
                                            "num_envs": 2}))
    assert len(rated) == len(learned) == 20
    close(betas, [0.4 + 0.6 * step / 120 for step in range(42, 120, 4)])


def test_a_resumed_run_goes_on_as_if_nothing_had_happened():
    same = QUICK | {"env": "tests.envs:Constant-v0", "env_kwargs": '{"length": 10}', "num_envs": 2,
                    "anneal_lr": False, "eps_steps": 100, "beta_start": 1.0}
    whole = dqn_per.train(dqn_per.Config(**same | {"run_dir": "whole"}))
    dqn_per.train(dqn_per.Config(**same | {"total_steps": 60}))
    parts = dqn_per.train(dqn_per.Config(**same | {"resume": True}))
    for one, two in zip(copies(whole).values(), copies(parts).values(), strict=True):
        assert torch.equal(one, two)
    one, two = (torch.load(f"{run}/resume-120/rank0.pt")["state"]["buffer"]
                for run in ("whole", "run"))
    assert torch.equal(one["priority"], two["priority"]) and one["highest"] == two["highest"]
    assert one["priority"].unique().numel() > 5


@pytest.mark.slow
@pytest.mark.parametrize("case", probe.CASES[2:], ids=lambda case: case.env)
def test_probe(case, monkeypatch):
    monkeypatch.setattr(probe, "value", lambda agent, obs: agent.critic(obs).max().item())
    rows = probe.probe(dqn_per, case, False, **PROBE)
    assert probe.passed(rows), f"look at {case.hint}: {rows}"


# ---- Two processes

def learn_share(folder):
    """Two updates with this rank's part of each batch, all of it if it is alone."""
    agent = make_agent(dqn_per, seed=mpi.rank())                # rank 0's weights are taken
    mpi.flatten(agent.critic_targ)
    optimizer = mpi.Adam(mpi.flatten(agent.critic))
    for k in range(2):
        rows = torch.arange(32).chunk(mpi.size())[mpi.rank()]
        columns = vars(weighted(seed=k)).values()
        batch = dqn_per.Weighted(*(column[rows] for column in columns))
        dqn_per.update(agent, optimizer, batch, 1e-2)
    torch.save(dict(agent.state_dict()), folder / f"rank{mpi.rank()}of{mpi.size()}.pt")
    return agent.state_dict()


def test_two_ranks_equal_one(tmp_path):
    two_ranks(__file__, tmp_path)
    one = learn_share(tmp_path)
    first, second = (torch.load(tmp_path / f"rank{k}of2.pt") for k in (0, 1))
    for name in one:
        assert torch.equal(first[name], second[name])
        close(first[name], one[name])


if __name__ == "__main__":
    learn_share(Path(sys.argv[1]))
