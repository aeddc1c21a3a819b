"""algos/c51.py, where it is not algos/dqn.py: the atoms, the projection, the cross-entropy."""
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings as how, strategies as st

from algos import c51, rainbow
from tests.algos.test_contract import build
from tests.helpers import bare, close, name_of, refused, vec
from tests.offpolicy import (
    dqn_agent as make_agent, dqn_batch as make_batch, fits, gradient_in, through)
from tests.registry import config
from utils.optim import Adam
from utils.run import checkpoint

CLEANRL = np.full(51, 1 / 51), np.linspace(-100, 100, 51)       # uniform, in steps of 4


def projected(rew, discount, prob, atoms):
    """One sample, in float64."""
    rew, discount, prob = (torch.as_tensor(x, dtype=torch.float64)[None]
                           for x in (rew, discount, prob))
    target, clipped = bare(c51).project(rew, discount, prob, torch.as_tensor(atoms))
    return target[0].numpy(), clipped.item()


@st.composite
def cases(draw):
    """(rew, discount, probabilities, atoms); the discount is 0 where s' is terminal"""
    num_atoms = draw(st.integers(2, 60))
    low, width = draw(st.floats(-200, 200)), draw(st.floats(0.5, 400))
    weights = draw(st.lists(st.floats(0.001, 1), min_size=num_atoms, max_size=num_atoms))
    discount = draw(st.one_of(st.just(0.0), st.floats(0, 1)))
    return (draw(st.floats(-300, 300)), discount, np.array(weights) / sum(weights),
            np.linspace(low, low + width, num_atoms))


@how(max_examples=100, deadline=None, derandomize=True, database=None)
@given(cases())
@example((0.0, 1.0, *CLEANRL))                                  # all stay on the grid
@example((4.0, 1.0, *CLEANRL))                                  # the next one, the last one clipped
def test_the_projection_is_a_loop_over_pairs_of_atoms(case):
    """Each atom gets of what moves to less than one spacing from it, the more the nearer it is."""
    rew, discount, prob, atoms = case
    spacing, expected, outside = atoms[1] - atoms[0], np.zeros(len(atoms)), 0.0
    for p, z in zip(prob, atoms):
        goal = rew + discount * z
        moved = min(max(goal, atoms[0]), atoms[-1])
        outside += p * min(1.0, abs(goal - moved) / spacing)    # to atoms beyond, if there were any
        for i, atom in enumerate(atoms):
            expected[i] += p * max(0.0, 1 - abs(moved - atom) / spacing)
    target, clipped = projected(*case)
    np.testing.assert_allclose(target, expected, atol=1e-9)
    assert target.sum() == pytest.approx(1) and (target >= 0).all()
    assert clipped == pytest.approx(outside, abs=1e-9)


def test_a_hair_beyond_the_end_is_no_alarm():
    """1 + 0.99 * 100 is above 100 in float32, and all the probability is there."""
    atoms, rew = torch.linspace(-100, 100, 51), vec(1.0001)
    _, clipped = c51.project(rew, vec(0.99), torch.eye(51)[-1:], atoms)
    assert (rew + 0.99 * atoms[-1] > atoms[-1]).all() and 0 < clipped.item() < 1e-4


def tiny_agent(own, targ):
    """Two actions, three atoms; the outputs of both networks are given, and do not depend on s."""
    agent = make_agent(c51, num_acts=2, hidden=(), num_atoms=3, v_min=-1.0, v_max=1.0,
                       dueling=False)
    for net, outputs in ((agent.critic, own), (agent.critic_targ, targ)):
        net.head[0].weight.data.zero_()
        net.head[0].bias.data.copy_(outputs.flatten())
    return agent


@pytest.mark.parametrize("probs,best", [
    (((0.5, 0, 0.5), (0, 0.9, 0.1)), 1),                        # means 0 and 0.1
    (((0, 0.6, 0.4), (0.45, 0, 0.55)), 0)])                     # 0.4 and 0.1; its mode is lower
def test_the_best_action_has_the_highest_mean(probs, best):
    agent = tiny_agent(*(vec(*x).clamp(min=1e-9).log() for x in (probs, probs[::-1])))
    close(agent.atoms, vec(-1, 0, 1))
    assert agent.act(torch.zeros(5, 3), deterministic=True).tolist() == [best] * 5


def test_what_is_ruled_out_in_float32_has_a_finite_loss_and_is_still_learned():
    agent = tiny_agent(vec((0, 0, 0), (0, 400, 0)), torch.zeros(6))
    obs = torch.zeros(2, 3)
    batch = c51.Transitions(obs, torch.tensor([1, 1]), vec(-1, 1), obs, vec(1, 1))
    loss, _, grad = gradient_in(agent.critic, c51.critic_loss, agent, batch)
    close(loss, 400.0)
    close(grad[-3:], vec(-0.5, 1, -0.5))


def by_loop(agent, batch, discounts, double=True):
    """Return m, sample by sample, and log p of the actions taken, by the layers: [B, 9]."""
    out = through(agent.critic.head, agent.critic.encoder(batch.obs)).unflatten(1, (-1, 9))
    if out.shape[1] == 5:                                       # b, and A of four actions
        out = out[:, :1] + out[:, 1:] - out[:, 1:].mean(1, keepdim=True)
    logp, targets, alike = out.log_softmax(-1), [], set()
    close(agent.critic(batch.obs), logp, rtol=1e-4)
    for k, discount in enumerate(discounts):
        with torch.no_grad():
            own, prob = (net(batch.next_obs[k:k + 1])[0].exp().double()
                         for net in (agent.critic, agent.critic_targ))
        best, other = ((each @ agent.atoms.double()).argmax()
                       for each in ((own, prob) if double else (prob, own)))
        alike.add((best == other).item())
        targets.append(projected(batch.rew[k], discount, prob[best], agent.atoms)[0])
    assert alike == {True, False}
    return torch.tensor(np.float32(targets)), logp[range(32), batch.act]


@pytest.mark.parametrize("double,dueling", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("kind", ["vector", "film", "image"])
def test_the_loss_is_that_of_a_loop_over_samples(kind, double, dueling):
    """And its gradient that of a fit to constants: none reaches the network by the target."""
    agent = make_agent(c51, kind, gamma=0.7, num_atoms=9, v_min=-2.0, v_max=1.0,
                       double=double, dueling=dueling)
    batch = make_batch(c51, kind)
    target, logp = by_loop(agent, batch, 0.7 * (1 - batch.terminated), double)
    loss = -(target * logp).sum(-1).mean()
    metrics = fits(agent.critic, loss, c51.critic_loss, agent, batch)
    close(metrics["q_loss"], loss.detach())
    close(metrics["q"], logp.detach().exp() @ agent.atoms, rtol=1e-4)


def test_steps_are_small_where_the_gradient_is():
    """By Adam's eps in section 5 of the paper, 0.01 / 32."""
    assert build("c51", config("c51"))["optimizer"].eps == pytest.approx(0.01 / 32, rel=0.1)


and_rainbow = pytest.mark.parametrize("algo", [c51, rainbow], ids=name_of)


@and_rainbow
@pytest.mark.parametrize("beyond,says", [(1, False), (2, True)])    # 3% and 6% of the batch
def test_returns_beyond_the_support_are_said(algo, beyond, says, capsys):
    agent, rew = make_agent(algo), torch.full((32,), 100.0)     # the highest atom
    rew[:beyond] = 300
    obs, act, _, next_obs, _ = vars(make_batch(c51, "vector")).values()
    over = {"terminated": torch.ones(32)} if algo is c51 else {
        "discount": torch.zeros(32), "rows": torch.arange(32), "weight": torch.ones(32)}
    batch = algo.Transitions(obs=obs, act=act, rew=rew, next_obs=next_obs, **over)
    algo.update(agent, Adam(agent.critic), batch, 1e-3)
    assert ("--v-min or --v-max" in capsys.readouterr().out) == says


@and_rainbow
def test_weights_are_refused_by_another_support_and_taken_by_their_own(algo):
    agent = make_agent(algo, v_min=-10.0, v_max=10.0)
    said = refused(lambda: make_agent(algo).adopt(agent.state_dict()))
    assert said == "--init-from: its weights need --num-atoms 51 --v-min -10 --v-max 10"
    other = make_agent(algo, v_min=-10.0, v_max=10.0)
    if algo is rainbow:
        for sigma in agent.critic.head[0].weight_sigma, agent.critic.head[0].bias_sigma:
            sigma.data.fill_(0)                                     # it has learned enough
    other.adopt(agent.state_dict())
    close(other.critic.head[0].weight, agent.critic.head[0].weight)
    if algo is rainbow:                                             # and explores anew
        assert other.critic.head[0].weight_sigma.all() and other.critic.head[0].bias_sigma.all()
    refused(checkpoint.load_into, other.adopt, {}, "a run", says="a run holds .* no 'atoms'")
