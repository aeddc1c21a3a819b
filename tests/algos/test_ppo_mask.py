"""algos/ppo_mask.py, where it is not algos/ppo.py: what forbidden actions do to the policy."""
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from algos import ppo, ppo_mask
from tests.envs import with_mask
from tests.helpers import VECTOR, close, gradients, noted, refused, rows, shaken, vec
from tests.onpolicy import losses
from utils.envs import make_envs
from utils.optim import Adam
from utils.spaces import FlatBox, Parts, obs_kind

SMALL = {"device": "cpu", "hidden": (8, 8), "num_envs": 2, "rollout_steps": 64,
         "minibatch_size": 16, "epochs": 2, "total_steps": 128, "run_dir": "run"}
SPACE = FlatBox(with_mask(VECTOR, 4))
LOGITS = vec((1, 2, 3, 4), (0, 0, 0, 0), (5, -5, 30, 0), (1, 2, 3, 4))
MASKS = vec((1, 0, 1, 0), (0, 1, 1, 1), (1, 1, 0, 1), (0, 0, 1, 0))


def make_agent(space=SPACE, num_acts=4):
    """Return a small agent whose policy depends on what it sees, with statistics."""
    torch.manual_seed(0)
    agent = shaken(ppo_mask.Agent(space, Discrete(num_acts), ppo_mask.Config(**SMALL)), 0.3)
    agent.obs_stats.count.fill_(50)
    agent.obs_stats.mean.fill_(3.0), agent.obs_stats.var.fill_(4.0)
    return agent


def policy(logits):
    """Return what `Agent.policy` makes of these logits and MASKS."""
    agent = make_agent()
    agent.actor.forward = lambda seen: logits
    return agent.policy(torch.cat([torch.zeros(4, 3), MASKS], 1))


def some_obs(count=50):
    """Random observations with random masks, [B, 7], and the masks."""
    rng = np.random.default_rng(0)
    masks = rng.random((count, 4)) < 0.4
    masks[np.arange(count), rng.integers(4, size=count)] = True
    seen = rng.normal(3, 2, (count, 3))
    return np.concatenate([seen, masks], 1).astype(np.float32), torch.from_numpy(masks)


# ---- Logits, probabilities, entropy

def allowed_probs(logits, mask):
    """By the definition, in Python's floats: exponentials of what is allowed, over their sum."""
    weights = [math.exp(x) if allowed else 0.0 for x, allowed in zip(logits, mask)]
    return [weight / sum(weights) for weight in weights]


def test_probabilities_are_those_of_what_is_allowed_renormalised():
    """And exactly 0 for what is not, however high its logit is, which log pi leaves alone."""
    probs = vec(*map(allowed_probs, LOGITS.tolist(), MASKS.tolist()))
    close(policy(LOGITS).probs, probs)
    act = torch.tensor([2, 1, 3, 2])
    logp, grad = gradients(lambda x: policy(x).log_prob(act).sum(), LOGITS)
    close(logp, probs[range(4), act].log().sum())
    close(grad, torch.nn.functional.one_hot(act, 4) - probs)
    for forbidden in (policy(LOGITS).probs, grad):
        assert (forbidden[MASKS == 0] == 0).all()


def test_the_entropy_is_that_of_what_is_allowed_with_its_gradient():
    def by_hand(logits):
        rows = [-(p * p.log()).sum() for p in (x[m > 0].softmax(-1) for x, m in zip(logits, MASKS))]
        return torch.stack(rows).mean()

    ours = gradients(lambda x: policy(x).entropy().mean(), LOGITS)
    for mine, expected in zip(ours, gradients(by_hand, LOGITS)):
        close(mine, expected)
    assert ours[1][3].tolist() == [0, 0, 0, 0]                  # one action: there is no choice


# ---- Acting

@pytest.mark.parametrize("scale", [1.0, 1000.0])                # also of logits far apart
def test_no_action_is_forbidden_drawn_or_best(scale):
    agent = make_agent()
    agent.actor[-1].weight.data *= scale
    obs, masks = some_obs(3000)
    for act in (agent.act(obs), agent.act(obs, deterministic=True)):
        assert masks.gather(1, act[:, None]).all()
    logits = agent.actor((torch.from_numpy(obs[:, :3]) - 3) / 2)
    best = torch.where(masks, logits, -math.inf).argmax(1)
    assert torch.equal(act, best) and (logits.argmax(1) != best).any()
    assert agent.predict(obs[7]) == best[7]
    assert agent.predict({"observation": obs[7, :3], "action_mask": np.int8(obs[7, 3:])}) == best[7]


@pytest.mark.parametrize("mask", [[0, 0, 0, 0], [-1, 1, 1, 1], [0, 0.5, 1, 1]])
def test_what_is_no_mask_is_refused_before_it_is_acted_on(mask):
    obs, _ = some_obs(5)
    obs[3, 3:] = mask
    agent = make_agent()
    for act in (agent.act, agent.predict):
        said = refused(lambda act=act: act(obs))
        assert said.startswith(f"the observation has action_mask {vec(*mask).tolist()}; it takes 0")


# ---- What the networks see

def test_the_mask_is_not_seen_and_has_no_statistics():
    """Wherever it stands among the observations: Gymnasium sorts the parts of a Dict by name."""
    space = FlatBox(Dict({"observation": VECTOR, "action_mask": Box(0, 1, (4,), np.int8)}))
    assert list(space.parts) == ["action_mask", "observation"]
    agent, (obs, masks) = make_agent(space=space), some_obs()
    obs = torch.from_numpy(np.concatenate([obs[:, 3:], obs[:, :3]], 1))
    inputs = agent.normalize_obs(obs)
    close(inputs, torch.cat([(obs[:, 4:] - 3) / 2, masks.float()], 1))
    everything = torch.cat([inputs[:, :3], torch.ones(50, 4)], 1)
    assert torch.equal(agent.value(inputs), agent.value(everything))
    seen = []
    agent.actor.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    masked, free = agent.policy(inputs), agent.policy(everything)
    assert torch.equal(*seen) and not torch.equal(masked.probs, free.probs)
    agent = ppo_mask.train(ppo_mask.Config(env="tests.envs:MaskEnds-v0", **SMALL))
    close(agent.obs_stats.mean[1], 3.0)                         # it shows (x, 3)


@pytest.mark.parametrize("norm_obs,target_kl", [(True, 0.05), (False, 1e-6)])
def test_masks_that_forbid_nothing_change_nothing_to_the_bit(norm_obs, target_kl):
    """Two updates on CartPole: parameters, statistics and every metric of PPO itself."""
    settings = SMALL | {"norm_obs": norm_obs, "target_kl": target_kl, "ent_coef": 0.01}
    plain = ppo.train(ppo.Config(env="CartPole-v1", **settings)).state_dict()
    settings |= {"run_dir": "masked"}
    masked = ppo_mask.train(ppo_mask.Config(env="tests.envs:AllAllowed-v0", **settings))
    masked = masked.state_dict()
    assert masked.keys() == plain.keys()
    assert all(torch.equal(masked[name], plain[name]) for name in plain)
    assert rows("masked") == rows("run") and rows("run", "episodes.csv")


# ---- Learning

def test_an_update_is_of_the_policy_that_acted(monkeypatch):
    """With the masks of its own states, which change in every step: logp_old, ratio, H and kl."""
    calls = losses(monkeypatch, ppo_mask, "ppo_loss")
    cfg = ppo_mask.Config(env="tests.envs:MaskCounter-v0", **SMALL)
    envs = make_envs(cfg, 2)
    agent = make_agent(envs.single_observation_space, 5)

    def by_hand(obs):
        logits = agent.actor((torch.from_numpy(obs[:, :3]) - 3) / 2).tolist()
        return [allowed_probs(*row) for row in zip(logits, obs[:, 3:])]

    probs = noted(monkeypatch, agent, "act", by_hand)
    rollout, _ = ppo_mask.collect(agent, envs, envs.reset(seed=1)[0], 32)
    metrics = ppo_mask.update(agent, Adam(agent), rollout, 0.0)  # nothing moves
    probs = torch.tensor(probs)
    acted = probs.gather(2, rollout.act[..., None]).log().flatten()
    used = torch.cat([call.logp_old for call in calls[:4]])         # the first epoch
    close(used.sort().values, acted.sort().values, rtol=1e-4)
    close(metrics["kl"], 0.0)
    close(metrics["pi_loss"].mean(), 0.0, atol=1e-5)                # the mean of advantages
    close(metrics["entropy"].mean(), -probs.xlogy(probs).sum(2).mean())


# ---- Images, and actions of several parts

IMAGE = Box(0, 255, (9, 8, 3), np.uint8)
PARTS = Parts(MultiDiscrete([3, 2]))
HALVES = Tuple((Box(0, 1, (3,), np.int8), MultiBinary(2)))


@pytest.mark.parametrize("seen", [
    {"see": IMAGE, "at": VECTOR}, {"observation": Dict(see=IMAGE, at=VECTOR)}], ids=len)
def test_all_beside_the_mask_is_seen_and_an_image_is_encoded(seen):
    first, *rest = seen.items()                                 # the mask stands between them
    space = FlatBox(Dict([first, ("action_mask", Box(0, 1, (4,), np.int8)), *rest]))
    agent = make_agent(space)
    assert agent.embed.sizes == [216, 3] and agent.obs_stats.mean.shape == (3,)
    space.own.seed(1)
    raw = space.own.sample()
    raw["action_mask"] = np.int8([0, 1, 0, 1])
    obs = torch.from_numpy(space.flatten(raw))[None]
    inputs = agent.normalize_obs(obs)
    at = torch.from_numpy(raw["at"] if "at" in raw else raw["observation"]["at"])
    close(inputs[0, 216:], torch.cat([(at - 3) / 2, vec(0, 1, 0, 1)]))
    assert torch.equal(inputs[:, :216], obs[:, :216])
    assert (agent.policy(agent.encoder(inputs)).probs[0, [0, 2]] == 0).all()
    assert agent.predict(raw) in (1, 3)


@pytest.mark.parametrize("mask", [Box(0, 1, (5,), np.int8), HALVES], ids=["flat", "own"])
def test_every_part_has_a_mask_of_its_own(mask):
    """One after the other, or as Gymnasium's `MultiDiscrete.sample` takes them."""
    space = FlatBox(Dict(observation=VECTOR, action_mask=mask))
    agent = ppo_mask.Agent(space, PARTS, ppo_mask.Config(**SMALL))
    given = np.array([0, 1, 0, 1, 1], np.int8)
    raw = {"observation": np.zeros(3, np.float32),
           "action_mask": given if mask is not HALVES else (given[:3], given[3:])}
    obs = np.stack(500 * [space.flatten(raw)])
    act = agent.act(obs)
    assert (act[:, 0] == 1).all() and set(act[:, 1].tolist()) == {0, 1}
    pi = agent.policy(agent.encoder(agent.normalize_obs(torch.from_numpy(obs[:1]))))
    close(pi.entropy(), pi.base_dist.entropy()[:, 1])
    assert agent.predict(raw)[0] == 1
    obs[7, agent.mask] = [1, 1, 1, 0, 0]                        # nothing is left of the second
    assert "action_mask [1.0, 1.0, 1.0, 0.0, 0.0]" in refused(agent.act, obs)
    said = refused(ppo_mask.Agent, FlatBox(with_mask(VECTOR, 6)), PARTS, agent.cfg)
    assert said.startswith("--env has an action_mask of 6 numbers; it takes 5, ")


def test_algorithms_without_masks_take_them_as_vectors():
    agent = ppo.train(ppo.Config(env="tests.envs:MaskEnds-v0", **SMALL))
    assert agent.actor[0].in_features == 6
    assert obs_kind(FlatBox(Dict(observation=VECTOR, mask=VECTOR))) == "vector"


# ---- The task

def test_tour_pays_for_the_way_and_ends_when_all_is_visited():
    env = gym.make("tasks:Tour-v0", points=3)
    obs, _ = env.reset(seed=1)
    places, here = env.unwrapped.away, np.zeros(2)              # it starts in the middle
    for left, act in ((2, 1), (2, 1), (1, 0), (0, 2)):
        again = not obs["action_mask"][act]
        assert obs["observation"][act] == pytest.approx((not again) * np.hypot(*places[act] - here))
        obs, rew, terminated, truncated, _ = env.step(act)
        assert rew == pytest.approx(-1 if again else -np.hypot(*places[act] - here))
        assert obs["action_mask"].sum() == left and not obs["action_mask"][act]
        assert terminated == (left == 0) and not truncated
        here = places[act]
