"""algos/ppo.py: its loss by hand, what `update` gives to it, and stable-baselines3's step."""
import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from jaxtyping import TypeCheckError
from stable_baselines3 import PPO
from stable_baselines3.common.logger import configure
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from algos import ppo, ppo_popart
from tests import onpolicy
from tests.helpers import LOG_2PI, Nowhere, bare, close, gradients, refuses_columns, vec
from tests.onpolicy import SPACES, distribution, outputs, pairs, parameters, rows_of, tiny_agent
from utils import mpi

SMALL = {"num_envs": 3, "rollout_steps": 24, "minibatch_size": 24, "epochs": 1, "hidden": (8, 8)}
make_agent = partial(onpolicy.make_agent, ppo)
make_rollout = partial(onpolicy.make_rollout, ppo)
targets = partial(onpolicy.targets, ppo)

every_kind = pytest.mark.parametrize("kind", SPACES)
vectors = pytest.mark.parametrize("kind", ["box", "discrete"])


PLAIN_LOSS = ppo.ppo_loss


def learn(agent, rollout, loss=PLAIN_LOSS, lr=1e-3, make=None):
    """One update -> the agent's parameters after it, and the metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "ppo_loss", loss)
        return onpolicy.learn(ppo, agent, rollout, make, lr)


Spy = partial(onpolicy.Spy, PLAIN_LOSS)


# ---- Its own equations

def test_normalize_adv_by_hand():
    adv = vec((1, 2, 3), (10, 30, 20), (5, 5, 5))  # three minibatches, each by its own statistics
    high = math.sqrt(1.5)  # 1 / sqrt(2/3): the variance divides by n
    close(ppo.normalize_advantages(adv), vec((-high, 0, high), (-high, high, 0), (0, 0, 0)))
    close(ppo.normalize_advantages(vec((0, 2e-8))), vec((-0.5, 0.5)))  # epsilon outside the root
    close(ppo.normalize_advantages(vec((3,), (-7,))), vec((0,), (0,)))


def clip_loss(ratio, adv, clip=0.2):
    """The loss of samples with these ratios, and its gradient in their log-probabilities."""
    logp_old = torch.linspace(-3, 2, len(ratio))
    return gradients(lambda logp: ppo.clipped_policy_loss(logp, logp_old, vec(*adv), clip),
                     logp_old + vec(*ratio).log())


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


@pytest.mark.parametrize("algo,loc,scale", [(ppo, 0, 1), (ppo_popart, 50, 100)])
def test_whole_loss_by_hand(algo, loc, scale):
    """PopArt compares n(s) = 2 with targets in units of its scale, so that it has the same loss."""
    agent = tiny_agent(algo, mu=1, log_std=math.log(2), val=2, hidden=(1,), vf_coef=0.5,
                       ent_coef=0.1)
    if algo is ppo_popart:
        agent.loc.fill_(loc), agent.square.fill_(loc**2 + scale**2)
    logp = -math.log(2) - LOG_2PI / 2 - vec(0, 2)  # of actions 0 and 2 deviations off
    loss, metrics = (ppo.ppo_loss if algo is ppo else algo.popart_loss)(agent, algo.Minibatch(
        obs=vec((3,), (4,)), act=vec((1,), (5,)), adv=vec(1, -2), ret=loc + scale * vec(5, 1),
        logp_old=logp - vec(1.5, 1).log()))  # the first is beyond the range
    names, params = zip(*agent.named_parameters())
    grads = dict(zip(names, torch.autograd.grad(loss, params)))
    bonus = math.log(2) + LOG_2PI / 2 + 0.5
    close(metrics["pi_loss"], 0.4)
    close(metrics["v_loss"], 5)
    close(metrics["entropy"], bonus)
    close(loss.detach(), 0.4 + 0.5 * 5 - 0.1 * bonus)
    close(grads["actor.2.bias"], vec(1))  # -mean of ratio A z / sigma
    close(grads["log_std"], vec(3 - 0.1))  # -mean of ratio A (z^2 - 1), less ent_coef
    close(grads["critic.2.bias"], vec(-1))  # 0.5 mean of 2 (V - R)


def test_approx_kl_by_hand():
    logp_old = vec(-1, 2)
    kl, by_logp = gradients(lambda logp: ppo.approx_kl(logp, logp_old).mean(),
                            logp_old + vec(2, .5).log())
    close(kl, 0.25)  # of 1 - log 2 and log 2 - 1/2
    close(by_logp, vec(0.5, -0.25))  # (ratio - 1) / 2


# ---- [B] against [B, 1]

def test_a_loss_refuses_a_column_for_a_batch():
    refuses_columns(bare(ppo).clipped_policy_loss, 3, 0.2)
    with pytest.raises(TypeCheckError):
        ppo.clipped_policy_loss(torch.zeros(4), torch.zeros(4), torch.zeros(4, 1), 0.2)
    for algo, loss in ((ppo, "ppo_loss"), (ppo_popart, "popart_loss")):
        plain = bare(algo)
        agent = plain.Agent(*SPACES["box"], plain.Config())
        with pytest.raises(AssertionError):
            getattr(plain, loss)(agent, plain.Minibatch(
                obs=torch.zeros(4, 3), act=torch.zeros(4, 2), logp_old=torch.zeros(4),
                adv=torch.zeros(4), ret=torch.zeros(4, 1)))


# ---- What the loss is given

@every_kind
def test_ratio_is_1_at_first_with_the_probabilities_of_acting(kind):
    agent, spy = make_agent(kind, minibatch_size=8), Spy()
    rollout = make_rollout(agent)
    acting = distribution(agent, rollout.obs.flatten(0, 1))
    logp = acting.log_prob(rollout.act.flatten(0, 1))
    if kind == "box":
        assert (rollout.act.abs() > 1).any()  # what the environment clips, the policy does not
    learn(agent, rollout, spy)
    for call in spy.calls:
        rows = rows_of(call, agent, rollout)
        assert torch.equal(call.act, rollout.act.flatten(0, 1)[rows])
        close(call.logp_old, logp[rows], atol=1e-5)
    first = spy.calls[0]
    with torch.no_grad():
        out, _ = outputs(first.agent, first.obs)
        ratio = (ppo.log_prob(out, first.agent.log_std, first.act) - first.logp_old).exp()
    close(ratio, torch.ones(8), rtol=1e-4)


@vectors
def test_every_sample_is_taken_once_an_epoch_and_in_a_new_order(kind):
    agent, spy = make_agent(kind, minibatch_size=4, epochs=3), Spy()
    rollout = make_rollout(agent)
    learn(agent, rollout, spy)
    orders = torch.stack([rows_of(call, agent, rollout) for call in spy.calls]).view(3, 24)
    assert torch.equal(orders.sort(1).values, torch.arange(24).expand(3, 24))
    assert len({tuple(order) for order in [range(24), *orders.tolist()]}) == 4


@every_kind
@pytest.mark.parametrize("anew", [True, False])
def test_targets_follow_the_critic_from_epoch_to_epoch_but_logp_old_does_not(kind, anew):
    agent, spy = make_agent(kind, epochs=3, norm_adv=False, gamma=0.9, lam=0.8,
                            recompute_adv=anew), Spy()
    rollout, before = make_rollout(agent), copy.deepcopy(agent)
    learn(agent, rollout, spy, lr=1e-2)
    rows = [rows_of(call, agent, rollout) for call in spy.calls]
    for call, order in zip(spy.calls, rows):
        adv, ret = targets(call.agent if anew else before, rollout)
        close(call.adv, adv[order], rtol=1e-4, atol=1e-5)
        close(call.ret, ret[order], rtol=1e-4, atol=1e-5)
        assert not (call.adv.requires_grad or call.ret.requires_grad or call.logp_old.requires_grad)
    first, *_, last = (call.ret[order.argsort()] for call, order in zip(spy.calls, rows))
    assert ((first - last).abs().max() > 0.01) == anew
    first, *_, last = (call.logp_old[order.argsort()] for call, order in zip(spy.calls, rows))
    assert torch.equal(first, last)


@pytest.mark.parametrize("minibatch", [24, 8])
def test_norm_adv_normalizes_each_minibatch(minibatch):
    agent, spy = make_agent(minibatch_size=minibatch), Spy()
    rollout = make_rollout(agent)
    adv, _ = targets(agent, rollout)
    learn(agent, rollout, spy, lr=0.0)
    for call in spy.calls:
        own = adv[rows_of(call, agent, rollout)]
        close(call.adv, (own - own.mean()) / own.std(correction=0), rtol=1e-4, atol=1e-5)


def test_without_scale_rew_rewards_stay_as_they_are():
    agent, spy = make_agent(gamma=0.0, scale_rew=False), Spy()  # so that the return is the reward
    rollout = make_rollout(agent)
    learn(agent, rollout, spy)
    close(spy.calls[0].ret, rollout.rew.flatten()[rows_of(spy.calls[0], agent, rollout)])


# ---- Steps and metrics

@every_kind
def test_metrics_say_what_happened(kind):
    agent, spy = make_agent(kind, minibatch_size=8, epochs=4, clip_ratio=0.05), Spy()
    rollout, before = make_rollout(agent), copy.deepcopy(agent)
    metrics = learn(agent, rollout, spy, lr=1e-3 if kind == "images" else 1e-2)[1]
    obs, act = rollout.obs.flatten(0, 1), rollout.act.flatten(0, 1)
    old, new = (distribution(x, obs).log_prob(act) for x in (before, agent))
    ratio = (new - old).exp()
    outside = (ratio - 1).abs() > 0.05
    assert 0 < outside.sum() < 24
    close(metrics["clip_frac"], outside.float().mean())
    close(metrics["kl"], (ratio - 1 - ratio.log()).mean(), rtol=1e-3)
    with torch.no_grad():
        _, val = outputs(before, before.normalize_obs(obs))
    close(metrics["val"].flatten(), val)
    told = [PLAIN_LOSS(agent, ppo.Minibatch(*columns))[1]
            for agent, *columns in (vars(call).values() for call in spy.calls)]
    for name in ("pi_loss", "v_loss", "entropy"):
        close(metrics[name], torch.stack([each[name] for each in told]).detach(), rtol=1e-4)
    assert metrics["grad_norm"].shape == (12,)


# ---- stable-baselines3

def their_ppo(agent, lr):
    """Their PPO with our settings and weights; advantages come normalised from us."""
    cfg = agent.cfg
    nets = {"net_arch": [*cfg.hidden], "optimizer_kwargs": {"eps": 1e-5}}
    model = PPO("MlpPolicy", Nowhere(*SPACES["discrete" if agent.discrete else "box"]), lr,
                n_steps=64, n_epochs=1, clip_range=cfg.clip_ratio, normalize_advantage=False,
                ent_coef=cfg.ent_coef, vf_coef=cfg.vf_coef, max_grad_norm=cfg.max_grad_norm,
                policy_kwargs=nets, device="cpu")
    model.set_logger(configure(None, []))
    for our, their in pairs(agent, model.policy):
        their.data.copy_(our.data)
    return model


class Drifted(onpolicy.Spy):
    """A spy whose old policy is another one, so that ratios leave the range at once."""

    def __call__(self, agent, minibatch):
        noise = torch.linspace(-0.5, 0.5, len(minibatch.ret))  # of shuffled samples
        return super().__call__(agent, replace(minibatch, logp_old=minibatch.logp_old + noise))


def clipped_shares(call):
    """Shares of a minibatch beyond the range, by side and sign: (+ +), (+ -), (- +), (- -)."""
    with torch.no_grad():
        out, _ = outputs(call.agent, call.obs)
        ratio = (ppo.log_prob(out, call.agent.log_std, call.act) - call.logp_old).exp()
    clip = call.agent.cfg.clip_ratio
    return [(side & sign).float().mean() for side in (ratio > 1 + clip, ratio < 1 - clip)
            for sign in (call.adv > 0, call.adv < 0)]


@vectors
@pytest.mark.parametrize("num_steps", [1, 10])
def test_loss_gradient_and_step_are_those_of_stable_baselines3(kind, num_steps):
    agent = make_agent(kind, num_envs=4, rollout_steps=64 * num_steps, minibatch_size=64,
                       ent_coef=0.01, max_grad_norm=0.2)
    start, model = parameters(agent), their_ppo(agent, lr=1e-3)
    spy = Drifted(PLAIN_LOSS)
    flat, metrics = learn(agent, make_rollout(agent), spy, lr=1e-3)
    assert len(spy.calls) == num_steps
    assert min(min(clipped_shares(call)) for call in spy.calls) > 0.03

    samples = [RolloutBufferSamples(call.obs, call.act, torch.zeros(64), call.logp_old, call.adv,
                                    call.ret) for call in spy.calls]
    model.rollout_buffer.get = lambda batch_size: iter(samples)
    model.train()
    logged = model.logger.name_to_value
    close(metrics["pi_loss"].mean(), logged["train/policy_gradient_loss"], rtol=1e-4, atol=1e-6)
    close(metrics["v_loss"].mean(), logged["train/value_loss"], rtol=1e-4)
    close(metrics["entropy"].mean(), -logged["train/entropy_loss"], rtol=1e-4)
    assert metrics["grad_norm"].min() > agent.cfg.max_grad_norm  # so that the cut is compared too
    assert (flat - start).abs().max() > 9e-4 * num_steps**0.5
    for our, their in pairs(agent, model.policy):
        close(our.grad, their.grad, rtol=1e-3, atol=1e-6 * num_steps)
        close(our.data, their.data, rtol=0, atol=1e-6 * num_steps)


def test_training_has_the_optimizer_of_stable_baselines3(monkeypatch):
    """Adam (utils/mpi.py is compared with PyTorch's) with an epsilon, and nothing else is set."""
    given, plain = [], ppo.update
    monkeypatch.setattr(ppo, "update", lambda agent, optimizer, *rest: given.append(optimizer)
                        or plain(agent, optimizer, *rest))
    ppo.train(ppo.Config(env="CartPole-v1", total_steps=24, **SMALL))
    theirs = PPO("MlpPolicy", Nowhere(*SPACES["discrete"]), device="cpu").policy.optimizer
    [ours], param = given, torch.nn.Parameter(torch.zeros(1))
    assert type(ours) is mpi.Adam and type(theirs) is torch.optim.Adam
    assert theirs.defaults == torch.optim.Adam(
        [param], lr=theirs.defaults["lr"], eps=ours.eps).defaults
