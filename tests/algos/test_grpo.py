"""algos/grpo.py: sampling, masks, losses and whole runs.

The oracle knows four tokens and answers of at most two, so 13 answers. It asks for one token after
the other, without padding and without masks.
"""
import copy
import math
from itertools import product

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from algos import grpo
from tasks import Text
from tests.helpers import close, copies, noted, refused, rows, same, vec
from tests.onpolicy import parameters
from utils.optim import Adam

TEXTS = Box(0, 3, (3,), np.int64), Box(0, 3, (2,), np.int64)
PROMPT = (0, 2, 1)                                              # filled up on the left
ANSWERS = [(0, 0), *product((1, 2, 3), range(4))]
DR = {"baseline": "mean", "length_norm": False, "kl_coef": 0.0}


class Same(Text):
    """The answer to "a=" or "aa=" is "a". Careless people answer any letter, once or twice."""

    alphabet, sizes = "\n=abc", (3, 3)

    def draw(self, rng):
        return str(rng.choice(list("abc"))) * int(rng.integers(1, 3)) + "="

    def is_right(self, prompt, answer):
        return answer == prompt[0]

    def careless(self, prompt, rng):
        return self.draw(rng)[:-1]


gym.register("Same-v0", f"{__name__}:Same")


def config(**settings):
    return grpo.Config(**{"env": "Same-v0", "width": 16, "layers": 1, "group_size": 4,
                          "batch_size": 8, "pretrain_steps": 0, "total_steps": 96,
                          "run_dir": "run", "device": "cpu"} | settings)


def make_agent(seed=0, spaces=TEXTS, **settings):
    torch.manual_seed(seed)
    return grpo.Agent(*spaces, config(**settings))


def tokens(*texts):
    return torch.tensor(texts, dtype=torch.int64)


def by_hand(agent, prompt, answer):
    """log pi of each token of an answer up to its end, one forward pass per token."""
    text, logps = [token for token in prompt if token], []
    for token in answer:
        logps.append(agent.logits(tokens(text))[0, -1].log_softmax(-1)[token])
        text.append(token)
        if token == 0:
            break
    return torch.stack(logps)


def grads(agent, loss):
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(agent.parameters()))])


# ---- Tokens

def test_answers_come_as_often_as_they_are_probable():
    agent = make_agent()
    answers = agent.act(tokens(*[PROMPT] * 20_000))
    places = {answer: i for i, answer in enumerate(ANSWERS)}
    seen = np.bincount([places[tuple(row)] for row in answers.tolist()], minlength=13) / 20_000
    probs = [by_hand(agent, PROMPT, answer).sum().exp().item() for answer in ANSWERS]
    close(seen, probs, rtol=0, atol=0.015)
    best, = agent.act(tokens(PROMPT), deterministic=True).tolist()
    text = [2, 1]
    for token in best:
        assert token == (0 if text[-1] == 0 else agent.logits(tokens(text))[0, -1].argmax())
        text.append(token)


def test_what_fills_up_a_prompt_changes_nothing_and_every_token_of_it_counts():
    agent = make_agent(spaces=(Box(0, 3, (6,), np.int64), TEXTS[1]), layers=2)
    plain = agent.logits(tokens([2, 1, 3]))
    for filling in (1, 3):
        filled = agent.logits(tokens([0] * filling + [2, 1, 3]))
        assert filled.isfinite().all()
        close(filled[:, filling:], plain)
    both = agent.logits(tokens([0, 0, 2, 1, 3], [3, 2, 2, 1, 3]))
    close(both[:1, 2:], plain)                                  # rows are on their own
    for other in ([1, 1, 3], [2, 3, 3], [1, 2, 3]):             # also in another order
        assert (agent.logits(tokens(other))[0, -1] - plain[0, -1]).abs().max() > 1e-3
    close(agent.logits(tokens([2, 1, 1]))[:, :2], plain[:, :2])  # no token sees a later one


def test_the_corpus_teaches_answers_and_their_end_but_no_prompts():
    agent, answers = make_agent(), [(0, 0), (2, 0), (1, 3)]
    loss = grpo.corpus_loss(agent, tokens(*[PROMPT] * 3), tokens(*answers))
    close(loss, -torch.cat([by_hand(agent, PROMPT, answer) for answer in answers]).mean())


# ---- Losses by hand

def test_advantages_by_hand():
    """Each group on its own, also those without any difference."""
    rew = vec((1, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0), (1, 1, 0, 0))
    root = math.sqrt(3)
    close(grpo.group_advantages(rew, "std"), vec(
        (root, *[-1 / root] * 3), (0, 0, 0, 0), (0, 0, 0, 0), (1, 1, -1, -1)), rtol=1e-4)
    close(grpo.group_advantages(rew, "mean"), vec(
        (0.75, *[-0.25] * 3), (0, 0, 0, 0), (0, 0, 0, 0), (0.5, 0.5, -0.5, -0.5)))
    assert torch.equal(grpo.group_advantages(rew, "none"), rew)


@pytest.mark.parametrize("length_norm", [True, False])
def test_the_loss_by_hand(length_norm):
    """All tokens of an answer have its advantage. The lengths are 1 and 2: after an end is none.

    The penalty has the gradient of its ratio, too: its mean is then that of KL(pi || pi_ref).
    """
    agent, ref = make_agent(kl_coef=0.5, length_norm=length_norm), make_agent(2)
    old = copy.deepcopy(agent)
    old.head.bias.data += vec(0, 0.5, 0, -0.1)
    answers, adv = [(0, 0), (1, 3)], vec(1.5, -1.0)
    prompt, answer = tokens(PROMPT, PROMPT), tokens(*answers)
    with torch.no_grad():
        logp_old, logp_ref = (grpo.log_prob(each, prompt, answer) for each in (old, ref))
    loss, metrics = grpo.grpo_loss(agent, grpo.Batch(prompt, answer, logp_old, logp_ref, adv))
    pi_loss, penalty, kl, clipped = 0.0, 0.0, [], []
    for answer, a in zip(answers, adv):
        logp, logp_old, logp_ref = (by_hand(each, PROMPT, answer) for each in (agent, old, ref))
        ratio, back = (logp - logp_old).exp(), (logp_ref - logp).exp()
        kl.append(ratio * (back - 1 - back.log()))
        share = 1 / 2 / (len(logp) if length_norm else 1)
        pi_loss -= share * torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).sum()
        penalty += share * kl[-1].sum()
        clipped += ((ratio - 1).abs() > 0.2).tolist()
    close(metrics["pi_loss"], pi_loss)
    close(metrics["kl"], torch.cat(kl).mean())
    close(loss, pi_loss + 0.5 * penalty)
    close(grads(agent, loss), grads(agent, pi_loss + 0.5 * penalty), rtol=1e-4)
    close(metrics["clip_frac"], np.mean(clipped))
    assert 0 < np.mean(clipped) < 1
    assert not any(x.requires_grad for x in metrics.values())       # no graph is kept for the log


def test_no_token_attends_to_nothing(monkeypatch):
    """Padding, too: a softmax of nothing would be NaN."""
    attend = grpo.scaled_dot_product_attention
    monkeypatch.setattr(grpo, "scaled_dot_product_attention", lambda *qkv, attn_mask: attend(
        *qkv, attn_mask=attn_mask) if attn_mask.any(-1).all() else pytest.fail("nothing to see"))
    make_agent().logits(tokens([0, 0, 1], [1, 2, 3]))


# ---- An iteration

def test_a_group_answers_one_prompt_and_gets_its_own_rewards(monkeypatch):
    updates = noted(monkeypatch, grpo, "update")
    grpo.train(config(total_steps=320, lr=1e-3))
    *_, seen, rates = zip(*updates)
    np.testing.assert_allclose(rates, np.linspace(1e-3, 1e-4, 10))
    prompts = torch.stack([answers.prompt for answers in seen])  # [iterations, B, prompt]
    groups = prompts.unflatten(1, (8, 4))
    assert (groups == groups[:, :, :1]).all()
    assert len(groups[:, :, 0].flatten(1).unique(dim=0)) == 10  # new ones in each iteration
    assert len(groups[:, :, 0].unique(dim=1)[0]) > 4
    for answers in seen:
        for prompt, answer, rew in zip(answers.prompt, answers.answer, answers.rew):
            given, said = [t for t in prompt.tolist() if t], answer.tolist()
            assert rew == (said[:2] == [given[-2], 0])
    assert 0.02 < torch.cat([answers.rew for answers in seen]).mean() < 0.9
    returns = [float(row["ep_ret"]) for row in rows("run", "episodes.csv")]
    assert sum(returns) == sum(float(answers.rew.sum()) for answers in seen)


def test_an_update_compares_with_the_policy_that_answered_and_with_the_reference(monkeypatch):
    agent, reference = make_agent(epochs=3), make_agent(1)
    prompt, answer = tokens(*[PROMPT] * 8), tokens(*ANSWERS[:8])
    answers = grpo.Answers(prompt, answer, vec(1, 0, 0, 0, 1, 1, 0, 0))
    before, fixed = copy.deepcopy(agent), copies(reference)
    batches = noted(monkeypatch, grpo, "grpo_loss", lambda agent, batch: (copies(agent), batch))
    metrics = grpo.update(agent, reference, Adam(agent), answers, 5e-4)
    assert len(batches) == 3 and same(batches[0][0], copies(before))
    assert not same(batches[1][0], batches[0][0]) and same(copies(reference), fixed)
    for _, batch in batches:
        close(batch.logp_old, grpo.log_prob(before, prompt, answer).detach())
        close(batch.logp_ref, grpo.log_prob(reference, prompt, answer).detach())
        close(batch.adv, grpo.group_advantages(answers.rew.view(2, 4), "std").flatten())
    assert metrics["mixed_groups"].tolist() == [1, 1]
    assert metrics["answer_len"].tolist() == [1, 2, 2, 2, 2, 2, 2, 2]
    assert metrics["clip_frac"][0] == 0 < metrics["clip_frac"].shape[0] == 3


# ---- Whole runs

@pytest.mark.parametrize("settings", [{}, DR, {"baseline": "none"}], ids=["grpo", "dr", "none"])
def test_it_learns(settings):
    agent = grpo.train(config(total_steps=1600, lr=3e-3, pretrain_steps=60, **settings))
    returns = [float(row["ep_ret"]) for row in rows("run", "episodes.csv")]
    assert np.mean(returns[:100]) < 0.4 and np.mean(returns[-300:]) > 0.85
    prompts = np.array([[0, 2, 1], [3, 3, 1], [4, 4, 1], [0, 3, 1]])
    assert agent.predict(prompts).tolist() == [[2, 0, 0], [3, 0, 0], [4, 0, 0], [3, 0, 0]]
    assert agent.predict(prompts[1]).tolist() == [3, 0, 0]


def test_the_reference_is_the_pretrained_model_or_that_of_init_from(monkeypatch):
    seen = noted(monkeypatch, grpo, "update", lambda *args: [*map(copies, args[:2])])
    first = grpo.train(config(pretrain_steps=5))
    grpo.train(config(pretrain_steps=5, init_from="run", run_dir="other", total_steps=64))
    (agent, reference), second, third, (loaded, of_loaded), _ = seen
    assert same(agent, reference) and same(second[1], reference) and same(third[1], reference)
    assert same(loaded, copies(first)) and same(of_loaded, loaded)
    assert not same(second[0], reference) and not torch.equal(
        torch.cat([x.flatten() for x in agent.values()]), parameters(make_agent()))


def test_a_task_of_texts_is_in_no_other_process():
    refused(config, async_envs=True, says="--async-envs: a task of texts stays in this process")


# ---- The tasks

@pytest.mark.parametrize("task,prompt,right,wrong", [
    ("Sums", "3+5=", ["8"], ["9", "08", "8=", ""]),
    ("Sums", "7+5=", ["12"], ["1", "2", "21"]),
    ("Brackets", "([", ["])", "()])", "][])"], [")]", "]", "])(", "", "]))"])])
def test_right_answers(task, prompt, right, wrong):
    env = gym.make(f"tasks:{task}-v0").unwrapped
    env.reset(seed=1)
    for answers, rew in ((right, 1.0), (wrong, 0.0)):
        for answer in answers:
            env.prompt = prompt
            ended = answer.ljust(env.sizes[1], "\n")
            assert env.step(env.tokens(ended))[1:4] == (rew, True, False), answer


@pytest.mark.parametrize("task", ["Sums", "Brackets"])
def test_the_corpus_is_right_at_times_and_fits(task):
    env = gym.make(f"tasks:{task}-v0").unwrapped
    prompts, answers = env.corpus(2000, seed=1)
    assert same(torch.tensor(prompts), torch.tensor(env.corpus(2000, seed=1)[0]))
    right = []
    for prompt, answer in zip(prompts, answers):
        assert prompt in env.observation_space and answer in env.action_space
        env.prompt = "".join(env.alphabet[token] for token in prompt if token)
        right.append(env.step(answer)[1])
    assert 0.15 < np.mean(right) < 0.3
