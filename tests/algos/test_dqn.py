"""algos/dqn.py by hand, and what holds for it and for its children alike."""
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from scipy import stats

from algos import c51, dqn, dqn_atari, dqn_per, qr_dqn, rainbow
from tests.helpers import close, name_of, noted, rows
from tests.offpolicy import (
    dqn_agent as make_agent, dqn_batch as make_batch, dqn_quick as quick, fits, flat, through)

CHILDREN = [dqn, dqn_per, dqn_atari, c51, qr_dqn]
every_child = pytest.mark.parametrize("algo", CHILDREN, ids=name_of)
each_alone = pytest.mark.parametrize("algo,kind", [
    (dqn, "vector"), (dqn, "film"), (dqn, "image"), (dqn_per, "vector"), (dqn_per, "image"),
    (dqn_atari, "film"), (dqn_atari, "image")], ids=lambda x: x if type(x) is str else name_of(x))


@each_alone
@pytest.mark.parametrize("dueling,outputs", [(True, 5), (False, 4)])
def test_the_network_has_an_output_for_what_all_actions_share(algo, kind, dueling, outputs):
    """From the network's own layers, step by step; images are divided by 255, channels go first."""
    agent, obs = make_agent(algo, kind, dueling=dueling), make_batch(algo, kind, size=6).obs
    x = obs
    if kind != "vector":
        x = (obs if kind == "film" else obs.permute(0, 3, 1, 2)) / 255
        x = torch.nn.Sequential(*agent.critic.encoder)(x)
        assert x.shape == (6, 512)
    out = through(agent.critic.head, x)
    assert out.shape == (6, outputs)
    expected = out[:, :1] + out[:, 1:] - out[:, 1:].mean(1, keepdim=True) if dueling else out
    close(agent.critic(obs), expected, rtol=1e-4, atol=1e-5)


# ---- Acting

def explorer(algo, best, num_acts, eps):
    """A function without arguments: the actions of an agent for which these are the best."""
    two_atoms = {"num_atoms": 2} if algo is c51 else {}
    agent = make_agent(algo, num_acts=num_acts, **two_atoms)
    q = torch.nn.functional.one_hot(best, num_acts).float()
    out = torch.stack([1 - q, q], -1).log() if two_atoms else q
    out = q[..., None] if algo is qr_dqn else out
    agent.critic.forward = lambda obs: out
    agent.eps.fill_(eps)
    return lambda: agent.act(torch.zeros(len(best)))


@every_child
@pytest.mark.parametrize("eps", [0.0, 0.3, 1.0])
def test_an_action_is_random_with_probability_eps(algo, eps):
    """Any of four then, the best one too: 1 - eps + eps / 4 for that one, eps / 4 for another."""
    n = 20_000
    act = explorer(algo, torch.full((n,), 2), 4, eps)()
    counts, share = torch.bincount(act, minlength=4).numpy(), np.full(4, eps / 4)
    share[2] += 1 - eps
    assert (counts[share == 0] == 0).all()
    assert eps == 0 or stats.chisquare(counts, n * share).pvalue > 1e-3


@every_child
def test_each_environment_draws_for_itself(algo):
    """Two environments both act at random as often as chance has it, and not alike."""
    act = explorer(algo, torch.zeros(2, dtype=torch.int64), 1000, 0.5)
    pairs = torch.stack([act() for _ in range(2000)])
    first, second = (pairs > 0).long().T
    assert stats.chisquare(torch.bincount(2 * first + second, minlength=4)).pvalue > 1e-3
    alike = pairs[:, 0] == pairs[:, 1]
    assert alike[(pairs > 0).all(1)].float().mean() < 0.05


# ---- The agent and its loss

def test_vectors_of_bytes_are_no_images_and_are_not_scaled():
    space = Box(0, 255, (3,), np.uint8)
    stored = dqn.ReplayBuffer(5, space, torch.device("cpu")).columns["obs"]
    assert stored.dtype == np.float32
    agent = dqn.Agent(space, Discrete(4), dqn.Config())
    obs = np.array([[200, 3, 70]], np.uint8)
    close(agent.critic(torch.as_tensor(obs)), agent.critic(torch.tensor([[200.0, 3, 70]])))
    assert agent.act(obs).shape == (1,)


@each_alone
@pytest.mark.parametrize("double", [True, False])
def test_the_loss_is_that_of_a_loop_over_samples(algo, kind, double):
    """And its gradient that of a regression to numbers: none reaches the network by the target."""
    delta = 1.0 if double else 0.5
    agent = make_agent(algo, kind, double=double, gamma=0.7, huber_delta=delta)
    batch = make_batch(algo, kind)
    losses, errors = [], []
    with torch.no_grad():
        q_next, q_targ = agent.critic(batch.next_obs), agent.critic_targ(batch.next_obs)
    assert not torch.allclose(q_next, q_targ, atol=1e-2)
    for k, judge in enumerate(q_next if double else q_targ):
        best = max(range(4), key=judge.tolist().__getitem__)
        target = batch.rew[k] + 0.7 * (1 - batch.terminated[k]) * q_targ[k][best]
        errors.append(agent.critic(batch.obs[k:k + 1])[0, batch.act[k]] - target)
        size = errors[-1].abs()
        loss = size**2 / 2 if size < delta else delta * (size - delta / 2)
        losses.append(loss * getattr(batch, "weight", torch.ones(32))[k])
    expected = torch.stack(losses).mean()
    metrics = fits(agent.critic, expected, algo.critic_loss, agent, batch)
    close(metrics["q_loss"], expected.detach())
    close(metrics["q"], agent.critic(batch.obs)[range(32), batch.act].detach(), rtol=1e-4)
    if algo is dqn_per:
        close(metrics["td_error"], torch.stack(errors).detach(), atol=1e-5)


# ---- The loop

@pytest.mark.parametrize("algo", [*CHILDREN, rainbow], ids=name_of)
@pytest.mark.parametrize("num_envs,update_every,target_every", [
    (2, 3, 7), (7, 3, 2), (5, 1, 12), (3, 4, 25), (1, 10, 3)])
def test_the_target_is_the_network_of_the_last_multiple(algo, num_envs, update_every, target_every,
                                                        monkeypatch):
    """Copied at every multiple of target_every, or right after it, whatever the other two are."""
    weights = noted(monkeypatch, algo, "interact", lambda agent, *rest: (   # before each step
        flat(agent.critic), flat(agent.critic_targ)))
    agent = algo.train(quick(algo, num_envs=num_envs, update_every=update_every,
                             target_every=target_every, anneal_lr=False, total_steps=90))
    weights.append((flat(agent.critic), flat(agent.critic_targ)))
    assert len(weights) == 1 - -90 // num_envs
    for step, (own, targ) in zip(range(0, 99, num_envs), weights):
        if step // target_every > (step - num_envs) // target_every:  # also at 0: they are equal
            expected = own
        assert torch.equal(targ, expected), f"after step {step}"
    assert not torch.equal(expected, weights[0][0])


@every_child
def test_eps_follows_the_steps(algo, monkeypatch):
    """And is what the log says it is."""
    eps = noted(monkeypatch, algo, "interact", lambda agent, *rest: agent.eps.item())
    algo.train(quick(algo, num_envs=4, eps_steps=50, eps_end=0.1, total_steps=100))
    close(eps, [max(0.1, 1 - 0.9 * t / 50) for t in range(0, 100, 4)])
    assert [float(row["eps"]) for row in rows()] == pytest.approx([eps[14], eps[24]])


@pytest.mark.parametrize("algo,buffer", [(dqn_per, "PrioritizedBuffer"), (rainbow, "NStepBuffer")])
def test_beta_follows_the_steps(algo, buffer, monkeypatch):
    betas = noted(monkeypatch, getattr(algo, buffer), "sample", lambda *args: args[-1])
    algo.train(quick(algo, num_envs=4, total_steps=100, update_every=4))
    assert betas == pytest.approx([0.4 + 0.6 * t / 100 for t in range(40, 100, 4)])
    assert [float(row["beta"]) for row in rows()] == pytest.approx([betas[4], betas[14]])
