"""algos/ddpg.py by hand, and what holds for it and for its children td3 and sac alike."""
import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from algos import crossq, ddpg, sac, sac_her, td3
from tests import helpers, offpolicy
from tests.helpers import close, column, copies, name_of, quick
from tests.offpolicy import (
    NETS, flat, gradient_in, linear_agent, make_agent, make_batch, make_optimizers, noise_is,
    update)

every_algo = pytest.mark.parametrize("algo", [ddpg, td3, sac], ids=["ddpg", "td3", "sac"])
and_her = pytest.mark.parametrize("algo", [ddpg, td3, sac, sac_her], ids=name_of)


# ---- Hand values

@and_her
def test_targets_follow_by_hand(algo):
    """Every weight and bias of every layer moves, and none of the network that is followed."""
    targ, net = (torch.nn.Sequential(offpolicy.line([0.0], 0.0), offpolicy.line([0.0], 0.0))
                 for _ in range(2))
    for param, value in zip(targ.parameters(), (0.0, 10.0, 4.0, -8.0)):
        param.data.fill_(value)
    for param, value in zip(net.parameters(), (1.0, -10.0, 4.0, 0.0)):
        param.data.fill_(value)
    algo.polyak_update(targ, net, 0.25)
    assert flat(targ).tolist() == [0.25, 5, 4, -6] and flat(net).tolist() == [1, -10, 4, 0]


@pytest.mark.parametrize("algo", [ddpg, td3], ids=["ddpg", "td3"])
def test_exploration_by_hand(algo):
    """The policy's action is (0.5, -0.9) in all states."""
    agent = make_agent(algo, hidden=())
    agent.actor[0].weight.data.zero_()
    agent.actor[0].bias.data = torch.tensor([0.5, -0.9]).atanh()
    with noise_is(torch.tensor([[1.0, -2], [0, 30], [-16, 1]])):
        close(agent.act(torch.zeros(3, 3)), [[0.6, -1], [0.5, 1], [-1, -0.8]])


S, A, NEXT = column(1.0, 2.0), column(0.5, -1.0), column(3.0, 3.0)
REW, ENDS = torch.tensor([1.0, -2]), torch.tensor([0.0, 1])
BATCH = ddpg.Transitions(S, A, REW, NEXT, ENDS)


def test_critic_loss_and_gradient_by_hand():
    """Targets: the action 0.5 everywhere, Q_targ = 2 s + 4 a + 1, so V' = 9 and y = 5.5, -2."""
    agent = linear_agent(ddpg, [(1.0, 1.0, 0.0)], [(2.0, 4.0, 1.0)], gamma=0.5)
    agent.actor_targ[0] = offpolicy.line([0.0], math.atanh(0.5)).requires_grad_(False)
    loss, metrics, grad = gradient_in(agent.critic, ddpg.critic_loss, agent, BATCH)
    close(metrics["q"], [1.5, 1])
    close(metrics["critic_loss"], loss)
    close(loss, (16 + 9) / 2)
    close(grad, [2.0, -5, -1])                                      # of s, of a, of the bias


@pytest.mark.parametrize("algo", [ddpg, td3], ids=["ddpg", "td3"])
def test_actor_loss_and_gradient_by_hand(algo):
    """Q = s + 3 a and a = tanh(b) = 0.5: -mean Q = -3, its slope in b -3 (1 - 0.25)."""
    critics = [(1.0, 3.0, 0.0), (1.0, -7.0, 100.0)][:1 if algo is ddpg else 2]
    agent = linear_agent(algo, critics, critics)
    agent.actor[0] = offpolicy.line([0.0], math.atanh(0.5))
    batch = algo.Transitions(S, A, REW, NEXT, ENDS)
    loss, metrics, grad = gradient_in(agent.actor, algo.actor_loss, agent, batch)
    close(loss, -3.0)
    close(metrics["actor_loss"], -3.0)
    close(grad, [-3.375, -2.25])                                    # of the weight, of the bias


# ---- Actions

@every_algo
def test_noise_is_independent_in_every_dimension_and_sample(algo):
    agent, obs = make_agent(algo), torch.zeros(2000, 3)
    best = agent.act(obs, deterministic=True)
    assert (best == best[0]).all() and torch.equal(best, agent.act(obs, deterministic=True))
    noise = agent.act(obs) - best
    assert (noise.std(0) > 0.05).all() and abs(np.corrcoef(noise.T)[0, 1]) < 0.1
    assert len(noise.unique(dim=0)) == 2000


@pytest.mark.parametrize("algo", [ddpg, td3, sac, sac_her, crossq], ids=name_of)
def test_the_first_actions_are_uniform_and_from_the_seeded_generator(algo):
    agent = make_agent(algo)
    torch.manual_seed(5)
    act = agent.random_act(20000)
    assert act.shape == (20000, 2) and act.abs().max() <= 1
    close(act.mean(0), [0, 0], atol=0.02)
    close(act.var(0), [1 / 3, 1 / 3], rtol=0.03)
    between = torch.corrcoef(torch.cat([act.T[:, 1:], act.T[:, :-1]]))  # and with the row before
    close(between, torch.eye(4), atol=0.04)
    torch.manual_seed(5)
    assert torch.equal(act, agent.random_act(20000))


# ---- Targets and gradients

@and_her
def test_at_an_end_only_the_reward_counts(algo):
    """The loss is then that of gamma = 0; elsewhere it is not."""
    for ends in (False, True):
        batch = replace(make_batch(algo), terminated=torch.full((32,), float(ends)))
        losses = []
        for gamma in (0.0, 0.9):
            losses.append(algo.critic_loss(make_agent(algo, gamma=gamma), batch)[0])
        assert torch.equal(*losses) == ends


@every_algo
def test_the_critics_targets_are_constants(algo):
    """No gradient of the critic's loss reaches the actor or a target network."""
    agent, batch = make_agent(algo), make_batch(algo)
    for param in agent.parameters():
        param.requires_grad_(True)
    loss, _ = algo.critic_loss(agent, batch)
    grads = torch.autograd.grad(loss, list(agent.parameters()), allow_unused=True)
    reached = {name for (name, _), grad in zip(agent.named_parameters(), grads) if grad is not None}
    assert reached == {name for name in copies(agent) if name.startswith("critic.")}


@pytest.mark.parametrize("algo", [td3, sac], ids=["td3", "sac"])
def test_two_critics_begin_different(algo):
    critic = algo.Agent(helpers.VECTOR, helpers.BOX, algo.Config()).critic
    for one, other in zip(critic.q1.parameters(), critic.q2.parameters(), strict=True):
        assert not torch.isclose(one, other).all()


@every_algo
def test_the_policys_loss_asks_the_critics_and_not_their_targets(algo):
    agent, batch = make_agent(algo), make_batch(algo)
    grads = []
    for _ in range(2):
        torch.manual_seed(2)
        grads.append(gradient_in(agent.actor, algo.actor_loss, agent, batch)[2])
        for name in NETS[name_of(algo)]:
            for param in getattr(agent, f"{name}_targ").parameters():
                param.data.fill_(torch.nan)
    assert torch.equal(*grads)


@every_algo
def test_an_update_is_a_step_of_each_and_then_the_targets_follow(algo):
    """The critic first; the actor by the new critic; the targets behind the new networks."""
    agent, batch = make_agent(algo, tau=0.3, lr=1e-2), make_batch(algo)
    twin = copy.deepcopy(agent)
    optimizers, twins = make_optimizers(agent), make_optimizers(twin)
    for optimizer in optimizers.values():
        optimizer.grad.fill_(123)                                   # of an earlier update
    torch.manual_seed(4)
    metrics = update(algo, agent, optimizers, batch, count=1)      # the second: actor and targets
    torch.manual_seed(4)
    said, learns = {}, {"critic": twin.critic, "actor": twin.actor}
    for name, loss_fn in (("critic", algo.critic_loss), ("actor", algo.actor_loss)):
        _, told, twins[name].grad[:] = gradient_in(learns[name], loss_fn, twin, batch)
        said |= told | {f"{name}_grad_norm": twins[name].step(1e-2)}
    if algo is sac:
        _, told, twins["alpha"].grad[:] = gradient_in(twin.log_alpha, algo.alpha_loss, twin,
                                                      said["logp"])
        said |= told | {"alpha_grad_norm": twins["alpha"].step(1e-2)}
    assert helpers.same(metrics, said)
    for name in ("critic", "actor", *["log_alpha"] * (algo is sac)):
        assert torch.equal(flat(getattr(agent, name)), flat(getattr(twin, name)))
    for name in NETS[name_of(algo)]:                                # as they were before, in part
        was, now = flat(getattr(twin, f"{name}_targ")), flat(getattr(agent, name))
        close(flat(getattr(agent, f"{name}_targ")), 0.7 * was + 0.3 * now)


# ---- The loop

@every_algo
def test_actions_are_random_until_start_steps_and_the_policys_then(algo, monkeypatch):
    sources = []
    for name in ("act", "random_act"):
        function = getattr(algo.Agent, name)
        monkeypatch.setattr(algo.Agent, name, lambda *args, name=name, function=function, **kwargs:
                            sources.append(name) or function(*args, **kwargs))
    algo.train(quick(algo, num_envs=2, start_steps=40))
    assert sources == 20 * ["random_act"] + 40 * ["act"]


@every_algo
@pytest.mark.parametrize("total,start,random_steps", [
    (1e6, None, 10_000), (1e5, None, 10_000), (3e4, None, 3000), (99, None, 9), (5, None, 0),
    (120, 40, 40), (120, 0, 0), (100, 5000, 5000),
])
def test_the_warm_up_is_at_most_a_tenth_of_the_budget_unless_given(algo, total, start,
                                                                    random_steps):
    cfg = algo.Config(total_steps=total, start_steps=start)
    got = algo.num_start_steps(cfg)
    assert got == random_steps and isinstance(got, int)
    assert algo.num_updates(random_steps, cfg) == 0
    assert algo.num_updates(random_steps + 7, cfg) == 7
