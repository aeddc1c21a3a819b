"""algos/rainbow.py, where it is not algos/c51.py: steps, priorities, noise, double and dueling."""
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings as how, strategies as st
from scipy import stats

from algos import c51, rainbow
from tests.algos.test_buffers import CPU, reloaded, transitions
from tests.algos.test_c51 import by_loop
from tests.helpers import VECTOR, close
from tests.offpolicy import dqn_agent, dqn_batch, fits
from utils.optim import Adam

few = how(max_examples=40, deadline=None, derandomize=True, database=None)


def make(capacity, num_envs=1):
    return rainbow.NStepBuffer(capacity, VECTOR, num_envs, CPU)


def config(**settings):
    return rainbow.Config(**{"gamma": 0.5, "n_step": 3} | settings)


def make_agent(kind="vector", **settings):
    return dqn_agent(rainbow, kind, **{"num_atoms": 9, "v_min": -2.0, "v_max": 1.0} | settings)


def without_noise(agent):
    for name, param in agent.named_parameters():
        param.data.mul_("sigma" not in name)
    return agent


def make_batch(kind="vector"):
    """Random transitions of one to three steps, of which some terminate."""
    obs, act, rew, next_obs, terminated = vars(dqn_batch(c51, kind)).values()
    discount = (1 - terminated) * 0.5 ** torch.randint(1, 4, (32,))
    weight = torch.rand(32)
    return rainbow.Transitions(obs, act, rew, discount, next_obs, torch.arange(32), weight)


# ---- The buffer: n steps and priorities

def test_the_buffer_tells_its_memory(capsys):
    """Eight numbers of 4 bytes (two observations, r, whether terminal), two of 8, one of 1."""
    columns = make(1_000_000).columns.values()
    assert sum(column.nbytes for column in columns) == 49_000_000
    assert capsys.readouterr().out == "replay buffer: 1,000,000 transitions, 49 MB when full\n"


def walk(start, log, n_step, gamma):
    """(return, discount, number of the last transition) from one transition on, by a loop."""
    total, discount = 0.0, 1.0
    for number, rew, terminated, ended in log[start:start + n_step]:
        total, discount, last = total + discount * rew, discount * gamma, number
        if ended:
            break
    return total, discount * (1 - terminated), last


def test_targets_add_up_the_steps_of_one_episode_in_one_environment():
    @few
    @given(st.integers(2, 9), st.integers(1, 3), st.integers(1, 5), st.integers(0, 99),
           st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=4))
    def check(rows, num_envs, n_step, seed, calls):
        rng, capacity = np.random.default_rng(seed), rows * num_envs + seed % 2
        buffer, logs, count = make(capacity, num_envs), [[] for _ in range(num_envs)], 0
        for steps, reload in calls:
            for _ in range(steps):
                numbers = np.arange(count, count + num_envs)
                rew = rng.integers(-9, 9, num_envs).astype(float)
                terminated, truncated = rng.random((2, num_envs)) < 0.2
                obs = np.broadcast_to(numbers[:, None], (num_envs, 3)).astype(float)
                buffer.add(obs=obs, act=numbers % 4, rew=rew, next_obs=obs + 0.5,
                           terminated=terminated, ended=terminated | truncated)
                for log, *row in zip(logs, numbers, rew, terminated, terminated | truncated):
                    log.append(row)
                count += num_envs
            if reload:                                          # new episodes begin
                buffer = reloaded(buffer, make(capacity, num_envs))
                for log in logs:
                    log[-1][-1] = True
            batch = buffer.sample(20, config(n_step=n_step), 0.5)
            for k, number in enumerate(batch.obs[:, 0].int().tolist()):
                assert count - capacity <= number < count and batch.act[k] == number % 4
                log = logs[number % num_envs]
                rew, discount, last = walk(number // num_envs, log, n_step, 0.5)
                assert (batch.rew[k], batch.discount[k]) == (rew, discount)
                assert batch.next_obs[k, 0] == last + 0.5

    check()


def test_rows_are_drawn_by_priority_and_weighed_against_it():
    buffer = make(10)
    for number in range(8):
        buffer.add(**transitions(rainbow, [number]))
    assert buffer.columns["priority"][:8].tolist() == [1.0] * 8
    priority = torch.arange(1.0, 9.0)
    buffer.set_priorities(torch.arange(8), priority)
    batch = buffer.sample(7200, config(), 0.5)
    counts = np.bincount(batch.rows, minlength=8)
    assert (abs(counts - 7200 * priority.numpy() / 36) <= 2).all()      # stratified
    assert torch.equal(batch.rows, batch.obs[:, 0].long())
    close(batch.weight, (1 / priority[batch.rows]) ** 0.5)
    for number in 8, 9, 10:                                     # the last one overwrites row 0
        buffer.add(**transitions(rainbow, [number]))
    assert buffer.columns["priority"][[8, 9, 0]].tolist() == [8] * 3    # new rows have the highest


# ---- The loss

@pytest.mark.parametrize("kind", ["vector", "image"])
def test_the_loss_is_that_of_a_loop_over_samples(kind):
    """And its gradient that of a fit to constants. The critic chooses, its target rates."""
    agent, batch = without_noise(make_agent(kind)), make_batch(kind)
    assert (batch.discount == 0).any()
    target, logp = by_loop(agent, batch, batch.discount)
    loss = -((target * logp).sum(-1) * batch.weight).mean()
    plain = torch.nn.ParameterList(param for name, param in agent.critic.named_parameters()
                                   if "sigma" not in name)
    metrics = fits(plain, loss, rainbow.critic_loss, agent, batch)
    close(metrics["q_loss"], loss.detach())
    prob = logp.detach().exp()
    close(metrics["q"], prob @ agent.atoms, rtol=1e-4)
    close(metrics["kl"], stats.entropy(target, prob, axis=1), rtol=1e-3, atol=1e-5)


def test_what_fits_perfectly_can_be_drawn_again():
    agent = without_noise(make_agent(hidden=()))
    layer, = agent.critic.head
    layer.weight.data.zero_()
    layer.bias.data.zero_()[0] = 1e3                            # the return is surely v_min
    sure = {"rew": torch.full((32,), -2.0), "discount": torch.zeros(32)}
    assert (rainbow.critic_loss(agent, replace(make_batch(), **sure))[1]["kl"] > 0).all()


# ---- Noise

def test_noise_is_a_product_of_one_number_per_input_and_one_per_output():
    torch.manual_seed(1)
    layer = rainbow.NoisyLinear(4, 3, sigma_init=0.5)
    assert layer.weight.abs().max() <= 0.5 and layer.bias.abs().max() <= 0.5
    assert (layer.weight_sigma == 0.25).all() and (layer.bias_sigma == 0.25).all()
    x = torch.cat([torch.zeros(1, 4), torch.eye(4)])
    plain = layer(x, noisy=False)
    close(plain, x @ layer.weight.T + layer.bias)
    noise = torch.stack([layer(x, noisy=True) - plain for _ in range(4000)]).detach() / 0.25
    bias = noise[:, 0]                                          # f(e_i)
    weight = noise[:, 1:] - noise[:, :1]                        # f(e_i) f(e_j), [draws, 4, 3]
    ratio = weight / bias[:, None]
    close(ratio, ratio[..., :1].expand_as(ratio), rtol=1e-2, atol=1e-3)     # f(e_j)
    for each in bias[:, 0], ratio[:, 0, 0]:                     # f(e)^2 is |e|, e is normal
        assert stats.kstest(each.square() * each.sign(), "norm").pvalue > 1e-3
    assert abs(np.corrcoef(bias[:, 0], bias[:, 1])[0, 1]) < 0.05
    close(weight.square().mean((0, 1, 2)), 2 / math.pi, rtol=0.1)
    layer(x, noisy=True).square().sum().backward()
    assert layer.weight_sigma.grad.any() and layer.bias_sigma.grad.any()    # it is learned


def test_actions_are_the_best_under_noise_and_evaluation_draws_nothing():
    agent, obs = make_agent(), torch.randn(6, 3)
    state = torch.get_rng_state()
    acts = agent.act(obs, deterministic=True)
    assert torch.equal(torch.get_rng_state(), state)
    logp = agent.critic(obs, noisy=False)
    assert torch.equal(acts, (logp.exp() @ agent.atoms).argmax(-1))
    torch.manual_seed(3)
    drawn = torch.stack([agent.act(obs) for _ in range(200)])
    torch.manual_seed(3)
    again = torch.stack([(agent.critic(obs).exp() @ agent.atoms).argmax(-1) for _ in range(200)])
    assert torch.equal(drawn, again) and (drawn != acts).any()


def test_without_noise_none_is_learned():
    agent, batch = make_agent(), make_batch()
    agent = rainbow.Agent(*agent.spaces, replace(agent.cfg, sigma_init=0.0))
    rainbow.update(agent, Adam(agent.critic), batch, 1e-2)
    assert not any(layer.weight_sigma.any() or layer.bias_sigma.any()
                   for layer in agent.critic.head)
    assert torch.equal(agent.critic(batch.obs), agent.critic(batch.obs))


def test_the_target_has_noise_of_its_own(monkeypatch):
    """Three passes, three draws: that which chooses, that which rates, that which learns."""
    agent, batch = make_agent(hidden=()), make_batch()
    draws, draw = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **more: draws.append(
        draw(*size, **more)) or draws[-1])
    rainbow.critic_loss(agent, batch)
    assert len(draws) == 3 and len({x[0].item() for x in draws}) == 3
