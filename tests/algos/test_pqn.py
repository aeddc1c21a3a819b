"""algos/pqn.py, where it is not algos/dqn.py: lambda-returns, LayerNorm, passes over a rollout."""
import numpy as np
import torch
from gymnasium.spaces import Discrete
from hypothesis import given, settings as how, strategies as st
from torch import nn
from torch.nn.functional import layer_norm

from algos import pqn
from tests.helpers import VECTOR, bare, close, noted, shaken, vec
from tests.onpolicy import IMAGES, make_rollout
from utils.optim import Adam


def make_agent(space=VECTOR, **settings):
    torch.manual_seed(0)
    small = {"num_envs": 2, "rollout_steps": 12, "minibatch_size": 4, "hidden": (8, 8)}
    return shaken(pqn.Agent(space, Discrete(3), pqn.Config(**small | settings)))


# ---- The lambda-return

@how(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 9), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_lambda_return_is_a_mean_of_n_step_returns(steps, gamma, lam, seed):
    """Weighted by (1 - lam) lam^(n - 1); the last one, up to an end, has all that is left."""
    rng = np.random.default_rng(seed)
    rew, val = rng.normal(size=(2, steps))
    terminated, truncated = rng.random((2, steps)) < 0.2
    done = terminated | truncated
    expected = []
    for t in range(steps):
        last = next((k for k in range(t, steps) if done[k]), steps - 1)
        total, weight = 0.0, 1.0
        for k in range(t, last + 1):
            rewards = sum(gamma ** (j - t) * rew[j] for j in range(t, k + 1))
            n_step = rewards + gamma ** (k - t + 1) * (not terminated[k]) * val[k]
            share = weight if k == last else weight * (1 - lam)
            total, weight = total + share * n_step, weight * lam
        expected.append(total)
    tensors = [torch.as_tensor(x, dtype=torch.float64)[:, None] for x in (rew, val)]
    flags = [torch.as_tensor(x, dtype=torch.float64)[:, None] for x in (terminated, done)]
    ret = bare(pqn).lambda_return(*tensors, *flags, gamma, lam)
    np.testing.assert_allclose(ret[:, 0], expected, atol=1e-9)


def test_targets_take_the_best_action_in_the_successor_of_each_step():
    """Also where it is only in next_obs: at the end of an episode, and of the rollout."""
    agent = make_agent(gamma=0.9, lam=0.7)
    rollout = make_rollout(pqn, agent, seed=1)
    assert 0 < rollout.terminated.sum() < rollout.done.sum()
    with torch.no_grad():
        best = agent.critic(rollout.next_obs.flatten(0, 1)).max(-1)[0].view(6, 2)
    expected = pqn.lambda_return(rollout.rew, best, rollout.terminated, rollout.done, 0.9, 0.7)
    close(pqn.compute_targets(agent, rollout), expected)


# ---- The loss

def test_loss_by_hand_and_no_gradient_beside_the_action_taken():
    class Table(nn.Module):
        def forward(self, obs):
            return q

    agent = make_agent()
    agent.critic = Table()
    q = vec((1, 2, 3), (4, 5, 6)).requires_grad_()
    batch = pqn.Minibatch(torch.zeros(2, 3), torch.tensor([2, 0]), vec(1, 7))
    loss, metrics = pqn.pqn_loss(agent, batch)
    close(loss.detach(), ((3 - 1) ** 2 + (4 - 7) ** 2) / 2)
    close(metrics["q"], (3 + 4) / 2)
    (grad,) = torch.autograd.grad(loss, q)
    close(grad, vec((0, 0, 2), (-3, 0, 0)))


def test_every_epoch_learns_from_each_sample_once_with_targets_from_before(monkeypatch):
    """The minibatches differ between epochs; the lambda-returns do not."""
    agent = make_agent(epochs=3)
    rollout = make_rollout(pqn, agent)
    expected = pqn.compute_targets(agent, rollout).flatten()
    seen = noted(monkeypatch, pqn, "pqn_loss", lambda agent, batch: batch)
    metrics = pqn.update(agent, Adam(agent.critic), rollout, 1e-2)
    obs = rollout.obs.flatten(0, 1)
    rows = [[int((obs == one).all(-1).nonzero()) for one in batch.obs] for batch in seen]
    epochs = [sum(rows[k:k + 3], []) for k in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    for batch, mine in zip(seen, rows):
        close(batch.target, expected[mine])
        assert torch.equal(batch.act, rollout.act.flatten()[mine])
    assert metrics["q_loss"].shape == metrics["grad_norm"].shape == (9,)


def test_eps_falls_to_its_end_and_stays(monkeypatch):
    eps = noted(monkeypatch, pqn, "collect", lambda agent, *rest: agent.eps.item())
    pqn.train(pqn.Config(num_envs=2, rollout_steps=8, minibatch_size=4, hidden=(4,), eps_end=0.1,
                         eps_steps=16, total_steps=40, run_dir="run"))
    close(eps, [1, 0.55, 0.1, 0.1, 0.1])


# ---- The network

def test_vectors_pass_linear_layernorm_relu():
    """Each sample to mean 0 and variance 1 over its units: (x - mean) / sqrt(var + 1e-5)."""
    net, obs = make_agent().critic, torch.randn(5, 3)
    params, x = [param.detach() for param in net.parameters()], obs
    for weight, bias, scale, shift in (params[:4], params[4:8]):
        x = x @ weight.T + bias
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        x = (x * scale + shift).clamp(min=0)
    close(net(obs), x @ params[8].T + params[9])


def test_images_are_normalised_after_the_encoder():
    net, images = make_agent(IMAGES).critic, torch.randint(256, (2, 44, 36, 3), dtype=torch.uint8)
    features = images.permute(0, 3, 1, 2) / 255
    for layer in [*net.encoder][:-1]:
        features = layer(features)
    assert (features >= 0).all() and features.shape == (2, 512)
    scale, shift = net.encoder[-1].weight, net.encoder[-1].bias
    close(net(images), net.head(layer_norm(features, (512,)) * scale + shift), rtol=1e-4)
