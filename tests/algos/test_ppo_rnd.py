"""algos/ppo_rnd.py, where it is not algos/ppo.py: novelty, its stream, and who learns what."""
import copy
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch

from algos import ppo, ppo_rnd
from tests import onpolicy
from tests.helpers import bare, close, column, copies, moved, noted, vec
from tests.onpolicy import SPACES, every_kind, rows_of
from utils.nets import ImageEncoder
from utils.optim import Adam

make_agent = partial(onpolicy.make_agent, ppo_rnd)
make_rollout = partial(onpolicy.make_rollout, ppo_rnd)
targets = partial(onpolicy.targets, ppo_rnd)
learn = partial(onpolicy.spied, ppo_rnd, "rnd_loss")


def plain(rollout):
    """Return a rollout as `collect` does, without what `add_intrinsic` adds."""
    return ppo_rnd.Rollout(*(getattr(rollout, each.name) for each in fields(ppo_rnd.Rollout)))


# ---- Novelty, and the stream of rewards for it

def test_novelty_by_hand():
    """The mean over features of squared differences, and its gradient is the predictor's alone."""
    agent = ppo_rnd.Agent(*SPACES["box"], onpolicy.make_config(ppo_rnd, hidden=(2,)))
    for net, bias in ((agent.predictor, (1, 3)), (agent.target, (0, 1))):
        for param in net.parameters():
            param.data.zero_()
        net[1][-1].bias.data = vec(*bias)
    close(agent.novelty(torch.randn(5, 3)), 5 * [2.5])          # (1 + 4) / 2
    loss, metrics = ppo_rnd.predictor_loss(agent, torch.randn(5, 3))
    loss.backward()
    close(loss.detach(), 2.5)
    close(metrics["pred_loss"], 2.5)
    close(agent.predictor[1][-1].bias.grad, [1, 2])
    assert {name.partition(".")[0] for name, param in agent.named_parameters()
            if param.grad is not None} == {"predictor"}


def test_the_predictor_is_deeper_than_its_target_and_starts_elsewhere():
    agent = ppo_rnd.Agent(*SPACES["box"], ppo_rnd.Config())
    assert [layer.out_features for layer in agent.target[1][::2]] == 3 * [64]
    assert [layer.out_features for layer in agent.predictor[1][::2]] == 4 * [64]
    obs = agent.novelty_inputs(torch.randn(50, 3))
    assert agent.novelty(obs).mean() > 0.1


@every_kind
def test_networks_see_inputs_normalised_by_statistics_of_their_own_up_to_5(kind):
    agent = make_agent(kind)
    agent.novelty_stats.mean.fill_(2), agent.novelty_stats.var.fill_(16)
    raw = make_rollout(agent).next_obs.flatten(0, 1)
    raw[0] = 255
    wanted = ((raw.double() - 2) / 4).clamp(-5, 5).float()
    assert wanted.max() == 5
    for net in (agent.target, agent.predictor):
        found = net(agent.novelty_inputs(raw))
        if kind == "images":                                    # without its division by 255
            assert type(net[0]) is ImageEncoder
            features = torch.nn.Sequential(*net[0])(wanted.movedim(-1, 1))
            close(found, net[1](features), rtol=1e-3, atol=1e-3)
        else:
            close(found, net[1](wanted))


@every_kind
def test_intrinsic_rewards_by_numpy(kind):
    """In three rollouts. Statistics are of all successors so far, also before the first reward."""
    agent = make_agent(kind, int_gamma=0.9)
    seen, sums, last = [], [], 0.0
    for part in (agent.novelty_stats, agent.int_sum_stats):
        assert part.count == 0
    for seed in range(3):
        rollout = make_rollout(agent, seed)
        seen.append(rollout.next_obs.flatten(0, 1).double())
        acted = rollout.last_obs[0].numpy().copy()
        found = agent.add_intrinsic(plain(rollout), acted)
        rows = torch.cat(seen)
        std = torch.sqrt(rows.var(0, correction=0) + 1e-8)
        inputs = ((seen[-1] - rows.mean(0)) / std).clamp(-5, 5).float()
        with torch.no_grad():
            inputs = inputs * 255 if kind == "images" else inputs
            novelty = (agent.predictor(inputs) - agent.target(inputs)).square().mean(-1)
        novelty = novelty.view_as(rollout.rew).numpy()
        assert rollout.done.sum() > 2                           # which cuts nothing
        running = np.full(3, last)
        for row in novelty:
            running = row + 0.9 * running
            sums.append(running)
        last = running.mean()
        close(found.int_rew, novelty / np.std(sums), rtol=1e-3, atol=1e-5)
        assert found.int_rew.min() > 0 and not found.int_rew.requires_grad
        assert torch.equal(found.last_obs, rollout.last_obs)
        acted += 1                                              # the environment may write there
        assert torch.equal(found.last_obs, rollout.last_obs)
        for name, value in vars(plain(rollout)).items():
            assert torch.equal(getattr(found, name), value)


@every_kind
@pytest.mark.parametrize("gamma,lam", [(0.9, 0.8), (0.99, 1.0), (0.5, 0.0)])
def test_intrinsic_targets_are_the_double_sum_over_all_ends(kind, gamma, lam):
    """The next value is that of the next observation that is acted on, also in a new episode.

    Here all environments begin one after the last step.
    """
    agent = make_agent(kind, int_gamma=gamma, gamma=0.3, lam=lam)
    rollout = make_rollout(agent)
    rollout.done[-1] = 1
    rollout = replace(rollout, last_obs=rollout.last_obs.flip(1))
    steps, envs = rollout.rew.shape
    acted = torch.cat([rollout.obs, rollout.last_obs])          # [T + 1, N, ...]
    with torch.no_grad():
        inputs = agent.normalize_obs(acted.flatten(0, 1))
        val = agent.int_value(agent.encoder(inputs)).view(steps + 1, envs)
    adv = torch.zeros(steps, envs)
    for t in range(steps):
        for k in range(t, steps):
            delta = rollout.int_rew[k] + gamma * val[k + 1] - val[k]
            adv[t] += (gamma * lam) ** (k - t) * delta
    assert rollout.done.sum() > 2 and rollout.terminated.sum() > 0
    obs = agent.normalize_obs(rollout.obs).flatten(0, 1)
    found = ppo_rnd.intrinsic_targets(agent, rollout, obs)
    close(found[0], adv, rtol=1e-4, atol=1e-4)
    close(found[1], adv + val[:-1], rtol=1e-4, atol=1e-4)


# ---- What an update does

@every_kind
@pytest.mark.parametrize("anew", [True, False])
def test_advantages_are_weighted_sums_and_targets_are_apart(kind, anew):
    agent = make_agent(kind, epochs=3, norm_adv=False, gamma=0.9, lam=0.8, ext_coef=3.0,
                       int_coef=0.5, recompute_adv=anew)
    rollout, before = make_rollout(agent), copy.deepcopy(agent)
    calls, _, metrics = learn(agent, rollout, lr=1e-2)
    assert len(calls) == 3
    for call in calls:
        order = rows_of(call, agent, rollout)
        then = call.agent if anew else before                   # at the start of the epoch
        adv, ret = targets(then, rollout)
        obs = agent.normalize_obs(rollout.obs).flatten(0, 1)
        int_adv, int_ret = map(torch.flatten, ppo_rnd.intrinsic_targets(then, rollout, obs))
        close(call.adv, (3 * adv + 0.5 * int_adv)[order], rtol=1e-4, atol=1e-4)
        close(call.ret, ret[order], rtol=1e-4, atol=1e-4)
        close(call.int_ret, int_ret[order], rtol=1e-4, atol=1e-4)
        assert not (call.adv.requires_grad or call.int_ret.requires_grad)
    assert torch.equal(metrics["int_rew"], rollout.int_rew)
    still = {"target", "predictor", "novelty_stats", "int_sum_stats", "int_sum"}
    assert not still & {name.partition(".")[0] for name in moved(copies(before), agent)}


@pytest.mark.parametrize("kind", ["box", "discrete"])
def test_without_intrinsic_advantages_it_is_ppo(kind):
    """Actor and critic. Only the intrinsic critic learns besides."""
    shared = {"epochs": 2, "minibatch_size": 8, "max_grad_norm": 0.0, "ent_coef": 0.01}
    agent = make_agent(kind, ext_coef=1.0, int_coef=0.0, **shared)
    rollout = make_rollout(agent)
    parent = onpolicy.make_agent(ppo, kind, **shared)
    own = agent.state_dict()
    parent.load_state_dict({name: own[name] for name in parent.state_dict()})
    before = copies(parent)
    theirs = ppo.Rollout(**vars(plain(rollout)))
    for algo, learner, data in ((ppo_rnd, agent, rollout), (ppo, parent, theirs)):
        torch.manual_seed(0)
        onpolicy.learn(algo, learner, data, lr=1e-2)
    assert len(moved(before, parent)) > 5
    for name, value in parent.state_dict().items():
        close(agent.state_dict()[name], value, atol=1e-7)       # where weights lie rounds them


def test_the_losses_of_both_critics_count_alike():
    agent = onpolicy.tiny_agent(ppo_rnd, val=2, hidden=(1,), vf_coef=0.5, ent_coef=0.0)
    agent.int_critic[-1].bias.data.fill_(7)
    batch = ppo_rnd.Minibatch(obs=vec((3,), (4,)), act=vec((0,), (0,)), logp_old=vec(0, 0),
                              adv=vec(0, 0), ret=vec(5, 1), int_ret=vec(7, 3))
    loss, metrics = ppo_rnd.rnd_loss(agent, batch)
    loss.backward()
    close(metrics["v_loss"], 5)                                 # (9 + 1) / 2
    close(metrics["int_v_loss"], 8)                             # (0 + 16) / 2
    close(loss.detach(), 0.5 * 13)
    close(agent.critic[-1].bias.grad, [-1])                     # 0.5 mean of 2 (V - R)
    close(agent.int_critic[-1].bias.grad, [2])
    assert all(param.grad is None for param in agent.predictor.parameters())
    with pytest.raises(AssertionError):
        plain_algo = bare(ppo_rnd)
        columns = vars(batch) | {"int_ret": column(7, 3)}
        plain_algo.rnd_loss(agent, plain_algo.Minibatch(**columns))


@every_kind
@pytest.mark.parametrize("share,count", [(1.0, 3), (0.5, 2), (0.01, 1)])
def test_the_predictor_learns_the_successors_alone_and_each_once(kind, share, count, monkeypatch):
    agent = make_agent(kind, minibatch_size=8, pred_share=share, pred_lr=1e-3)
    rollout = make_rollout(agent)
    agent.novelty_stats.mean.fill_(1), agent.novelty_stats.var.fill_(100)
    rows = agent.novelty_inputs(rollout.next_obs.flatten(0, 1)).flatten(1)
    given = noted(monkeypatch, ppo_rnd, "predictor_loss", lambda agent, inputs: inputs)
    before, optimizer = copies(agent), Adam(agent.predictor)
    metrics = ppo_rnd.update_predictor(agent, optimizer, rollout)
    equal = (torch.cat(given).flatten(1)[:, None] == rows).all(-1)
    assert [len(each) for each in given] == count * [8]
    assert (equal.sum(1) == 1).all() and len(set(equal.int().argmax(1).tolist())) == 8 * count
    assert moved(before, agent) == {name for name in before if name.startswith("predictor.")}
    assert metrics["pred_loss"].shape == metrics["pred_grad_norm"].shape == (count,)
    assert optimizer.steps == count
    first = equal.int().argmax(1).tolist()
    assert first != sorted(first)                               # in random order
