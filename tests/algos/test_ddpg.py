"""algos/ddpg.py by hand, and what holds for it and for its children td3 and sac alike."""
import copy
import math

import pytest
import torch

from algos import crossq, ddpg, sac, sac_her, td3
from tests import helpers, offpolicy
from tests.helpers import close, copies, name_of, quick
from tests.offpolicy import (
    NETS, THREE, UNUSED, flat, gradient_in, linear_agent, make_agent, make_batch, make_optimizers,
    noise_is, update)

every_algo = pytest.mark.parametrize("algo", [ddpg, td3, sac], ids=["ddpg", "td3", "sac"])


# ---- Hand values

@pytest.mark.parametrize("algo", [ddpg, td3], ids=["ddpg", "td3"])
def test_exploration_by_hand(algo):
    """The policy's action is (0.5, -0.9) in all states."""
    agent = make_agent(algo, hidden=())
    agent.actor[0].weight.data.zero_()
    agent.actor[0].bias.data = torch.tensor([0.5, -0.9]).atanh()
    with noise_is(torch.tensor([[1.0, -2], [0, 30], [-16, 1]])):
        close(agent.act(torch.zeros(3, 3)), [[0.6, -1], [0.5, 1], [-1, -0.8]])


def test_critic_loss_and_gradient_by_hand():
    """a' = 0.5, so Q_targ = 2 s + 4 a + 1 is 9 and 43, and the third an end: y = 5.5, 19.5, 1."""
    agent = linear_agent(ddpg, [(1.0, 1.0, 0.0)], [(2.0, 4.0, 1.0)], gamma=0.5)
    agent.actor_targ[0] = offpolicy.line([0.0], math.atanh(0.5)).requires_grad_(False)
    batch = ddpg.Transitions(**THREE)
    loss, metrics, grad = gradient_in(agent.critic, ddpg.critic_loss, agent, batch)
    close(metrics["q"], [1.5, 1, 2])
    close(metrics["critic_loss"], loss)
    close(loss, (16 + 342.25 + 1) / 3)
    close(1.5 * grad, [-4 - 37 + 3, -2 + 18.5 - 1, -21.5])          # of s, of a, of the bias


@pytest.mark.parametrize("algo", [ddpg, td3], ids=["ddpg", "td3"])
def test_actor_loss_and_gradient_by_hand(algo):
    """Q = s + 3 a and a = tanh(b) = 0.5: -mean Q = -3.5, its slope in b -3 (1 - 0.25)."""
    count = 1 if algo is ddpg else 2
    agent = linear_agent(algo, [(1.0, 3.0, 0.0), (1.0, -7.0, 100.0)][:count], UNUSED[:count])
    agent.actor[0] = offpolicy.line([0.0], math.atanh(0.5))
    batch = algo.Transitions(**THREE)
    loss, metrics, grad = gradient_in(agent.actor, algo.actor_loss, agent, batch)
    close(loss, -3.5)
    close(metrics["actor_loss"], -3.5)
    close(grad, [-4.5, -2.25])                                      # of the weight, of the bias


# ---- Actions

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
        said |= told | {f"{name}_grad_norm": twins[name].grad_norm()}
        twins[name].step(1e-2)
    if algo is sac:
        _, told, twins["alpha"].grad[:] = gradient_in(twin.log_alpha, algo.alpha_loss, twin,
                                                      said["logp"])
        said |= told | {"alpha_grad_norm": twins["alpha"].grad_norm()}
        twins["alpha"].step(1e-2)
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
    assert cfg.start_steps == random_steps and isinstance(cfg.start_steps, int)
    assert algo.num_updates(random_steps, cfg) == 0
    assert algo.num_updates(random_steps + 7, cfg) == 7
