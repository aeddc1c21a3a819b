"""algos/acer.py: Retrace, truncated weights, the trust region, the average policy, the replay."""
import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from torch.nn.utils import parameters_to_vector as flat

from algos import acer
from tests import onpolicy
from tests.algos.test_contract import watch
from tests.helpers import agent_for, bare, close, copies, gradients, noted, refused, rows, same, vec
from tests.onpolicy import (
    SPACES, Descent, learn, losses, make_config, make_optimizers, make_rollout)

every_kind = pytest.mark.parametrize("kind", ["discrete", "images"])
SMALL = {"buffer_size": 72, "replay_ratio": 2, "ent_coef": 0.1}     # three rollouts of 24 steps


def config(**settings):
    return make_config(acer, **SMALL | settings)


def make_agent(kind="discrete", seed=0, **settings):
    """A small agent whose weights and statistics, the average included, are not the initial ones.

    Its logits and its Q differ from action to action, so that ratios are far from 1.
    """
    agent = onpolicy.make_agent(acer, kind, seed, **SMALL | settings)
    for net in (agent.actor, agent.policy_avg[1], agent.critic):
        weight = net[-1].weight.data
        weight += 1.4 * torch.randn_like(weight) / weight.shape[1]**0.5
    return agent


def old_rollout(agent, seed=0):
    """A random rollout of another policy, with the probabilities of that one."""
    other = make_agent("images" if agent.obs_stats.image else "discrete", seed=seed + 7, **{
        name: getattr(agent.cfg, name) for name in ("num_envs", "rollout_steps")})
    return make_rollout(acer, other, seed)


def trained(agent):
    return [param for param in agent.parameters() if param.requires_grad]


def outputs(agent, raw_obs):
    """The policy as a distribution, Q, and the average policy, at raw observations [B, ...]."""
    obs = agent.normalize_obs(raw_obs)
    with torch.no_grad():
        policy = Categorical(logits=agent.actor(agent.encoder(obs)))
        q, average = agent.critic(agent.encoder(obs)), agent.policy_avg(obs)
    return policy, q, Categorical(logits=average)


def targets(agent, rollout):
    """Q(s_t, a_t), R_t and V(s_t), [T, N], by the definition of Retrace (Munos et al. 2016, eq. 4):

    Q + sum_s gamma^(s-t) c_(t+1) .. c_s delta_s for every t.
    """
    steps, envs = rollout.rew.shape
    policy, q, _ = outputs(agent, rollout.obs.flatten(0, 1))
    after, next_q, _ = outputs(agent, rollout.next_obs.flatten(0, 1))
    val, next_val = ((each.probs * value).sum(-1).view(steps, envs).double()
                     for each, value in ((policy, q), (after, next_q)))
    at = rollout.act.flatten()
    mu = rollout.log_mu.flatten(0, 1).exp()[range(steps * envs), at]
    rho = (policy.probs[range(steps * envs), at] / mu).view(steps, envs).double()
    q = q[range(steps * envs), at].view(steps, envs).double()
    rew = rollout.rew.double()
    if agent.cfg.scale_rew:
        rew = (rew / agent.reward_sum_stats.var.sqrt()).clamp(-10, 10)
    ret, gamma = q.clone(), agent.cfg.gamma
    for t, n in np.ndindex(steps, envs):
        weight = 1.0
        for s in range(t, steps):
            if s > t:
                weight *= gamma * agent.cfg.lam * min(1.0, rho[s, n])
            tail = 0.0 if rollout.terminated[s, n] else gamma * next_val[s, n]
            ret[t, n] += weight * (rew[s, n] + tail - q[s, n])
            if rollout.done[s, n]:
                break
    return q.float(), ret.float(), val.float()


# ---- Retrace and the loss

def test_infinite_and_vanishing_ratios_give_finite_weights():
    policy = Categorical(logits=vec((0, -200, -300)))
    ratio = torch.tensor([[torch.inf, 0, 0]])
    for act in range(3):
        got = acer.policy_gradient(policy, vec((1, 2, 3)), ratio, torch.tensor([act]), vec(4), 10.0)
        assert got.isfinite().all()


def q_batch(agent, rollout):
    """What `update` makes of a rollout."""
    with torch.no_grad():
        _, ret, _ = targets(agent, rollout)
    return acer.Batch(agent.normalize_obs(rollout.obs).flatten(0, 1), rollout.act.flatten(),
                      rollout.log_mu.flatten(0, 1), ret.flatten())


@every_kind
def test_the_whole_direction_from_distributions(kind):
    """u, g, k and z, sample by sample, from PyTorch's distributions and autograd.

    Q is large, for nothing is clipped, and the average policy has its own encoder of images.
    """
    agent = make_agent(kind, max_slope=0.03, max_ratio=0.8, vf_coef=0.0, ent_coef=0.1)
    agent.critic[-1].weight.data *= 10
    rollout = old_rollout(agent)
    batch, logits = q_batch(agent, rollout), []
    agent.actor.register_forward_hook(lambda _, args, out: logits.append(out))
    loss, metrics = acer.acer_loss(agent, batch)
    z = -len(batch.act) * torch.autograd.grad(loss, logits[0])[0]  # the loss's is -z / B
    policy, q, average = outputs(agent, rollout.obs.flatten(0, 1))
    mu, c, over = batch.log_mu.exp(), 0.8, []
    for i in range(len(z)):
        val = (policy.probs[i] * q[i]).sum()

        def gain(logits, i=i, val=val):
            logp, pi = Categorical(logits=logits), policy.probs[i]
            first = min(c, pi[batch.act[i]] / mu[i, batch.act[i]]) * logp.log_prob(batch.act[i])
            second = sum(pi[a] * max(0, 1 - c * mu[i, a] / pi[a]) * (q[i, a] - val)
                         * logp.log_prob(torch.tensor(a)) for a in range(4))
            return first * (batch.ret[i] - val) + second

        _, g = gradients(gain, policy.logits[i])
        _, k = gradients(lambda x, i=i: kl_divergence(
            Categorical(logits=average.logits[i]), Categorical(logits=x)), policy.logits[i])
        excess = max(0.0, float(k @ g) - 0.03)
        over.append(excess > 0)
        _, by_entropy = gradients(lambda x: Categorical(logits=x).entropy(), policy.logits[i])
        close(z[i], g - excess / (k @ k) * k + 0.1 * by_entropy, rtol=1e-3, atol=1e-3)
    assert 3 < sum(over) < 20 and q.abs().max() > 15
    close(metrics["projected"], np.mean(over))
    close(metrics["entropy"], policy.entropy().mean(), rtol=1e-4)
    close(metrics["kl_avg"], kl_divergence(average, policy).mean(), rtol=1e-3)
    ratio = (policy.log_prob(batch.act) - batch.log_mu[range(len(z)), batch.act]).exp()
    close(metrics["ratio"], ratio, rtol=1e-4)
    assert (ratio > c).sum() > 3 and (policy.probs / mu > c).any(-1).sum() > (ratio > c).sum()


def test_the_policy_gradient_refuses_columns():
    for at in range(5):
        args = [torch.ones(4, 3)] * 3 + [torch.zeros(4, dtype=torch.int64), torch.ones(4)]
        args[at] = args[at][:, :1] if at < 3 else args[at][:, None]
        args[0] = Categorical(args[0])
        with pytest.raises(AssertionError):
            bare(acer).policy_gradient(*args, 2.0)


# ---- The update

@every_kind
@pytest.mark.parametrize("lam", [1.0, 0.8])
def test_one_step_on_the_whole_batch_down_its_gradient(kind, lam, monkeypatch):
    """Its targets are those of the definition: V(s') is that of the true next observation.

    Its metrics are of the policy of now and the probabilities of then.
    """
    agent = make_agent(kind, max_grad_norm=0.0, lam=lam)
    rollout = old_rollout(agent)
    assert 0 < rollout.terminated.sum() < rollout.done.sum()
    expected, kept = q_batch(agent, rollout), rollout.log_mu.clone()
    q, ret, _ = targets(agent, rollout)
    policy, _, _ = outputs(agent, rollout.obs.flatten(0, 1))
    start = flat(trained(agent))
    calls = losses(monkeypatch, acer, "acer_loss")
    [optimizer] = make_optimizers(acer, agent, Descent)
    metrics = acer.update(agent, optimizer, rollout, 0.1)
    (batch,) = calls
    for name, value in vars(expected).items():
        close(getattr(batch, name), value, rtol=1e-4, atol=1e-5)
    assert not batch.ret.requires_grad
    close(start - flat(trained(agent)), 0.1 * optimizer.grad, rtol=1e-3)
    close(metrics["grad_norm"], optimizer.grad.norm())
    ratio = (policy.log_prob(batch.act) - kept.flatten(0, 1)[range(24), batch.act]).exp()
    assert (ratio - 1).abs().max() > 0.1
    close(metrics["ratio"], ratio, rtol=1e-4)
    close(metrics["q"], q, rtol=1e-4, atol=1e-5)
    share = 1 - np.var((ret - q).numpy()) / np.var(ret.numpy())
    close(metrics["explained_variance"], share, rtol=1e-3, atol=1e-4)
    assert torch.equal(rollout.log_mu, kept)


@every_kind
@pytest.mark.parametrize("tau", [0.0, 0.1, 1.0])
def test_the_average_begins_as_the_policy_and_follows_its_weights_after_the_step(kind, tau):
    fresh = acer.Agent(*SPACES[kind], config())
    assert torch.equal(flat(fresh.policy_avg.parameters()), flat(fresh.policy_net().parameters()))
    agent = make_agent(kind, tau=tau)
    old = flat(agent.policy_avg.parameters())
    before = flat(agent.policy_net().parameters())
    learn(acer, agent, old_rollout(agent), lr=0.1)
    new = flat(agent.policy_net().parameters())
    assert len(old) == len(new) and (new - before).abs().max() > 1e-3
    close(flat(agent.policy_avg.parameters()), old + tau * (new - old), rtol=1e-4, atol=1e-6)


# ---- The replay buffer, and whole runs

def test_the_buffer_keeps_the_latest_rollouts_and_draws_each_as_often():
    buffer, other = (acer.ReplayBuffer(80, SPACES["discrete"][0], torch.device(device))
                     for device in ("cpu", "meta"))             # for three rollouts of 24 steps
    columns = vars(make_rollout(acer, make_agent()))
    for number in range(5):                                     # of which all numbers are this one
        numbers = {name: torch.full_like(x, number) for name, x in columns.items()}
        buffer.add(acer.Rollout(**numbers))
        held = {int(buffer.sample().rew[0, 0]) for _ in range(60)}
        assert held == set(range(max(0, number - 2), number + 1))
    drawn = [int(buffer.sample().rew[0, 0]) for _ in range(3000)]
    assert all(abs(drawn.count(number) - 1000) < 120 for number in (2, 3, 4))
    for x in vars(buffer.sample()).values():
        assert len(x.unique()) == 1                             # all columns are of one rollout
    other.load_state_dict(buffer.state_dict())
    assert {x.device.type for x in vars(other.sample()).values()} == {"meta"}   # its own device


def watched(**settings):
    """Train. Return (rollout, metrics) of every update."""
    seen = watch("acer", config(env="CartPole-v1", run_dir="run", **settings))
    return [(phase.args["rollout"], phase.metrics) for phase in seen.updates]


def test_old_rollouts_are_replayed_as_they_were_collected(monkeypatch):
    """Raw, and with the probabilities of then. Ratios of a new one are 1, of old ones not."""
    acted = noted(monkeypatch, acer, "collect_with_policy", lambda agent, *_: copies(agent))
    seen = watched(total_steps=240, lr=0.05, seed=3)
    new, old, older = seen[::3], [each for i, each in enumerate(seen) if i % 3], 0
    assert len(new) == 10 and len(old) == 20
    for i, (rollout, metrics) in enumerate(new):
        assert (metrics["ratio"] - 1).abs().max() < 1e-5
        assert not rollout.log_mu.requires_grad                 # a buffer of graphs would grow
        agent = agent_for(acer, config(env="CartPole-v1"))
        agent.load_state_dict(acted[i])
        policy, _, _ = outputs(agent, rollout.obs.flatten(0, 1))
        close(rollout.log_mu.flatten(0, 1), policy.logits, rtol=1e-4, atol=1e-5)
        for replayed, _ in old[2 * i:2 * i + 2]:
            held = [each for each, _ in new[max(0, i - 2):i + 1]]
            assert any(same(vars(replayed), vars(each)) for each in held)
            older += not same(vars(replayed), vars(rollout))
    assert not all(same(vars(a), vars(b)) for (a, _), (b, _) in zip(old[::2], old[1::2]))
    assert older > 5 and max((metrics["ratio"] - 1).abs().max() for _, metrics in old) > 0.1
    obs = torch.cat([rollout.obs for rollout, _ in new]).flatten(0, 1)
    assert obs[0].abs().max() <= 0.05                           # raw: of CartPole's first state


def test_a_report_tells_new_and_replayed_rollouts_apart():
    seen = watched(total_steps=96, report_every=48)
    for row, updates in zip(rows("run"), (seen[:6], seen[6:]), strict=True):
        for name in ("q_loss", "entropy", "grad_norm", "explained_variance", "kl_avg", "projected"):
            for prefix, some in (("", updates[::3]), ("replayed_", updates[1::3] + updates[2::3])):
                mean = np.mean([float(metrics[name]) for _, metrics in some])
                assert float(row[prefix + name]) == pytest.approx(mean, rel=1e-5, abs=1e-7), name


# ---- More that went wrong unseen

@every_kind
def test_every_old_row_trains_critic_and_encoder_alike_however_unlikely_it_is_now(kind):
    """L_Q has no ratio, and vf_coef adds its whole gradient to the policy's in a shared encoder."""
    agents = [make_agent(kind, vf_coef=vf_coef) for vf_coef in (0.0, 0.5)]
    batch = q_batch(agents[0], old_rollout(agents[0]))
    grads = []
    for agent in agents:
        loss, metrics = acer.acer_loss(agent, batch)
        loss.backward()
        grads.append({name: param.grad for name, param in agent.named_parameters()})
    assert metrics["ratio"].min() < 0.7 and metrics["ratio"].max() > 1.2
    q = agents[1](batch.obs)[1][range(len(batch.act)), batch.act]
    loss = (q - batch.ret).square().mean()
    close(metrics["q_loss"], loss.detach(), rtol=1e-4)
    for part in ("encoder", "critic"):
        for name, param in getattr(agents[1], part).named_parameters():
            expected, = torch.autograd.grad(0.5 * loss, [param], retain_graph=True)
            name = f"{part}.{name}"
            close(grads[1][name] - grads[0][name], expected, rtol=1e-3, atol=1e-5)
            assert part == "critic" or grads[0][name].any()


def test_probabilities_that_underflow_are_ratios_of_1_where_pi_is_mu():
    """exp(-200) is 0 in float32, and 0 / 0 is no number."""
    for taken in (0, 1):
        agent = make_agent()
        agent.actor[-1].bias.data[1] -= 200
        rollout = vars(make_rollout(acer, agent))
        act = torch.full_like(rollout["act"], taken)
        _, metrics = learn(acer, agent, acer.Rollout(**rollout | {"act": act}), lr=0.0)
        close(metrics["ratio"], torch.ones(24), rtol=1e-3)
        assert all(x.isfinite().all() for x in metrics.values())
        assert flat(agent.parameters()).isfinite().all()


def test_the_buffer_tells_the_memory_of_obs_and_next_obs_and_refuses_one_without_end(capsys):
    acer.ReplayBuffer(64_000, gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), torch.device("cpu"))
    assert "64,000 transitions, 3.61 GB" in capsys.readouterr().out
    said = refused(acer.train, config(env="CartPole-v1", run_dir="run", buffer_size=10**9))
    assert said.startswith("--buffer-size") and "GB" in said
