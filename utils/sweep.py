"""Train many runs: algorithms x environments x settings x seeds.

    python -m utils.sweep --algos ppo --envs Hopper-v4 Walker2d-v4 --seeds 6
        --jobs 2 --set lr=1e-4,3e-4 total_steps=1e5 --out DIR   (on one line)
    python -m utils.sweep --results DIR         (for runs started by hand)

--dry-run lists the runs. Each is a process of its own. It gets the directory
DIR/<env>/<algo>/<settings>/seed<k>, with its output beside it in seed<k>.log.
When it ends, result.json in that directory holds all that is needed to publish
it, in a few kB. The same command again skips finished runs and resumes
interrupted ones.

On several machines, 8 runs at a time:

    mpiexec -n 9 python -m mpi4py.futures -m utils.sweep ...

The machines must see DIR and this project under the same paths. If one of them
fails, the whole sweep ends.
"""

import io
import itertools
import re
import shlex
import signal
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass, fields
from pathlib import Path

from utils import mpi, play
from utils.checks import check_range, flag, new_name_of
from utils.envs import make_envs
from utils.flags import nearest, read_command
from utils.jobs import Crew, Job, run_all, start_or_resume
from utils.mpi import UsageError
from utils.results import OURS, has_result, make_results
from utils.run import RunConfig, parse
from utils.rundir import as_folder


@dataclass(frozen=True)
class Sweep:
    algos: tuple[str, ...] = ()  # files in algos/, without .py
    envs: tuple[str, ...] = ()  # Gymnasium ids
    seeds: int = 1  # number of seeds, counted from the first
    first_seed: int = 1  # the first seed; 100 with --seeds 3 gives 100, 101, 102
    set: tuple[str, ...] = ()  # settings, each with one or more values: lr=1e-4,3e-4 "hidden=64 64"
    jobs: int = 1  # runs at a time; under mpiexec the number of workers decides
    out: str = "runs/sweep"  # the folder for all runs
    dry_run: bool = False  # only print the commands
    results: str = ""  # instead of training: write result.json for the runs in this folder

    def __post_init__(self):
        check_range(self, "seeds jobs", 1)
        check_range(self, "first_seed", 0)
        for name in ("algos", "envs"):
            for word in getattr(self, name):
                if "," in word:
                    raise UsageError(f"{flag(name)} is {word}; it takes names with spaces between "
                                     f"them: {word.replace(',', ' ')}")


# ---- which runs


def plan(sweep: Sweep) -> list[Job]:
    """Return all runs: first one seed of each, then the next seed of each.

    UsageError: an algorithm refuses any of its settings or environments.
    """
    if not (sweep.algos and sweep.envs):
        raise UsageError("--algos and --envs are needed, or --results")
    grid = [parse_set(text) for text in sweep.set]
    names = [name for name, _ in grid]
    if len(set(names)) < len(names):
        raise UsageError(f"--set: {max(names, key=names.count)} is given twice")
    runs = []
    for algo, env in itertools.product(sweep.algos, sweep.envs):
        module = play.find_module(algo, f"--algos {algo}")
        for values in itertools.product(*(values for _, values in grid)):
            flags = [word for given in zip(names, values) for word in as_flags(module, *given)]
            command = [sys.executable, "-m", module.__name__, "--env", env, *flags]
            flags = command[3:]  # after python -m module
            cfg = parse(module.Config, module.__doc__, flags)
            runs.append((algo, module, cfg, command))
    for module, cfg in {(run[0], run[2].env): run[1:3] for run in runs}.values():  # one of each
        check_pair(module, cfg)
    jobs = []
    seeds = range(sweep.first_seed, sweep.first_seed + sweep.seeds)
    for seed, (algo, _, cfg, command) in itertools.product(seeds, runs):
        settings = ",".join(f"{name}={as_text(getattr(cfg, name))}" for name in sorted(names))
        settings = as_folder(settings) or "default"
        folder = Path(sweep.out, as_folder(cfg.env), algo, settings, f"seed{seed}")
        place = ["--seed", str(seed), "--run-dir", str(folder)]
        jobs.append(Job(algo, folder, int(cfg.total_steps), [*command, *place]))
    folders = [job.run_dir for job in jobs]
    if len(set(folders)) < len(folders):
        raise UsageError(f"two runs would share {max(folders, key=folders.count)}")
    return jobs


def check_pair(module, cfg) -> None:
    """UsageError: the environment is unknown, or the algorithm cannot handle it."""
    try:
        with redirect_stderr(io.StringIO()):  # a UsageError prints its message
            envs = make_envs(cfg, 1)
            module.Agent(envs.single_observation_space, envs.single_action_space, cfg)
            envs.close()
    except UsageError as error:
        raise UsageError(f"{module.__name__} on {cfg.env}: {error}") from None


def parse_set(text: str) -> tuple[str, list[str]]:
    """lr=1e-4,3e-4 -> ("lr", ["1e-4", "3e-4"]). A JSON object is one value."""
    name, equals, values = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text}: it takes name=value or name=value,value")
    values = [values] if values.startswith("{") else values.split(",")
    if "" in values:
        raise UsageError(f"--set {text}: a value is empty; values stand like lr=1e-4,3e-4")
    return name.replace("-", "_"), values


def as_flags(module, name: str, value: str) -> list[str]:
    """Return one setting as flags of the algorithm. UsageError: it has no such setting."""
    defaults = {field.name: field.default for field in fields(module.Config)}
    if name in OURS:
        raise UsageError(f"--set {name}: the sweep gives it itself (--envs, --seeds, --out)")
    if name not in defaults:
        new = new_name_of(name, defaults)
        near = [new] if new else nearest(name, defaults)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(f"--set {name}: {module.__name__} has no such setting{meant}")
    default = defaults[name]
    if not isinstance(default, bool):
        return [flag(name), *(value.split() if isinstance(default, tuple) else [value])]
    if value.lower() not in ("true", "false"):
        raise UsageError(f"--set {name}={value}: it takes True or False")
    return [flag(name) if value.lower() == "true" else flag(f"no_{name}")]


def as_text(value) -> str:
    """Return the same text for the same value however it was typed, such as 1e-4 and 0.0001."""
    if isinstance(value, tuple):
        return "-".join(map(as_text, value))
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


# ---- the command


def hint(name: str) -> str:
    """Return what to say about a flag that a sweep does not have."""
    told = {"collect": "it is now called --results",
            "resume": "the same command again resumes runs that are not finished",
            "seed": "--seeds is the number of seeds, --first-seed the first of them",
            "env": "did you mean --envs?", "run_dir": "did you mean --out?"}
    if name in told:
        return told[name]
    algos = Path(__file__).parents[1].glob("algos/*.py")
    settings = {field.name for field in fields(RunConfig)}.union(
        *(re.findall(r"^    (\w+): .*# ", path.read_text("utf-8"), re.M) for path in algos))
    near = [] if nearest(name, [field.name for field in fields(Sweep)]) else nearest(name, settings)
    return f"a setting of the algorithm is given by --set {near[0]}=..." if near else ""


def main(sweep: Sweep) -> int:
    """Return the exit status: 1 if a run failed, 130 or 143 if a signal stopped the sweep."""
    if sweep.results:
        return make_results(Path(sweep.results))
    if mpi.size() > 1 and "mpi4py.futures" not in sys.modules:
        raise UsageError("mpiexec would run the sweep several times: mpiexec -n W python -m "
                         "mpi4py.futures -m utils.sweep ...")
    jobs = plan(sweep)
    if sweep.dry_run:
        for job in jobs:
            done = "# finished: " * has_result(job.run_dir, job.total_steps)
            print(done + shlex.join(start_or_resume(job)))
        return 0
    try:
        Path(sweep.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {sweep.out} cannot be made: {error.strerror}") from None
    crew = Crew()
    before = {number: signal.signal(number, crew.on_signal)
              for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return run_all(jobs, sweep.jobs, crew)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    raise SystemExit(main(read_command(Sweep, __doc__, "python -m utils.sweep", hint=hint)))
