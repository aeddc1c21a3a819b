"""Group Relative Policy Optimization (GRPO).  Shao et al. 2024, arXiv:2402.03300.

The problem. A language model is a policy: the state is the text so far, the action is
the next token. Often only a whole answer can be judged, so the reward comes at the end.
PPO would need a critic that predicts it, a second model as large as the first.

The idea. Sample G answers to the same prompt. Their mean reward is the baseline: an
answer that is better than its group becomes more likely, token by token, and a worse
one less likely. The rest is PPO: ratios and clipping allow several gradient steps on
the same answers. A penalty keeps the policy close to a reference, here the pretrained
model. A program checks the answers (a "verifiable reward"). What `train` does:

    pretrain             imitate a small corpus in which most answers are wrong
    repeat until `total_steps`, which counts answers:
      collect              sample G answers to each prompt, and get their rewards
      update
        group_advantages     compare each answer with its group
        grpo_loss            `epochs` Adam steps, each on all answers

The tasks are in tasks.py. One step of an environment takes a whole answer, so
`Agent.act` samples all its tokens, and an episode has one step. Both normalisations of
the paper are biased: see `group_advantages` and `answer_mean`. Dr. GRPO (Liu et al.
2025, arXiv:2503.20783) does without: --baseline mean --no-length-norm. REINFORCE is
--baseline none --no-length-norm --epochs 1 --kl-coef 0.

Healthy values. `ep_ret`, the share of right answers, rises from 0.2 to above 0.95, `kl`
to 0.5. The share of `mixed_groups` falls to 0.1, and `clip_frac` stays below 0.1.

Run   python -m algos.grpo --env tasks:Sums-v0
"""
from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from torch.nn.functional import scaled_dot_product_attention

# mpi           several processes may share the prompts. Config has totals;
#               mpi.share(total) is the part of this process
from utils import mpi
from utils.envs import make_envs
from utils.errors import UsageError
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Natural, Positive, Run, RunConfig, check_range, main

# Shapes, which the tests check at every call. A token is the number of a character.
Prompts = Int64[Tensor, "B prompt"]  # padded with END on the left
Tokens = Int64[Tensor, "B answer"]  # answers, padded with END on the right
PerToken = Float32[Tensor, "B answer"]  # one number per token of an answer
PerAnswer = Float32[Tensor, "B"]  # one number per answer
Groups = Float32[Tensor, "groups G"]  # the same, with one row per prompt
Scalar = Float32[Tensor, ""]

END = 0  # the token that ends an answer; also the padding


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    env: str = "tasks:Sums-v0"  # a text task (also tasks:Brackets-v0)
    total_steps: float = 1e5  # answers, rounded up to whole iterations
    batch_size: int = 32  # prompts per iteration (16 to 1024)
    group_size: int = 8  # G, answers to each prompt (4 to 64)
    epochs: int = 4  # gradient steps per iteration, each on all answers (1 to 8)
    lr: Positive = 5e-4  # initial learning rate (from 1e-6 for large models to 1e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    clip_ratio: Positive = 0.2  # c, PPO's clipping range (0.1 to 0.3)
    kl_coef: float = 0.04  # beta, weight of the KL to the reference (0 to 0.1)
    max_grad_norm: float = 0.5  # maximum gradient norm; 0: off
    baseline: Literal["std", "mean", "none"] = "std"  # (r - mean) / std, r - mean, or r
    length_norm: bool = True  # an answer's loss: the mean over its tokens, or the sum
    pretrain_steps: Natural = 500  # gradient steps on the corpus; none with --init-from
    width: int = 64  # numbers per token in the transformer; a multiple of 16
    layers: int = 2  # blocks of the transformer (1 to 4)

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "group_size", low=2, high=1e5)  # raises UsageError
        check_range(self, "width layers", high=1e4)
        if self.async_envs:  # `pretrain` asks the task for its corpus
            raise UsageError("--async-envs: a task of texts stays in this process")
        if self.width % 16:
            raise UsageError(f"--width is {self.width}; it takes a multiple of 16")


# ===================================== data types =====================================
@dataclass(frozen=True)
class Answers:  # of one iteration; G successive rows answer the same prompt
    prompt: Prompts
    answer: Tokens
    rew: PerAnswer  # r: 1 if the answer is right, 0 otherwise


@dataclass(frozen=True)
class Batch:  # what the loss takes, row by row as in Answers
    prompt: Prompts
    answer: Tokens
    logp_old: PerToken  # log pi_old of each token, before the update
    logp_ref: PerToken  # log pi_ref of each token, by the reference
    adv: PerAnswer  # A: how much better the answer is than its group


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.batch_size) * cfg.group_size)
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        reference = copy.deepcopy(agent)
        optimizer = Adam(agent)  # of `pretrain`, too: its averages carry over
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, reference=reference, optimizer=optimizer)
        if step == 0:
            if not cfg.init_from:
                pretrain(agent, optimizer, envs)
            reference.load_state_dict(agent.state_dict())  # from now on it stays fixed
        # The G environments of a group have one seed, so they give the same prompts.
        group = np.arange(envs.num_envs) // cfg.group_size  # 0 0 ... 1 1 ...
        prompts, _ = envs.reset(seed=(run.env_seed + group).tolist())
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            answers, prompts = collect(agent, envs, prompts)
            metrics = update(agent, reference, optimizer, answers, lr)
            step += cfg.batch_size * cfg.group_size
            run.report(step, envs, **metrics)  # if due: log, evaluate, save
    return agent


def pretrain(agent: Agent, optimizer: Adam, envs: gym.vector.VectorEnv) -> None:
    """Imitate careless answers. The model learns what an answer looks like, and is
    right now and then: otherwise no group would have a right answer to learn from."""
    mpi.say(f"pretraining: {agent.cfg.pretrain_steps} gradient steps on the corpus")
    task = envs.unwrapped.envs[0].unwrapped  # without wrappers
    corpus = task.corpus(4096, agent.cfg.seed)
    prompt, answer = (torch.as_tensor(part).to(agent.device) for part in corpus)
    for _ in range(agent.cfg.pretrain_steps):
        rows = torch.randint(len(prompt), (256 // mpi.size(),))
        loss = corpus_loss(agent, prompt[rows], answer[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.average_grads()  # over processes
        optimizer.step(1e-3)


def collect(agent: Agent, envs: gym.vector.VectorEnv, prompts: np.ndarray
            ) -> tuple[Answers, np.ndarray]:
    """Answer the prompts [B, prompt]. Return the answers and the next prompts."""
    answer = agent.act(prompts)
    next_prompts, rew, _, _, _ = envs.step(agent.env_act(answer))
    prompt, rew = (torch.as_tensor(part).to(answer.device) for part in (prompts, rew))
    groups = prompt.unflatten(0, (-1, agent.cfg.group_size))
    assert (groups == groups[:, :1]).all(), "a group has to answer one prompt"
    return Answers(prompt=prompt, answer=answer, rew=rew.float()), next_prompts


def update(agent: Agent, reference: Agent, optimizer: Adam, answers: Answers,
           lr: float) -> dict:
    """Take `epochs` gradient steps on all answers. Return metrics."""
    cfg, prompt, answer = agent.cfg, answers.prompt, answers.answer
    groups = answers.rew.view(-1, cfg.group_size)  # [B] -> [groups, G]
    with torch.no_grad():  # both stay fixed while pi moves
        logp_old = log_prob(agent, prompt, answer)
        logp_ref = log_prob(reference, prompt, answer)
    batch = Batch(prompt=prompt, answer=answer, logp_old=logp_old, logp_ref=logp_ref,
                  adv=group_advantages(groups, cfg.baseline).flatten())
    steps = []  # the metrics of each gradient step
    for _ in range(cfg.epochs):
        loss, metrics = grpo_loss(agent, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.average_grads()  # over processes
        grad_norm = optimizer.clip_grads(cfg.max_grad_norm)
        optimizer.step(lr)
        steps.append(metrics | {"grad_norm": grad_norm})
    metrics = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    mixed = groups.amax(1) > groups.amin(1)  # only these groups say what is better
    return metrics | {"mixed_groups": mixed.float(), "lr": lr,
                      "answer_len": answer_mask(answer).sum(-1)}


# ======================================= losses =======================================
def corpus_loss(agent: Agent, prompt: Prompts, answer: Tokens) -> Scalar:
    """-mean log pi(token), over all tokens of the answers, END included: the model has
    to learn to stop. Prompts are given, so it need not predict their tokens."""
    mask = answer_mask(answer)
    return -(mask * log_prob(agent, prompt, answer)).sum() / mask.sum()


def log_prob(agent: Agent, prompt: Prompts, answer: Tokens) -> PerToken:
    """log pi(token | prompt, answer before it) for each token of the answers.

    The first token of the answer follows the last token of the prompt, and nothing
    follows the last token of the answer.
    """
    text = torch.cat([prompt, answer], dim=1)
    return agent.policy(text[:, :-1], num_next=answer.shape[1]).log_prob(answer)


def answer_mask(answer: Tokens) -> PerToken:
    """1 up to the first END, which the policy chose; 0 for the padding after it."""
    is_end = (answer == END).long()
    ends_before = is_end.cumsum(-1) - is_end
    return (ends_before == 0).float()


def group_advantages(rew: Groups, baseline: str) -> Groups:
    """A = (r - mean r) / (std r + 1e-6), where mean and std are those of the group.

    A baseline must not depend on the answer. This one does, since mean r has r in it
    with weight 1/G. If only the mean is subtracted and tokens are summed, that scales
    the expected gradient by 1 - 1/G; its direction stays that of grad E[r]. If all
    answers are right or all are wrong, A is 0: such a group teaches nothing. Dividing
    by std r is a bias: prompts that are nearly always right or nearly always wrong
    weigh more than others.
    """
    if baseline == "none":
        return rew
    centered = rew - rew.mean(1, keepdim=True)
    if baseline == "mean":
        return centered
    return centered / (rew.std(1, correction=0, keepdim=True) + 1e-6)


def grpo_loss(agent: Agent, batch: Batch) -> tuple[Scalar, dict]:
    """L = mean over answers i of (1 / length_i) sum over their tokens t of

        l_it + kl_coef k_it

        l_it   makes the tokens of good answers more likely: see `clipped_policy_loss`
        k_it   is large if pi is far from the reference: see `approx_kl`

    Without length_norm, there is no 1 / length_i.
    """
    cfg = agent.cfg
    mask = answer_mask(batch.answer)
    logp = log_prob(agent, batch.prompt, batch.answer)
    adv = batch.adv.unsqueeze(-1).expand_as(logp)  # the same for all its tokens
    pi_losses = clipped_policy_loss(logp, batch.logp_old, adv, cfg.clip_ratio)
    pi_loss = answer_mean(pi_losses, mask, cfg.length_norm)
    kl = approx_kl(logp, batch.logp_old, batch.logp_ref)
    loss = pi_loss + cfg.kl_coef * answer_mean(kl, mask, cfg.length_norm)
    outside = ((logp - batch.logp_old).exp() - 1).abs() > cfg.clip_ratio
    return loss, {"pi_loss": pi_loss.detach(),  # the others: means over all tokens
                  "kl": (mask * kl.detach()).sum() / mask.sum(),
                  "clip_frac": (mask * outside).sum() / mask.sum()}


def clipped_policy_loss(logp: PerToken, logp_old: PerToken, adv: PerToken,
                        clip_ratio: float) -> PerToken:
    """-min(ratio A, clip(ratio, 1 - c, 1 + c) A), with c = clip_ratio.

    As in PPO, ratio = pi(token) / pi_old(token). A token no longer pushes once its
    probability has moved far enough in the direction of A. In the first step of an
    update, all ratios are 1, and the gradient is that of -A log pi(token).
    """
    assert logp.shape == logp_old.shape == adv.shape
    ratio = (logp - logp_old).exp()
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return -torch.min(ratio * adv, clipped * adv)


def approx_kl(logp: PerToken, logp_old: PerToken, logp_ref: PerToken) -> PerToken:
    """ratio (pi_ref / pi - 1 - log(pi_ref / pi)), with ratio = pi / pi_old. It is >= 0.

    The ratio weights tokens of pi_old as if they were pi's. So the mean is KL(pi ||
    pi_ref), and that of its gradient is the gradient of this KL. Without the ratio, as
    in the paper ("k3"), it is that of the other KL(pi_ref || pi), since samples have no
    gradient: near the reference both agree, far from it they do not.
    """
    assert logp.shape == logp_old.shape == logp_ref.shape
    log_ratio = logp_ref - logp
    return (logp - logp_old).exp() * (log_ratio.exp() - 1 - log_ratio)


def answer_mean(x: PerToken, mask: PerToken, length_norm: bool) -> Scalar:
    """Mean over answers of sum_t x_t or, with length_norm, of the mean over t.

    The sum gives the policy gradient, since log pi(answer) = sum_t log pi(token_t). The
    mean is biased: each token of a long answer counts less. So among right answers, the
    short ones gain more; among wrong answers, the long ones lose less.
    """
    assert x.shape == mask.shape
    total = (x * mask).sum(-1)
    return (total / mask.sum(-1) if length_norm else total).mean()


# ======================================= agent ========================================
class Block(nn.Module):
    """A layer of the transformer: attention and an MLP, each added to its input."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Float32[Tensor, "B text width"],
                visible: Bool[Tensor, "B text text"]
                ) -> Float32[Tensor, "B text width"]:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 16))  # 16 numbers per head
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, text, 16] each
        found = scaled_dot_product_attention(q, k, v, attn_mask=visible.unsqueeze(1))
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Agent(Policy):  # which adds predict(obs)
    """A small transformer that predicts the next token: all that answering needs."""

    takes = {"obs": "vector", "act": "tokens"}

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.answer_len = act_space.shape[0]
        num_tokens = int(act_space.high.max()) + 1
        self.embed = nn.Embedding(num_tokens, cfg.width)
        self.position = nn.Embedding(obs_space.shape[0] + self.answer_len, cfg.width)
        self.blocks = nn.ModuleList([Block(cfg.width) for _ in range(cfg.layers)])
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, num_tokens)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def logits(self, text: Int64[Tensor, "B text"]) -> Float32[Tensor, "B text tokens"]:
        """Texts -> logits of the token that follows each of their tokens.

        A token attends to itself and to earlier ones, but not to the padding on the
        left, and positions count from the first real token. So padding has no effect.
        """
        real = (text != END).cumsum(-1) > 0  # [B, text]: from the first real token on
        position = (real.cumsum(-1) - 1).clamp(min=0)
        square = torch.ones(text.shape[1], text.shape[1], device=text.device).bool()
        itself = square.tril() & square.triu()  # so that padding attends to something
        visible = square.tril() & real.unsqueeze(1) | itself  # [B, text, text]
        x = self.embed(text) + self.position(position)
        for block in self.blocks:
            x = block(x, visible)
        return self.head(self.norm(x))

    def policy(self, text: Int64[Tensor, "B text"], num_next: int) -> Distribution:
        """pi of what follows each of the last `num_next` tokens of the texts."""
        logits = self.logits(text)[:, -num_next:]  # [B, num_next, tokens]
        return Categorical(logits=logits, validate_args=False)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Prompts [B, prompt] -> answers [B, answer], one token after the other."""
        text = prompt = torch.as_tensor(obs).to(self.device)
        ended = torch.zeros_like(prompt[:, :1]).bool()  # [B, 1]
        for _ in range(self.answer_len):
            pi = self.policy(text, num_next=1)
            token = pi.mode if deterministic else pi.sample()  # [B, 1]
            token = token.masked_fill(ended, END)
            ended = ended | (token == END)
            text = torch.cat([text, token], dim=1)
        return text[:, prompt.shape[1]:]

    def env_act(self, act: Tensor) -> np.ndarray:
        """Answers for `env.step`."""
        return act.cpu().numpy()


if __name__ == "__main__":
    main(train, Config, __doc__)
