"""algos/dqn.py by hand, and what holds for it and for its children alike."""
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from scipy import stats
from stable_baselines3 import DQN
from stable_baselines3.common.logger import configure
from stable_baselines3.common.type_aliases import ReplayBufferSamples

from algos import c51, dqn, dqn_atari, dqn_per
from tests.helpers import VECTOR, Nowhere, bare, close, name_of, refuses_columns, rows, vec
from tests.offpolicy import (
    DQN_SPACES as SPACES,
    dqn_agent as make_agent,
    dqn_batch as make_batch,
    dqn_loss as loss_of,
    dqn_quick as quick,
    flat,
    gradient_in,
)
from utils import mpi

every_algo = pytest.mark.parametrize("algo", [dqn, dqn_per, dqn_atari], ids=name_of)
every_child = pytest.mark.parametrize("algo", [dqn, dqn_per, dqn_atari, c51], ids=name_of)
each_alone = pytest.mark.parametrize("algo,kind", [
    (dqn, "vector"), (dqn, "film"), (dqn, "image"), (dqn_per, "vector"), (dqn_per, "image"),
    (dqn_atari, "film"), (dqn_atari, "image")], ids=lambda x: x if type(x) is str else name_of(x))


# ---- Equations

@every_algo
def test_target_by_hand(algo):
    """A step on the way; a time limit, which is stored as that; a death; both at once: a death."""
    rew, terminated, next_val = vec(1, 1, 1, -2), vec(0, 0, 1, 1), vec(10, 10, 10, 10)
    close(algo.td_target(rew, terminated, next_val, 0.5), vec(6, 6, 1, -2))


@every_algo
def test_q_of_an_action_by_hand(algo):
    close(algo.q_of(vec((1, 5, 2), (4, 3, 6)), torch.tensor([2, 0])), vec(2, 4))


@every_algo
@pytest.mark.parametrize("error,loss,slope", [
    (0.5, 0.125, 0.5), (-0.5, 0.125, -0.5), (1, 0.5, 1), (3, 2.5, 1), (-3, 2.5, -1), (0, 0, 0)])
def test_huber_by_hand(algo, error, loss, slope):
    q = vec(7 + error, 7).requires_grad_()
    losses = algo.huber(q, vec(7, 7))
    close(losses, vec(loss, 0))
    losses.sum().backward()
    close(q.grad, vec(slope, 0))


@every_algo
def test_what_has_another_shape_is_refused_without_the_checker_too(algo):
    algo = bare(algo)
    refuses_columns(algo.td_target, 3, 0.9)
    refuses_columns(algo.huber, 2)


@every_algo
def test_dueling_by_hand(algo):
    base, adv = vec((10,), (20,)), vec((1, 2, 6), (0, 0, 3))
    q = algo.dueling_q(base, adv)
    close(q, vec((8, 9, 13), (19, 19, 22)))
    close(q.mean(-1), vec(10, 20))                              # b is the mean of Q
    close(algo.dueling_q(base, adv + 5), q)                     # the level of A does not matter


@each_alone
@pytest.mark.parametrize("dueling,outputs", [(True, 5), (False, 4)])
def test_the_network_has_an_output_for_what_all_actions_share(algo, kind, dueling, outputs):
    """From the network's own layers, step by step; images are divided by 255, channels go first."""
    agent, obs = make_agent(algo, kind, dueling=dueling), make_batch(algo, kind, size=6).obs
    x = obs
    if kind != "vector":
        x = (obs if kind == "film" else obs.permute(0, 3, 1, 2)) / 255
        x = agent.critic.encoder[1:](x)
        assert x.shape == (6, 512)
    out = agent.critic.head(x)
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
@pytest.mark.parametrize("drawn,eps,kinds", [(0.0, 0.0, 1), (1 - 2**-24, 1.0, 8)])
def test_eps_0_is_never_at_random_and_1_always_whatever_is_drawn(algo, drawn, eps, kinds,
                                                                 monkeypatch):
    """The least and the greatest of the numbers that there are from 0 to 1 without 1."""
    monkeypatch.setattr(torch, "rand", lambda shape, **device: torch.full(shape, drawn))
    assert len(explorer(algo, torch.full((2000,), 7), 8, eps)().unique()) == kinds


@every_child
def test_each_environment_draws_for_itself(algo):
    """Of two environments both act at random as often as chance has it, not always together.

    And not alike where they do.
    """
    act = explorer(algo, torch.zeros(2, dtype=torch.int64), 1000, 0.5)
    pairs = torch.stack([act() for _ in range(2000)])
    first, second = (pairs > 0).long().T
    assert stats.chisquare(torch.bincount(2 * first + second, minlength=4)).pvalue > 1e-3
    alike = pairs[:, 0] == pairs[:, 1]
    assert alike[(pairs > 0).all(1)].float().mean() < 0.05


# ---- The agent

@every_child
def test_the_target_starts_equal_and_is_another_object(algo):
    kind = "film" if algo is dqn_atari else "vector"
    agent = algo.Agent(SPACES[kind], Discrete(4), algo.Config())
    own, targ = agent.critic.state_dict(), agent.critic_targ.state_dict()
    assert list(own) == list(targ) and all(torch.equal(own[name], targ[name]) for name in own)
    addresses = {param.data_ptr() for param in agent.parameters()}
    assert len(addresses) == len(own) + len(targ)
    assert not any(param.requires_grad for param in agent.critic_targ.parameters())


@each_alone
def test_actions_are_the_best_ones_but_for_eps(algo, kind):
    agent, obs = make_agent(algo, kind), make_batch(algo, kind, size=200).obs
    best, state = agent.act(obs, deterministic=True), torch.get_rng_state()
    assert best.shape == (200,) and best.dtype == torch.int64
    agent.eps.fill_(0.0)
    assert torch.equal(agent.act(obs), best)
    agent.eps.fill_(0.4)
    assert 0.15 < (agent.act(obs) != best).float().mean() < 0.45         # 0.3: a quarter are best
    torch.set_rng_state(state)
    agent.act(obs, deterministic=True)
    assert torch.equal(torch.get_rng_state(), state)
    act = agent.predict(obs[0].numpy())
    assert act == best[0] and Discrete(4).contains(act)


def test_vectors_of_bytes_are_no_images_and_are_not_scaled():
    space = Box(0, 255, (3,), np.uint8)
    stored = dqn.ReplayBuffer(5, space, torch.device("cpu")).columns["obs"]
    assert stored.dtype == np.float32
    agent = dqn.Agent(space, Discrete(4), dqn.Config())
    obs = np.array([[200, 3, 70]], np.uint8)
    close(agent.critic(torch.as_tensor(obs)), agent.critic(torch.tensor([[200.0, 3, 70]])))
    assert agent.act(obs).shape == (1,)


# ---- The loss and its gradient

@pytest.mark.parametrize("double,target", [(True, 1 + 0.5 * 1), (False, 1 + 0.5 * 5)])
def test_the_action_of_the_target_is_the_networks(double, target):
    """One layer by hand: the network likes action 0 best, its target action 1."""
    agent = make_agent(dqn, num_acts=2, hidden=(), double=double, dueling=False, gamma=0.5)
    for net, bias in ((agent.critic, (3, 2)), (agent.critic_targ, (1, 5))):
        net.head[0].weight.data.zero_(), net.head[0].bias.data.copy_(vec(*bias))
    obs = torch.zeros(2, 3)
    batch = dqn.Transitions(obs, torch.tensor([1, 1]), vec(1, 1), obs, vec(0, 1))
    loss, metrics, grad = gradient_in(agent.critic, dqn.dqn_loss, agent, batch)
    close(metrics["q"], vec(2, 2))
    errors = vec(2 - target, 2 - 1)                             # of the second a death is the end
    close(loss, torch.where(errors.abs() < 1, errors**2 / 2, errors.abs() - 0.5).mean())
    close(grad[-2:], vec(0, errors.clamp(-1, 1).mean()))        # of the biases: action 1 was taken


@each_alone
@pytest.mark.parametrize("double", [True, False])
def test_the_loss_is_that_of_a_loop_over_samples(algo, kind, double):
    """And its gradient that of a regression to numbers: none reaches the network by the target.

    The target's weights are others than the network's. Images come with channels first and last.
    """
    agent = make_agent(algo, kind, double=double, gamma=0.7)
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
        loss = size**2 / 2 if size < 1 else size - 0.5
        losses.append(loss * getattr(batch, "weight", torch.ones(32))[k])
    expected = torch.stack(losses).mean()
    grads = torch.autograd.grad(expected, list(agent.critic.parameters()))
    loss, metrics, grad = gradient_in(agent.critic, loss_of(algo), agent, batch)
    close(loss, expected.detach())
    close(metrics["q_loss"], expected.detach())
    close(grad, torch.cat([grad.flatten() for grad in grads]), rtol=1e-4, atol=1e-5)
    if algo is dqn_per:
        close(metrics["td_error"], torch.stack(errors).detach(), atol=1e-5)


@pytest.mark.parametrize("num_steps", [1, 10])
def test_loss_gradient_and_steps_are_those_of_stable_baselines3(num_steps):
    """In float64, on the same batches; their DQN is neither double nor dueling."""
    algo = bare(dqn)
    agent = make_agent(algo, double=False, dueling=False).double()
    agent.critic.forward = lambda obs: agent.critic.head(obs)   # without the cast to float32
    agent.critic_targ.forward = lambda obs: agent.critic_targ.head(obs)
    theirs = DQN("MlpPolicy", Nowhere(VECTOR, Discrete(4)), 1e-3, gamma=0.99,
                 max_grad_norm=float("inf"), buffer_size=10, device="cpu",
                 policy_kwargs={"net_arch": [16, 16]})
    theirs.set_logger(configure(None, []))
    theirs.policy.double()
    nets = (agent.critic, theirs.q_net), (agent.critic_targ, theirs.q_net_target)
    for our, their in nets:
        their.q_net.load_state_dict(our.head.state_dict())
        their.extract_features = lambda obs, extractor: obs     # it would make them float32
    optimizer = mpi.Adam(agent.critic)
    for k in range(num_steps):
        batch = make_batch(algo, seed=k, dtype=torch.float64)
        obs, act, rew, next_obs, terminated = vars(batch).values()
        sample = ReplayBufferSamples(obs, act[:, None], next_obs, terminated[:, None], rew[:, None])
        theirs.replay_buffer.sample = lambda *args, sample=sample, **kwargs: sample
        theirs.train(1, 32)
        metrics = algo.update(agent, optimizer, batch, 1e-3)
        close(metrics["q_loss"], theirs.logger.name_to_value["train/loss"], rtol=1e-9)
    for our, their in zip(*(net.parameters() for net in nets[0]), strict=True):
        close(our.grad, their.grad, rtol=1e-7, atol=1e-10)
        close(our.data, their.data, rtol=0, atol=1e-9)
    for our, their in zip(*(net.parameters() for net in nets[1]), strict=True):
        assert torch.equal(our, their)


# ---- The loop

def noted_run(algo, monkeypatch, cfg):
    """A run -> its agent, (step, network, target) after each step, and the step of each update.

    Steps are environment steps of all environments of this process.
    """
    weights, updates, at = [], [], [0]
    update, interact = algo.update, algo.interact

    def noting_update(agent, *args):
        updates.append(at[0])
        return update(agent, *args)

    def noting_interact(agent, envs, *args):
        if at[0]:
            weights.append((at[0], flat(agent.critic), flat(agent.critic_targ)))
        at[0] += envs.num_envs
        return interact(agent, envs, *args)

    with monkeypatch.context() as patch:
        patch.setattr(algo, "update", noting_update)
        patch.setattr(algo, "interact", noting_interact)
        agent = algo.train(cfg)
    weights.append((at[0], flat(agent.critic), flat(agent.critic_targ)))
    return agent, weights, updates


@every_child
@pytest.mark.parametrize("num_envs", [1, 2, 7])
@pytest.mark.parametrize("every", [1, 4])
def test_updates_keep_their_interval_whatever_num_envs(algo, num_envs, every, monkeypatch):
    cfg = quick(algo, num_envs=num_envs, update_every=every, anneal_lr=False, total_steps=90)
    _, _, updates = noted_run(algo, monkeypatch, cfg)
    total = -(-90 // num_envs) * num_envs                       # whole steps of all
    due = range(40 + every, total + 1, every)                   # the k-th belongs to its step ...
    assert len(updates) == len(due) == (total - 40) // every
    assert all(0 <= at - step < num_envs for step, at in zip(due, updates))     # ... or right after


@every_child
@pytest.mark.parametrize("num_envs,update_every,target_every", [
    (1, 3, 7), (2, 3, 7), (7, 3, 2), (5, 1, 12), (3, 4, 25), (4, 2, 24), (1, 10, 3)])
def test_the_target_is_the_network_of_the_last_multiple(algo, num_envs, update_every, target_every,
                                                        monkeypatch):
    """Copied at every multiple of target_every, or right after it, whatever the other two are."""
    cfg = quick(algo, num_envs=num_envs, update_every=update_every, target_every=target_every,
                anneal_lr=False, total_steps=90)
    agent, weights, _ = noted_run(algo, monkeypatch, cfg)
    assert len(weights) == -(-90 // num_envs)
    expected, before = weights[0][2], 0                         # the initial weights: none learned
    for step, own, targ in weights:
        if step // target_every > before // target_every:
            expected = own
        assert torch.equal(targ, expected), f"after step {step}"
        before = step
    assert not torch.equal(expected, weights[0][1])
    for own, targ in zip(agent.critic.parameters(), agent.critic_targ.parameters()):
        assert own.data_ptr() != targ.data_ptr()


def schedules(algo, cfg):
    """A run -> {step: eps that acted}, {step: lr of updates}, {step: beta}, of this process.

    Steps are environment steps of all environments, before the vector step.
    """
    eps, rates, betas, step = {}, {}, {}, [-cfg.num_envs]
    interact, update = algo.interact, algo.update

    def noting_interact(agent, *rest):
        step[0] += cfg.num_envs
        eps[step[0]] = agent.eps.item()
        return interact(agent, *rest)

    def noting_update(agent, optimizer, batch, lr):
        rates[step[0]] = lr
        return update(agent, optimizer, batch, lr)

    patch = pytest.MonkeyPatch()
    patch.setattr(algo, "interact", noting_interact)
    patch.setattr(algo, "update", noting_update)
    if algo is dqn_per:
        sample = algo.PrioritizedBuffer.sample

        def noting_sample(buffer, batch_size, beta):
            betas[step[0]] = beta
            return sample(buffer, batch_size, beta)

        patch.setattr(algo.PrioritizedBuffer, "sample", noting_sample)
    algo.train(cfg)
    patch.undo()
    return eps, rates, betas


def schedule_config(algo, run_dir="run"):
    return quick(algo, num_envs=4, eps_steps=50, lr=0.1, eps_end=0.1, total_steps=100,
                 run_dir=run_dir)


@every_child
def test_eps_and_lr_follow_the_steps(algo):
    """And are what the log says they are."""
    eps, rates, betas = schedules(algo, schedule_config(algo))
    assert list(eps) == list(range(0, 100, 4)) and list(rates) == list(range(40, 100, 4))
    close(list(eps.values()), [max(0.1, 1 - 0.9 * t / 50) for t in eps])
    close(list(rates.values()), [0.1 * (1 - t / 100) for t in rates])
    assert list(betas.values()) == pytest.approx([0.4 + 0.6 * t / 100 for t in betas])
    assert bool(betas) == (algo is dqn_per)
    for row, step in zip(rows("run"), (60, 100), strict=True):
        assert float(row["lr"]) == pytest.approx(rates[step - 4])
        assert float(row["eps"]) == pytest.approx(eps[step - 4])
        if betas:
            assert float(row["beta"]) == pytest.approx(betas[step - 4])
