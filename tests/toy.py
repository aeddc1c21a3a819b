"""A toy algorithm: a linear layer, trained by `Run` as an algorithm file would, in milliseconds."""
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from utils.policy import Policy
from utils.run import Run, RunConfig


@dataclass(frozen=True)
class Config(RunConfig):
    """The settings of every run, and some of each kind."""

    env: str = "CartPole-v1"
    run_dir: str = "run"
    total_steps: float = 800
    num_envs: int = 4
    hidden: tuple[int, ...] = (8, 8)
    lr: float = 1e-2
    width: int = 2
    max_grad_norm: float | None = None


@dataclass(frozen=True)
class Rare(Config):
    """With the settings that say when reports are due and when learning starts."""

    report_every: int = 250
    start_steps: int | None = None


class Agent(torch.nn.Linear):
    """What evaluations ask of an agent."""

    q_value, adopt = None, Policy.adopt


class Stop(Exception):
    """Ends a run where a test wants it."""


class Toy(Run):
    """A run that counts its own steps."""

    def start(self, agent, **state):
        self.step = super().start(agent, **state)

    def advance(self, steps, *episodes, **metrics):
        """Report after so many more steps, in which these episodes have ended: (vector steps ago,
        env, ep_ret, ep_len) and, if the environment tells it, success."""
        self.step += steps
        if "eval_ret" in metrics:  # as if it had been evaluated
            self.logger.store(eval_ret=metrics.pop("eval_ret"))
        # GRPO has environments, too, of which its Config says nothing.
        envs = SimpleNamespace(pop_episodes=lambda: list(episodes), close=lambda: None, num_envs=5)
        self.report(self.step, envs, **metrics)


@contextmanager
def start(cfg, agent=None, **state):
    """A run whose agent is ready, to be advanced by hand."""
    with Toy(cfg) as run:
        run.start(agent or Agent(3, cfg.width), **state)
        yield run


def train(cfg, stop_at=None, always=False):
    """100 steps a report; `always` saves at each; its numbers rest on generator and optimizer."""
    with Toy(cfg) as run:
        agent = Agent(3, cfg.width)
        optimizer = torch.optim.Adam(agent.parameters(), cfg.lr)
        run.start(agent, optimizer=optimizer)
        while run.step < cfg.total_steps:
            if run.step == stop_at:
                raise Stop
            noise = torch.randn(8, 3)
            optimizer.zero_grad()
            loss = agent(noise).square().mean()
            loss.backward()
            optimizer.step()
            late = {"late": loss} if run.step >= 300 else {}
            if always:
                run.saver.time = -1e9
            ended = [(15, 1, loss.item(), 10), (15, 0, 2.0, 5)]
            run.advance(100, *ended, loss=loss, noise=noise, **late)
    return agent
