"""Equations and functions that the on-policy files share, in each of them."""
import copy
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings as how, strategies as st

from algos import ppo_lstm, ppo_popart
from tests.helpers import LOG_2PI, bare, close, copies, moved, noted, vec
from tests.onpolicy import (
    DISCRETE, IMAGES, ONPOLICY as ALGOS, SPACES, distribution, every_kind, learn, make_agent,
    make_config as config, make_rollout, targets, tiny_agent)
from utils import mpi
from utils.envs import stack_steps
from utils.nets import ImageEncoder, SquashedGaussian
from utils.stats import RunningStats

every_algo = pytest.mark.parametrize("name", ALGOS)
without_memory = pytest.mark.parametrize("name", [name for name in ALGOS if name != "ppo_lstm"])
with_images = pytest.mark.parametrize("name", [name for name in ALGOS if name != "gail"])
every_case = pytest.mark.parametrize("name,kind", [
    (name, kind) for name in ALGOS for kind in SPACES if (name, kind) != ("gail", "images")])


# ---- Equations that the files share

part = st.sampled_from((0.0, 0.5, 0.9, 1.0))


@every_algo
def test_gae_is_the_double_sum(name):
    """Eq. (16) of the GAE paper as it stands: from each step, all errors to the episode's end."""
    @how(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 999), st.integers(1, 12), st.sampled_from((0.0, 0.2, 1.0)), part, part)
    def check(seed, length, often, gamma, lam):
        rng = np.random.default_rng(seed)
        rew, val, next_val = 3 * torch.tensor(rng.normal(size=(3, length, 3))).float()
        terminated, truncated = torch.tensor(rng.random((2, length, 3)) < often).float()
        done, adv = torch.maximum(terminated, truncated), torch.zeros_like(rew)
        for t, n in np.ndindex(*rew.shape):
            for k in range(t, len(rew)):
                future = 0 if terminated[k, n] else gamma * next_val[k, n]
                adv[t, n] += (gamma * lam) ** (k - t) * (rew[k, n] + future - val[k, n])
                if done[k, n]:
                    break
        ours = ALGOS[name].gae(rew, val, next_val, terminated, done, gamma, lam)
        close(ours, adv, rtol=1e-4, atol=1e-4)

    check()


@every_algo
def test_observations_that_float32_cannot_tell_apart_reach_the_networks(name):
    """As a clock in seconds does: near 1.7e9, float32 steps by 128."""
    agent = make_agent(ALGOS[name], "box")
    obs = 1.7e9 + 60 * np.array([[0, 1, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0]])
    rollout = stack_steps([{"obs": obs}, {"obs": obs}], torch.device("cpu"))
    agent.obs_stats = RunningStats((3,))
    agent.obs_stats.update(rollout["obs"].flatten(0, 1))
    inputs = agent.normalize_obs(rollout["obs"])
    close(inputs[0], vec((-1, 1, 0), (1, 1, 0), (-1, -1, 0), (1, -1, 0)))


@pytest.mark.parametrize("name,loss_name,loc,scale", [
    ("a2c", "a2c_loss", 0, 1), ("acktr", "a2c_loss", 0, 1), ("ppo", "ppo_loss", 0, 1),
    ("ppo_lstm", "ppo_loss", 0, 1), ("ppo_popart", "popart_loss", 50, 100)])
def test_whole_loss_by_hand(name, loss_name, loc, scale):
    """PopArt compares n(s) = 2 with targets in units of its scale, so that it has PPO's loss."""
    agent = tiny_agent(ALGOS[name], mu=1, log_std=math.log(2), val=2, hidden=(1,), vf_coef=0.5,
                       ent_coef=0.1)
    logp = -math.log(2) - LOG_2PI / 2 - vec(0, 2)  # of actions 0 and 2 deviations off
    columns = {"obs": vec((3,), (4,)), "act": vec((1,), (5,)), "adv": vec(1, -2),
               "ret": loc + scale * vec(5, 1)}
    pi_loss, by_log_std = -(logp[0] - 2 * logp[1]) / 2, 3.5
    if "ppo" in name:  # the first ratio is beyond the range
        columns["logp_old"], pi_loss, by_log_std = logp - vec(1.5, 1).log(), 0.4, 3
    if name == "ppo_lstm":  # two steps of one environment
        columns["obs"] = ppo_lstm.Inputs(columns["obs"][:, None], torch.zeros(2, 1),
                                         torch.zeros(2, 1, agent.cfg.lstm_size))
    if loc:
        agent.loc.fill_(loc), agent.square.fill_(loc**2 + scale**2)

    def loss_of(algo, **changes):
        make = algo.Minibatch if "ppo" in name else algo.Batch
        return getattr(algo, loss_name)(agent, make(**columns | changes))

    loss, metrics = loss_of(ALGOS[name])
    names, params = zip(*agent.named_parameters())
    grads = dict(zip(names, torch.autograd.grad(loss, params)))
    mu, log_std = vec((1,), (1,)).requires_grad_(), vec(math.log(2)).requires_grad_()
    bonus = SquashedGaussian(mu, log_std).entropy().mean()
    bonus_by_mu, bonus_by_log_std = torch.autograd.grad(bonus, (mu, log_std))
    bonus = bonus.item()
    close(metrics["pi_loss"], pi_loss)
    close(metrics["v_loss"], 5)
    close(metrics["entropy"], bonus)
    close(loss.detach(), pi_loss + 0.5 * 5 - 0.1 * bonus)
    close(grads["actor.2.bias"], 1 - 0.1 * bonus_by_mu.sum(0))  # -mean of ratio A z / sigma
    close(grads["log_std"], by_log_std - 0.1 * bonus_by_log_std)  # -mean of ratio A (z^2 - 1)
    close(grads["critic.2.bias"], vec(-1))  # 0.5 mean of 2 (V - R)
    with pytest.raises(AssertionError):
        loss_of(bare(ALGOS[name]), ret=columns["ret"][:, None])


# ---- The agent that acts

@every_case
def test_the_first_policy_prefers_nothing(name, kind):
    """Weights keep the length of what passes through, but for the last ones of the policy."""
    agent = ALGOS[name].Agent(*SPACES[kind], config(ALGOS[name]))
    gains = {agent.actor[-1]: 0.01, agent.critic[-1]: 0.0 if ALGOS[name] is ppo_popart else 1.0}
    gains |= {agent.int_critic[-1]: 1.0} if name == "ppo_rnd" else {}
    layers = [layer for name, layer in agent.named_modules()
              if hasattr(layer, "weight") and not name.startswith("disc.")]
    for layer in layers:
        weight = layer.weight.detach().flatten(1)
        weight = weight if len(weight) <= weight.shape[1] else weight.T
        gain = gains.get(layer, math.sqrt(2))
        close(weight @ weight.T, gain**2 * torch.eye(len(weight)), atol=1e-4 * gain**2)
        assert not layer.bias.any()
    assert set(gains) < set(layers)


@every_algo
def test_layers_have_the_sizes_of_the_papers(name):
    """Two of 64 with tanh between them, for actor and critic apart; an LSTM's replaces one."""
    for kind, outputs in (("box", 2), ("discrete", 4)):
        agent = ALGOS[name].Agent(*SPACES[kind], ALGOS[name].Config(std_init=0.2))
        hidden = [(64, 128)] if name == "ppo_lstm" else [(64, 3), (64, 64)]
        for net, count in ((agent.actor, outputs), (agent.critic, 1)):
            sizes = [layer.weight.shape for layer in net if hasattr(layer, "weight")]
            assert sizes == [*hidden, (count, 64)]
            assert all(type(layer).__name__ == "Tanh" for layer in net[1::2])
        more = {"ppo_lstm": "embed", "gail": "disc"}.get(name)
        assert not more or all(type(layer) is torch.nn.Tanh for layer in getattr(agent, more)[1::2])
        close([] if agent.discrete else agent.log_std.exp(), 2 * [0.2] * (kind == "box"))
        if name == "ppo_lstm":
            assert (agent.lstm.input_size, agent.lstm.hidden_size) == (64, 128)


@every_algo
def test_observations_are_normalised_and_rewards_scaled_by_the_running_statistics(name):
    """Of mean 3 and deviation 2; of deviation 3, and without their mean, which is 1."""
    obs = 3 + 2 * torch.tensor([[-1.0, 0, 1], [2, 3, 1e6]])
    close(make_agent(ALGOS[name]).normalize_obs(obs), [[-1, 0, 1], [2, 3, 10]])
    if "norm_obs" in vars(ALGOS[name].Config()):
        close(make_agent(ALGOS[name], norm_obs=False).normalize_obs(obs), obs)
    if name != "ppo_popart":
        rew = torch.tensor([3.0, -6, 1e6])
        close(make_agent(ALGOS[name]).reward_sum_stats.scale(rew), [1, -2, 10])


@with_images
def test_an_encoder_sees_images_between_0_and_1_and_keeps_their_rows(name):
    """And colours may stand first or last."""
    last = make_agent(ALGOS[name], "images")
    first = ALGOS[name].Agent(gym.spaces.Box(0, 255, (3, 44, 36), np.uint8), DISCRETE, last.cfg)
    obs = torch.randint(256, (5, *IMAGES.shape), dtype=torch.uint8)
    floats = obs.permute(0, 3, 1, 2).float() / 255
    for agent, images in ((last, obs), (first, obs.permute(0, 3, 1, 2))):
        encoders = [part for part in agent.modules() if isinstance(part, ImageEncoder)]
        for encoder in encoders:
            features = encoder(agent.normalize_obs(images))
            close(features, torch.nn.Sequential(*encoder)(floats), rtol=1e-4, atol=1e-5)
            assert features.shape == (5, 512) and features.std(0).max() > 0
        assert encoders


@every_algo
@pytest.mark.parametrize("kind", ["box", "discrete"])
def test_actions_are_drawn_from_the_policy_for_each_environment_anew(name, kind):
    agent = make_agent(ALGOS[name], kind)
    agent.actor[-1].weight.data *= 10
    obs = torch.tensor([[2.0, 4, 5], [3.0, -1, 2]])
    act = agent.act(obs.repeat(20000, 1)).unflatten(0, (-1, 2))
    policy = distribution(agent, obs)
    if kind == "discrete":
        shares = torch.stack([(act == k).float().mean(0) for k in range(4)], -1)
        assert policy.probs.std() > 0.02  # not as good as uniform
        close(shares, policy.probs, atol=0.015)
        both = (act[:, :1] == act[:, 1:]).float().mean()
        close(both, policy.probs.prod(0).sum(), atol=0.015)
    else:
        close(act.mean(0), policy.loc, atol=0.05)
        close(act.std(0), policy.log_std.exp().expand_as(policy.loc), rtol=0.03)
        assert torch.corrcoef(act.flatten(1).T).triu(1).abs().max() < 0.04
    assert torch.equal(agent.act(obs, deterministic=True), policy.mode)


# ---- What an update changes

@without_memory
def test_explained_variance_of_returns_that_do_not_vary(name, monkeypatch):
    algo, agent = ALGOS[name], make_agent(ALGOS[name])
    monkeypatch.setattr(algo, "compute_targets",
                        lambda agent, rollout, obs: [torch.zeros_like(rollout.rew)] * 3)
    _, metrics = learn(algo, agent, make_rollout(algo, agent), lr=1e-2)
    close(metrics["explained_variance"], 1.0)


@without_memory
def test_metrics_say_what_was_believed_before(name):
    """val and the explained variance are those of the critic that acted, not of the fitted one."""
    algo = ALGOS[name]
    agent = make_agent(algo, epochs=3)
    rollout, before = make_rollout(algo, agent), copy.deepcopy(agent)
    _, metrics = learn(algo, agent, rollout, lr=1e-2)
    adv, ret = targets(algo, before, rollout)
    close(metrics["val"].flatten(), ret - adv, rtol=1e-4, atol=1e-5)
    close(metrics["explained_variance"], 1 - np.var(adv.numpy()) / np.var(ret.numpy()), rtol=1e-4)


@without_memory
@pytest.mark.parametrize("kind", ["box", "discrete"])
def test_the_entropy_is_that_of_the_policy_that_acted_in_all_states(name, kind):
    algo = ALGOS[name]
    agent = make_agent(algo, kind)
    rollout = make_rollout(algo, agent)
    expected = distribution(agent, rollout.obs.flatten(0, 1)).entropy().mean()
    entropy = torch.as_tensor(learn(algo, agent, rollout)[1]["entropy"])
    close(entropy.mean(), expected, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in ALGOS if hasattr(ALGOS[name], "policy_change")])
def test_no_epoch_follows_one_that_moved_the_policy_too_far(name, monkeypatch):
    def after(epochs, target_kl):
        agent = make_agent(ALGOS[name], epochs=epochs, target_kl=target_kl)
        params, metrics = learn(ALGOS[name], agent, make_rollout(ALGOS[name], agent), lr=1e-2)
        return params, metrics["epochs"], metrics["kl"].item()

    (_, *first), (params, *second), (_, *last) = (after(epochs, 0.0) for epochs in (1, 2, 4))
    assert (first[0], second[0], last[0]) == (1, 2, 4) and first[1] < second[1] < last[1]
    limit = (first[1] + second[1]) / 2
    stopped, epochs, _ = after(4, limit)
    assert epochs == 2 and torch.equal(stopped, params)
    # Another process may have moved further. All stop together.
    monkeypatch.setattr(mpi, "average", lambda x: x if x.ndim else 10 * x)
    assert after(4, limit)[1] == 1


@pytest.mark.parametrize("name", ["vpg", "trpo"])
@every_kind
def test_value_steps_are_on_rows_of_the_whole_rollout(name, kind, monkeypatch):
    """With images, they train all of the critic's own encoder."""
    algo, shown = ALGOS[name], []
    agent = make_agent(algo, kind, minibatch_size=8, v_steps=30)
    rollout = make_rollout(algo, agent)
    _, ret = targets(algo, agent, rollout)
    inputs = agent.normalize_obs(rollout.obs).flatten(0, 1)
    before = [param.clone() for param in agent.critic.parameters()]

    agent.critic.register_forward_pre_hook(lambda _, inputs: shown.append(inputs[0]))
    given = noted(monkeypatch, algo, "value_loss", lambda *pair: (shown[-1], *pair))
    metrics = learn(algo, agent, rollout, lr=1e-2)[1]
    assert not any(map(torch.equal, before, agent.critic.parameters()))
    seen = torch.zeros(24)
    for rows, _, rets in given:
        equal = (rows[:, None] == inputs).flatten(2).all(-1)
        assert (equal.sum(1) == 1).all() and not rows.requires_grad
        at = equal.int().argmax(1)
        close(rets, ret[at], rtol=1e-4, atol=1e-5)
        assert len(set(at.tolist())) == 8                       # none twice in a minibatch
        seen[at] += 1
    assert len(given) == 30 and seen.min() > 0 and seen.std() > 0
    losses = [(val - rets).square().mean() for _, val, rets in given]
    close(metrics["v_loss"], torch.stack(losses).detach())


WITHOUT_ADVANTAGE = {  # parts of the agent that learn from images where no action was better
    "vpg": {"critic"}, "trpo": {"critic"},
    "a2c": {"critic", "encoder"}, "acktr": {"critic", "encoder"}, "ppo": {"critic", "encoder"},
    "ppo_popart": {"critic", "encoder", "num_rollouts", "loc", "square"},
    "ppo_lstm": {"critic", "lstm", "embed"}, "ppo_rnd": {"critic", "int_critic", "encoder"},
}


@with_images
def test_who_learns_from_the_value_loss_alone(name, monkeypatch):
    """With images, the encoder is the policy's in vpg and trpo, and shared in the others."""
    algo = ALGOS[name]
    targets = "recurrent_targets" if name == "ppo_lstm" else "compute_targets"
    plain = getattr(algo, targets)

    def no_advantage(*args):
        val, adv, ret = plain(*args)
        return val, torch.zeros_like(adv), ret

    monkeypatch.setattr(algo, targets, no_advantage)
    agent = make_agent(algo, "images", norm_adv=False, ent_coef=0.0, int_coef=0.0)
    before = copies(agent)
    learn(algo, agent, make_rollout(algo, agent), lr=1e-2)
    assert {each.partition(".")[0] for each in moved(before, agent)} == WITHOUT_ADVANTAGE[name]
