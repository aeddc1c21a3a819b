"""A run: its settings, its directory, its checkpoints, and the command line that starts it.

    with Run(cfg) as run:                  # refuses bad input; nothing is written yet
        cfg = run.cfg                      # complete; with --resume the settings of that run
        ...                                # environments, agent.to(run.device), optimizers
        run.register(agent, optimizer=optimizer)    # what a checkpoint holds
        step = run.restore()               # 0, or where the run stopped
        while step < cfg.total_steps:
            ...                            # collect, learn
            step += cfg.num_envs           # the loop counts environment steps, over all ranks
            run.store(q_loss=q_loss)       # as often as you like
            run.evaluate(step)             # these three do something only when it is due
            run.log(step, envs)
            run.save(step)

The run directory holds config.json, algo.py, progress.csv, episodes.csv, TensorBoard's events,
policy.pt, best.pt with --eval-every, and resume-<step>/ (see utils/rundir.py, utils/source.py,
utils/logger.py and utils/checkpoint.py).
After SIGINT or SIGTERM the next `save` writes a checkpoint and ends the run with status 130 or 143.
"""

import math
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

import torch

from utils import checkpoint, mpi
from utils.checks import (
    SHARED,
    check_divides,
    check_range,
    check_settings,
    check_spaces,
    flag,
    new_name_of,
)
from utils.envs import evaluate, is_image, make_envs
from utils.flags import given_settings, read_command, words_of
from utils.launch import launch
from utils.logger import Logger, import_wandb, merge, start_wandb
from utils.mpi import UsageError, together
from utils.rundir import hold, module_name, open_run, plain_settings, write_config
from utils.summary import summary

__all__ = ["Run", "RunConfig", "check_divides", "check_range", "check_settings", "check_spaces",
           "main"]

# What to say about flags that do not exist.
HINTS = {"render": "python -m utils.play RUN --video FILE.mp4 records a video",
         "capture_video": "python -m utils.play RUN --video FILE.mp4 records a video",
         "seeds": "python -m utils.sweep --seeds N trains with several seeds",
         "algo": "the module is the algorithm, as in python -m algos.NAME"}

SAVED = ("state", "rng", "cuda_rng", "seconds", "best")  # in each rank's part of a checkpoint


@dataclass(frozen=True)
class RunConfig:
    """The settings of every run. An algorithm's Config adds its own."""

    env: str = "HalfCheetah-v4"  # Gymnasium id; my_package:MyEnv-v0 imports my_package first
    env_kwargs: str = "{}"  # keyword arguments of the environment, a JSON object
    seed: int = 1  # seed of everything random in the run
    run_dir: str = ""  # where the run is kept (default: runs/<env>/<algo>/seed<k>)
    resume: bool = False  # continue from the last checkpoint in the run directory
    changed_code: bool = False  # --resume even if the algorithm file has changed since
    init_from: str = ""  # load weights and statistics from this run; the rest starts fresh
    eval_every: int = 0  # steps between deterministic evaluations, made at reports; 0: never
    wandb: bool = False  # also send metrics to Weights & Biases; needs the extra wandb
    num_procs: int = 1  # MPI processes that share environments, buffer and batches
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA for images, if there is one
    compile: bool = False  # torch.compile losses and gradients: faster steps, slower start
    torch_threads: int = 1  # PyTorch threads per process, at most the number of cores
    given: ClassVar[frozenset] = frozenset()  # settings on the command line; see rundir.py

    def __post_init__(self):
        check_settings(self)  # raises UsageError


def main(train, config_class, doc: str) -> None:
    """Run an algorithm file as a command: parse its flags and train."""
    train(parse(config_class, doc))


def parse(config_class, doc: str, args: list[str] | None = None):
    """Return the Config of a command line. --help prints `doc` and its own settings first."""
    args = sys.argv[1:] if args is None else list(args)
    known = config_class.__dataclass_fields__
    for given, _ in words_of(args):
        new = new_name_of(given.removeprefix("--"), known) if given.startswith("--") else None
        if new:
            raise UsageError(f"{given} is now called {flag(new)}")
    shared = {field.name for field in fields(RunConfig)}
    own = {name: field for name, field in known.items() if name not in shared}
    config_class.__dataclass_fields__ = own | known  # the order in which tyro lists them
    prog = f"python -m {module_name(config_class)}"
    cfg = read_command(config_class, doc, prog, args, HINTS.get)
    object.__setattr__(cfg, "given", given_settings(config_class, args))  # it is frozen
    return cfg


class Run:
    """Everything around training: directory, processes, seeds, device, checkpoints, reports.

    cfg           the settings, with run_dir filled in
    device        where the networks belong
    env_seed      the seed for `envs.reset`; a resumed run gets a new one
    Every rank makes the same calls in the same order. UsageError refuses bad input before
    anything is built or written.
    """

    def __init__(self, cfg):
        self.cfg = cfg = open_run(cfg)
        if cfg.wandb:
            import_wandb()  # refuses to start without it
        launch(cfg)  # with --num-procs P, this process becomes P ranks that come here again
        for name in SHARED.split():
            share(getattr(cfg, name, 0), name)  # refuses what the ranks cannot divide
        self.run_dir = Path(cfg.run_dir)
        self.root = mpi.rank() == 0
        self.logger = Logger()
        self.device = choose_device(cfg)
        self.signal = 0
        self.signal_time = 0.0
        self.reported_step = 0
        self.saved_step = None
        self.seconds = 0.0
        self.best = -math.inf
        self.reports = 0
        self.stop = 0
        self.save_due = self.improved = False
        self.ended = False
        self.stack = ExitStack()

    def __enter__(self):
        torch.set_num_threads(self.cfg.torch_threads)
        # glibc returns freed memory to the system, so the next step waits for every page again.
        # After a block of this size has been freed once, glibc keeps up to twice as much.
        torch.empty(30 << 20, dtype=torch.uint8)
        torch.manual_seed(mpi.seed(self.cfg.seed, 0))  # differs between ranks
        mpi.COMPILE = self.cfg.compile
        if self.cfg.compile:  # a graph that calls its products from C++ takes a fifth less time
            os.environ.setdefault("TORCHINDUCTOR_CPP_WRAPPER", "1")  # read when inductor is loaded
        return self

    def __exit__(self, kind, error, trace):
        mpi.COMPILE = False
        if isinstance(error, Exception) and self.saved_step is not None:
            error.add_note(f"In {self.cfg.env}, after step {self.reported_step:,}; the checkpoint "
                           f"of step {self.saved_step:,} in {self.run_dir} stays")
            if "Output array is the wrong shape" in str(error):  # NumPy, in a vector environment
                error.add_note("Its observations have another shape than its observation_space: "
                               "gymnasium.utils.env_checker.check_env tells more")
        try:
            self.stack.close()
        except OSError:
            if error is None:  # else this one is a consequence
                raise
        if self.ended:
            seconds = self.reported - self.started
            mpi.say(summary(self.cfg, module_name(type(self.cfg)), self.reported_step, seconds))

    # ---- start

    def register(self, agent, **state) -> None:
        """Say what evaluations play and checkpoints hold.

        agent    nn.Module; its state dict is all that acting needs. Every rank gets rank 0's
        state    what else training needs to continue, each with state_dict() and
                 load_state_dict(): optimizers, a replay buffer
        """
        self.agent = agent
        self.state = {"agent": agent, **state}
        broadcast(agent)

    def restore(self) -> int:
        """Open the run directory, load what the run continues from, and return its step.

        --resume loads all that is registered, and the random number generators. --init-from loads
        the agent alone. Otherwise the run starts at step 0.
        """
        cfg = self.cfg
        initial = None
        mpi.barrier()  # every rank has found the directory free
        if cfg.init_from and not cfg.resume:
            initial = together(self.load_policy)
        with ExitStack() as stack:  # a later refusal closes what was opened before
            lock = together(hold if self.root else None, cfg)
            if self.root:
                stack.enter_context(lock)
            resumes = cfg.resume and bool(checkpoint.resume_folders(self.run_dir))
            if resumes:
                self.reported_step, saved = checkpoint.load_resume(self.run_dir, *SAVED)
                together(self.load_checkpoint, saved)
            elif cfg.resume and cfg.init_from:  # killed before its first checkpoint
                together(self.load_policy)
            if self.root:
                write_config(cfg, self.reported_step, initial)
                mpi.say(f"run: {self.run_dir}\ndevice: {self.device.type} (--device {cfg.device})")
                if cfg.wandb:
                    start_wandb(self.run_dir, plain_settings(cfg), stack)
                self.logger.open(self.run_dir, self.reported_step, cfg.total_steps, stack)
            in_main = threading.current_thread() is threading.main_thread()
            for number in (signal.SIGINT, signal.SIGTERM) if in_main else ():
                before = signal.signal(number, self.on_signal)
                stack.callback(signal.signal, number, before or signal.SIG_DFL)
            self.reported = time.perf_counter()
            self.started = self.reported - self.seconds
            if resumes:
                self.saved, self.saved_step = self.reported, self.reported_step
                self.save_seconds = 0.0
            else:
                self.save_checkpoint()  # so that --resume works from here on
            self.stack = stack.pop_all()
        return self.reported_step

    @property
    def env_seed(self) -> int:
        return mpi.seed(self.cfg.seed, 1, self.reported_step)

    def load_policy(self):
        """Load the agent of --init-from; return what config.json records about it."""
        path = Path(self.cfg.init_from, "policy.pt")
        own = self.agent.state_dict()
        policy = checkpoint.load_file(path, "agent", "step")
        # The bounds of the action box belong to the environment, not to the policy.
        bounds = {name: own[name] for name in ("low", "high") if name in own}
        checkpoint.load_into(self.agent, policy["agent"] | bounds, path)
        return {"run": self.cfg.init_from, "step": policy["step"]}

    def load_checkpoint(self, saved):
        """Continue with what `save` wrote."""
        source = f"{self.run_dir}/resume-{self.reported_step}"
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

    def on_signal(self, number, frame):
        now = time.monotonic()
        # A terminal and mpiexec may both deliver the same Ctrl-C.
        if self.signal and number == signal.SIGINT and now > self.signal_time + 0.3:
            raise KeyboardInterrupt
        if self.root and not self.signal:
            os.write(2, b"\nsaving and stopping at the next report; Ctrl-C again stops at once\n")
        self.signal, self.signal_time = self.signal or number, now

    # ---- reports

    def store(self, **metrics) -> None:
        """Keep metrics (numbers, tensors, arrays) of one update for the next report."""
        self.logger.store(**metrics)

    def due(self, step: int) -> bool:
        """Return whether `step` is logged: at every call, or, with a setting `report_every`, when
        it passes a multiple of that; also at the end."""
        return step >= self.cfg.total_steps or self.passes(getattr(self.cfg, "report_every", 1),
                                                           step)

    def evaluate(self, step: int) -> None:
        """Play ten deterministic episodes, if `step` is logged and has passed --eval-every."""
        every = self.cfg.eval_every
        at_end = step >= self.cfg.total_steps
        if every and self.due(step) and (at_end or self.passes(every, step)) and self.root:
            returns, _ = evaluate(self.agent, self.cfg, 10, self.cfg.seed)
            self.store(eval_ret=returns)

    def log(self, step: int, envs, **metrics) -> None:
        """Write a row of progress.csv, and the episodes that ended, if `step` is due.

        step       environment steps so far, over all ranks
        envs       from `make_envs`; their episodes that ended since the last row are written
        metrics    like `store`, but kept only if a row is due

        FloatingPointError, on all ranks, names a metric that is not finite.
        """
        cfg = self.cfg
        if not self.due(step):
            return
        self.store(**metrics)
        num_envs = getattr(cfg, "num_envs", 0)  # 0: it takes no steps of environments
        first_env = mpi.rank() * mpi.share(num_envs)
        ended = [(step - ago * num_envs, first_env + env, *end)
                 for ago, env, *end in envs.pop_episodes()]
        if ended:
            self.store(ep_ret=[end[2] for end in ended], ep_len=[end[3] for end in ended])
        for end in ended:
            if len(end) > 4:  # the environment tells success
                self.store(success=end[4])
        now = time.perf_counter()
        # A large replay buffer takes long to save. Saving gets at most 1/20 of the time.
        save_due = now - self.saved > max(60, 20 * self.save_seconds)
        # The only message of a report. After it, all ranks know the same and do the same.
        told = mpi.gather((self.logger.take(), ended, save_due, self.signal))
        speed = (step - self.reported_step) / max(now - self.reported, 1e-9)
        row = {"step": step, "time": round(now - self.started, 3),
               "steps_per_second": round(speed, 1)}
        for name in dict.fromkeys(name for mine, *_ in told for name in mine):
            row |= merge(name, [mine[name] for mine, *_ in told if name in mine])
        self.reported_step = step
        self.reported = now
        for name, value in row.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"{name} is {value} at step {step:,}")
        if self.root:
            self.logger.write(row, sorted(end for _, ended, *_ in told for end in ended))
        self.stop = max(number for *_, number in told)
        self.save_due = told[0][2] or self.stop or self.reports == 0 or step >= cfg.total_steps
        self.reports += 1
        self.improved = row.get("eval_ret_mean", -math.inf) > self.best
        self.best = max(self.best, row.get("eval_ret_mean", -math.inf))

    def save(self, step: int) -> None:
        """Write best.pt after a best evaluation, and a checkpoint if one is due at `step`.

        After SIGINT or SIGTERM, it ends the run: SystemExit 130 or 143.
        """
        if step != self.reported_step:
            return
        if self.improved:
            self.improved = False
            self.save_policy("best.pt")
        if self.save_due:
            self.save_due = False
            self.save_checkpoint()
        self.ended = step >= self.cfg.total_steps or self.stop > 0
        if self.stop:
            raise SystemExit(128 + self.stop)

    def passes(self, every: int, step: int) -> bool:
        """Return whether a multiple of `every` lies between the last report and `step`."""
        return step // every > self.reported_step // every

    # ---- checkpoints

    def save_checkpoint(self):
        """Write policy.pt and what --resume needs. Every rank saves at the same step."""
        mpi.check_equal(torch.nn.utils.parameters_to_vector(self.agent.parameters()))
        began = time.perf_counter()
        self.save_policy("policy.pt")
        cuda = self.device.type == "cuda"
        checkpoint.save_resume(self.run_dir, self.reported_step, {
            "state": {name: part.state_dict() for name, part in self.state.items()},
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if cuda else None,
            "seconds": began - self.started, "best": self.best})
        self.saved, self.saved_step = time.perf_counter(), self.reported_step
        self.save_seconds = self.saved - began

    def save_policy(self, name):
        """Write rank 0's agent for `play`. FloatingPointError rather than a file with NaN."""
        state = self.agent.state_dict()
        for key, value in state.items():
            if value.isnan().any():
                raise FloatingPointError(f"{key} of the agent is nan, step {self.reported_step:,}")
        if self.root:
            self.logger.sync()
            checkpoint.save_file(self.run_dir / name, {
                "agent": state, "step": self.reported_step, "settings": plain_settings(self.cfg)})


def share(total: int, name: str) -> int:
    """Return this rank's part of the setting `name`. UsageError: the ranks cannot divide it."""
    if total % mpi.size():
        raise UsageError(f"{flag(name)} is {total}; it takes a multiple of the {mpi.size()} "
                         "processes")
    return total // mpi.size()


def choose_device(cfg) -> torch.device:
    """Return the device that --device asks for."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cfg.device == "cuda" and gpus == 0:
        raise UsageError("--device cuda: PyTorch finds no CUDA GPU here; it takes auto or cpu")
    wanted = cfg.device == "cuda"
    if cfg.device == "auto" and gpus > 0:
        envs = make_envs(cfg, 1)
        wanted = is_image(envs.single_observation_space)  # small networks are faster on the CPU
        envs.close()
    return torch.device("cuda", mpi.rank() % gpus) if wanted else torch.device("cpu")


def broadcast(agent: torch.nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, in place."""
    if mpi.size() == 1:
        return
    for tensor in agent.state_dict().values():
        tensor.copy_(torch.from_numpy(mpi.bcast(tensor.cpu().numpy())))
