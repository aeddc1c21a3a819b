"""algos/ppo_lstm.py, where it is not algos/ppo.py: when the memory is kept, stored and cleared.

The oracle is an agent that acts one step of one environment at a time, in `walk`.
"""
import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

from algos import ppo_lstm
from tests import onpolicy
from tests.helpers import close, noted
from tests.onpolicy import Descent, every_kind, learn, losses, make_config, make_rollout
from utils.envs import make_envs
from utils.evaluate import evaluate


def make_agent(kind="box", **settings):
    """Return an agent whose memory matters: the outputs depend strongly on h."""
    agent = onpolicy.make_agent(ppo_lstm, kind, **settings)
    agent.lstm.weight_hh_l0.data *= 3
    agent.actor[-1].weight.data *= 30
    return agent


def normalized(agent, rollout):
    """Return the rollout's sequences as the network gets them."""
    return ppo_lstm.Inputs(agent.normalize_obs(rollout.obs), rollout.done, rollout.memory)


def walk(agent, rollout):
    """Return h [T, N, size], V(s) and V(s'), each [T, N]: step by step, by an LSTM cell."""
    cell = nn.LSTMCell(agent.lstm.input_size, agent.lstm.hidden_size)
    cell.load_state_dict({name.removesuffix("_l0"): x
                          for name, x in agent.lstm.state_dict().items()})

    def see(raw, memory):
        return cell(agent.embed(agent.normalize_obs(raw[None])), memory)

    hidden, vals, next_vals = [], [], []
    for n in range(rollout.rew.shape[1]):
        memory = tuple(rollout.memory[:, n:n + 1])
        for t in range(len(rollout.rew)):
            memory = see(rollout.obs[t, n], memory)
            hidden.append(memory[0][0])
            vals.append(agent.critic(memory[0]))
            next_vals.append(agent.critic(see(rollout.next_obs[t, n], memory)[0]))
            if rollout.done[t, n]:
                memory = tuple(torch.zeros(2, 1, agent.lstm.hidden_size))
    shape = rollout.rew.T.shape
    return (torch.stack(hidden).unflatten(0, shape).transpose(0, 1),
            torch.cat(vals).view(shape).T, torch.cat(next_vals).view(shape).T)


def log_prob(agent, h, act):
    """Return log pi(a|s), [T, N], of h and actions [T, N, ...]."""
    return agent.policy(h.flatten(0, 1)).log_prob(act.flatten(0, 1)).view(h.shape[:2])


@every_kind
def test_values_and_targets_are_those_of_single_steps(kind):
    """The last observation of an episode or rollout is seen with the memory of that episode."""
    agent = make_agent(kind, gamma=0.9, lam=0.8)
    agent.critic[-1].weight.data *= 5
    rollout = make_rollout(ppo_lstm, agent)
    inner = (rollout.done[:-1] == 0).nonzero()
    assert len(inner) and rollout.terminated.any() and (rollout.done > rollout.terminated).any()
    with torch.no_grad():
        _, val, next_val = walk(agent, rollout)
        rew = (rollout.rew / agent.reward_sum_stats.var.sqrt()).clamp(-10, 10).float()
        adv = ppo_lstm.gae(rew, val, next_val, rollout.terminated, rollout.done, 0.9, 0.8)
        actual = ppo_lstm.recurrent_targets(agent, rollout, normalized(agent, rollout))
    for ours, theirs in zip(actual, (val, adv, adv + val), strict=True):
        close(ours, theirs, rtol=1e-4, atol=1e-4)


# ---- Sequences are what was seen

@every_kind
def test_unroll_is_acting_step_by_step(kind):
    """Across ends of episodes, from any memory, and in any order of environments."""
    agent = make_agent(kind)
    rollout = make_rollout(ppo_lstm, agent)
    with torch.no_grad():
        expected, val, _ = walk(agent, rollout)
        h, memory = agent.unroll(normalized(agent, rollout))
        close(h, expected.flatten(0, 1))
        assert torch.equal(h, agent.encoder(normalized(agent, rollout)))
        close(agent.value(h), val.flatten())
    agent.memory = rollout.memory
    for t, obs in enumerate(rollout.obs):
        agent.act(obs)
        close(agent.memory[0], expected[t])
        ends = rollout.done[t].bool() if t < 7 else torch.ones(3, dtype=bool)
        close(memory[:, t, ends], agent.memory[:, ends])        # before it is cleared
        agent.forget(rollout.done[t].bool().numpy())
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        permuted = agent.encoder(normalized(agent, rollout)[order])
    close(permuted, expected[:, order].flatten(0, 1))


def test_the_gradient_goes_back_to_the_start_of_the_episode_and_no_further():
    agent = make_agent("discrete")
    obs = torch.randn(6, 2, 3, requires_grad=True)
    done = torch.zeros(6, 2)
    done[2, 0] = 1
    start = torch.randn(2, 2, 8, requires_grad=True)
    h = agent.encoder(ppo_lstm.Inputs(obs, done, start))
    by_obs, by_start = torch.autograd.grad(h[-2:].sum(), (obs, start))     # of the last step
    reached = by_obs.abs().sum(-1) > 0
    assert reached[:, 0].tolist() == [False] * 3 + [True] * 3 and reached[:, 1].all()
    assert not by_start[:, 0].any() and by_start[:, 1].any()


@pytest.mark.parametrize("obs", ["vector", "image"])
def test_rollouts_hold_the_memory_before_their_first_step(obs, monkeypatch):
    """Acting had the same, in rollouts that start in the middle of an episode and at its start."""
    cfg = make_config(ppo_lstm, env="tests.envs:Counter-v0", env_kwargs=json.dumps({"obs": obs}))
    envs = make_envs(cfg, 3)
    agent = ppo_lstm.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    agent.lstm.weight_hh_l0.data *= 3
    shown = envs.reset(seed=7)[0]
    before = noted(monkeypatch, agent, "act", lambda obs: agent.memory_before(obs).clone())
    acted = noted(monkeypatch, agent, "forget", lambda done: agent.memory[0].clone())
    starts = torch.ones(3)                                      # whether an episode starts
    for steps in (5, 2, 1, 9):
        rollout, shown = ppo_lstm.collect_with_memory(agent, envs, shown, steps)
        with torch.no_grad():
            h = agent.encoder(normalized(agent, rollout))
        assert torch.equal(rollout.memory, before[-steps])
        close(h, torch.cat(acted[-steps:]))
        for memory, ended in zip(before[-steps:], rollout.done):
            assert torch.equal(memory.abs().sum((0, 2)) == 0, starts == 1)
            starts = ended
    assert rollout.memory.any()


@every_kind
def test_a_minibatch_is_all_steps_of_its_environments_in_order(kind, monkeypatch):
    agent = make_agent(kind, num_envs=6, rollout_steps=24, minibatch_envs=2, epochs=2,
                       norm_adv=False)
    rollout, before = make_rollout(ppo_lstm, agent), copy.deepcopy(agent)
    calls = losses(monkeypatch, ppo_lstm, "ppo_loss")
    learn(ppo_lstm, agent, rollout, Descent, lr=0.0)            # so that V stays
    obs, done, memory = vars(normalized(before, rollout)).values()
    scaled = (rollout.rew / before.reward_sum_stats.var.sqrt()).clamp(-10, 10).float()
    with torch.no_grad():
        h, val, next_val = walk(before, rollout)
        adv = ppo_lstm.gae(scaled, val, next_val, rollout.terminated, done, 0.99, 0.95)
        logp = log_prob(before, h, rollout.act)
    orders = []
    for minibatch in calls:
        seen = minibatch.obs
        assert seen.obs.shape[:2] == (4, 2)
        envs = [int((memory == seen.memory[:, i:i + 1]).all(2).all(0).nonzero()) for i in (0, 1)]
        orders.append(envs)
        assert torch.equal(seen.obs, obs[:, envs])
        assert torch.equal(seen.done, done[:, envs])
        assert torch.equal(minibatch.act, rollout.act[:, envs].flatten(0, 1))
        for name, expected in (("logp_old", logp), ("adv", adv), ("ret", adv + val)):
            close(getattr(minibatch, name), expected[:, envs].flatten(), rtol=1e-4, atol=1e-4)
    epochs = orders[:3], orders[3:]
    assert all(sorted(sum(epoch, [])) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_kl_is_that_of_the_policy_with_memory():
    agent = make_agent(epochs=2, minibatch_envs=1)
    rollout, before = make_rollout(ppo_lstm, agent), copy.deepcopy(agent)
    _, metrics = learn(ppo_lstm, agent, rollout, lr=3e-3)
    with torch.no_grad():
        old, new = [log_prob(each, walk(each, rollout)[0], rollout.act) for each in (before, agent)]
    log_ratio = new - old
    close(metrics["kl"], (log_ratio.exp() - 1 - log_ratio).mean(), rtol=1e-3)
    close(metrics["clip_frac"], ((log_ratio.exp() - 1).abs() > 0.2).float().mean())


# ---- Acting after training

def test_predict_remembers_until_it_is_told_to_forget():
    agent = make_agent()
    obs = np.float32([[1, 2, 3], [4, 5, 6]])
    for done in (None, np.array([True])):
        agent.forget(done)
        first, second = [agent.predict(row) for row in obs]
        agent.forget(np.array([False]))
        assert not np.allclose(agent.predict(obs[0]), first)    # now it has seen something
        agent.forget(done)
        np.testing.assert_array_equal([agent.predict(row) for row in obs], [first, second])


def test_another_number_of_environments_starts_afresh():
    agent = make_agent()
    obs = torch.randn(5, 3)
    agent.forget()
    expected = agent.act(obs, deterministic=True)
    agent.act(obs[:2])
    assert agent.memory.shape[1] == 2
    close(agent.act(obs, deterministic=True), expected)


# ---- What is learned

@pytest.mark.slow
def test_it_learns_to_remember():
    """A policy without memory has a return of 0 on average. Rollouts end inside episodes."""
    cfg = ppo_lstm.Config(env="tasks:Recall-v0", env_kwargs='{"delay": 3}', total_steps=9600,
                          rollout_steps=240, lr=1e-2, lstm_size=16, hidden=(16,), epochs=4,
                          device="cpu", run_dir="run")
    returns, _ = evaluate(ppo_lstm.train(cfg), cfg, 20, seed=1)
    assert returns.mean() == 1
