"""What is often reported as a bug and is none: these choices pass, and why each is sound."""
import math

import pytest
import torch

from algos import a2c, acktr, ddpg, dqn, ppo, sac, td3, trpo, vpg
from tests.helpers import (
    ONPOLICY as ALGOS,
    copies,
    dqn_agent,
    dqn_batch,
    gae,
    learn,
    make_rollout,
    moved,
    offpolicy_agent,
    offpolicy_batch,
    offpolicy_optimizers,
    onpolicy_agent as make_agent,
)
from utils import mpi

every_algo = pytest.mark.parametrize("name", ALGOS)


def random_steps(rows=40, envs=3):
    torch.manual_seed(0)
    rew, val, next_val = torch.randn(3, rows, envs)
    terminated, truncated = (torch.rand(2, rows, envs) < 0.2).float()
    return rew, val, next_val, terminated, torch.maximum(terminated, truncated)


@pytest.mark.parametrize("algo", [vpg, a2c, acktr, ppo, trpo], ids=lambda algo: algo.__name__)
def test_delta_needs_no_mask_for_the_end_of_an_episode(algo):
    """ "GAE without (1 - done) on delta": V(s') of a terminal state is 0 before GAE sees it or by
    GAE's own mask, which comes to the same; that of a truncated one belongs in delta."""
    rew, val, next_val, terminated, done = random_steps()
    one = gae(algo, rew, val, next_val, terminated, done, 0.9, 0.8)
    two = gae(algo, rew, val, next_val * (1 - terminated), 0 * done, done, 0.9, 0.8)
    for first, second in zip(one, two):
        torch.testing.assert_close(first, second)
    masked = gae(algo, rew, val, next_val * (1 - done), terminated, done, 0.9, 0.8)
    assert (masked[0] - one[0]).abs().max() > 0.1, "a truncated step has a future"


def test_kl_is_looked_at_once_an_epoch_after_its_steps():
    """ "KL is checked too late": a whole epoch is taken, policy and value function, then none."""
    agent = make_agent(ppo, target_kl=1e-9, epochs=5, minibatch_size=8)
    rollout, before, steps = make_rollout(ppo, agent), copies(agent), []
    counted = type("Counted", (mpi.Adam,), {
        "move": lambda self, lr: steps.append(1) or mpi.Adam.move(self, lr)})
    _, metrics = learn(ppo, agent, rollout, counted, lr=1e-2)
    assert len(steps) == rollout.rew.numel() // 8 and metrics["kl"] > 1e-9
    assert {name.partition(".")[0] for name in moved(before, agent)} == {"actor", "critic",
                                                                          "log_std"}


@pytest.mark.parametrize("alpha", [0.05, 1.0, 20.0])
def test_the_temperature_steps_along_log_alpha(alpha):
    """ "The loss has log alpha instead of alpha": both vanish at the same entropy, and point the
    same way beside it; only the length of the step differs."""
    agent = offpolicy_agent(sac, alpha=alpha)           # d = 2, so the target entropy is -2
    log_alpha = agent.log_alpha
    log_alpha.data.fill_(math.log(alpha))
    for logp in (torch.full((8,), 1.5), torch.full((8,), 2.5), torch.full((8,), 2.0)):
        by_alpha = torch.autograd.grad(-(log_alpha.exp() * (logp - 2.0)).mean(), log_alpha)[0]
        ours = torch.autograd.grad(sac.alpha_loss(agent, logp)[0], log_alpha)[0]
        assert ours.sign() == by_alpha.sign()
        torch.testing.assert_close(by_alpha, alpha * ours)


@pytest.mark.parametrize("share", [-1.0, -0.5])
def test_target_entropy_is_a_choice(share):
    """ "-dim / 2 instead of -dim": alpha rests at the entropy that was asked for, whichever."""
    want = share * 2                                            # d = 2
    agent = offpolicy_agent(sac, target_entropy=want)
    slopes = [torch.autograd.grad(sac.alpha_loss(agent, logp)[0], agent.log_alpha)[0]
              for logp in (torch.full((4,), -want), torch.full((4,), -want + 1))]
    assert slopes[0] == 0
    assert slopes[1] < 0, "too sure: alpha rises"


@every_algo
def test_rewards_are_scaled_and_not_centred(name):
    """ "NormalizeReward does not subtract the mean": it would change the task. A reward of 1 a step
    says live on; without its mean it would say nothing."""
    algo = ALGOS[name]
    agent = make_agent(algo, gamma=0.0)                         # the return is the reward
    if hasattr(agent, "reward_sum_stats") and hasattr(algo, "compute_targets"):
        rollout = make_rollout(algo, agent)
        rollout.rew.fill_(1.0)                                  # their mean, in the statistics
        obs = agent.normalize_obs(rollout.obs).flatten(0, 1)
        _, _, ret = algo.compute_targets(agent, rollout, obs)
        torch.testing.assert_close(ret, torch.full_like(ret, 1 / 3))


@pytest.mark.parametrize("algo", [ppo, a2c], ids=lambda algo: algo.__name__)
def test_the_bonus_is_subtracted_from_a_loss(algo):
    """ "The entropy's sign is wrong": a descent on -ent_coef H widens the policy."""
    agent = make_agent(algo, ent_coef=0.1)
    obs, zeros = torch.randn(8, *agent.obs_stats.mean.shape), torch.zeros(8)
    act = torch.randn(8, len(agent.log_std))
    if algo is ppo:
        loss, _ = ppo.ppo_loss(agent, ppo.Minibatch(obs, act, zeros, zeros, zeros))
    else:
        loss, _ = a2c.a2c_loss(agent, a2c.Batch(obs, act, zeros, zeros))
    assert (torch.autograd.grad(loss, agent.log_std)[0] < 0).all()


@pytest.mark.parametrize("algo", [ddpg, td3, sac], ids=lambda algo: algo.__name__)
def test_a_target_may_ask_for_gradients(algo):
    """ "The target is not detached": under no_grad, in no optimizer, it gets none anyway."""
    grads = []
    for asks in (False, True):
        agent, batch = offpolicy_agent(algo), offpolicy_batch(algo)
        optimizers = offpolicy_optimizers(agent)
        for name, module in agent.named_children():
            if name.endswith("_targ"):
                module.requires_grad_(asks)
        torch.manual_seed(1)
        algo.critic_loss(agent, batch)[0].backward()
        grads.append(optimizers["critic"].grad.clone())
        targets = [param for name, param in agent.named_parameters() if "_targ" in name]
        assert targets and all(param.grad is None for param in targets)
    assert torch.equal(*grads) and grads[0].any()


def test_a_target_may_ask_for_gradients_dqn():
    grads = []
    for asks in (False, True):
        agent, batch = dqn_agent(dqn), dqn_batch(dqn)
        agent.critic_targ.requires_grad_(asks)
        optimizer = mpi.Adam(agent.critic)
        dqn.dqn_loss(agent, batch)[0].backward()
        grads.append(optimizer.grad.clone())
        assert all(param.grad is None for param in agent.critic_targ.parameters())
    assert torch.equal(*grads) and grads[0].any()
