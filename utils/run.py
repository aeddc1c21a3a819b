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
            run.evaluate(step)             # these three do something only when it is due; `log`
            run.log(step, envs)            # comes second, since its row has the evaluation
            run.save(step)

utils/logger.py and utils/checkpoint.py say what the run directory holds. A resumed run starts its
environments anew. After SIGINT or SIGTERM the next `save` writes a checkpoint and raises `Stopped`;
the command line ends with status 130 or 143.
"""

import ctypes
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Literal

import gymnasium as gym
import numpy as np
import torch

from utils import checkpoint, mpi
from utils.cli import (
    check_multiples, check_range, check_settings, flag, nearest, program, read_command)
from utils.envs import closing_envs, evaluate, is_game, is_image, make_envs, with_version
from utils.logger import Logger, merge, read_table
from utils.mpi import UsageError, cores, launch, together

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["Run", "RunConfig", "check_range", "main"]  # for algorithm files

# What to say about flags that do not exist.
HINTS = {"render": "python -m utils.play RUN --render shows a trained policy in a window",
         "capture_video": "python -m utils.play RUN --video FILE.mp4 records a video",
         "algo": "the module is the algorithm, as in python -m algos.NAME"}

SAVED = ("state", "rng", "cuda_rng", "seconds", "best")  # in each rank's part of a checkpoint
# Settings that may differ on --resume.
FREE = {"total_steps", "device", "torch_threads", "bf16", "compile", "run_dir", "resume",
        "changed_code"}
# The files of a run, with config.json, which names it as one, at the end.
PARTS = ("algo.py", "progress.csv", "episodes.csv", "events.out.tfevents.*",
         "policy.pt", "best.pt", "resume-*", "result.json", "config.json")
CORES = "/proc/stat"  # how busy each core has been
PACKAGES = ["torch", "gymnasium", "numpy", "mujoco", "ale_py", "Box2D", "mpi4py"]


@dataclass(frozen=True)
class RunConfig:
    """The settings of every run. An algorithm's Config adds its own."""

    env: str = "HalfCheetah-v4"  # Gymnasium id; my_package:MyEnv-v0 imports my_package first
    env_kwargs: str = "{}"  # keyword arguments of the environment, a JSON object
    seed: int = 1  # seed of everything random in the run
    run_dir: str = ""  # where the run is kept (default: runs/<env>/<algo>/seed<k>)
    resume: bool = False  # continue from the last checkpoint in the run directory
    overwrite: bool = False  # replace the run that is in the run directory
    changed_code: bool = False  # --resume even if the algorithm file has changed since
    init_from: str = ""  # load weights and statistics from this run; the rest starts fresh
    eval_every: int = 0  # steps between deterministic evaluations, made at reports; 0: never
    num_procs: int = 1  # MPI processes that share environments, buffer and batches
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA for images, if there is one
    compile: bool = False  # torch.compile losses: faster steps, slower start; on in long runs
    bf16: bool = False  # networks of images in bfloat16; on for Atari if the processor has it
    torch_threads: int = 1  # PyTorch threads per process; 0: two if a second core is free
    often: ClassVar[tuple] = ("env", "total_steps", "seed", "num_envs", "lr")  # first in --help
    given: ClassVar[frozenset] = frozenset()  # the names of settings that the caller gave
    for_games: ClassVar[dict] = {}  # defaults for ALE/... and MinAtar/...
    for_atari: ClassVar[dict] = {}  # defaults for ALE/... alone

    def __new__(cls, *args, **kwargs):
        cfg = super().__new__(cls)
        known = [field.name for field in fields(cls)]
        values = {**dict(zip(known, args)), **kwargs}
        for name in values.keys() - known:
            near = " or ".join(nearest(name, known))
            raise TypeError(f"Config has no setting {name}{near and f'; did you mean {near}?'}")
        if len(values) == len(fields(cls)):  # `replace` gives all
            values = {each.name for each in fields(cls) if values[each.name] != each.default}
        object.__setattr__(cfg, "given", frozenset(values))  # it is frozen
        return cfg

    def __post_init__(self):
        check_settings(self)  # raises UsageError
        if not self.resume and not for_game(self):  # else `suit_games` changes some first
            check_multiples(vars(self))


class Stopped(KeyboardInterrupt):
    """Raised after SIGINT or SIGTERM, when the checkpoint is written. `status` is for exit."""

    def __init__(self, number: int):
        super().__init__(f"signal {number}; the run is saved")
        self.status = 128 + number


def main(train, config_class, doc: str) -> None:
    """Run an algorithm file as a command: parse its flags and train."""
    with program("nothing new was saved; the same command starts again"):
        train(parse(config_class, doc))


def parse(config_class, doc: str, args: list[str] | None = None):
    """Return the Config of a command line. --help prints `doc` and all settings."""
    return read_command(config_class, doc, f"python -m {module_name(config_class)}", args,
                        HINTS.get)


def for_game(cfg) -> dict:
    """Return the defaults for the game that `cfg` is to play, if it is one, over the usual ones."""
    return (cfg.for_games if is_game(cfg.env) else {}) | (
        cfg.for_atari if is_game(cfg.env, "ALE/") else {})


def suit_games(cfg, given):
    """Return `cfg` with its defaults for games, if it is to play one, but for what was given."""
    mine = {name: value for name, value in for_game(cfg).items() if name not in given}
    if cfg.resume or not is_game(cfg.env):
        return cfg
    file = checkpoint.file_of(type(cfg)) or Path("notebook.py")
    other = file.with_name(f"{file.stem.partition('_')[0]}_atari.py")
    if is_game(cfg.env, "ALE/") and other.exists() and other != file:
        mpi.say(f"python -m algos.{other.stem} is made for Atari: it stores every frame once")
    if "hidden" in given:
        mpi.say("--hidden is not used: it is for vectors, and a game is seen as images")
    if mine:
        words = [f"{flag(name)} {value}" if value is not False else flag(f"no_{name}")
                 for name, value in mine.items()]
        mpi.say(f"settings for games, unless given: {' '.join(words)}")
    return replace(cfg, **mine)


def suit_machine(cfg, given):
    """Return `cfg` with --bf16 and --compile, unless given, where this machine gains by them.

    Compiling takes up to half a minute, and files that take few gradient steps per environment
    step gain too little by it (benchmarks/decisions.md, Speed).
    """
    if cfg.resume or torch.cuda.is_available():
        return cfg
    has = torch.cpu.get_capabilities()
    if "bf16" not in given | cfg.for_atari.keys() and is_game(cfg.env, "ALE/"):
        cfg = replace(cfg, bf16=bool(has.get("avx512_bf16") or has.get("amx_bf16")))
    least = (100_000 if hasattr(cfg, "update_every") else 500_000 if hasattr(cfg, "epochs")
             else math.inf)
    can = type(cfg).__module__ in mpi.COMPILABLE and (
        os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++"))
    compiles = "compile" not in given and cfg.total_steps >= least and can
    return replace(cfg, compile=True) if compiles else cfg


class Run:
    """Everything around training: directory, processes, seeds, device, checkpoints, reports.

    cfg           the settings, with run_dir filled in
    device        where the networks belong
    env_seed      the seed for `envs.reset`; a resumed run gets a new one
    Every rank makes the same calls in the same order.
    """

    def __init__(self, cfg):
        if not isinstance(cfg, RunConfig):
            raise TypeError(f"train takes a Config, such as Config(env='CartPole-v1'), not {cfg!r}")
        given = cfg.given
        cfg = open_run(cfg)
        launch(cfg)  # with --num-procs P, this process becomes P ranks that come here again
        self.cfg = cfg = suit_machine(suit_games(cfg, given), given)
        shared = replace(cfg, num_procs=mpi.size(), resume=False)  # refuses too many ranks
        check_multiples(vars(shared))  # of a game's own settings, too
        self.run_dir = Path(cfg.run_dir)
        self.root = mpi.rank() == 0
        self.logger = Logger()
        self.device = choose_device(cfg)
        self.pid = os.getpid()
        self.signal, self.signal_time = 0, 0.0
        self.reported_step, self.saved_step = 0, None
        self.seconds = self.save_seconds = 0.0
        self.best = -math.inf
        self.ended = False
        self.stack = ExitStack()

    def __enter__(self):
        self.stack.enter_context(closing_envs())
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
        for name in (-1, -3) if mallopt else ():  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of glibc:
            mallopt(name, 2**30)  # returning freed memory took 14% of a run of PPO on Pong
        self.threads = Threads(self.cfg.torch_threads)
        seed = mpi.seed(self.cfg.seed, 0)  # differs between ranks
        torch.manual_seed(seed)
        random.seed(seed)  # by these two an environment may draw, though it should not
        np.random.seed(seed)  # noqa: NPY002
        mpi.COMPILE = self.cfg.compile
        return self

    def __exit__(self, kind, error, trace):
        mpi.COMPILE = False
        if error and self.saved_step is not None:
            error.add_note(f"In {self.cfg.env}, after step {self.reported_step:,}; the checkpoint "
                           f"of step {self.saved_step:,} in {self.cfg.run_dir} stays; --resume "
                           "continues it")
        self.stack.close()
        if self.ended:
            mpi.say(summary(self.cfg, self.reported_step, self.reported - self.started))

    # ---- start

    def register(self, agent, **state) -> None:
        """Say what evaluations play and checkpoints hold.

        agent    nn.Module; its state dict is all that acting needs. Every rank gets rank 0's
        state    what else training needs to continue, each with state_dict() and
                 load_state_dict(): optimizers, a replay buffer
        """
        self.agent = agent
        self.state = {"agent": agent, **state}
        if mpi.size() > 1:
            for tensor in agent.state_dict().values():
                tensor.copy_(torch.from_numpy(mpi.gather(tensor.cpu().numpy())[0]))
        encoders = [part for part in agent.modules() if hasattr(part, "bf16")]  # ImageEncoder
        for part in encoders:
            part.bf16 = self.cfg.bf16
        if self.cfg.bf16:
            mpi.say("--bf16: " + ("networks of images compute in bfloat16 (--no-bf16: in float32)"
                                  if encoders else "not used, for it is for images"))

    def restore(self) -> int:
        """Open the run directory, load what the run continues from, and return its step.

        --resume loads all that is registered, and the random number generators. --init-from loads
        the agent alone. If the run has all its steps, nothing is written.
        """
        cfg = self.cfg
        # It also waits until every rank has found the directory free.
        initial = together(self.load_policy if cfg.init_from and not cfg.resume else None)
        in_main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if in_main else ():  # from here on: save
            before = signal.signal(number, self.on_signal)
            self.stack.callback(signal.signal, number, before or signal.SIG_DFL)
        together(claim if self.root else None, cfg, self.stack)
        if cfg.resume and checkpoint.resume_folders(self.run_dir):
            self.reported_step, saved = checkpoint.load_resume(cfg.run_dir, *SAVED)
            together(self.load_checkpoint, saved)
            if self.reported_step >= cfg.total_steps:
                mpi.say(f"{cfg.run_dir} has its {cfg.total_steps:,.0f} steps: nothing to do; "
                        "a larger --total-steps continues it")
                return self.reported_step
        elif cfg.resume and cfg.init_from:  # killed before its first checkpoint
            together(self.load_policy)
        if self.root:
            write_config(cfg, self.reported_step, initial)
            compiles = ("--compile, which takes up to a minute at first (without: --no-compile)"
                        if type(cfg).__module__ in mpi.COMPILABLE else "nothing to --compile")
            mpi.say(f"run: {cfg.run_dir}, {cfg.total_steps:,.0f} steps\n"
                    f"device: {self.device.type} (--device {cfg.device}), --torch-threads "
                    f"{cfg.torch_threads}" + f", {compiles}" * cfg.compile)
            own = getattr(sys.modules[type(cfg).__module__], "num_start_steps", None)
            start = own(cfg) if own else getattr(cfg, "start_steps", 0)  # no updates before
            if self.reported_step < start:
                mpi.say(f"learning starts at step {start:,}" + (
                    "; steps take longer from there" if start <= cfg.total_steps else
                    ", after --total-steps, so this run learns nothing"))
            self.logger.open(self.run_dir, self.reported_step, cfg.total_steps, self.stack)
        self.reported = time.perf_counter()
        self.started = self.reported - self.seconds
        if self.saved_step is None:
            self.save_checkpoint()  # so that --resume works from here on
        return self.reported_step

    @property
    def env_seed(self) -> int:
        return mpi.seed(self.cfg.seed, 1, self.reported_step)

    def load_policy(self):
        """Load the agent of --init-from; return what config.json records about it."""
        path = Path(self.cfg.init_from, "policy.pt")
        own = self.agent.state_dict()
        policy = checkpoint.load_file(path, "agent", "step", flag="--init-from")
        # The bounds of the action box belong to the environment, not to the policy.
        bounds = {name: own[name] for name in ("low", "high") if name in own}
        checkpoint.load_into(self.agent, policy["agent"] | bounds, path)
        return {"run": self.cfg.init_from, "step": policy["step"]}

    def load_checkpoint(self, saved):
        """Continue with what `save` wrote."""
        checkpoint.load_into(self.agent, saved["state"]["agent"], self.cfg.run_dir)
        for name, part in self.state.items():
            part.load_state_dict(saved["state"][name])
        torch.set_rng_state(saved["rng"])
        if self.device.type == "cuda" and saved["cuda_rng"] is not None:
            torch.cuda.set_rng_state(saved["cuda_rng"], self.device)
        self.seconds, self.best = saved["seconds"], saved["best"]
        self.saved, self.saved_step = time.perf_counter(), self.reported_step

    def on_signal(self, number, frame):
        if os.getpid() != self.pid:  # a process of an environment, forked from this one
            if number == signal.SIGTERM:  # a Ctrl-C is for the run, which still needs this process
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        # A terminal and mpiexec may both deliver the same Ctrl-C.
        if self.signal and number == signal.SIGINT and now > self.signal_time + 0.3:
            raise KeyboardInterrupt
        if self.root and not self.signal:
            when = b" at the next report" * (mpi.size() > 1)
            os.write(2, b"\nsaving and stopping" + when + b"; Ctrl-C again stops at once\n")
        self.signal, self.signal_time = self.signal or number, now
        mpi.COMPILE = False  # what is not yet compiled no longer pays

    # ---- reports

    def store(self, **metrics) -> None:
        """Keep metrics (numbers, tensors, arrays) of one update for the next report."""
        self.logger.store(**metrics)

    def due(self, step: int) -> bool:
        """Return whether `step` is logged: at every call, or, with a setting `report_every`, when
        it passes a multiple of that; also at the end, and after a signal to a single process."""
        return (self.passes(getattr(self.cfg, "report_every", 1), step)
                or self.signal > 0 and mpi.size() == 1)

    def evaluate(self, step: int) -> None:
        """Play ten deterministic episodes, if `step` is logged and has passed --eval-every."""
        every = self.cfg.eval_every
        if every and self.due(step) and self.passes(every, step) and self.root:
            steps = [] if hasattr(self.agent, "q_value") else None
            returns, lengths = evaluate(self.agent, self.cfg, 10, self.cfg.seed, True,
                                        lambda: self.signal > 0, steps=steps)
            if lengths.all():  # else a signal has ended it
                self.store(eval_ret=returns)
                if steps:
                    self.store(**q_and_return(self.agent, steps, lengths))

    def log(self, step: int, envs, **metrics) -> None:
        """Write a row of progress.csv, and the episodes that ended, if `step` is due.

        step       environment steps so far, over all ranks
        envs       from `make_envs`; their episodes that ended since the last row are written
        metrics    like `store`, but kept only if a row is due

        FloatingPointError, on all ranks, names a metric that is not finite.
        """
        if not self.due(step):
            return
        self.store(**metrics)
        num_envs = getattr(self.cfg, "num_envs", 0)  # 0: it takes no steps of environments
        first_env = mpi.rank() * mpi.share(num_envs)
        ended = [(step - ago * num_envs, first_env + env, *end)
                 for ago, env, *end in envs.pop_episodes()]
        for _, _, ep_ret, ep_len, *success in ended:
            self.store(ep_ret=[ep_ret], ep_len=[ep_len])
            if success:  # the environment tells it
                self.store(success=success[0])
        now = time.perf_counter()
        # A large replay buffer takes long to save. Saving gets at most 1/20 of the time.
        late = now - self.saved > max(60, 20 * self.save_seconds)
        save_due = late or self.logger.reports == 0 or step >= self.cfg.total_steps
        # The only message of a report. After it, all ranks know the same and do the same.
        told = mpi.gather((self.logger.take(), ended, save_due, self.signal))
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
        self.stop = max(number for *_, number in told)
        self.save_due = told[0][2] or self.stop
        mean = row.get("eval_ret_mean", -math.inf)
        self.improved, self.best = mean > self.best, max(mean, self.best)

    def save(self, step: int) -> None:
        """Write best.pt and a checkpoint, if they are due. Raise `Stopped` after a signal."""
        self.threads.adapt()
        if step != self.reported_step:
            return
        if self.improved:
            self.save_policy("best.pt")
        if self.save_due:
            self.save_checkpoint()
        self.ended = step >= self.cfg.total_steps or self.stop > 0
        if self.stop:
            raise Stopped(self.stop)

    def passes(self, every: int, step: int) -> bool:
        """Return whether `step` is the last or has passed a multiple of `every` since a report."""
        return step >= self.cfg.total_steps or step // every > self.reported_step // every

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
            checkpoint.save_file(self.run_dir / name, {
                "agent": state, "step": self.reported_step, "settings": plain_settings(self.cfg)})


def q_and_return(agent, steps: list[tuple], lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Return Q(s, a) and the discounted return that followed, for the states that `evaluate` gives.

    At a time limit the rewards are cut off. So a state counts only if its episode terminated, or
    if what lies beyond the limit weighs less than 1%.
    """
    obs, act, rew, terminated, _ = (np.stack(column) for column in zip(*steps))  # [T, N, ...]
    gamma = agent.cfg.gamma
    left = lengths - np.arange(len(rew))[:, None]  # steps until the end; the last one has 1
    returns = rew.copy()
    for t in reversed(range(len(rew) - 1)):
        returns[t] += gamma * (left[t] > 1) * returns[t + 1]
    whole = terminated[lengths - 1, np.arange(len(lengths))] | (gamma ** np.maximum(left, 0) < 0.01)
    counts = whole & (left > 0)
    if not counts.any():
        return {}
    q = agent.q_value(obs[counts], torch.from_numpy(act[counts]))
    return {"eval_q": q.numpy(), "eval_discounted": returns[counts]}


class Threads:
    """The number of PyTorch's threads: as given or, for 0, two while a second core is free.

    Beside another busy process, two threads take longer than one, since each waits for the other.
    So `adapt` looks once a second how much the others have used of our cores. After it has gone
    back to one thread, it waits for ten seconds. Without Linux's /proc/stat, and where the bits of
    a matrix product would depend on the number of threads, 0 means one.
    """

    def __init__(self, number: int):
        strict = os.environ.get("MKL_CBWR", "").endswith("STRICT")
        self.adapts = number == 0 and strict and cores() > 1 and os.path.exists(CORES)
        torch.set_num_threads(number or 1)
        self.look(1)

    def look(self, seconds: float) -> None:
        """Begin to measure; `adapt` is due in so many seconds."""
        self.began, self.due = time.monotonic(), time.monotonic() + seconds
        self.used = self.used_by_others() if self.adapts else 0.0

    def used_by_others(self) -> float:
        """Return the seconds that other processes have used of our cores, since some fixed time."""
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        with open(CORES) as file:  # cpu0 user nice system idle iowait irq softirq steal ...
            rows = [line.split() for line in file if line.startswith("cpu")]
        ticks = sum(sum(map(int, row[1:4] + row[6:9])) for row in rows if row[0] in ours)
        return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()

    def adapt(self) -> None:
        """Choose the number of threads, if it is time to."""
        if not self.adapts or time.monotonic() < self.due:
            return
        others = (self.used_by_others() - self.used) / (time.monotonic() - self.began)
        before, threads = torch.get_num_threads(), 2 if cores() - others > 1.75 else 1
        torch.set_num_threads(threads)
        self.look(10 if threads < before else 1)


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


# ---- the run directory


def open_run(cfg):
    """Return `cfg` with the run directory filled in; with --resume the settings of the run.

    Every rank calls it; it writes nothing. UsageError: something is not there, or would be lost.
    """
    if not cfg.resume or "env" in cfg.given:
        cfg = with_version(cfg)
    algo = module_name(type(cfg)).rpartition(".")[2]
    run_dir = Path(cfg.run_dir or Path("runs", as_folder(cfg.env), algo, f"seed{cfg.seed}"))
    if cfg.resume:
        return settings_of_run(cfg, algo, run_dir)
    replaced_files(cfg, run_dir)  # refuses if there are any to lose
    return replace(cfg, run_dir=str(run_dir))


def as_folder(text):
    """Return a text, such as an environment's id, as a name that every file system can hold."""
    return re.sub(r"[^\w.,=+-]+", "-", text)


def module_name(config_class):
    """Return the module of a Config, such as "algos.x", even if it is the running program."""
    name, main = config_class.__module__, sys.modules["__main__"]
    if name != "__main__":
        return name
    if main.__spec__:  # python -m
        return main.__spec__.name
    path = Path(getattr(main, "__file__", "notebook")).resolve()
    package = f"{path.parent.name}." if (path.parent / "__init__.py").exists() else ""
    return package + path.stem


def settings_of_run(cfg, algo, run_dir):
    """Return the Config of the run to resume. Settings that may differ come from `cfg` if given."""
    config = read_config(run_dir, "--resume: ")
    if config["algo"] != algo:
        raise UsageError(f"--resume: {run_dir} is a run of {config['algo']}, not of {algo}")
    saved = max(checkpoint.resume_folders(run_dir), default=-1)
    if has_rows(run_dir) and saved < 0:
        raise UsageError(f"--resume: there is no checkpoint in {run_dir}; delete it to restart")
    settings, defaults = config["settings"], vars(type(cfg)())
    for name in cfg.given:
        value, known = getattr(cfg, name), settings.get(name, defaults[name])
        if name not in FREE and value != known:
            raise UsageError(f"{flag(name)} is {value}, but {known} in {run_dir}: "
                             "--resume keeps the settings of the run")
        settings[name] = value
    try:
        cfg = type(cfg)(**settings | {"resume": True, "run_dir": str(run_dir)})
    except TypeError as error:
        raise UsageError(f"--resume: another version made {run_dir}: {error}") from None
    continues = has_rows(run_dir) and saved < cfg.total_steps and not cfg.changed_code
    if continues and checkpoint.has_changed(type(cfg), run_dir):
        raise UsageError(f"--resume: {checkpoint.file_of(type(cfg))} has changed since this run, "
                         f"whose code is {run_dir}/algo.py; --changed-code continues with the "
                         "changed file")
    return cfg


def read_config(run_dir, prefix=""):
    """Return a run's config.json as a dict. `Config(**config["settings"])` is the run's Config."""
    path = Path(run_dir, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        settings, _ = config["settings"].items(), (config["algo"], config["module"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        wrong = (f"{run_dir} holds no run: config.json: {error.strerror}"
                 if isinstance(error, OSError) else
                 f"{path} is damaged: {type(error).__name__} {error}")
        if nearby := ", ".join(runs_in(run_dir)):
            wrong += f"; runs nearby: {nearby}"
        raise UsageError(prefix + wrong) from None
    # JSON makes lists of tuples, which a frozen dataclass could not hash.
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings}
    if isinstance(settings.get("torch_threads"), int):  # perhaps of a machine with more cores
        settings["torch_threads"] = min(settings["torch_threads"], cores())
    return config | {"settings": settings}


def runs_in(folder):
    """Return the first five runs at most four levels below a folder or, without it, below runs."""
    folder = Path(folder if Path(folder).is_dir() else "runs")
    found = [path for depth in range(1, 5) for path in folder.glob("*/" * depth + "policy.pt")]
    return [str(path.parent) for path in found[:5]]


def has_rows(run_dir):
    """Return whether a run has reported. One that has not loses nothing by starting again."""
    path = Path(run_dir, "progress.csv")
    return path.exists() and path.read_bytes().count(b"\n") > 1  # more than the header


def replaced_files(cfg, run_dir):
    """Return the files of an earlier run that this one replaces, config.json last.

    UsageError: they hold a report or a later checkpoint, and --overwrite is not given.
    """
    files = [path for pattern in PARTS for path in run_dir.glob(pattern)]
    if files:  # of a run whose config.json is lost, or of somebody else
        read_config(run_dir, "another --run-dir is needed: ")
    reported = has_rows(run_dir) or any(checkpoint.resume_folders(run_dir))  # after step 0
    if reported and not cfg.overwrite:
        command = f"python -m {module_name(type(cfg))} --run-dir {shlex.quote(str(run_dir))}"
        raise UsageError(f"{run_dir} holds a run already. To continue it: {command} --resume. To "
                         f"replace it, add --overwrite. To keep it, add --seed {cfg.seed + 1} or "
                         "another --run-dir")
    return files


def claim(cfg, stack):
    """Make the run directory, lock it until `stack` closes, and empty it of a run to replace."""
    try:
        Path(cfg.run_dir).mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(open(Path(cfg.run_dir, ".lock"), "w"))
    except OSError as error:
        raise UsageError(f"--run-dir is {cfg.run_dir}: {error.strerror}") from None
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another process is writing the run in {cfg.run_dir}") from None
    except OSError:
        pass  # some network file systems have no locks
    # Another run may have used the directory since `open_run` looked.
    for path in [] if cfg.resume else replaced_files(cfg, Path(cfg.run_dir)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_config(cfg, step, initial):
    """Write config.json and, beside it, the algorithm file. A resume appends its own origin."""
    if cfg.resume:
        config = read_config(cfg.run_dir)
        before = config["settings"]["total_steps"]
        if before != cfg.total_steps:
            mpi.say(f"--total-steps {cfg.total_steps:,.0f} instead of {before:,.0f}: annealing "
                    "runs to the new end")
        config["resumed"] = [*config.get("resumed", []), {"step": step, **origin()}]
    else:
        module = module_name(type(cfg))
        spec = gym.spec(cfg.env.rpartition(":")[2])
        config = {"algo": module.rpartition(".")[2], "module": module, **origin(),
                  "init_from": initial, "env_spec_kwargs": spec.kwargs}
    config["settings"] = plain_settings(cfg)
    checkpoint.write_text(Path(cfg.run_dir, "config.json"),
                          json.dumps(config, indent=2, default=str) + "\n")
    if file := checkpoint.file_of(type(cfg)):  # a kill before this leaves a run, not a riddle
        with checkpoint.whole(Path(cfg.run_dir, "algo.py")) as copy:
            copy.write(file.read_bytes())


def plain_settings(cfg):
    """Return the settings as plain values, which JSON and a checkpoint can hold."""
    settings = asdict(cfg) | {"resume": False, "changed_code": False, "overwrite": False}
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in settings.items()}


def origin():
    """Return the command, git commit ("" outside of a repository) and versions of this process."""
    versions = {name: sys.modules[name].__version__ for name in PACKAGES if sys.modules.get(name)}
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True,
                                text=True).stdout.strip()
    except OSError:
        commit = None  # git is not installed
    return {"command": shlex.join(sys.orig_argv), "git_commit": commit,
            "versions": {"python": sys.version.split()[0], **versions}}


# ---- the last lines


def summary(cfg, step: int, seconds: float) -> str:
    """Return what a run says when it has ended or was stopped: how it went, how to go on."""
    total, run = cfg.total_steps, shlex.quote(cfg.run_dir)
    episodes = [float(row["ep_ret"]) for row in read_table(cfg.run_dir, "episodes.csv")]
    first, returns = episodes[:20], episodes[-100:]
    reports = read_table(cfg.run_dir, "progress.csv")
    evals = [(float(row["eval_ret_mean"]), int(row["step"]))
             for row in reports if row.get("eval_ret_mean")]
    columns = [name for name, value in reports[-1].items() if value][3:] if reports else []
    y = "" if returns or not columns else f" --y {columns[0]}"
    lines = {"done" if step >= total else "stopped":
             f"{step:,} of {total:,.0f} steps in {timedelta(seconds=round(seconds))}"}
    lines["train100"] = (f"{rounded(sum(returns) / len(returns))}, mean return of the last "
                         f"{len(returns)} training episodes, which act with noise" if returns else
                         "no episode has ended in training; `play` below plays ten")
    if step >= total and len(episodes) >= 120 and not cfg.init_from:
        error = math.sqrt(np.var(returns) / 100 + np.var(first) / 20)
        if np.mean(returns) - np.mean(first) <= 1.5 * error:
            lines["train100"] += (f"; hardly better than the first 20 ({rounded(np.mean(first))}): "
                                  "train for longer, or see docs/debugging.md")
    if evals:
        (last, at), (best, best_at) = evals[-1], max(evals, key=lambda pair: pair[0])
        lines["eval"] = (f"{rounded(last)} at step {at:,}, without noise; best {rounded(best)} at "
                         f"step {best_at:,} (play it with --best)")
    resume = f"python -m {module_name(type(cfg))} --run-dir {run} --resume"
    resume += f" --total-steps {2 * total:.0f}" * (step >= total)
    lines |= {"files": cfg.run_dir, "play": f"python -m utils.play {run}",
              "plot": f"python -m plot {run}{y}", "resume": resume}
    return "\n".join(f"{name:<10}{text}" for name, text in lines.items())


def rounded(ret: float) -> str:
    """Return a mean return as text, with at least three digits and one decimal."""
    return f"{ret:.1f}" if abs(ret) >= 10 else f"{ret:#.3g}"
