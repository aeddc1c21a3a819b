"""The mathematics of algos/ppo.py: by hand, against oracles, and where shapes must not match."""
import math
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from stable_baselines3.common.buffers import RolloutBuffer
from torch.distributions import Categorical, Independent, Normal

from algos import ppo
from tests import helpers
from tests.helpers import (
    LOG_2PI,
    bare,
    close,
    column,
    gradients,
    vec,
)
from utils import mpi

gae = partial(helpers.gae, ppo)
reward_sums = partial(helpers.reward_sums, ppo)


def jacobian(function, *inputs):
    """One matrix per input: row t says by what one more in each step changes the result in t.

    For functions that are linear in each of their inputs.
    """
    result, matrices = function(*inputs), []
    for at, value in enumerate(inputs):
        columns = []
        for step in range(len(value)):
            more = value.clone()
            more[step] += 1
            columns.append((function(*inputs[:at], more, *inputs[at + 1:]) - result)[:, 0])
        matrices.append(torch.stack(columns, dim=1))
    return matrices


# ---- Equations (1) and (2): advantages and returns

REW, VAL, NEXT_VAL = column(1, 1, 1, 1), column(5, 6, 7, 8), column(6, 10, 8, 9)
NO_END = column(0, 0, 0, 0)
ENDS = [  # terminated, done, advantages for gamma = lam = 1/2
    (NO_END, NO_END, (-1.1640625, -0.65625, -2.625, -2.5)),
    (NO_END, column(0, 1, 0, 0), (-1, 0, -2.625, -2.5)),  # a time limit: V(s') counts
    (column(0, 1, 0, 0), column(0, 1, 0, 0), (-2.25, -5, -2.625, -2.5)),  # a death: it does not
    (NO_END, column(0, 0, 0, 1), (-1.1640625, -0.65625, -2.625, -2.5)),  # the rollout's own end
    (column(0, 0, 0, 1), column(0, 0, 0, 1), (-1.234375, -0.9375, -3.75, -7)),
]


@pytest.mark.parametrize("terminated,done,adv", ENDS)
def test_gae_by_hand(terminated, done, adv):
    actual, ret = gae(REW, VAL, NEXT_VAL, terminated, done, 0.5, 0.5)
    close(actual, column(*adv))
    close(ret, column(*adv) + VAL)


@pytest.mark.parametrize("terminated,done,delta", [
    (NO_END, NO_END, (-1, 0, -2, -2.5)),
    (NO_END, column(1, 1, 1, 1), (-1, 0, -2, -2.5)),
    (column(1, 0, 1, 0), column(1, 1, 1, 1), (-4, 0, -6, -2.5)),
])
def test_gae_with_lam_0_is_the_one_step_error(terminated, done, delta):
    close(gae(REW, VAL, NEXT_VAL, terminated, done, 0.5, 0.0)[0], column(*delta))


@pytest.mark.parametrize("terminated,done,by_rew,by_next_val", [
    (column(0, 0, 0), column(0, 0, 0), [(1, .25, .0625), (0, 1, .25), (0, 0, 1)],
     [(.5, .125, .03125), (0, .5, .125), (0, 0, .5)]),
    (column(0, 0, 0), column(0, 1, 0), [(1, .25, 0), (0, 1, 0), (0, 0, 1)],
     [(.5, .125, 0), (0, .5, 0), (0, 0, .5)]),
    (column(0, 1, 0), column(0, 1, 0), [(1, .25, 0), (0, 1, 0), (0, 0, 1)],
     [(.5, 0, 0), (0, 0, 0), (0, 0, .5)]),
])
def test_what_each_advantage_depends_on(terminated, done, by_rew, by_next_val):
    inputs = REW[:3], VAL[:3], NEXT_VAL[:3]
    parts = jacobian(lambda *x: gae(*x, terminated, done, 0.5, 0.5)[0], *inputs)
    close(parts[0], vec(*by_rew))
    close(parts[1], -vec(*by_rew))
    close(parts[2], vec(*by_next_val))


def random_steps(seed, p_terminated, p_truncated, shape=(30, 4)):
    """rew, val, next_val, terminated, done; V(s') is the next V(s) where the episode goes on."""
    rng = np.random.default_rng(seed)
    rew, val, final_val = rng.normal(size=(3, *shape))
    terminated = rng.random(shape) < p_terminated
    done = terminated | (rng.random(shape) < p_truncated)
    next_val = np.where(done, final_val, np.vstack([val[1:], final_val[-1:]]))
    return [torch.tensor(x, dtype=torch.float32) for x in (rew, val, next_val, terminated, done)]


def double_sum(rew, val, next_val, terminated, done, gamma, lam):
    """Eq. (16) of the GAE paper as it stands: from each step, all errors to the episode's end."""
    adv = np.zeros(rew.shape)
    for t, n in np.ndindex(*rew.shape):
        for k in range(t, len(rew)):
            future = 0 if terminated[k, n] else gamma * next_val[k, n]
            adv[t, n] += (gamma * lam) ** (k - t) * float(rew[k, n] + future - val[k, n])
            if done[k, n]:
                break
    return adv


@pytest.mark.parametrize("gamma,lam", [(0.99, 0.95), (0.9, 1.0), (1.0, 0.5), (0.0, 0.9)])
@pytest.mark.parametrize("p_terminated,p_truncated", [(0, 0), (.2, 0), (0, .2), (.2, .2), (1, 1)])
def test_gae_is_the_double_sum(p_terminated, p_truncated, gamma, lam):
    steps = random_steps(7, p_terminated, p_truncated)
    adv, ret = gae(*steps, gamma, lam)
    close(adv, double_sum(*steps, gamma, lam), rtol=1e-4, atol=1e-5)
    close(ret, adv + steps[1])


def test_returns_with_lam_1_are_discounted_rewards_and_what_follows_them():
    rew, val, next_val, terminated, done = random_steps(3, 0.1, 0.1)
    _, ret = gae(rew, val, next_val, terminated, done, 0.9, 1.0)
    assert done.any() and not done[-1].all()
    follows = next_val[-1] * (1 - terminated[-1])
    for t in reversed(range(len(rew))):
        follows = torch.where(done[t] > 0, next_val[t] * (1 - terminated[t]), follows)
        follows = rew[t] + 0.9 * follows
        close(ret[t], follows)


@pytest.mark.parametrize("deadly", [0.0, 1.0])
def test_gae_of_two_episodes_in_a_row_is_that_of_each_alone(deadly):
    first, second = random_steps(1, 0, 0), random_steps(2, 0, 0)
    first[3][-1], first[4][-1] = deadly, 1.0
    joined = gae(*(torch.cat(pair) for pair in zip(first, second)), 0.9, 0.8)
    apart = zip(gae(*first, 0.9, 0.8), gae(*second, 0.9, 0.8))
    for actual, parts in zip(joined, apart):
        close(actual, torch.cat(parts))


def test_gae_keeps_environments_apart():
    steps = random_steps(4, 0.1, 0.1)
    together, _ = gae(*steps, 0.9, 0.8)
    for n in range(together.shape[1]):
        close(together[:, [n]], gae(*(x[:, [n]] for x in steps), 0.9, 0.8)[0])


@pytest.mark.parametrize("terminated", [0.0, 1.0])
def test_gae_of_a_single_step_is_its_error(terminated):
    """Of each environment; batch = num_envs is a rollout of one step."""
    rew, val, next_val = torch.randn(3, 1, 4)
    ends = torch.full((1, 4), terminated)
    adv, ret = gae(rew, val, next_val, ends, ends, 0.9, 0.8)
    close(adv, rew + (0.9 * next_val if terminated == 0 else 0) - val)
    close(ret, adv + val)


def test_gae_is_that_of_stable_baselines3():
    rew, val, next_val, terminated, done = random_steps(5, 0.1, 0.1)
    truncated = done * (1 - terminated)
    assert truncated.any() and terminated.any() and done[-1].any() and not done[-1].all()
    space = gym.spaces.Discrete(2)
    buffer = RolloutBuffer(len(rew), space, space, "cpu", gae_lambda=0.8, gamma=0.9, n_envs=4)
    buffer.values = val.numpy()
    buffer.rewards = (rew + 0.9 * truncated * next_val).numpy()  # how its collection bootstraps
    buffer.episode_starts = torch.vstack([torch.ones(1, 4), done[:-1]]).numpy()
    buffer.compute_returns_and_advantage(next_val[-1], done[-1].numpy())
    adv, ret = gae(rew, val, next_val, terminated, done, 0.9, 0.8)
    close(adv, buffer.advantages)
    close(ret, buffer.returns)


# ---- Equations (3) and (4): the policy's distribution

def test_log_prob_of_a_standard_normal_at_its_mean():
    close(ppo.log_prob(vec((0,)), vec(0), vec((0,))), vec(-0.9189385))


def test_log_prob_of_a_normal_by_hand():
    log_std = vec(0, math.log(2))
    act = vec((1, 5))  # 1 and 2 deviations off
    logp, by_out, by_log_std = gradients(
        lambda *x: ppo.log_prob(*x, act).sum(), vec((0, 1)), log_std)
    close(logp, -0.5 - 2 - math.log(2) - LOG_2PI)
    close(by_out, vec((1, 1)))  # z / sigma
    close(by_log_std, vec(0, 3))  # z^2 - 1


def test_log_prob_of_a_categorical_by_hand():
    out, act = vec((0, math.log(3)), (0, math.log(3))), torch.tensor([1, 0])
    close(ppo.log_prob(out, None, act), vec(math.log(0.75), math.log(0.25)))
    _, by_out = gradients(lambda x: ppo.log_prob(x, None, act).sum(), out)
    close(by_out, vec((-0.25, 0.25), (0.75, -0.75)))  # 1 where drawn, less the probability


def test_entropy_of_a_normal_by_hand():
    out, log_std = vec((5, -5), (1, 2), (0, 0)), vec(0, math.log(2)).requires_grad_()
    bonus = ppo.entropy(out, log_std)
    close(bonus.detach(), math.log(2) + LOG_2PI + 1)  # summed over dimensions, not over the batch
    close(torch.autograd.grad(bonus, log_std)[0], vec(1, 1))


def test_entropy_of_a_categorical_by_hand():
    bonus, by_out = gradients(lambda x: ppo.entropy(x, None), vec((7, 7), (0, math.log(3))))
    close(bonus, (math.log(2) + 2 * math.log(2) - 0.75 * math.log(3)) / 2)
    slope = 3 / 16 * math.log(3) / 2  # p q log(q / p), of a mean over two
    close(by_out, vec((0, 0), (slope, -slope)))


def random_policy(kind, num_rows=6):
    """A policy's outputs, its deviations, actions, and the library's distribution of them."""
    out = 3 * torch.randn(num_rows, 4)
    if kind == "discrete":
        return out, None, torch.randint(4, (num_rows,)), Categorical(logits=out)
    log_std = torch.randn(4)
    return out, log_std, 5 * torch.randn(num_rows, 4), Independent(Normal(out, log_std.exp()), 1)


@pytest.mark.parametrize("num_rows", [6, 1])
@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_log_prob_and_entropy_are_those_of_the_library(kind, num_rows):
    out, log_std, act, library = random_policy(kind, num_rows)
    close(ppo.log_prob(out, log_std, act), library.log_prob(act))
    close(ppo.entropy(out, log_std), library.entropy().mean())


# ---- Equations (5) to (8): value loss, running statistics, advantages

def test_value_loss_by_hand():
    loss, by_val = gradients(lambda val: ppo.value_loss(val, vec(1, 4, 0)), vec(1, 2, 3))
    close(loss, 13 / 3)
    close(by_val, vec(0, -4 / 3, 2))


@pytest.mark.parametrize("done,sums,goes_on", [
    ((0, 0, 0), (3, 3.5, 4.75), 4.75),
    ((0, 1, 0), (3, 3.5, 3), 3),  # an episode's last reward counts, and then no more
    ((1, 0, 1), (3, 2, 4), 0),
])
def test_reward_sums_by_hand(done, sums, goes_on):
    actual, last = reward_sums(column(1, 2, 3), column(*done), vec(4), 0.5)
    close(actual, column(*sums))
    close(last, vec(goes_on))


def test_what_each_reward_sum_depends_on():
    rew, done = column(1, 2, 3, 4), column(0, 0, 1, 0)
    (by_rew,) = jacobian(lambda x: reward_sums(x, done, vec(4), 0.5)[0], rew)
    close(by_rew, vec((1, 0, 0, 0), (.5, 1, 0, 0), (.25, .5, 1, 0), (0, 0, 0, 1)))


@pytest.mark.parametrize("cuts", [[], [10], [1, 2, 29]])
def test_reward_sums_go_on_over_rollouts(cuts):
    rew, _, _, _, done = random_steps(6, 0.1, 0.1)
    last, parts = torch.zeros(4), []
    for rew_part, done_part in zip(rew.tensor_split(cuts), done.tensor_split(cuts)):
        part, last = reward_sums(rew_part, done_part, last, 0.9)
        parts.append(part)
    for (t, n), actual in np.ndenumerate(torch.cat(parts)):
        start = max([0, *(k + 1 for k in range(t) if done[k, n])])
        expected = sum(0.9 ** (t - k) * float(rew[k, n]) for k in range(start, t + 1))
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_normalize_adv_by_hand():
    adv = vec((1, 2, 3), (10, 30, 20), (5, 5, 5))  # three minibatches, each by its own statistics
    high = math.sqrt(1.5)  # 1 / sqrt(2/3): the variance divides by n
    close(ppo.normalize_advantages(adv), vec((-high, 0, high), (-high, high, 0), (0, 0, 0)))


def test_normalize_adv_adds_its_epsilon_outside_the_root():
    close(ppo.normalize_advantages(vec((0, 2e-8))), vec((-0.5, 0.5)))


def test_what_a_normalized_advantage_depends_on():
    rows = vec((1, 2, 3), (4, 5, 9))
    _, by_adv = gradients(lambda adv: ppo.normalize_advantages(adv)[0, 1], rows)
    high = math.sqrt(1.5)
    close(by_adv, vec((-high / 3, 2 * high / 3, -high / 3), (0, 0, 0)))


def test_normalize_adv_of_single_samples_is_zero():
    close(ppo.normalize_advantages(vec((3,), (-7,))), vec((0,), (0,)))


# ---- Equations (9) to (12): PPO's own

def clip_loss(ratio, adv, clip=0.2):
    """The loss of samples with these ratios, and its gradient in their log-probabilities."""
    logp_old = torch.linspace(-3, 2, len(ratio))
    return gradients(lambda logp: ppo.clipped_policy_loss(logp, logp_old, vec(*adv), clip),
                     logp_old + vec(*ratio).log())


def test_clip_loss_by_hand():
    loss, by_logp = clip_loss((1.5, .5, 1.5, .5), (1, 1, -1, -1))
    close(loss, 0.15)
    close(by_logp, vec(0, -0.125, 0.375, 0))


@pytest.mark.parametrize("ratio,adv,clip,loss,slope", [
    (1, 2, .2, -2, -2), (1, -2, .2, 2, 2),
    (1.1, 2, .2, -2.2, -2.2), (.9, 2, .2, -1.8, -1.8),  # inside, it pays
    (1.3, 2, .2, -2.4, 0), (.7, 2, .2, -1.4, -1.4),  # outside, no gain but all of a loss
    (1.3, -2, .2, 2.6, 2.6), (.7, -2, .2, 1.6, 0),
    (1.3, 2, .4, -2.6, -2.6), (.7, -2, .4, 1.4, 1.4),  # another range
    (3, 0, .2, 0, 0),
])
def test_clip_loss_sign_by_sign(ratio, adv, clip, loss, slope):
    actual, by_logp = clip_loss((ratio,), (adv,), clip)
    close(actual, loss)
    close(by_logp, vec(slope))


def tiny_agent(mu, log_std, val, **settings):
    """A policy of one action dimension and a value function that see nothing: only biases."""
    space = gym.spaces.Box(-1, 1, (1,), np.float32)
    agent = ppo.Agent(space, space, ppo.Config(hidden=(1,), **settings))
    for param in agent.parameters():
        param.data.zero_()
    for param, value in ((agent.actor[-1].bias, mu), (agent.critic[-1].bias, val),
                         (agent.log_std, log_std)):
        param.data.fill_(value)
    return agent


def loss_and_gradients(agent, *columns):
    """Loss, metrics and gradients by name, of one minibatch."""
    loss, metrics = ppo.ppo_loss(agent, ppo.Minibatch(*columns))
    names, params = zip(*agent.named_parameters())
    return loss.detach(), metrics, dict(zip(names, torch.autograd.grad(loss, params)))


def test_whole_loss_by_hand():
    agent = tiny_agent(mu=1, log_std=math.log(2), val=2, vf_coef=0.5, ent_coef=0.1)
    act = vec((1,), (5,))  # 0 and 2 deviations off
    logp = -math.log(2) - LOG_2PI / 2 - vec(0, 2)
    logp_old = logp - vec(1.5, 1).log()  # the first is beyond the range
    obs, adv, ret = vec((3,), (4,)), vec(1, -2), vec(5, 1)
    loss, metrics, grads = loss_and_gradients(agent, obs, act, logp_old, adv, ret)
    bonus = math.log(2) + LOG_2PI / 2 + 0.5
    close(metrics["pi_loss"], 0.4)
    close(metrics["v_loss"], 5)
    close(metrics["entropy"], bonus)
    close(loss, 0.4 + 0.5 * 5 - 0.1 * bonus)
    close(grads["actor.2.bias"], vec(1))  # -mean of ratio A z / sigma
    close(grads["log_std"], vec(3 - 0.1))  # -mean of ratio A (z^2 - 1), less ent_coef
    close(grads["critic.2.bias"], vec(-1))  # 0.5 mean of 2 (V - R)


def test_entropy_bonus_widens_the_policy():
    agent = tiny_agent(mu=0, log_std=0, val=0, ent_coef=0.3)
    zeros = torch.zeros(4)
    _, _, grads = loss_and_gradients(agent, torch.zeros(4, 1), torch.randn(4, 1), *3 * [zeros])
    close(grads["log_std"], vec(-0.3))


def test_approx_kl_by_hand():
    logp_old = vec(-1, 2)
    kl, by_logp = gradients(lambda logp: ppo.approx_kl(logp, logp_old).mean(),
                            logp_old + vec(2, .5).log())
    close(kl, 0.25)  # of 1 - log 2 and log 2 - 1/2
    close(by_logp, vec(0.5, -0.25))  # (ratio - 1) / 2


def test_approx_kl_expects_the_divergence_of_the_new_policy_from_the_old():
    out, act = 2 * vec((1, -1, 0, 0.5)).expand(4, 4), torch.arange(4)
    old = torch.zeros(4, 4)  # uniform: each action once is the expectation
    kl = ppo.approx_kl(ppo.log_prob(out, None, act), ppo.log_prob(old, None, act)).mean()
    library = torch.distributions.kl_divergence(Categorical(logits=old), Categorical(logits=out))
    close(kl, library.mean())


MEANS = {
    "value_loss": lambda x: ppo.value_loss(x[0], x[1]),
    "clipped_policy_loss": lambda x: ppo.clipped_policy_loss(x[0], x[1], x[2], 0.2),
    "approx_kl": lambda x: ppo.approx_kl(x[0], x[1]).mean(),
    "entropy": lambda x: ppo.entropy(x.T, None),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_loss_is_a_mean_over_the_batch(name):
    columns = torch.randn(3, 8)
    first, second, whole = map(MEANS[name], (columns[:, :4], columns[:, 4:], columns))
    assert whole.ndim == 0
    close(whole, (first + second) / 2)


# ---- [B] against [B, 1]

WRONG_SHAPES = [("value_loss", at, ()) for at in range(2)]
WRONG_SHAPES += [("clipped_policy_loss", at, (0.2,)) for at in range(3)]


@pytest.mark.parametrize("name,at,rest", WRONG_SHAPES)
def test_a_loss_refuses_a_column_for_a_batch(name, at, rest):
    count = 2 if name == "value_loss" else 3
    args = [torch.randn(4, 1) if i == at else torch.randn(4) for i in range(count)]
    with pytest.raises(AssertionError):
        getattr(bare(ppo), name)(*args, *rest)
    with pytest.raises(TypeCheckError):
        getattr(ppo, name)(*args, *rest)


@pytest.mark.parametrize("call", [
    lambda: ppo.approx_kl(torch.zeros(4), torch.zeros(4, 1)),
    lambda: ppo.normalize_advantages(torch.zeros(4)),
    lambda: gae(*[torch.zeros(4, 1)] * 2, torch.zeros(4), *[torch.zeros(4, 1)] * 2, 0.9, 0.9),
    lambda: gae(*[torch.zeros(4, 3)] * 4, torch.zeros(4, 2), 0.9, 0.9),
    lambda: ppo.value_loss(torch.zeros(4), torch.zeros(5)),
    lambda: ppo.value_loss(torch.zeros(4).double(), torch.zeros(4)),
])
def test_the_hook_sees_shapes_and_types(call):
    with pytest.raises(TypeCheckError):
        call()
