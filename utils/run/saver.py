"""What a run saves of itself and continues from."""

import hashlib
import math
import time
from contextlib import suppress
from pathlib import Path

import torch

from utils import mpi
from utils.errors import UsageError
from utils.run import checkpoint
from utils.run.directory import plain_settings
from utils.seeds import random_state, set_random_state


class Saver:
    """policy.pt, best.pt and what --resume needs.

    agent    a Policy, whose state dict is all that acting needs
    state    what else training needs: optimizers, a replay buffer
    step     that of the last checkpoint; None before the first
    best     the highest mean return of an evaluation
    """

    def __init__(self, cfg, agent, state: dict, device: torch.device):
        self.cfg, self.agent, self.device = cfg, agent, device
        self.state = {"agent": agent, **state}
        self.run_dir = Path(cfg.run_dir)
        self.step, self.best = None, -math.inf
        self.time = self.took = 0.0  # when the last checkpoint was saved, and for how long

    def load_initial(self) -> dict:
        """Load the agent of --init-from; return what config.json records about it."""
        path = Path(self.cfg.init_from, "policy.pt")
        policy = checkpoint.load_file(path)
        checkpoint.load_into(self.agent.adopt, policy["agent"], f"--init-from: {path}")
        return {"run": self.cfg.init_from, "step": policy["step"]}

    def load(self) -> tuple[int, float]:
        """Continue with what `save` wrote. Return the step and the seconds of training."""
        step, saved = checkpoint.load_resume(self.run_dir)
        for name, part in self.state.items():
            checkpoint.load_into(part.load_state_dict, saved["state"][name], self.run_dir)
        set_random_state(saved, self.device)
        with suppress(UsageError):  # there is no best.pt, or it is damaged
            self.best = checkpoint.load_file(self.run_dir / "best.pt").get("best", -math.inf)
        self.step = step
        return step, saved["seconds"]

    def due(self) -> bool:
        """Once a minute, or less often if a large replay buffer takes more than 1/20 of it."""
        return time.perf_counter() - self.time > max(60, 20 * self.took)

    def save(self, step: int, seconds: float) -> None:
        """Write policy.pt and what --resume needs. Every rank saves at the same step."""
        check_equal(torch.nn.utils.parameters_to_vector(self.agent.parameters()))
        began = time.perf_counter()
        self.save_policy("policy.pt", step)
        state = {name: part.state_dict() for name, part in self.state.items()}
        checkpoint.save_resume(self.run_dir, step, {
            "state": state, "seconds": seconds} | random_state(self.device))
        self.step, self.time = step, time.perf_counter()
        self.took = self.time - began

    def save_best(self, step: int, mean: float) -> None:
        """Write best.pt if no evaluation had a higher mean return."""
        if mean > self.best:
            self.best = mean
            self.save_policy("best.pt", step, best=mean)

    def save_policy(self, name: str, step: int, **more) -> None:
        """Write rank 0's agent for `play`. FloatingPointError rather than a file with NaN."""
        state = self.agent.state_dict()
        for key, value in state.items():
            if value.isnan().any():
                raise FloatingPointError(f"{key} of the agent is nan, step {step:,}")
        spaces = None  # unusual ones cannot be saved; then `load_agent` needs the environment
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            spaces = checkpoint.to_plain(self.agent.spaces)
        if mpi.rank() == 0:
            checkpoint.save_file(self.run_dir / name, {
                "agent": state, "spaces": spaces, "step": step,
                "settings": plain_settings(self.cfg)} | more)


def check_equal(flat: torch.Tensor) -> None:
    """RuntimeError naming the ranks whose parameters differ from rank 0's, in any bit."""
    sums = mpi.gather(hashlib.sha256(flat.detach().cpu().numpy().tobytes()).digest())
    if others := [k for k, digest in enumerate(sums) if digest != sums[0]]:
        raise RuntimeError(f"the parameters of ranks {others} differ from those of rank 0")
