"""The settings of every run, and the command line that gives them."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from utils import mpi
from utils.env_ids import is_game, with_version
from utils.errors import UsageError
from utils.run.command import program, read_command, read_settings
from utils.run.directory import default_dir, module_of, read_config
from utils.run.launch import start_ranks
from utils.run.ranges import as_text, check_settings, flag

# What to say about flags that do not exist.
HINTS = {"render": "python -m utils.play RUN --render shows a trained policy in a window",
         "capture_video": "python -m utils.play RUN --video FILE.mp4 records a video",
         "algo": "the module is the algorithm, as in python -m algos.NAME"}


@dataclass(frozen=True)
class RunConfig:
    """The settings of every run. An algorithm's Config adds its own.

    A file may declare `num_envs`, `report_every` and `start_steps` as settings of its own. Their
    values here are those of a file that does not.
    """

    env: str = "HalfCheetah-v4"  # Gymnasium id; my_package:MyEnv-v0 imports my_package first
    env_kwargs: str = "{}"  # keyword arguments of the environment, a JSON object
    seed: int = 1  # seed of everything random in the run
    run_dir: str = ""  # where the run is kept (default: runs/<env>/<algo>/seed<k>)
    resume: bool = False  # continue from the last checkpoint in the run directory
    overwrite: bool = False  # replace the run that is in the run directory
    init_from: str = ""  # load weights and statistics from this run; the rest starts fresh
    eval_every: int = 0  # steps between deterministic evaluations, made at reports; 0: never
    num_procs: int = 1  # MPI processes that share environments, buffer and batches
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA for images, if there is one
    torch_threads: int = 1  # PyTorch threads per process
    often: ClassVar[tuple] = ("env", "total_steps", "seed", "num_envs", "lr")  # first in --help
    for_games: ClassVar[dict] = {}  # settings that suit ALE/... and MinAtar/...
    for_atari: ClassVar[dict] = {}  # settings that suit ALE/..., over those for games
    num_envs: ClassVar[int] = 0  # it takes no steps of environments
    report_every: ClassVar[int] = 1  # every call of `Run.log` reports
    start_steps: ClassVar[int] = 0  # it learns from the first step on

    def __post_init__(self):
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
        settings = read_config(run_dir)["settings"] | {"run_dir": str(run_dir)} | changes
        try:
            return cls(**settings)
        except TypeError as error:
            raise UsageError(f"another version made {run_dir}: {error}") from None


def main(train, config_class, doc: str) -> None:
    """Run an algorithm file as a command: parse its flags and train."""
    with program("nothing new was saved; the same command starts again"):
        cfg = parse(config_class, doc)
        start_ranks(cfg.num_procs)  # with --num-procs P, this process becomes P ranks
        cfg = with_version(cfg)
        suits = {name: value for name, value in config_class.suited_to(cfg.env).items()
                 if getattr(cfg, name) == value and not cfg.resume}
        if suits:
            words = [f"{flag(name)} {as_text(value)}" if not isinstance(value, bool) else
                     flag(name if value else f"no_{name}") for name, value in suits.items()]
            mpi.say(f"settings that suit {cfg.env}: {' '.join(words)}")
        train(cfg)


def parse(config_class, doc: str, args: list[str] | None = None):
    """Return the Config of a command line. --help prints `doc` and all settings.

    Flags change the file's defaults; of a game, the settings that suit it; with --resume, the
    settings of the run.
    """
    command = config_class, doc, f"python -m {module_of(config_class)}", args, HINTS.get
    first = read_settings(*command)
    if first["resume"]:
        env = with_version(config_class(env=first["env"])).env
        run_dir = first["run_dir"] or default_dir(config_class, env, first["seed"])
        default = config_class.of_run(run_dir, resume=True)
    else:
        suits = config_class.suited_to(first["env"])
        default = config_class.for_env(first["env"]) if suits else None
    return read_command(*command, default)
