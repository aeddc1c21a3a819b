"""algos/crossq.py, where it is not algos/sac.py: batch renormalisation, one pass for both."""
import numpy as np
import pytest
import torch
from torch.nn.functional import batch_norm

from algos import crossq
from tests import offpolicy
from tests.algos.test_contract import build
from tests.helpers import bare, close, refused
from tests.offpolicy import fits, flat, make_batch, noise_is
from tests.registry import config
from utils import mpi

EPS = 1e-3


def make_agent(algo=crossq, **settings):
    """Return an agent whose running statistics are those of no batch."""
    agent = offpolicy.make_agent(algo, **{"critic_hidden": (12, 8)} | settings)
    for norm in norms(agent):
        norm.mean += 0.3 * torch.randn_like(norm.mean)
        norm.var *= 0.5 + torch.rand_like(norm.var)
    return agent


def norms(net):
    return [each for each in net.modules() if type(each).__name__ == "BatchRenorm"]


def stats(net):
    return [x.clone() for norm in norms(net) for x in (norm.mean, norm.var, norm.count)]


def plain(net, x, train):
    """The same network by a library: batch normalisation, linear, ReLU, ..., linear."""
    for k, (norm, layer) in enumerate(zip(norms(net), net.layers, strict=True)):
        x = x.relu() if k else x
        running = (None, None) if train else (norm.mean.clone(), norm.var.clone())
        x = layer(batch_norm(x, *running, norm.scale, norm.shift, training=train, eps=EPS))
    return x


def make_norm(width=4, warm_up=0):
    torch.manual_seed(0)
    norm = bare(crossq).BatchRenorm(width, warm_up).double()
    norm.scale.data.uniform_(0.5, 2), norm.shift.data.normal_()
    return norm


def renorm(x, norm):
    """r, d and y in NumPy."""
    x, mean, var, scale, shift = (t.detach().numpy().copy() for t in (
        x, norm.mean, norm.var, norm.scale, norm.shift))
    batch_mean, batch_std, std = x.mean(0), np.sqrt(x.var(0) + EPS), np.sqrt(var + EPS)
    r, d = np.clip(batch_std / std, 1 / 3, 3), np.clip((batch_mean - mean) / std, -5, 5)
    return r, d, scale * ((x - batch_mean) / batch_std * r + d) + shift


# ---- Batch renormalisation

def test_after_it_r_and_d_are_clipped_and_constants_to_the_gradient():
    """Units 0 and 1 are within the bounds, 2 and 3 above both, 4 and 5 below both."""
    norm = make_norm(width=6)
    norm.mean.copy_(torch.tensor([0.2, -0.3, -20, -30, 20, 30]))
    norm.var.copy_(torch.tensor([0.8, 1.5, 0.04, 0.02, 20, 40]))
    x = torch.randn(64, 6).double().requires_grad_()
    r, d, expected = renorm(x, norm)
    assert (r[2:4] == 3).all() and (r[4:] == 1 / 3).all() and (np.abs(d[2:4]) == 5).all()
    assert (np.abs(r[:2] - 1) < 0.5).all() and (0.1 < np.abs(d[:2])).all() and (d[4:] < -4).all()
    plain_y = (x - norm.mean) / (norm.var + EPS).sqrt()         # unless clipped, both are the same
    close(expected[:, :2], norm.scale[:2] * plain_y[:, :2] + norm.shift[:2], rtol=1e-9)
    out = torch.randn(64, 6).double()
    fixed = [norm.scale * torch.as_tensor(r), norm.scale * torch.as_tensor(d) + norm.shift]
    theirs = batch_norm(x, None, None, *fixed, training=True, eps=EPS)
    ours = norm(x, train=True)
    close(ours, expected, rtol=1e-9)
    close(torch.autograd.grad(ours, x, out)[0], torch.autograd.grad(theirs, x, out)[0], rtol=1e-8)


def test_running_statistics_are_weighted_means_of_the_batches_and_end_the_warm_up():
    """The batch after the first three meets r and d, by the statistics before it."""
    norm, mean, var = make_norm(warm_up=3), np.zeros(4), np.ones(4)
    for count in range(6):
        x = (1 + count + (2 + count) * torch.randn(8, 4)).double()
        *_, expected = renorm(x, norm)
        warm = batch_norm(x, None, None, norm.scale, norm.shift, training=True, eps=EPS)
        close(norm(x, train=True), expected if count >= 3 else warm, rtol=1e-9)
        mean = 0.99 * mean + 0.01 * x.numpy().mean(0)
        var = 0.99 * var + 0.01 * x.numpy().var(0)
    close(norm.mean, mean, rtol=1e-9)
    close(norm.var, var, rtol=1e-9)
    assert norm.state_dict()["count"] == 6                      # so a checkpoint has it
    theirs = batch_norm(x, norm.mean, norm.var, norm.scale, norm.shift, eps=EPS)
    close(norm(x, train=False), theirs, rtol=1e-9)
    close(norm.mean, mean, rtol=1e-9)
    assert norm.count == 6
    assert norm(x[:1], train=True).isfinite().all()             # a batch of one


# ---- The losses

@pytest.mark.parametrize("train", [False, True])
def test_networks_normalise_their_input_and_each_hidden_layer(train):
    agent, x = make_agent(hidden=(7, 6, 5)), torch.randn(9, 5)
    close(agent.actor(x[:, :3], train), plain(agent.actor, x[:, :3], train), rtol=1e-4, atol=1e-5)
    for net, q in zip((agent.critic.q1, agent.critic.q2), agent.critic(x[:, :3], x[:, 3:], train)):
        close(q, plain(net, x, train)[:, 0], rtol=1e-4, atol=1e-5)
    widths = [[len(norm.mean) for norm in norms(net)] for net in (agent.actor, agent.critic.q1)]
    assert widths == [[3, 7, 6, 5], [5, 12, 8]]
    assert {norm.warm_up for norm in norms(make_agent(warm_up=7))} == {7}
    close(agent.critic(x[:, :3], x[:, 3:])[0], agent.critic(x[:, :3], x[:, 3:], train=False)[0])


def test_critics_see_both_halves_in_one_batch_and_learn_from_the_first():
    """Against two batches of B rows, and against running statistics, Q differs clearly."""
    agent, batch, eps = make_agent(gamma=0.9), make_batch(crossq), torch.randn(32, 2)
    agent.log_alpha.data.fill_(-0.5)
    critic, before = agent.critic, stats(agent.actor)
    with noise_is(eps):                                         # a' by the running statistics
        out = plain(agent.actor, batch.next_obs, train=False).detach()
        next_act, next_logp = crossq.sample_squashed_gaussian(out)
    rows, next_rows = torch.cat([batch.obs, batch.act], 1), torch.cat([batch.next_obs, next_act], 1)
    both = [plain(net, torch.cat([rows, next_rows]), True)[:, 0] for net in (critic.q1, critic.q2)]
    apart = plain(critic.q1, rows, True)[:, 0]
    q1, q2 = (q[:32] for q in both)
    val = torch.min(both[0][32:], both[1][32:]).detach() - np.exp(-0.5) * next_logp
    target = batch.rew + 0.9 * (1 - batch.terminated) * val
    loss = (q1 - target).square().mean() + (q2 - target).square().mean()
    with noise_is(eps):
        metrics = fits(critic, loss, crossq.critic_loss, agent, batch, rtol=1e-3)
    close(metrics["critic_loss"], loss, rtol=1e-4)
    close(metrics["q1"], q1, rtol=1e-4, atol=1e-5)
    close(metrics["q2"], q2, rtol=1e-4, atol=1e-5)
    assert (apart - q1).abs().mean() > 0.01
    assert (plain(critic.q1, rows, False)[:, 0] - q1).abs().mean() > 0.01
    mean = torch.cat([rows, next_rows]).mean(0)                 # the statistics are those of both
    fresh = make_agent(gamma=0.9)                               # of before
    for net in ("q1", "q2"):
        first, old = (norms(getattr(each.critic, net))[0] for each in (agent, fresh))
        close(first.mean, 0.99 * old.mean + 0.01 * mean)
        assert first.count == 1
    assert all(map(torch.equal, before, stats(agent.actor)))


def test_actor_is_normalised_by_its_batch_and_the_critics_are_not():
    agent, batch, eps = make_agent(), make_batch(crossq), torch.randn(32, 2)
    agent.log_alpha.data.fill_(-0.5)
    before, critics = stats(agent.actor), stats(agent.critic)
    with noise_is(eps):
        act, logp = crossq.sample_squashed_gaussian(plain(agent.actor, batch.obs, train=True))
    rows = torch.cat([batch.obs, act], 1)
    q1, q2 = (plain(net, rows, False)[:, 0] for net in (agent.critic.q1, agent.critic.q2))
    loss = (np.exp(-0.5) * logp - torch.min(q1, q2)).mean()
    with noise_is(eps):
        metrics = fits(agent.actor, loss, crossq.actor_loss, agent, batch, rtol=1e-3)
    close(metrics["actor_loss"], loss, rtol=1e-4)
    close(metrics["logp"], logp.detach(), rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, critics, stats(agent.critic)))
    assert not any(map(torch.equal, before, stats(agent.actor)))
    now = stats(agent)
    agent.act(batch.obs), agent.act(batch.obs, deterministic=True)
    agent.predict(np.zeros(3, np.float32))
    assert all(map(torch.equal, now, stats(agent)))             # acting moves nothing
    best = plain(agent.actor, batch.obs, train=False).chunk(2, -1)[0].tanh()
    close(agent.act(batch.obs, deterministic=True), best, rtol=1e-4, atol=1e-5)


# ---- update

@pytest.mark.parametrize("learn_alpha", [True, False])
def test_every_third_update_moves_the_actor_and_alpha(learn_alpha):
    agent, batch = make_agent(learn_alpha=learn_alpha, alpha=0.3), make_batch(crossq)
    assert crossq.Config().policy_delay == 3
    optimizers = offpolicy.make_optimizers(agent)
    for count in range(7):
        parts = agent.critic, agent.actor, agent.log_alpha
        before, log_alpha = [flat(part) for part in parts], agent.log_alpha.item()
        metrics = crossq.update(agent, *optimizers.values(), batch, count)
        still = [torch.equal(old, flat(part)) for old, part in zip(before, parts)]
        due = count in (2, 5)
        assert still == [False, not due, not (due and learn_alpha)]
        assert ("actor_loss" in metrics, "alpha" in metrics) == (due, due and learn_alpha)
        if due and learn_alpha:
            close(metrics["alpha_loss"],
                  -log_alpha * (metrics["logp"].mean() + agent.target_entropy))
    assert learn_alpha or agent.alpha() == torch.tensor(0.3)
    counts = [norms(net)[0].count for net in (agent.critic.q1, agent.critic.q2, agent.actor)]
    assert counts == [7, 7, 2]


def test_adam_of_critics_and_actor_forgets_half():
    """That of alpha keeps its own beta."""
    made = build("crossq", config("crossq"))
    assert [made[key].beta1 for key in ("critic", "actor", "alpha")] == [0.5, 0.5, 0.9]


def test_several_processes_are_refused(monkeypatch):
    assert refused(lambda: crossq.Config(num_procs=2)).startswith("--num-procs is 2; it takes 1")
    cfg = config("crossq")
    for name in ("launched", "size"):
        monkeypatch.setattr(mpi, name, lambda: 3)               # by mpiexec
    assert refused(lambda: crossq.train(cfg)).startswith("--num-procs is 3")
