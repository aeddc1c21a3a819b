"""The settings of every run, what types of settings take, and the command line that gives them."""

import math
import numbers
from dataclasses import dataclass, fields
from functools import cache
from os import PathLike
from typing import (
    Annotated, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints)

from utils import mpi
from utils.env_ids import is_game
from utils.errors import UsageError
from utils.command import as_flags, flag, program, read_command, read_settings
from utils.run.code import module_of
from utils.run.directory import default_dir, read_config
from utils.run.launch import cores, start_ranks


class Range(NamedTuple):
    """low <= value <= high, and value > above."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf


# Types of settings, by the values that they take. A plain int is from 1 to 1e9, since more would
# hang or crash, a float at least 0, and the numbers of a tuple are from 1 to 1e5.
Natural = Annotated[int, Range(0, 1e9)]
Real = Annotated[float, Range()]
Positive = Annotated[float, Range(above=0)]
Fraction = Annotated[float, Range(0, 1)]

SHARED = "num_envs minibatch_size minibatch_envs batch_size buffer_size directions"  # among ranks
# The first is a multiple of the second.
DIVIDES = [("rollout_steps", "num_envs"), ("rollout_steps", "minibatch_size"),
           ("num_envs", "minibatch_envs"), *((name, "num_procs") for name in SHARED.split())]
# What other libraries call a setting, where the name is not nearly the same.
OTHERS_SAY = {
    "lr": "learning_rate actor_lr policy_lr q_lr", "v_lr": "critic_lr value_lr",
    "total_steps": "num_timesteps max_steps num_steps steps frames", "gamma": "discount",
    "num_procs": "n_cpu num_workers", "batch_size": "batch", "epochs": "update_epochs",
    "rollout_steps": "n_steps num_steps steps_per_epoch horizon batch", "lam": "gae_lambda",
    "clip_ratio": "clip_coef", "max_kl": "target_kl delta", "ent_coef": "entropy_coef",
    "alpha": "entropy_coef temperature", "learn_alpha": "autotune",
    "hidden": "hidden_sizes net_arch", "norm_obs": "normalize_obs", "scale_rew": "norm_reward",
    "buffer_size": "replay_size", "start_steps": "learning_starts update_after",
    "update_every": "train_frequency", "target_every": "target_update_interval",
    "policy_delay": "policy_frequency", "act_noise": "exploration_noise",
    "eps_end": "exploration_final_eps end_e", "eps_steps": "exploration_fraction",
    "env": "env_id env_name", "env_kwargs": "max_episode_steps", "device": "cuda gpu",
    "run_dir": "logdir save_dir exp_name out", "eval_every": "eval_freq",
    "report_every": "log_interval", "init_from": "load pretrained",
}


@dataclass(frozen=True)
class RunConfig:
    """The settings of every run. An algorithm's Config adds its own.

    A file may declare `num_envs`, `report_every` and `start_steps` as settings of its own. Their
    values here are those of a file that does not.
    """

    env: str = "HalfCheetah-v4"  # Gymnasium id; my_package:MyEnv-v0 imports my_package first
    env_kwargs: str = "{}"  # keyword arguments of the environment, a JSON object
    seed: Annotated[int, Range(0)] = 1  # seed of everything random in the run
    run_dir: str = ""  # where the run is kept (default: runs/<env>/<algo>[/<env_kwargs>]/seed<k>)
    resume: bool = False  # continue from the last checkpoint in the run directory
    overwrite: bool = False  # replace the run that is in the run directory
    init_from: str = ""  # load weights and statistics from this run; the rest starts fresh
    eval_every: Natural = 0  # steps between deterministic evaluations, made at reports; 0: never
    async_envs: bool = False  # step each environment in a process of its own (docs/training.md)
    num_procs: int = 1  # MPI processes that share environments, buffer and batches
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA for images, if there is one
    torch_threads: int = 1  # PyTorch threads per process
    others_say: ClassVar[dict] = OTHERS_SAY
    often: ClassVar[tuple] = ("env", "total_steps", "seed", "num_envs", "lr")  # first in --help
    for_games: ClassVar[dict] = {}  # settings that suit ALE/... and MinAtar/...
    for_atari: ClassVar[dict] = {}  # settings that suit ALE/..., over those for games
    act_parts: ClassVar[bool] = False  # an action of several parts becomes a vector, not a number
    num_envs: ClassVar[int] = 0  # it takes no steps of environments
    report_every: ClassVar[int] = 1  # every call of `Run.report` writes a row
    start_steps: ClassVar[int] = 0  # it learns from the first step on

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, list):  # which would not equal, or be hashed, as a run's tuple
                object.__setattr__(self, name, tuple(value))
            if isinstance(value, PathLike):
                object.__setattr__(self, name, str(value))
        check_settings(self)  # raises UsageError
        if self.start_steps is None:  # from now on a number, which --resume keeps
            object.__setattr__(self, "start_steps", min(10_000, int(self.total_steps / 10)))

    @classmethod
    def suited_to(cls, env: str) -> dict:
        """Return the settings of `for_games` and `for_atari` that suit an environment."""
        return (cls.for_games if is_game(env) else {}) | (
            cls.for_atari if is_game(env, "ALE/") else {})

    @classmethod
    def for_env(cls, env: str, **settings) -> "RunConfig":
        """Return a Config for an environment, with what suits a game unless `settings` has it."""
        return cls(**{"env": env} | cls.suited_to(env) | settings)

    @classmethod
    def of_run(cls, run_dir, **changes) -> "RunConfig":
        """Return the Config of a run, with `changes`. `resume=True` among them continues it."""
        config = read_config(run_dir)
        try:
            return cls(**config["settings"] | {"run_dir": str(run_dir)} | changes)
        except TypeError as error:
            raise UsageError(f"{run_dir} is a run of {config['algo']}, perhaps of another version: "
                             f"{error}") from None


# ---- ranges


def check_settings(cfg):
    """UsageError names the first setting that is of another kind, out of range or no multiple."""
    settings, kinds, limits = vars(cfg), *types_of(type(cfg))
    for name, most in ("total_steps", 1e12), ("num_envs", 1e5):
        if name in settings:
            check_range(cfg, name, 1, most)
    for name in (field.name for field in fields(cfg)):
        value, kind, choices = settings[name], kinds[name], get_args(kinds[name])
        if get_origin(kind) is Literal and value not in choices:
            raise UsageError(f"{flag(name)} is {value!r}; it takes {' or '.join(choices)}")
        if kind is bool and not isinstance(value, bool):  # "False" would be true
            raise UsageError(f"{flag(name)} is {value!r}; it takes True or False")
        if kind is str and not isinstance(value, str):
            raise UsageError(f"{flag(name)} is {value!r}; it takes a text")
        if get_origin(kind) is tuple and not isinstance(value, tuple):
            raise UsageError(f"{flag(name)} is {value!r}; it takes a tuple")
        if {int, float} & {kind, *choices}:
            check_range(cfg, name, *limits[name])
    check_range(cfg, "torch_threads", 1, cores())  # with more, PyTorch would crawl or hang
    if settings.get("norm_adv") and "minibatch_size" in settings:
        check_range(cfg, "minibatch_size", low=2)  # normalised, a single advantage would become 0
    if "minibatch_envs" in settings:  # T is at least 2, for the same reason
        check_range(cfg, "rollout_steps", low=2 * cfg.num_envs)
    if "buffer_size" in settings:  # a step of all environments fits in
        check_range(cfg, "buffer_size", low=cfg.num_envs)
    for a, b in DIVIDES:
        if {a, b} <= settings.keys() and settings[a] % settings[b]:
            raise UsageError(f"{flag(a)} is {settings[a]}; it takes a multiple of {flag(b)}, which "
                             f"is {settings[b]}")


@cache
def types_of(config_class) -> tuple[dict, dict[str, Range]]:
    """Return the types of a dataclass's settings, and the Range of those that are numbers."""
    limits = {}
    for name, kind in get_type_hints(config_class, include_extras=True).items():
        parts = kind, *get_args(kind)  # Natural, or Natural | None
        own = [each for part in parts for each in getattr(part, "__metadata__", ())
               if isinstance(each, Range)]
        usual = Range(1, 1e5) if get_origin(kind) is tuple else Range(1, 1e9)
        limits[name] = own[0] if own else Range(0) if float in parts else usual
    return get_type_hints(config_class), limits


def check_range(cfg, names, low=-math.inf, high=math.inf, above=-math.inf):
    """UsageError unless low <= value <= high and value > above, for each setting in `names`.

    NaN, infinity and anything that is not a number are refused. A setting declared int must be
    whole, and so must `total_steps`, which may be written 1e6. Each element of a tuple is checked.
    None passes if the declaration allows it.
    """
    kinds, _ = types_of(type(cfg))
    limits = ((low, "at least"), (above, "above"), (high, "at most"))
    bounds = "".join(f", {word} {limit:g}" for limit, word in limits if math.isfinite(limit))
    for name in names.split():
        value, parts = getattr(cfg, name), {kinds[name], *get_args(kinds[name])}
        whole = int in parts or name == "total_steps"
        for x in value if isinstance(value, tuple | list) else [value]:
            number = isinstance(x, numbers.Integral if int in parts else numbers.Real)
            fits = (number and not isinstance(x, bool) and math.isfinite(x)
                    and low <= x <= high and x > above and not (whole and x % 1))
            if not fits and not (x is None and type(None) in parts):
                what = "a whole number" if whole else "a number"
                raise UsageError(f"{flag(name)} is {value!r}; it takes {what}{bounds}")


# ---- the command line


def main(train, config_class, doc: str) -> None:
    """Run an algorithm file as a command: parse its flags and train."""
    with program("nothing new was saved; the same command starts again"):
        cfg = parse(config_class, doc)
        start_ranks(cfg.num_procs)  # with --num-procs P, this process becomes P ranks
        suits = {name: value for name, value in config_class.suited_to(cfg.env).items()
                 if getattr(cfg, name) == value and not cfg.resume}
        if suits:
            words = [word for name, value in suits.items() for word in as_flags(name, value)]
            mpi.say(f"settings that suit {cfg.env}: {' '.join(words)}")
        train(cfg)


def parse(config_class, doc: str, args: list[str] | None = None):
    """Return the Config of a command line. --help prints `doc` and all settings.

    Flags change the file's defaults; of a game, the settings that suit it; with --resume, the
    settings of the run.
    """
    command = config_class, doc, f"python -m {module_of(config_class)}", args
    first = read_settings(*command)
    if first["resume"]:
        named = {name: first[name] for name in ("env", "env_kwargs", "seed")}
        run_dir = first["run_dir"] or default_dir(config_class(**named))
        default = config_class.of_run(run_dir, resume=True)
    else:
        suits = config_class.suited_to(first["env"])
        default = config_class.for_env(first["env"]) if suits else None
    return read_command(*command, default)
