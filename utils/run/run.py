"""What happens around training: directory, seeds, signals, reports, checkpoints.

    with Run(cfg) as run:                  # refuses bad input; nothing is written yet
        ...                                # environments, agent.to(run.device), optimizers
        step = run.start(agent, optimizer=optimizer)    # what checkpoints hold; 0, or as resumed
        while step < cfg.total_steps:
            ...                            # collect, learn
            step += cfg.num_envs           # the loop counts environment steps, over all ranks
            run.store(q_loss=q_loss)       # as often as you like
            run.report(step, envs)         # log, evaluate and save, if they are due

A resumed run starts its environments anew. After SIGINT or SIGTERM the next report writes a
checkpoint and raises `Stopped`; the command line ends with status 130 or 143.
"""

import copy
import math
import re
import shlex
import time
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta

import torch

from utils import mpi
from utils.envs import make_envs
from utils.errors import UsageError
from utils.evaluate import close, evaluate, q_and_return
from utils.logger import Logger, merge
from utils.run import checkpoint
from utils.run.code import module_of
from utils.run.directory import (
    check_shared, find_run_dir, lock_and_empty, whose_code, write_config)
from utils.run.launch import check_ranks, from_root, on_host
from utils.run.saver import Saver
from utils.run.signals import Signals, Stopped
from utils.seeds import seed_all, seed_of
from utils.spaces import has_images


# What a run stores itself.
OWN = "step time steps_per_second ep_ret ep_len success eval_ret eval_q eval_discounted".split()


class Run:
    """Everything around training: directory, processes, seeds, device, checkpoints, reports.

    cfg           the settings, with run_dir and num_procs filled in
    device        where the networks belong
    env_seed      the seed for `envs.reset`; a resumed run gets a new one
    Every rank makes the same calls in the same order.
    """

    def __init__(self, cfg):
        check_ranks(cfg.num_procs)
        if cfg.async_envs and cfg.num_envs == 1:
            raise UsageError("--async-envs steps environments at the same time; it takes "
                             "--num-envs 2 or more, and this is 1")
        self.cfg = cfg = from_root(find_run_dir, replace(cfg, num_procs=mpi.size()))
        self.root = mpi.rank() == 0
        self.logger, self.signals = Logger(), Signals()
        self.device = choose_device(cfg)
        self.reported_step, self.ended = 0, False
        self.envs = self.saver = None
        self.stack = ExitStack()  # undoes on exit what the run has changed in this process

    def __enter__(self):
        self.stack.callback(mpi.say_once.cache_clear)  # the next run says them again
        self.stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(self.cfg.torch_threads)
        # Adam's averages for weights without a gradient sink below 1e-38, where a processor is
        # slow: without this, Rainbow on MinAtar takes 1.4 times as long, for the same numbers.
        flushes = (torch.tensor(1e-40) / 2).item() == 0  # perhaps the caller's choice
        self.stack.callback(torch.set_flush_denormal, flushes)
        torch.set_flush_denormal(True)
        seed_all(seed_of(self.cfg.seed, 0))  # differs between ranks
        return self

    def __exit__(self, kind, error, trace):
        with self.stack:
            if self.envs:
                close(self.envs)
        if self.saver:
            self.agent.eval()
        if error and self.saver and self.saver.step is not None:
            error.add_note(f"In {self.cfg.env}, after step {self.reported_step:,}; the checkpoint "
                           f"of step {self.saver.step:,} in {self.cfg.run_dir} stays; --resume "
                           "continues it")
        if self.ended:
            self.say_how_to_go_on()

    def say_what_runs(self, resumed):
        """Print where the run is, how it is computed, and what a user might not expect."""
        cfg = self.cfg
        begins = f" from step {self.reported_step:,}" if resumed else ""
        mpi.say(f"run: {cfg.run_dir}{begins}, {cfg.total_steps:,.0f} steps\n"
                f"device: {self.device.type} (--device {cfg.device}), --torch-threads "
                f"{cfg.torch_threads}")
        suits = {name: value for name, value in type(cfg).suited_to(cfg.env).items()
                 if value != getattr(type(cfg), name) and name != "total_steps"}
        if suits and not any(getattr(cfg, name) == suits[name] for name in suits):
            mpi.say(f"settings: none that suits games; Config.for_env({cfg.env!r}) has them")
        if self.reported_step < cfg.start_steps:
            mpi.say(f"learning starts at step {cfg.start_steps:,}" + (
                "; steps take longer then" if cfg.start_steps < cfg.total_steps else
                ", and this run ends before: it learns nothing"))

    def say_how_to_go_on(self):
        """Print how far the run has come, and the commands that show and continue it."""
        run, step, total = shlex.quote(self.cfg.run_dir), self.reported_step, self.cfg.total_steps
        resume = f"python -m {module_of(type(self.cfg))} --run-dir {run} --resume"
        resume += f" --total-steps {2 * total:.0f}" * (step >= total)
        seconds = timedelta(seconds=round(self.reported - self.started))
        mpi.say(f"{'done' if step >= total else 'stopped':<10}{step:,} of {total:,.0f} steps in "
                f"{seconds}\n"
                f"play      python -m utils.play {run}\n"
                f"plot      python -m plot {run}\n"
                f"resume    {resume}")

    # ---- start

    def start(self, agent, **state) -> int:
        """Open the run directory, load what the run continues from, and return its step.

        agent    a Policy; its state dict is all that acting needs. Every rank gets rank 0's
        state    what else training needs to continue, each with state_dict() and
                 load_state_dict(): optimizers, a replay buffer

        --resume loads all of these, and the random number generators. --init-from loads the agent
        alone. If the run has all its steps, nothing is written.
        """
        cfg = agent.cfg = self.cfg  # with run_dir and num_procs
        self.agent, self.saver = agent, Saver(cfg, agent, state, self.device)
        if mpi.size() > 1:
            for tensor in agent.state_dict().values():
                tensor.copy_(torch.from_numpy(mpi.comm().bcast(tensor.cpu().numpy())))
        # Without one, it was killed at its start and starts again.
        resumed = cfg.resume and from_root(checkpoint.resume_folders, cfg.run_dir)
        initial = self.saver.load_initial() if cfg.init_from and not resumed else None
        mpi.gather(None)  # all have loaded it, before rank 0 empties what may be the same folder
        self.signals.listen(self.stack)  # from here on: save
        from_root(lock_and_empty, cfg, self.stack)
        check_shared(cfg, mpi.gather(whose_code(cfg))[0])
        self.reported_step, seconds = self.saver.load() if resumed else (0, 0.0)
        self.env_seed = seed_of(cfg.seed, 1, self.reported_step)
        if self.reported_step >= cfg.total_steps:
            mpi.say(f"{cfg.run_dir} has its {cfg.total_steps:,.0f} steps: nothing to do; a larger "
                    "--total-steps continues it")
            return self.reported_step
        if self.root:
            write_config(cfg, self.reported_step, initial)
            self.say_what_runs(resumed)
            self.logger.open(cfg, self.reported_step, self.stack)
        self.reported = time.perf_counter()
        self.started = self.reported - seconds
        if not resumed:
            self.saver.save(0, 0.0)  # so that --resume works from here on
        return self.reported_step

    # ---- reports

    def store(self, **metrics) -> None:
        """Keep numbers, tensors or arrays for the next report. ValueError: a name is taken."""
        if taken := [name for name in metrics if re.sub("_(mean|std|min|max)$", "", name) in OWN]:
            raise ValueError(f"run.store: a run has its own {', '.join(taken)}; take another name")
        self.logger.store(**metrics)

    def report(self, step: int, envs, **metrics) -> None:
        """Write a row of progress.csv, and the episodes that ended, if `step` is due.

        step       environment steps so far, over all ranks
        envs       from `make_envs`; their episodes that ended since the last row are written
        metrics    like `store`, but kept only if a row is due

        A row is due when `step` passes a multiple of --report-every, at the end, and after a signal
        to a single process. Before it, the agent is evaluated if --eval-every asks for it; after
        it, best.pt and about once a minute a checkpoint are written. FloatingPointError, on all
        ranks, names a metric that is not finite. `Stopped`: a signal has come.
        """
        self.envs = envs  # which the end of the run closes
        alone = mpi.size() == 1
        if not (self.passes(self.cfg.report_every, step) or alone and self.signals.number > 0):
            return
        if self.cfg.eval_every and self.passes(self.cfg.eval_every, step) and self.root:
            self.evaluate()
        self.store(**metrics)
        first_env, first = mpi.rank() * envs.num_envs, self.reported_step + 1
        # In ARS, ranks take different numbers of steps, so there the step is only about right.
        ended = [(max(first, step - ago * self.cfg.num_envs), first_env + env, *end)
                 for ago, env, *end in envs.pop_episodes()]
        for _, _, ep_ret, ep_len, *success in ended:
            self.logger.store(ep_ret=[ep_ret], ep_len=[ep_len])
            if success:  # the environment tells it
                self.logger.store(success=success[0])
        now = time.perf_counter()
        save_due = self.saver.due() or self.logger.lines == 0 or step >= self.cfg.total_steps
        # The only message of a report. After it, all ranks know the same and do the same.
        told = mpi.gather((self.logger.take(), ended, save_due, self.signals.number))
        speed = (step - self.reported_step) / max(now - self.reported, 1e-9)
        row = {"step": step, "time": round(now - self.started, 3),
               "steps_per_second": round(speed, 1)}
        for name in dict.fromkeys(name for mine, *_ in told for name in mine):
            row |= merge(name, [mine[name] for mine, *_ in told if name in mine])
        self.reported_step, self.reported = step, now
        for name, value in row.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"{name} is {value} at step {step:,}")
        if self.root:
            self.logger.write(row, sorted(end for _, ended, *_ in told for end in ended))
        self.saver.save_best(step, row.get("eval_ret_mean", -math.inf))
        stop = max(number for *_, number in told)
        if told[0][2] or stop:
            self.saver.save(step, now - self.started)
        self.ended = step >= self.cfg.total_steps or stop > 0
        if stop:
            raise Stopped(stop)

    def evaluate(self) -> None:
        """Play ten deterministic episodes and store their returns."""
        steps = deque(maxlen=10_000) if self.agent.q_value else None  # else they fill memory
        agent = copy.deepcopy(self.agent).eval()  # Dropout, if there is any, is for training
        returns, lengths = evaluate(agent, self.cfg, 10, self.cfg.seed, True,
                                    lambda: self.signals.number > 0, steps=steps)
        if lengths.all():  # else a signal has ended it
            self.logger.store(eval_ret=returns)
            if steps:
                self.logger.store(**q_and_return(agent, steps, lengths))

    def passes(self, every: int, step: int) -> bool:
        """Return whether `step` is the last or has passed a multiple of `every` since a report."""
        return step >= self.cfg.total_steps or step // every > self.reported_step // every


def choose_device(cfg) -> torch.device:
    """Return the device that --device asks for."""
    gpus, (local, _) = torch.cuda.device_count(), on_host()
    if cfg.device == "cuda" and gpus == 0:
        raise UsageError("--device cuda: PyTorch finds no CUDA GPU here; it takes auto or cpu")
    wanted = cfg.device == "cuda"
    if cfg.device == "auto" and gpus > 0:
        with closing(make_envs(cfg, 1)) as envs:
            wanted = has_images(envs.single_observation_space)  # else the CPU is faster
    return torch.device("cuda", local % gpus) if wanted else torch.device("cpu")
