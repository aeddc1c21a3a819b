"""Where a run's numbers and progress go, how it is saved and how it goes on.

    cfg = open_run(cfg)                                which directory; refuses, writes nothing
    with Logger(cfg, agent, optimizer=optimizer) as log:
        while log.step < cfg.total_steps:
            log.store(val=val)                         as often as one likes, arrays of any length
            log.report(steps, episodes, pi_loss=pi_loss)

A run directory holds config.json, progress.csv (a row a report), episodes.csv (a row an episode),
TensorBoard's events and the checkpoints of utils/checkpoint.py. In progress.csv a number gives the
column `name`, the mean of all that was stored since the last report; an array gives `name_mean`,
`_std`, `_min`, `_max` over all elements (std divides by their number n, not n - 1); both over all
ranks, in float64. `time` is in seconds of training; those before a resume count.
"""

import math
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from utils import checkpoint, mpi
from utils.averages import merge, summary
from utils.inputs import check_divides, check_range, check_spaces, env_errors
from utils.mpi import UsageError, together
from utils.rundir import hold, open_run, plain_settings, write_config
from utils.table import Table

# What an algorithm file imports from here.
__all__ = ["Logger", "check_divides", "check_range", "check_spaces", "env_errors", "open_run"]

SAVED = ("state", "rng", "cuda_rng", "seconds", "best")  # in each rank's file
EPISODE = ["step", "time", "env", "ep_ret", "ep_len"]
PROGRESS = ["step", "time", "steps_per_second", "ep_ret_mean", "ep_ret_std", "ep_ret_min",
            "ep_ret_max", "ep_len_mean", "ep_len_std", "ep_len_min", "ep_len_max"]


class Logger:
    """Counts a run's steps, writes its numbers and saves it.

    agent    nn.Module; its state dict is all that is needed to act
    state    what else training needs to go on, with state_dict() and load_state_dict(): optimizers,
             schedules, a replay buffer (which had better hand over clones of its filled rows)

    With `cfg.resume` these, torch's generators and the counters go on as they were saved; with
    `cfg.init_from` the agent alone is loaded. `.step` counts environment steps over all ranks.
    Every rank makes the same calls in the same order. After SIGINT or SIGTERM the next report
    saves and ends the run; a second SIGINT ends it at once.
    """

    def __init__(self, cfg, agent, **state):
        self.cfg, self.run_dir, self.root = cfg, Path(cfg.run_dir), mpi.rank() == 0
        self.agent, self.state = agent, {"agent": agent, **state}
        self.device = next(agent.parameters(), torch.zeros(0)).device
        self.step, self.reports, self.seconds, self.best = 0, 0, 0.0, -math.inf
        self.values = {}  # name -> what was stored since the last report
        self.signal, self.signal_time, self.shown = 0, 0.0, None

    def __enter__(self):
        cfg, initial = self.cfg, None
        mpi.barrier()  # every rank has found the directory free
        if cfg.init_from and not cfg.resume:
            initial = together(self.load_policy)
        with ExitStack() as stack:  # a later refusal closes what was opened before
            lock = together(hold if self.root else None, cfg)
            if self.root:
                stack.enter_context(lock)
            goes_on = cfg.resume and bool(checkpoint.resume_folders(self.run_dir))
            if goes_on:
                self.step, saved = checkpoint.load_resume(self.run_dir, *SAVED)
                together(self.restore, saved)
            elif cfg.resume and cfg.init_from:  # killed before its first checkpoint: begins anew
                together(self.load_policy)
            if self.root:
                write_config(cfg, self.step, initial)
                self.open_files(stack)
            in_main = threading.current_thread() is threading.main_thread()
            for number in (signal.SIGINT, signal.SIGTERM) if in_main else ():
                before = signal.signal(number, self.on_signal)
                stack.callback(signal.signal, number, before or signal.SIG_DFL)
            self.reported = time.perf_counter()
            self.started = self.reported - self.seconds
            if goes_on:
                self.saved, self.saved_step, self.save_seconds = self.reported, self.step, 0.0
            else:
                self.save()  # so that --resume works from here on
            self.stack = stack.pop_all()
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception):
            error.add_note(f"In {self.cfg.env}, after step {self.step:,}; the checkpoint of step "
                           f"{self.saved_step:,} in {self.run_dir} stays")
        try:
            self.stack.close()
        except OSError:
            if error is None:  # else this one is a consequence
                raise

    def load_policy(self):
        """--init-from: weights and statistics of another run. Returns what config.json keeps."""
        path, own = Path(self.cfg.init_from, "policy.pt"), self.agent.state_dict()
        policy = checkpoint.load_file(path, "agent", "step")
        bounds = {name: own[name] for name in ("low", "high") if name in own}  # of this box
        checkpoint.load_into(self.agent, policy["agent"] | bounds, path)
        return {"run": self.cfg.init_from, "step": policy["step"]}

    def restore(self, saved):
        """Go on with what `save` handed over."""
        source = f"{self.run_dir}/resume-{self.step}"
        try:
            checkpoint.load_into(self.agent, saved["state"]["agent"], source)
            for name, part in self.state.items():
                part.load_state_dict(saved["state"][name])
            torch.set_rng_state(saved["rng"])
            if self.device.type == "cuda" and saved["cuda_rng"] is not None:
                torch.cuda.set_rng_state(saved["cuda_rng"], self.device)
            self.seconds, self.best = saved["seconds"], saved["best"]
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise UsageError(f"{source} is no checkpoint of this program: "
                             f"{type(error).__name__} {error}") from None

    def open_files(self, stack):
        from torch.utils.tensorboard import SummaryWriter  # a fifth of a second, on rank 0 alone

        self.progress = Table(self.run_dir / "progress.csv", PROGRESS, self.step)
        self.episodes = Table(self.run_dir / "episodes.csv", EPISODE, self.step)
        purge = self.step + 1 if self.cfg.resume else None
        self.board = SummaryWriter(self.run_dir, purge_step=purge, flush_secs=30)
        self.bar = tqdm(total=int(self.cfg.total_steps), initial=self.step, unit=" steps",
                        disable=not sys.stderr.isatty())
        for part in (self.progress, self.episodes, self.board, self.bar):
            stack.callback(part.close)
        mpi.say(f"run: {self.run_dir}")

    def on_signal(self, number, frame):
        now = time.monotonic()
        # A terminal and mpiexec may both pass on one and the same Ctrl-C.
        if self.signal and number == signal.SIGINT and now > self.signal_time + 0.3:
            raise KeyboardInterrupt
        if self.root and not self.signal:
            os.write(2, b"\nsaving and stopping at the next report; Ctrl-C again: at once\n")
        self.signal, self.signal_time = self.signal or number, now

    def eval_due(self, steps):
        """Whether an evaluation falls into the next `steps`: every `eval_every`, and at the end."""
        every, end = self.cfg.eval_every, self.step + steps
        return every > 0 and (end // every > self.step // every or end >= self.cfg.total_steps)

    def store(self, **values):
        """Keep numbers, tensors or arrays for the next report; ranks may store different names."""
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                value = torch.from_numpy(np.array(value, dtype=np.float64))
            # A clone, since who stores a buffer fills it anew before the report.
            self.values.setdefault(name, []).append(value.detach().clone())

    def report(self, steps, episodes=(), **metrics):
        """Count `steps`, of all ranks together; write what was stored; save if it is time.

        episodes    that ended on this rank, (t, env, ep_ret, ep_len): with vector step t of this
                    phase, in environment env of this rank's, both from 0
        metrics     are stored first

        FloatingPointError, on all ranks, names a quantity that is not finite. SystemExit 130 or
        143, after a checkpoint, if SIGINT or SIGTERM came.
        """
        num_envs = self.cfg.num_envs
        first_env = mpi.rank() * (num_envs // mpi.size())
        ends = [(self.step + (int(t) + 1) * num_envs, first_env + int(env), float(ret), int(length))
                for t, env, ret, length in episodes]
        if ends:
            self.store(ep_ret=[end[2] for end in ends], ep_len=[end[3] for end in ends])
        self.store(**metrics)
        self.step, self.reports, now = self.step + steps, self.reports + 1, time.perf_counter()
        assert all(end[0] <= self.step for end in ends), "an episode ended after the phase"
        mine = {name: summary(values) for name, values in self.values.items()}
        self.values = {}
        # A large replay buffer takes long to save; a twentieth of the time goes there at most.
        due = now - self.saved > max(60, 20 * self.save_seconds)
        # The one message of a report: after it all ranks know the same, and do the same.
        told = mpi.gather((mine, ends, due, self.signal))
        row = {"step": self.step, "time": round(now - self.started, 3),
               "steps_per_second": round(steps / max(now - self.reported, 1e-9), 1)}
        for name in dict.fromkeys(name for mine, *_ in told for name in mine):
            row |= merge(name, [mine[name] for mine, *_ in told if name in mine])
        for name, value in row.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"{name} is {value} at step {self.step:,}")
        self.reported, stop = now, max(signal for *_, signal in told)
        if self.root:
            self.write(row, sorted(end for _, ends, *_ in told for end in ends))
            self.bar.update(steps)
        if row.get("eval_ret_mean", -math.inf) > self.best:
            self.best = row["eval_ret_mean"]
            self.save_policy("best.pt")
        if told[0][2] or stop or self.reports == 1 or self.step >= self.cfg.total_steps:
            self.save()
        if stop:
            raise SystemExit(128 + stop)

    def write(self, row, ends):
        """One row in progress.csv, in TensorBoard and on standard output; the ended episodes."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.episodes.write([dict(zip(EPISODE, (step, row["time"], *end))) for step, *end in ends])
        self.progress.write([row])
        # All in one event takes a twentieth of the time that add_scalar takes for each.
        values = [Summary.Value(tag=name, simple_value=x) for name, x in row.items()]
        self.board.file_writer.add_summary(Summary(value=values[1:]), self.step)
        names = [name for name in self.progress.columns if name not in PROGRESS
                 and not name.endswith(("_std", "_min", "_max"))]
        names = ["ep_ret_mean", "ep_len_mean", *sorted(names, key="eval_ret_mean".__ne__)][:9]
        if names != self.shown or self.reports % 20 == 1:
            titles = ["step", "steps/s", *(name.removesuffix("_mean") for name in names)]
            tqdm.write(" ".join(f"{title[:9]:>9}" for title in titles))
        self.shown = names
        cells = [f"{row[name]:.4g}" if name in row else "" for name in names]
        cells = [f"{self.step:,}", f"{row['steps_per_second']:,.0f}", *cells]
        tqdm.write(" ".join(f"{cell:>9}" for cell in cells))
        sys.stdout.flush()

    def save(self):
        """policy.pt and what --resume needs; every rank, at the same step."""
        mpi.check_equal(torch.nn.utils.parameters_to_vector(self.agent.parameters()))
        began = time.perf_counter()
        self.save_policy("policy.pt")
        cuda = self.device.type == "cuda"
        checkpoint.save_resume(self.run_dir, self.step, {
            "state": {name: part.state_dict() for name, part in self.state.items()},
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if cuda else None,
            "seconds": began - self.started, "best": self.best})
        self.saved, self.saved_step = time.perf_counter(), self.step
        self.save_seconds = self.saved - began

    def save_policy(self, name):
        """Rank 0's agent as a file that `play` shows; FloatingPointError rather than with NaN."""
        state = self.agent.state_dict()
        for key, value in state.items():
            if value.isnan().any():
                raise FloatingPointError(f"{key} of the agent is nan at step {self.step:,}")
        if self.root:
            for table in (self.progress, self.episodes):
                os.fsync(table.file.fileno())  # a power cut leaves no checkpoint without its rows
            checkpoint.save_file(self.run_dir / name, {
                "agent": state, "step": self.step, "settings": plain_settings(self.cfg)})
