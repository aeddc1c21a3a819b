"""algos/gail.py, where it is not algos/ppo.py: the discriminator, its inputs and the reward."""
import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from algos import gail, ppo
from tests import onpolicy
from diagnose.envs import Probe
from tests.envs import HIGH, LOW
from tests.helpers import (
    bare, close, copies, gradients, make_demos, moved, noted, rows, same, vec, write_demos)
from tests.onpolicy import SPACES, Descent, Still, make_config, parameters
from utils.optim import Adam

make_agent = partial(onpolicy.make_agent, gail)
make_rollout = partial(onpolicy.make_rollout, gail)
every_kind = pytest.mark.parametrize("kind", ["box", "discrete"])


def played(agent, rollout):
    """Return what the discriminator should see of a rollout, computed here."""
    sees, act = (rollout.obs.flatten(0, 1) - 3) / 2, rollout.act.flatten(0, 1)
    if agent.discrete:
        return gail.Pairs(sees, torch.eye(4)[act])
    return gail.Pairs(sees, act.tanh())


# ---- Equations

def loss_of(expert_logit, policy_logit):
    """Call `disc_loss` with these logits."""
    agent = SimpleNamespace(disc_logit=lambda pairs: pairs)
    loss, loss_of.metrics = bare(gail).disc_loss(agent, expert_logit, policy_logit)
    return loss


def test_discriminator_loss_by_hand():
    """D is 3/4 and 1/4 on the expert's pairs; 1/2, 4/5 and 1/2 on the policy's."""
    loss, by_expert, by_policy = gradients(
        loss_of, vec(math.log(3), -math.log(3)), vec(0, math.log(4), 0))
    close(loss_of.metrics["d_expert"], 1 / 2)
    close(loss_of.metrics["d_policy"], 3 / 5)
    close(loss, (math.log(4 / 3) + math.log(4)) / 2 + (2 * math.log(2) + math.log(5)) / 3)
    close(by_expert, vec(-1 / 8, -3 / 8))                       # (D - 1) / 2
    close(by_policy, vec(1 / 6, 4 / 15, 1 / 6))                 # D / 3
    for logit in (vec(-200), vec(200)):                         # where it is sure
        assert all(x.isfinite().all() for x in gradients(loss_of, logit, logit))


def test_imitation_reward_by_hand():
    logit = vec(0, math.log(3), -math.log(3), 200, -200)
    close(gail.imitation_reward(logit, True),
          vec(math.log(2), math.log(4), math.log(4 / 3), 200, 0))
    close(gail.imitation_reward(logit, False),
          vec(math.log(1 / 2), math.log(3 / 4), math.log(1 / 4), 0, -200))


# ---- What the discriminator sees

def test_an_action_of_a_single_value_is_a_number_too():
    for dtype in np.float32, np.float64:                        # 0.1 is one value of its own
        agent = gail.Agent(SPACES["box"][0], Box(np.array([0.1, 0]), np.array([0.1, 0.5]), (2,),
                                                 dtype), make_config(gail))
        close(agent.pairs(torch.zeros(1, *agent.obs_shape), vec((0.1, 0.375))).act, vec((-1, 0.5)))


@every_kind
def test_the_discriminator_heeds_observations_and_actions(kind):
    agent = make_agent(kind)
    pairs = played(agent, make_rollout(agent))
    for part in ("obs", "act"):
        other = replace(pairs, **{part: getattr(pairs, part).flip(0)})
        assert not torch.equal(agent.disc_logit(other), agent.disc_logit(pairs))


def row_numbers(pairs, every):
    """Return which rows of `every` the pairs are; each must be one of them, as a whole."""
    def flat(x):
        return torch.cat([x.obs.flatten(1), x.act], 1)

    near = (flat(pairs)[:, None] - flat(every)).abs().amax(-1)
    assert (near.amin(1) < 1e-5).all()
    return near.argmin(1).tolist()


@every_kind
def test_each_gradient_step_sees_pairs_of_both_prepared_alike(kind, monkeypatch):
    """The expert's are drawn from the whole file, which is longer than the rollout's 24 steps."""
    agent = make_agent(kind, minibatch_size=8)
    calls = noted(monkeypatch, gail, "disc_loss", lambda agent, *pairs: pairs)
    rollout, demos = make_rollout(agent), make_demos(kind)
    disc_opt = Adam(agent.disc)
    for _ in range(20):
        gail.update_disc(agent, disc_opt, rollout, demos)
    sees = gail.Pairs((demos.obs - 3) / 2,
                      2 * (demos.act - vec(*LOW)) / (vec(*HIGH) - vec(*LOW)) - 1
                      if kind == "box" else torch.eye(4)[demos.act])
    assert len(calls) == 20 * 3
    shown = [row_numbers(expert, sees) for expert, _ in calls]
    done = [row_numbers(policy, played(agent, rollout)) for _, policy in calls]
    assert {len(idx) for idx in (*shown, *done)} == {8}
    assert {i for idx in shown for i in idx} == set(range(40))
    for epoch in range(20):
        assert sorted(sum(done[3 * epoch:3 * epoch + 3], [])) == list(range(24))
    assert done[:3] != done[3:6]


# ---- The reward

@every_kind
@pytest.mark.parametrize("positive", [True, False])
def test_the_reward_is_that_of_the_trained_discriminator_at_every_step(kind, positive):
    agent = make_agent(kind, minibatch_size=8, positive_rew=positive)
    rollout = make_rollout(agent)
    before = copies(agent)
    learned, metrics = gail.update_disc(agent, Adam(agent.disc), rollout, make_demos(kind))
    with torch.no_grad():
        share = agent.disc_logit(played(agent, rollout)).sigmoid().view_as(rollout.rew)
    expected = -torch.log(1 - share) if positive else torch.log(share)
    close(learned.rew, expected, rtol=1e-4)
    close(metrics["imit_rew"], expected.flatten(), rtol=1e-4)
    assert learned.rew.std() > 0
    assert all(name.startswith("disc.") for name in moved(before, agent))
    assert len(moved(before, agent)) == len(list(agent.disc.parameters()))
    for name, kept in vars(rollout).items():
        assert name == "rew" or getattr(learned, name) is kept
    assert not any(x.requires_grad for x in (learned.rew, *metrics.values()))


def test_the_discriminator_has_the_hidden_layers_of_the_settings():
    """And PyTorch's initial weights, which are not orthogonal."""
    disc = make_agent(hidden=(7, 5)).disc
    assert [layer.out_features for layer in disc[::2]] == [7, 5, 1]
    weight = gail.Agent(*SPACES["box"], make_config(gail)).disc[2].weight
    assert weight.abs().max() <= 1 / math.sqrt(8) and (weight @ weight.T).trace() < 8


def test_the_discriminator_has_its_own_learning_rate_and_no_gradient_is_clipped():
    """A plain step down it shows its length, which Adam's does not."""
    steps = []
    for bound, disc_lr in ((0.5, 1.0), (1e-9, 1.0), (0.5, 0.1)):
        agent = make_agent(max_grad_norm=bound, disc_lr=disc_lr)
        before = parameters(agent.disc)
        gail.update_disc(agent, Descent(agent.disc), make_rollout(agent), make_demos())
        steps.append(parameters(agent.disc) - before)
    assert torch.equal(*steps[:2])
    close(steps[2], 0.1 * steps[0], rtol=1e-3)


@every_kind
def test_with_a_constant_discriminator_it_is_ppo_with_a_constant_reward(kind):
    """To the bit, through two updates, whatever the environment pays."""
    idle = []

    def imitated(agent, rollout):
        if not idle:
            idle.append(Still(agent.disc))
        for param in agent.disc.parameters():
            param.data.zero_()
        return gail.update_disc(agent, *idle, rollout, make_demos(kind))[0]

    def equal(agent, rollout):
        return replace(rollout, rew=torch.full_like(rollout.rew, math.log(2)))

    ours, theirs = (onpolicy.two_updates(*args) for args in (
        (gail, kind, imitated), (ppo, kind, equal)))
    state = {k: v for k, v in ours.state_dict().items() if not k.startswith("disc.")}
    assert same(state, dict(theirs.state_dict())) and same(ours.reward_sum, theirs.reward_sum)


# ---- Whole runs

def test_the_rewards_of_the_environment_are_never_learned_from():
    """A million times as large, they change what is logged, and nothing else."""
    states = []
    for factor in (1.0, 1e6):
        settings = {"env": "CartPole-v1", "factor": factor}
        agent = gail.train(make_config(gail, env="tasks:Scaled-v0", total_steps=96,
                                       env_kwargs=json.dumps(settings), run_dir=f"{factor}"))
        states.append((agent.state_dict(), [row["ep_len"] for row in rows(f"{factor}",
                                                                           "episodes.csv")]))
    assert same(*states)
    returns = [float(row["ep_ret"]) for row in rows("1000000.0", "episodes.csv")]
    assert returns == [1e6 * float(length) for length in states[0][1]] and returns


@pytest.mark.slow
@pytest.mark.parametrize("box", [False, True])
def test_it_learns_what_the_expert_does_though_it_is_paid_for_the_opposite(box):
    """The environment pays for 1 after -1 and for 3 after 1; the expert does it the other way."""
    rng = np.random.default_rng(0)
    obs = np.float32(rng.choice([-1, 1], (40, 1)))
    spread = 0.3 * rng.normal(size=40) if box else 0    # of an expert that is not deterministic
    act = np.array([Probe.right(-row) for row in obs]) + spread
    kwargs = {"env": "diagnose.envs:ProbePolicy-v0", "env_kwargs": json.dumps({"box": box})}
    write_demos(lengths=40 * (1,), obs=obs, act=np.float32(act)[:, None] if box else act, **kwargs)
    agent = gail.train(gail.Config(
        **kwargs, demos="demos.npz", subsample=1, total_steps=8192, rollout_steps=256, num_envs=8,
        minibatch_size=64, epochs=4, lr=5e-3, gamma=0.5, hidden=(32,), disc_lr=1e-2,
        device="cpu", run_dir="run"))
    acts = [float(np.squeeze(agent.predict(np.float32([seen])))) for seen in (-1, 1)]
    assert np.allclose(acts, [3, 1], atol=0.5 if box else 0)
