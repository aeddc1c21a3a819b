"""Set-up of all tests: check shapes and types, use one thread, write nothing into the tree."""
import os
import shutil
import sys
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parent.parent

# Workers share the cores, and the order of sums, hence rounding, depends on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"
# If a test starts `python -m algos.ppo` in any directory, it must run the code of this tree.
paths = [str(ROOT), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

# Files lie in memory where there is room: flushing and deleting them took a fifth of the time.
if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2e9:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# Every function and dataclass of `algos` checks its annotations, shapes included. The numeric tower
# accepts an int as a float, as static type checkers do: Config(total_steps=1000) is fine.
if any(name.startswith("algos") for name in sys.modules):
    raise RuntimeError("algos was imported before the hook, so its shapes would not be checked")
install_import_hook("algos", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
pytest.register_assert_rewrite("tests.helpers", "tests.offpolicy", "tests.onpolicy")


@pytest.fixture(autouse=True)
def afresh():
    """Reset global state, so that no test depends on the tests before it in this process.

    A module that is not imported yet needs no reset, and importing it here would take seconds.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if envs := sys.modules.get("tests.envs"):
        envs.Counter.made.clear()       # numbers environments from 0 again
    if mpi := sys.modules.get("utils.mpi"):
        mpi.say_once.cache_clear()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run each test in its own empty directory, so that `runs/` is never written into the tree."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def many_cores(monkeypatch):
    """Pretend to have 16 cores: what --torch-threads takes depends on them. Subprocesses do not."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
