"""algos/bc.py: the inversion of the squashing, the loss, held-out pairs, and whole runs."""
import copy
import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from algos import bc
from tests.helpers import (
    BOX, LOG_2PI, VECTOR, close, copies, make_demos, noted, refused, rows, same, vec, write_demos)
from tests.onpolicy import parameters
from utils.demos import Demos, load_demos
from utils.envs import make_envs
from utils.optim import Adam

QUICK = {"demos": "demos.npz", "subsample": 1, "hidden": (8,), "batch_size": 8, "check_every": 10,
         "total_steps": 40, "run_dir": "run", "device": "cpu"}
ACTS = {"box": BOX, "discrete": Discrete(3)}


def config(**settings):
    return bc.Config(**QUICK | {"env": "CartPole-v1"} | settings)


def make_agent(kind="box", seed=0, obs_space=VECTOR, **settings):
    """Return a small agent whose statistics differ from the initial ones."""
    torch.manual_seed(seed)
    agent = bc.Agent(obs_space, ACTS[kind], config(**settings))
    agent.obs_stats.mean.fill_(3.0), agent.obs_stats.var.fill_(4.0)
    return agent


# ---- Equations

def test_squashing_is_inverted_by_hand():
    """The bounds of each dimension are its own: [0, 5] and [-3, 3]. The result is in float32."""
    act = make_agent().undo_env_act(vec((2.5, 0), (3.75, -1.5), (0, 3), (5, -3)))
    half, most = math.atanh(0.5), math.atanh(0.999)
    close(act, vec((0, 0), (half, -half), (-most, most), (most, -most)))
    assert 3.8 < most < 3.9
    agent = bc.Agent(VECTOR, Box(-2, 2, (2, 3), np.float64), config())
    act = agent.undo_env_act(torch.ones(4, 2, 3, dtype=torch.float64))
    assert act.dtype == torch.float32
    close(act, torch.full((4, 6), half))                        # rows
    for dtype in np.float32, np.float64:                        # 0.1 is one value of its own
        agent = bc.Agent(VECTOR, Box(np.array([0.1, 0]), np.array([0.1, 0.5]), (2,), dtype),
                         config())
        close(agent.undo_env_act(vec((0.1, 0.375))), vec((-most, half)))


@pytest.mark.parametrize("kind", ACTS)
def test_loss_by_hand(kind):
    policy = make_agent(kind, hidden=())
    for param in policy.parameters():
        param.data.zero_()
    if kind == "discrete":
        policy.actor[-1].bias.data = vec(0, math.log(3), math.log(4))  # 1/8, 3/8, 4/8
        batch, expected = bc.Pairs(torch.ones(2, 3), torch.tensor([0, 2])), math.log(8 * 2) / 2
    else:
        policy.actor[-1].bias.data, policy.log_std.data = vec(1, 2), vec(0, math.log(2))
        batch = bc.Pairs(torch.ones(2, 3), vec((1, 2), (2, 6)))
        expected = LOG_2PI + math.log(2) + (0.5 + 2) / 2
    loss, metrics = bc.bc_loss(policy, batch)
    close(loss.detach(), expected)
    close(metrics["bc_loss"], expected)


@pytest.mark.parametrize("kind", ACTS)
def test_a_batch_is_what_the_policy_gets_when_it_acts(kind):
    agent = make_agent(kind)
    demos = make_demos(kind)
    batch = bc.prepare(agent, demos)
    close(batch.obs, (demos.obs - 3) / 2)
    act = agent.act(demos.obs, deterministic=True)
    out = agent.actor(batch.obs)
    assert torch.equal(act, out.argmax(-1) if kind == "discrete" else out)
    assert batch.act.shape == act.shape and batch.act.dtype == act.dtype


# ---- Held-out pairs

@pytest.mark.parametrize("count,share,held", [(10, 0.3, 3), (40, 0.3, 12), (2, 0.3, 1), (2, 0.9, 1),
                                              (3, 0.01, 1), (3, 0.9, 2)])
def test_every_pair_is_trained_on_or_held_out(count, share, held):
    demos = Demos(torch.arange(count).float()[:, None], torch.arange(count))
    train, test = bc.split(demos, share, seed=1)
    assert len(test.obs) == len(test.act) == held
    assert sorted([*train.act.tolist(), *test.act.tolist()]) == list(range(count))
    for each in (train, test):
        assert torch.equal(each.obs[:, 0].long(), each.act)      # pairs stay pairs


def test_a_seed_is_a_split():
    demos = Demos(torch.arange(40.0)[:, None], torch.arange(40))
    torch.manual_seed(5)
    first = bc.split(demos, 0.3, seed=1)[1].act.tolist()
    assert first == bc.split(demos, 0.3, seed=1)[1].act.tolist()
    assert first != bc.split(demos, 0.3, seed=2)[1].act.tolist()
    assert first != sorted(first) and max(first) > 11            # not the first or last of a file


@pytest.mark.parametrize("kind", ACTS)
def test_the_best_held_out_loss_decides_who_acts(kind):
    """Random actions are learned by heart, so the held-out loss soon rises."""
    agent = make_agent(kind, lr=0.03, check_every=5, std_init=2.0)
    demos, wrong = make_demos(kind), make_demos(kind, seed=1)
    demos = Demos(wrong.obs, demos.act)                          # nothing to be learned
    train, held_out = (bc.prepare(agent, part) for part in bc.split(demos, 0.3, seed=0))
    learner, seen = copy.deepcopy(agent), []
    optimizer = Adam(learner)
    with torch.no_grad():
        first = best = float(bc.bc_loss(agent, held_out)[0])
        weights = copies(agent)
    for _ in range(20):
        metrics = bc.update(agent, learner, optimizer, train, held_out)
        with torch.no_grad():
            loss = float(bc.bc_loss(learner, held_out)[0])
        assert float(metrics["held_out_loss"]) == loss
        assert bool(metrics["improved"]) == (loss < best)
        if loss < best:
            best, weights = loss, copies(learner)
        assert float(metrics["best_loss"]) == pytest.approx(best, rel=1e-6)
        assert same(copies(agent), weights)
        seen.append(loss)
    assert min(seen) < first and max(np.diff(seen)) > 0.05       # it did fall, and rise


def test_held_out_pairs_are_never_learned_from(monkeypatch):
    agent = make_agent("discrete", check_every=200)
    train, held_out = (bc.prepare(agent, part) for part in bc.split(make_demos("discrete"), 0.3, 0))
    learner = copy.deepcopy(agent)
    seen = noted(monkeypatch, bc, "bc_loss", lambda agent, batch: torch.is_grad_enabled() and batch)
    bc.update(agent, learner, Adam(learner), train, held_out)
    seen = [batch for batch in seen if batch]
    acts = dict(zip(map(tuple, train.obs.tolist()), train.act.tolist()))
    assert {tuple(row) for batch in seen for row in batch.obs.tolist()} == set(acts)
    for batch in seen:
        assert len(batch.obs) == 8
        assert [acts[tuple(row)] for row in batch.obs.tolist()] == batch.act.tolist()


# ---- Whole runs

def test_statistics_are_those_of_the_pairs_it_trains_on():
    """Which a single pair does not leave."""
    arrays = write_demos(lengths=(10, 10))
    agent = bc.train(config())
    demos = Demos(torch.tensor(arrays["obs"]), torch.tensor(arrays["act"]))
    train, _ = bc.split(demos, 0.3, seed=1)
    close(agent.obs_stats.mean, train.obs.double().mean(0))
    close(agent.obs_stats.var, train.obs.double().var(0, correction=0))
    write_demos(lengths=(1,))
    assert "cloning needs at least 2" in refused(bc.train, config(run_dir="other"))


@pytest.mark.parametrize("env,expert,hidden,error", [
    ("CartPole-v1", lambda obs: int(obs[2] + 0.5 * obs[3] > 0), (8,), 0.07),
    # Its bounds are -2 and 2. The expert is at a bound in a third of all states.
    ("Pendulum-v1", lambda obs: np.clip(1.5 * obs[:1] + obs[1:2], -2, 2), (32,), 0.25)])
def test_an_expert_is_cloned_in_states_that_it_did_not_show(env, expert, hidden, error):
    write_demos(env=env, lengths=(600,), expert=expert)
    agent = bc.train(config(env=env, total_steps=1500, batch_size=64, lr=3e-3, hidden=hidden,
                            check_every=100))
    obs = np.random.default_rng(1).normal(size=(500, *agent.obs_shape)).astype(np.float32)
    assert np.mean([np.abs(agent.predict(row) - expert(row)) for row in obs]) < error


def test_init_from_brings_weights_and_statistics():
    write_demos(lengths=(20,))
    first = bc.train(config())
    write_demos("others.npz", lengths=(30,), obs=np.float32(5 + np.random.randn(30, 4)))
    second = bc.train(config(demos="others.npz", init_from="run", run_dir="other", lr=1e-9))
    close(second.obs_stats.mean, first.obs_stats.mean)
    cfg = second.cfg
    _, held_out = bc.split(load_demos(cfg, make_envs(cfg, 1)), cfg.held_out, cfg.seed)
    loss, _ = bc.bc_loss(second, bc.prepare(second, held_out))
    assert float(rows("other")[-1]["best_loss"]) == pytest.approx(loss.item(), rel=1e-4)
    close(parameters(second), parameters(first), atol=1e-5)
