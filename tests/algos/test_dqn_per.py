"""algos/dqn_per.py, where it is not algos/dqn.py: the tree, the priorities, the weights."""
from dataclasses import fields

import numpy as np
import pytest
import torch
from scipy import stats

from algos import dqn, dqn_per
from tests import probe
from tests.algos.test_dqn import CPU, check, part
from tests.helpers import (
    DQN_SPACES as SPACES,
    close,
    copies,
    dqn_agent as make_agent,
    dqn_batch as make_batch,
    dqn_quick as quick,
    film_logs,
    gradient_in,
    vec,
)
from utils import checkpoint, mpi
from utils.mpi import UsageError


def new_buffer(kind="vector", size=60):
    return dqn_per.PrioritizedBuffer(size, SPACES[kind], CPU)


def fill(buffer, steps, num_envs=3, kind="vector"):
    return film_logs(dqn_per, buffer, steps, num_envs, kind)


def leaves(buffer):
    """The priority of each row."""
    return buffer.tree.nodes[buffer.tree.num_leaves:][:buffer.capacity]


def rate(buffer, rng):
    """Every filled row gets a priority of its own -> its rows, these."""
    at = np.arange(buffer.num_stored)
    buffer.set_priorities(at, torch.tensor(rng.uniform(0.1, 2, len(at)), dtype=torch.float32))
    return at


# ---- Equations

def test_priority_by_hand():
    close(dqn_per.priority_of(vec(4, -9, 0), 0.5), vec(2, 3, 1e-3))
    close(dqn_per.priority_of(vec(4, -9, 1), 0.0), vec(1, 1, 1))


def test_rows_are_found_by_hand():
    """Laid end to end 1, 0, 3, 0, 4: row 0 to 1, row 2 from there to 4, row 4 from there to 8."""
    tree = dqn_per.SumTree(5)
    tree.set(np.arange(5), np.array([1.0, 0, 3, 0, 4]))
    assert tree.nodes[1] == 8
    point = np.array([0, 0.99, 1, 3.9, 4, 7.9, 8])              # the last by rounding alone
    assert tree.find(point).tolist() == [0, 0, 2, 2, 4, 4, 4]
    assert tree.get(np.array([4, 0, 3])).tolist() == [4, 1, 0]


def test_the_loss_is_weighted():
    """The gradient is that of DQN for each sample alone, by its weight; with weights 1 the same."""
    agent, batch = make_agent(dqn_per), make_batch(dqn_per)
    net, losses, grads, errors = agent.critic, [], [], []
    for k in range(32):
        one = part(batch, slice(k, k + 1))
        one.weight.fill_(1)
        loss, metrics, grad = gradient_in(net, dqn_per.per_loss, agent, one)
        losses.append(loss), grads.append(grad), errors.append(metrics["td_error"])
    batch = make_batch(dqn_per)
    loss, metrics, grad = gradient_in(net, dqn_per.per_loss, agent, batch)
    close(loss, (batch.weight * torch.stack(losses)).mean())
    close(grad, (batch.weight[:, None] * torch.stack(grads)).mean(0))
    close(metrics["td_error"], torch.cat(errors))
    batch.weight.fill_(1)
    _, _, grad = gradient_in(net, dqn_per.per_loss, agent, batch)
    plain = make_agent(dqn)
    columns = {field.name: getattr(batch, field.name) for field in fields(dqn.Transitions)}
    _, _, expected = gradient_in(plain.critic, dqn.dqn_loss, plain, dqn.Transitions(**columns))
    assert torch.equal(grad, expected)


def test_the_error_is_that_of_the_target_by_hand():
    agent = make_agent(dqn_per, num_acts=2, hidden=(), dueling=False, gamma=0.5)
    for net, bias in ((agent.critic, (3, 2)), (agent.critic_targ, (1, 5))):
        net.head[0].weight.data.zero_(), net.head[0].bias.data.copy_(vec(*bias))
    obs, act = torch.zeros(2, 3), torch.tensor([1, 0])
    batch = dqn_per.Transitions(obs, act, vec(1, 1), obs, vec(0, 1), np.arange(2), vec(1, 0.5))
    _, metrics = dqn_per.per_loss(agent, batch)
    close(metrics["td_error"], vec(2 - (1 + 0.5 * 1), 3 - 1))


# ---- The tree

@pytest.mark.parametrize("size", [1, 2, 5, 64, 100])
def test_every_node_is_the_sum_of_its_children(size):
    rng, tree, plain = np.random.default_rng(size), dqn_per.SumTree(size), np.zeros(size)
    for _ in range(30):
        at = rng.integers(size, size=7)                         # some twice
        priority = rng.uniform(size=size)[at]
        tree.set(at, priority)
        plain[at] = priority
    nodes, n = tree.nodes, tree.num_leaves
    assert np.array_equal(nodes[n:n + size], plain) and nodes[n + size:].sum() == 0
    assert np.array_equal(nodes[1:n], nodes[2:2 * n:2] + nodes[3:2 * n:2])
    assert nodes[1] == pytest.approx(plain.sum(), rel=1e-12)
    assert np.array_equal(tree.get(np.arange(size)), plain)


@pytest.mark.parametrize("size", [1, 5, 100])
def test_found_are_the_rows_of_brute_force(size):
    rng, tree = np.random.default_rng(0), dqn_per.SumTree(size)
    priority = rng.uniform(size=size) * (rng.uniform(size=size) < 0.6) + (np.arange(size) == 0)
    tree.set(np.arange(size), priority)
    point = rng.uniform(size=2000) * priority.sum()
    expected = np.searchsorted(priority.cumsum(), point, side="right")
    found = tree.find(point)
    assert (found != expected).mean() < 0.001                   # sums in another order may differ
    assert (priority[found] > 0).all()


def test_the_end_of_the_line_is_no_row_without_priority():
    tree = dqn_per.SumTree(6)
    tree.set(np.arange(6), np.array([0, 0.1, 0.2, 0, 0, 0]))
    total = tree.nodes[1]
    assert tree.find(np.array([0, total, 2 * total])).tolist() == [1, 2, 2]


# ---- The buffer

@pytest.mark.parametrize("kind", ["film", "image", "vector"])
@pytest.mark.parametrize("size", [300, 60], ids=["part", "wrapped"])
def test_filled_rows_have_priorities_and_no_others(kind, size):
    """From its first step to two times around; new ones have the highest so far."""
    buffer, rng = new_buffer(kind, size), np.random.default_rng(0)
    for k in range(4):
        fill(buffer, 10, 3, kind)
        assert np.array_equal(leaves(buffer) > 0, np.arange(size) < buffer.num_stored)
        if k == 0:
            assert set(leaves(buffer)) == {0, 1}                # nothing was rated: all are alike
        new = (buffer.position - 1 - np.arange(30)) % size
        assert (leaves(buffer)[new] == buffer.max_priority).all()
        highest = buffer.max_priority
        at = rate(buffer, rng)
        assert buffer.max_priority == max(highest, leaves(buffer)[at].max())
    before = leaves(buffer).copy()
    fill(buffer, 1, 3, kind)
    assert (leaves(buffer) == buffer.max_priority).sum() >= 3
    assert (before == buffer.max_priority).sum() < 3


@pytest.mark.parametrize("kind", ["film", "image", "vector"])
def test_transitions_are_those_of_the_parent(kind):
    buffer = new_buffer(kind, 20)
    check(buffer, fill(buffer, 30, 3, kind))
    batch = buffer.sample(16, 0.5)
    for field in fields(dqn.Transitions):
        assert np.array_equal(getattr(batch, field.name),
                              buffer.columns[field.name][batch.rows])


def test_rows_are_drawn_as_often_as_their_priorities_say():
    buffer = new_buffer(size=50)
    fill(buffer, 30)
    at = rate(buffer, np.random.default_rng(1))
    n = 40_000
    drawn = buffer.tree.find(torch.rand(n, dtype=torch.float64).numpy() * buffer.tree.nodes[1])
    sampled = np.concatenate([buffer.sample(1, 0.5).rows for _ in range(600)])
    for found in (drawn, sampled):
        counts = np.bincount(found, minlength=buffer.capacity)
        expected = len(found) * leaves(buffer) / leaves(buffer).sum()
        assert (counts[expected == 0] == 0).all()
        assert stats.chisquare(counts[at], expected[at]).pvalue > 1e-3


def test_a_batch_is_stratified():
    """One sample from each of as many equal pieces: a row with half of the sum has half of it."""
    buffer = new_buffer(size=40)
    fill(buffer, 20, 1)
    n = buffer.num_stored
    buffer.set_priorities(np.arange(n), torch.where(torch.arange(n) == 3, float(n - 1), 1.0))
    for _ in range(20):
        counts = np.bincount(buffer.sample(2 * n - 2, 0.5).rows, minlength=40)
        assert abs(counts[3] - (n - 1)) <= 1
        assert (counts[np.arange(40) != 3] <= 2).all()
    first = np.concatenate([buffer.sample(4, 0.5).rows for _ in range(200)])
    assert len(np.unique(first)) == n                           # and anything within a piece


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_at_most_1_and_undo_the_sampling(beta):
    buffer = new_buffer(size=50)
    fill(buffer, 30)
    rate(buffer, np.random.default_rng(2))
    batch = buffer.sample(256, beta)
    share = leaves(buffer)[batch.rows] / leaves(buffer).sum()
    expected = (buffer.num_stored * share) ** -beta
    close(batch.weight, torch.tensor(expected / expected.max(), dtype=torch.float32))
    assert batch.weight.max() == 1 and batch.weight.min() > 0
    assert batch.weight.dtype == torch.float32 and batch.weight.shape == (256,)


def test_batches_are_on_the_device_of_the_buffer():
    """"meta" stands for a GPU: nothing can be read from there."""
    buffer = new_buffer()
    fill(buffer, 5)
    buffer.device = torch.device("meta")
    batch = vars(buffer.sample(8, 0.5))
    assert batch.pop("rows").shape == (8,)                      # an index of arrays
    assert {column.device.type for column in batch.values()} == {"meta"}


def test_two_ranks_weigh_by_the_smallest_of_both(monkeypatch):
    buffer = new_buffer()
    fill(buffer, 30)
    rate(buffer, np.random.default_rng(2))
    torch.manual_seed(5)
    alone = buffer.sample(64, 1.0)
    monkeypatch.setattr(mpi, "gather", lambda mine: [mine, mine / 4])
    torch.manual_seed(5)
    close(buffer.sample(64, 1.0).weight, alone.weight / 4)


def test_it_goes_on_after_a_resume(tmp_path):
    buffer = new_buffer(size=50)
    before = fill(buffer, 13)
    rate(buffer, np.random.default_rng(3))
    buffer.max_priority = 7.0
    checkpoint.save_file(tmp_path / "a.pt", buffer.state_dict())
    other = new_buffer(size=50)
    other.load_state_dict(checkpoint.load_file(tmp_path / "a.pt"))
    check(other, before)
    assert np.array_equal(other.tree.nodes, buffer.tree.nodes) and other.max_priority == 7
    after = fill(other, 7)
    check(other, [one + two for one, two in zip(before, after)])
    assert np.array_equal(leaves(other) > 0, np.arange(50) < other.num_stored)
    assert (leaves(other) == 7).sum() == 21


# ---- The loop

@pytest.mark.parametrize("settings", [{"omega": -0.1}, {"omega": 1.1}, {"beta_start": 1.5}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(UsageError):
        dqn_per.Config(**settings)


def test_every_update_rates_what_it_learned_from(monkeypatch):
    """At once, with |Q - y| from before its step; beta grows to 1."""
    betas, learned, rated = [], [], []
    sample, rating = dqn_per.PrioritizedBuffer.sample, dqn_per.PrioritizedBuffer.set_priorities
    update = dqn_per.update

    def noting_sample(buffer, batch_size, beta):
        assert len(rated) == len(learned)
        betas.append(beta)
        return sample(buffer, batch_size, beta)

    def noting_update(agent, optimizer, batch, lr):
        error = dqn_per.per_loss(agent, batch)[1]["td_error"]
        learned.append([batch.rows, (error.abs() + 1e-6) ** agent.cfg.omega])
        return update(agent, optimizer, batch, lr)

    def noting_rate(buffer, at, values):
        assert np.array_equal(at, learned[-1][0])
        close(values, learned[-1][1])
        rated.append(at)
        rating(buffer, at, values)
        last = dict(zip(at.tolist(), values.tolist()))          # of a row that was drawn twice
        close(leaves(buffer)[list(last)], torch.tensor(list(last.values())))

    monkeypatch.setattr(dqn_per.PrioritizedBuffer, "sample", noting_sample)
    monkeypatch.setattr(dqn_per.PrioritizedBuffer, "set_priorities", noting_rate)
    monkeypatch.setattr(dqn_per, "update", noting_update)
    dqn_per.train(quick(dqn_per, update_every=4, num_envs=2))
    assert len(rated) == len(learned) == 20
    close(betas, [0.4 + 0.6 * step / 120 for step in range(42, 120, 4)])


def test_a_resumed_run_goes_on_as_if_nothing_had_happened():
    same = {"env": "tests.envs:Constant-v0", "env_kwargs": '{"length": 10}', "num_envs": 2,
            "anneal_lr": False, "eps_steps": 100, "beta_start": 1.0}
    whole = dqn_per.train(quick(dqn_per, **same, run_dir="whole"))
    dqn_per.train(quick(dqn_per, **same, total_steps=60))
    parts = dqn_per.train(quick(dqn_per, **same, resume=True))
    for one, two in zip(copies(whole).values(), copies(parts).values(), strict=True):
        assert torch.equal(one, two)
    one, two = (torch.load(f"{run}/resume-120/rank0.pt")["state"]["buffer"]
                for run in ("whole", "run"))
    assert torch.equal(one["priority"], two["priority"])
    assert one["max_priority"] == two["max_priority"]
    assert one["priority"].unique().numel() > 5


@pytest.mark.slow
@pytest.mark.parametrize("case", probe.CASES[2:], ids=lambda case: case.env)
def test_probe(case):
    rows = probe.probe(dqn_per, case, False)
    assert probe.passed(rows), f"look at {case.hint}: {rows}"
