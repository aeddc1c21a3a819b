"""Before any test: shapes and types are checked, one thread computes, nothing lands in the tree."""
import os
import sys
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parent.parent

# Two workers share two cores, and sums over several threads come out in another order.
os.environ["OMP_NUM_THREADS"] = "1"
# Compiled code would see the checkers that the hook puts around every function.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
# A `python -m algos.ppo` that a test starts, wherever it stands, runs this tree.
paths = [str(ROOT), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

# Every function and dataclass of `algos` checks its annotations, shapes included. The tower lets
# an int stand for a float, as Python's own type checkers do: Config(total_steps=1000) is fine.
if any(name.startswith("algos") for name in sys.modules):
    raise RuntimeError("algos was imported before the hook: its shapes would go unchecked")
install_import_hook("algos", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
pytest.register_assert_rewrite("tests.helpers")


@pytest.fixture(autouse=True)
def afresh():
    """Each test begins as if it were the only one, whatever ran before it in this process.

    What nobody has imported yet is as it should be, and takes seconds to import.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if envs := sys.modules.get("tests.envs"):
        envs.Counter.made.clear()       # environments are numbered from 0


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Each test works in its own empty directory, so that `runs/` never lands in the tree."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def dynamo_env():
    """The environment for a process of its own that compiles: no hook there, and no switch."""
    return {key: value for key, value in os.environ.items() if key != "TORCHDYNAMO_DISABLE"}
