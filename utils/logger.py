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

import difflib
import errno
import importlib
import json
import math
import numbers
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, asdict, fields, replace
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from tqdm import tqdm

from utils import checkpoint, mpi
from utils.checkpoint import together
from utils.mpi import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FREE = {"total_steps", "device", "torch_threads", "run_dir", "resume"}  # may differ on --resume
PACKAGES = ["torch", "gymnasium", "numpy", "mujoco", "ale_py", "Box2D", "mpi4py"]
KINDS = {"vector": "vectors (Box of one dimension)", "discrete": "Discrete from 0",
         "image": "images (Box of uint8, HWC or CHW, at least 36 pixels a side)",
         "box": "Box of floats with finite bounds"}
SAVED = ("state", "rng", "cuda_rng", "seconds", "best")  # in each rank's file
EPISODE = ["step", "time", "env", "ep_ret", "ep_len"]
PROGRESS = ["step", "time", "steps_per_second", "ep_ret_mean", "ep_ret_std", "ep_ret_min",
            "ep_ret_max", "ep_len_mean", "ep_len_std", "ep_len_min", "ep_len_max"]


# ---- What a setting, a space, an environment may be


def flag(name):
    return "--" + name.replace("_", "-")


def check_range(cfg, names, low=-math.inf, high=math.inf, *, above=-math.inf):
    """UsageError unless low <= value <= high and value > above, for each setting in `names`.

    Refused as well: NaN, infinity, what is no number and, where the setting is declared int, what
    is not whole (`total_steps` may be 1e6). Of a tuple each element is checked; None passes where
    it is declared.
    """
    types = {field.name: str(field.type) for field in fields(cfg)}
    limits = ((low, "at least"), (above, "above"), (high, "at most"))
    takes = "".join(f", {word} {limit}" for limit, word in limits if math.isfinite(limit))
    for name in names.split():
        value = getattr(cfg, name)
        kind = numbers.Integral if "int" in types[name] else numbers.Real
        whole = kind is numbers.Integral or name == "total_steps"
        for x in value if isinstance(value, tuple | list) else [value]:
            number = isinstance(x, kind) and not isinstance(x, bool) and math.isfinite(x)
            fits = number and low <= x <= high and x > above and (not whole or x == int(x))
            if not fits and not (x is None and "None" in types[name]):
                what = "a whole number" if whole else "a number"
                raise UsageError(f"{flag(name)} is {value}; it takes {what}{takes}")


def check_divides(cfg, pairs):
    """UsageError unless a is a multiple of b for each "a/b" in `pairs`, names of settings."""
    for pair in pairs.split():
        a, b = pair.split("/")
        if getattr(cfg, a) % getattr(cfg, b):
            raise UsageError(f"{flag(a)} is {getattr(cfg, a)}; it takes a multiple of "
                             f"{flag(b)}, which is {getattr(cfg, b)}")


def check_spaces(obs_space, act_space, obs, act):
    """UsageError unless the spaces are of one of the KINDS in `obs` and one of those in `act`."""
    kinds = obs_kind(obs_space), act_kind(act_space)
    sides = ("observation", obs_space, kinds[0], obs), ("action", act_space, kinds[1], act)
    for side, space, kind, takes in sides:
        if kind not in takes.split():
            fit = ", ".join(fitting_algos(*kinds))
            raise UsageError(f"--env has the {side} space {space}; this algorithm takes "
                             f"{' or '.join(KINDS[name] for name in takes.split())}"
                             f"{fit and f'; for this one there is {fit}'}")


def obs_kind(space):
    box, shape = isinstance(space, gym.spaces.Box), space.shape or ()
    sides = sorted(shape)[1:]  # a colour or a stack of frames is the shortest dimension
    if box and len(shape) == 3 and space.dtype == np.uint8 and min(sides) >= 36:
        return "image"
    return "vector" if box and len(shape) == 1 else "other"


def act_kind(space):
    if isinstance(space, gym.spaces.Discrete):
        return "discrete" if space.start == 0 else "other"
    floats = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating)
    return "box" if floats and space.is_bounded() else "other"


def fitting_algos(obs, act):
    """The algorithm files that say, in their own call of `check_spaces`, that they take these."""
    call = re.compile(r'check_spaces\(.*obs="(.*)", act="(.*)"\)')
    files = sorted(Path(__file__).parents[1].glob("algos/*.py"))
    says = [(path.stem, call.search(path.read_text(encoding="utf-8"))) for path in files]
    return [name for name, m in says if m and obs in m[1].split() and act in m[2].split()]


@contextmanager
def env_errors(cfg):
    """Around the making of environments: UsageError for what --env and --env-kwargs get wrong.

    Silences the notices about -v4 environments, which the published figures are for, and no other.
    """
    warnings.filterwarnings("ignore", message=".*is out of date", category=DeprecationWarning)
    import mujoco  # a tenth of a second

    mujoco.set_mju_user_warning(mujoco_warning)  # also ends MUJOCO_LOG.TXT
    wrong = f"--env-kwargs is {cfg.env_kwargs}; it takes a JSON object of what {cfg.env} takes"
    atari = cfg.env.startswith("ALE/")
    try:
        if not isinstance(json.loads(cfg.env_kwargs), dict):
            raise UsageError(wrong)
        if atari:
            gym.register_envs(importlib.import_module("ale_py"))
        yield
    except json.JSONDecodeError as error:
        raise UsageError(f"{wrong}: {error}") from None
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        no_atari = atari and isinstance(error, ModuleNotFoundError)
        extra = "atari" if no_atari else "box2d" if "ox2" in str(error) else ""
        how = f"pip install -e '.[{extra}]'" if extra else error
        raise UsageError(f"--env is {cfg.env}, which is not installed: {how}") from None
    except gym.error.Error as error:
        near = difflib.get_close_matches(cfg.env.rpartition(":")[2], gym.registry, 3)
        hint = f" The nearest: {', '.join(near)}" if near else ""
        raise UsageError(f"--env is {cfg.env}: {error}{hint}") from None
    except TypeError as error:
        if cfg.env_kwargs == "{}":  # then it is the environment's own
            raise
        raise UsageError(f"{wrong}: {error}") from None


def mujoco_warning(text):
    if "deprecated" not in text:
        print(f"MuJoCo: {text}", file=sys.stderr)


# ---- The run directory


def open_run(cfg):
    """`cfg` with the run directory filled in. Every rank calls it; it writes nothing.

    With --resume the settings are those of the run; one that is finished ends here, with status 0.
    UsageError: a directory that holds a run or cannot be written; --resume of what is no run of
    this algorithm, or with other settings; --init-from what holds no policy.
    """
    algo = module_name(cfg).rpartition(".")[2]
    run_dir = Path(cfg.run_dir or Path("runs", cfg.env.replace("/", "-"), algo, f"seed{cfg.seed}"))
    cfg = replace(cfg, run_dir=str(run_dir))
    if cfg.resume:
        cfg = settings_of_run(cfg, algo)
        if finished(run_dir, cfg.total_steps):
            mpi.say(f"{run_dir} has its {cfg.total_steps:,.0f} steps: nothing to do")
            raise SystemExit(0)
        return cfg
    refuse_taken(run_dir)
    if cfg.init_from:
        checkpoint.load_file(Path(cfg.init_from, "policy.pt"), "agent", "step", flag="--init-from")
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--run-dir is {run_dir}, but {there} is no directory to write in")
    return cfg


def settings_of_run(cfg, algo):
    """The Config of the run to resume; what may differ is taken from `cfg` where given."""
    config = read_config(cfg.run_dir, "--resume: ")
    if config["algo"] != algo:
        raise UsageError(f"--resume: {cfg.run_dir} is a run of {config['algo']}, not of {algo}")
    if not checkpoint.resume_folders(cfg.run_dir):
        raise UsageError(f"--resume: there is no checkpoint in {cfg.run_dir}; delete it to restart")
    settings = config["settings"]
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        known = settings.get(field.name, default)
        if value != default and field.name in FREE:  # the default counts as not given
            settings[field.name] = value
        elif value not in (default, known):
            raise UsageError(f"{flag(field.name)} is {value}, but {known} in {cfg.run_dir}: "
                             "--resume goes on with what the run has")
    try:
        return type(cfg)(**settings)
    except TypeError as error:
        raise UsageError(f"--resume: {cfg.run_dir} is of another version: {error}") from None


def read_config(run_dir, prefix=""):
    """A run's config.json, such that `Config(**config["settings"])` is its Config."""
    path = Path(run_dir, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        settings, _ = config["settings"].items(), (config["algo"], config["module"])
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{prefix}{run_dir} holds no run: there is no config.json") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{prefix}{path} is damaged: {type(error).__name__} {error}") from None
    # JSON makes lists of tuples, which a frozen dataclass could not hash.
    config["settings"] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings}
    return config


def finished(run_dir, total_steps):
    path = run_dir / "policy.pt"
    return path.exists() and checkpoint.load_file(path, "agent", "step")["step"] >= total_steps


def refuse_taken(run_dir):
    names = ("config.json", "policy.pt", "progress.csv")
    if any(os.path.exists(run_dir / name) for name in names) or checkpoint.resume_folders(run_dir):
        raise UsageError(f"{run_dir} holds a run already: --resume goes on with it, another "
                         "--seed or another --run-dir starts a new one")


def hold(cfg):
    """Make the run directory and lock it, as long as the file returned is open."""
    try:
        Path(cfg.run_dir).mkdir(parents=True, exist_ok=True)
        file = open(Path(cfg.run_dir, ".lock"), "w")
    except OSError as error:
        raise UsageError(f"--run-dir is {cfg.run_dir}: {error.strerror}") from None
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(f"another process is writing the run in {cfg.run_dir}") from None
    except OSError:
        pass  # some network file systems know no locks
    if not cfg.resume:
        refuse_taken(Path(cfg.run_dir))  # it may have begun, and ended, since `open_run` looked
    return file


def module_name(cfg):
    """The module that `cfg` comes from, also where it is the running program: "algos.x"."""
    name, main = type(cfg).__module__, sys.modules["__main__"]
    if name != "__main__":
        return name
    if main.__spec__:  # python -m
        return main.__spec__.name
    path = Path(getattr(main, "__file__", "notebook")).resolve()
    package = f"{path.parent.name}." if (path.parent / "__init__.py").exists() else ""
    return package + path.stem


def plain_settings(cfg):
    """The settings as what JSON and a checkpoint can hold."""
    settings = asdict(cfg) | {"resume": False}
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in settings.items()}


def origin():
    """What produced a run's numbers, beside its settings."""
    used = [sys.modules[name] for name in PACKAGES if sys.modules.get(name)]
    versions = {module.__name__: module.__version__ for module in used}
    git = "git describe --always --dirty --abbrev=40 --exclude=*".split()
    try:
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        done = None  # there is no git
    return {"command": shlex.join(sys.orig_argv), "git_commit": done and done.stdout.strip(),
            "versions": {"python": sys.version.split()[0], **versions}}


# ---- Numbers


class Table:
    """A csv file; each write is one call with whole rows, so that a kill leaves whole rows."""

    def __init__(self, path, columns, step):
        """Goes on with a file's rows up to `step`, if there is one."""
        self.path, text = path, path.read_bytes().decode(errors="replace") if path.exists() else ""
        header, *rows = text.split("\n")[:-1] or [",".join(columns)]  # half a line has no "\n"
        self.columns, cells = header.split(","), [row.split(",") for row in rows]
        self.rewrite([row for row in cells if len(row) == len(self.columns)
                      and row[0].isdecimal() and int(row[0]) <= step])

    def rewrite(self, rows):
        text = "".join(",".join(row) + "\n" for row in [self.columns, *rows])
        checkpoint.write_whole(self.path, partial(write_text, text))
        self.file = open(self.path, "ab", buffering=0)

    def write(self, rows):
        """Append dicts. A column that comes late is empty in the rows before."""
        new = list(dict.fromkeys(name for row in rows for name in row if name not in self.columns))
        if new:
            self.file.close()
            old = [row.split(",") + [""] * len(new) for row in self.path.read_text().split("\n")]
            self.columns += new
            self.rewrite(old[1:-1])
        # repr is the shortest text that reads back as the same float.
        cells = [[repr(row[name]) if name in row else "" for name in self.columns] for row in rows]
        data = "".join(",".join(row) + "\n" for row in cells).encode()
        try:
            if self.file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self):
        self.file.close()


def write_text(text, file):
    file.write(text.encode())


def summary(values):
    """Is it a distribution, n, mean, sum of squared deviations, min, max of tensors of any shape.

    These five numbers, unlike the values themselves, make a small message; `merge` joins them.
    """
    device = values[0].device
    flat = torch.cat([value.reshape(-1).to(device) for value in values]).double().cpu().numpy()
    spread = any(value.ndim for value in values)
    if not flat.size:
        return spread, 0, 0.0, 0.0, math.inf, -math.inf
    with np.errstate(all="ignore"):  # what is not finite is refused by name, later
        mean = flat.mean()
        squares = np.square(flat - mean).sum()
    return spread, flat.size, *map(float, (mean, squares, flat.min(), flat.max()))


def merge(name, parts):
    """The columns of one quantity, of the summaries of those ranks that have it."""
    spread, counts, means, squares, lows, highs = zip(*parts)
    n = sum(counts)
    if n == 0:
        return {}
    mean = sum(count * own for count, own in zip(counts, means)) / n
    if not any(spread):
        return {name: mean}
    # Around the common mean: what a rank has around its own, and its own around the common one.
    gaps = [own - mean for own in means]
    around = sum(squares) + sum(count * gap * gap for count, gap in zip(counts, gaps))
    return {f"{name}_mean": mean, f"{name}_std": math.sqrt(around / n),
            f"{name}_min": min(lows), f"{name}_max": max(highs)}


# ---- The logger


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
            stack.enter_context(together(hold if self.root else None, cfg) or ExitStack())
            if cfg.resume:
                self.step, saved = checkpoint.load_resume(self.run_dir, *SAVED)
                together(self.restore, saved)
            if self.root:
                self.write_config(initial)
                self.open_files(stack)
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    before = signal.signal(number, self.on_signal)
                    stack.callback(signal.signal, number, before or signal.SIG_DFL)
            self.reported = time.perf_counter()
            self.started = self.reported - self.seconds
            if cfg.resume:
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
        path = Path(self.cfg.init_from, "policy.pt")
        policy = checkpoint.load_file(path, "agent", "step")
        checkpoint.load_into(self.agent, policy["agent"], path)
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

    def write_config(self, initial):
        cfg, now = self.cfg, origin()
        if cfg.resume:
            config = read_config(self.run_dir)
            before = config["settings"]["total_steps"]
            if before != cfg.total_steps:
                mpi.say(f"--total-steps {cfg.total_steps:,.0f} instead of {before:,.0f}: annealing "
                        "runs to the new end")
            config["resumed"] = [*config.get("resumed", []), {"step": self.step, **now}]
        else:
            module, spec = module_name(cfg), gym.registry.get(cfg.env.rpartition(":")[2])
            config = {"algo": module.rpartition(".")[2], "module": module, **now,
                      "init_from": initial, "env_spec_kwargs": spec.kwargs if spec else {}}
        config["settings"] = plain_settings(cfg)
        text = json.dumps(config, indent=2, default=str) + "\n"
        checkpoint.write_whole(self.run_dir / "config.json", partial(write_text, text))

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
        names = [name for name in self.progress.columns if name not in PROGRESS]
        names = [name for name in names if not name.endswith(("_std", "_min", "_max"))]
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
