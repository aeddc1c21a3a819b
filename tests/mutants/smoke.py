"""Check that a file with a planted bug still runs, and choose and order its tests.

As a pytest plugin (`pytest -p tests.mutants.smoke --of ppo`), this file leaves out the tests of
other algorithms and puts slow tests last. As a test file, it checks that the module with the bug
imports and runs. A bug that crashes by itself needs no test, so it does not belong here.
"""
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from utils import mpi
from utils.errors import UsageError
from utils.run.launch import clean_env

ROOT = Path(__file__).resolve().parents[2]
ALGOS = {path.stem for path in ROOT.glob("algos/[a-z]*.py")}

SLOW = ("ranks", "process", "signal", "kill", "probe", "cartpole", "reach", "atari",
        "video", "display", "num_procs", "world", "test_a_seed_is_a_run")

# Only the settings that the algorithm's Config has are used.
SMALL = {"num_envs": 2, "rollout_steps": 64, "batch_size": 64, "minibatch_size": 32, "epochs": 2,
         "v_steps": 3, "hidden": (8, 8), "report_every": 8, "start_steps": 64, "buffer_size": 64,
         "pretrain_steps": 20, "target_every": 16, "eps_steps": 64, "cg_steps": 3, "device": "cpu"}


# ---- The plugin
def pytest_addoption(parser):
    parser.addoption("--of", default="", help="module with the planted bug")


def pytest_collection_modifyitems(config, items):
    of = config.getoption("--of")
    if of in ALGOS:
        items[:] = [item for item in items if of in (named(item) or own(item) or {of})]
    items.sort(key=lambda item: item.path.stem != "test_mpi" and any(w in item.name for w in SLOW))


def named(item):
    """Return the algorithms among a test's parameters, which may be names or modules."""
    values = getattr(item, "callspec", None) and item.callspec.params.values() or ()
    names = [v.__name__.rpartition(".")[2] if isinstance(v, ModuleType) else v for v in values]
    return {name for name in names if isinstance(name, str) and name in ALGOS}


def own(item):
    """Return the algorithm whose file of tests this is, if it is one's."""
    return {item.path.stem.removeprefix("test_")} & ALGOS


# ---- The test

def test_it_runs(request):
    of = request.config.getoption("--of")
    if not {mpi.__file__, request.module.__file__} <= set(map(str, ROOT.rglob("*.py"))):
        raise RuntimeError("the tests import another tree than the one with the bug")
    if of in ("mpi", "optim", "stats"):
        run_ranks()
    else:
        run_algo(of if of in ALGOS else "dqn")


def plain(name):
    """Load an algorithm without shape checks: a bug that only they notice does not crash a run."""
    spec = importlib.util.spec_from_file_location(f"plain.{name}", ROOT / f"algos/{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_algo(name):
    algo = plain(name)
    known, ran = {field.name for field in dataclasses.fields(algo.Config)}, []
    other = {"dqn_atari": ["tests.envs:Bright-v0"], "sac_her": ["tasks:BitFlip-v0"],
             "ppo_mask": ["tasks:Tour-v0"], "grpo": ["tasks:Brackets-v0"]}
    for env in ("CartPole-v1", "Pendulum-v1", *other.get(name, [])):
        steps = 128 if "buffer_size" in known else 192
        settings = {"env": env, "total_steps": steps, "eval_every": steps, "run_dir": env,
                    "env_kwargs": '{"max_episode_steps": 30}', "demos": f"{env}.npz"} | SMALL
        if "demos" in known:
            from tests.helpers import write_demos  # not before the tests' import hook

            write_demos(settings["demos"], env, settings["env_kwargs"], lengths=(20, 30))
        try:
            algo.train(algo.Config(**{k: v for k, v in settings.items() if k in known}))
        except UsageError:  # it takes only other actions or observations
            continue
        ran.append(env)
    if not ran:
        raise RuntimeError(f"{name} takes none of the environments")


def run_ranks():
    """Train, save and resume PPO, alone and with a second process."""
    ppo = plain("ppo")
    known = {field.name for field in dataclasses.fields(ppo.Config)}
    settings = {name: value for name, value in SMALL.items() if name in known}
    ppo.train(ppo.Config(env="CartPole-v1", run_dir="run", eval_every=64, total_steps=128,
                         **settings))
    ppo.train(ppo.Config.of_run("run", total_steps=192, resume=True))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    flags = ("-m algos.ppo --env CartPole-v1 --num-envs 2 --rollout-steps 64 "
             "--minibatch-size 64 --total-steps 128").split()
    command = [shutil.which("mpiexec", path=path), "-n", "2", sys.executable, *flags]
    env = clean_env() | {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert "differ from those of rank 0" not in done.stderr, "the run's own check"
    done.check_returncode()
