"""The trained policy of a run."""

import importlib
import pkgutil
import warnings
from contextlib import closing
from pathlib import Path

from utils.envs import make_envs
from utils.errors import UsageError
from utils.run import checkpoint
from utils.run.directory import has_changed, read_config


def find_module(name: str, asked: str):
    """Import an algorithm file, such as algos.ppo. UsageError says what `asked` for it.

    Only files in algos/ are imported: a stranger's run must not name code of theirs.
    """
    folder = importlib.import_module("algos").__path__
    names = [each.name for each in pkgutil.iter_modules(folder, "algos.") if "__" not in each.name]
    if name not in names:
        raise UsageError(f"{asked}: there is no {name}, only {', '.join(names)}")
    return importlib.import_module(name)


def read_run(run, best: bool = False):
    """Return a run's algorithm module, its Config and the contents of its policy.pt (best.pt)."""
    module = find_module(read_config(run)["module"], str(run))
    cfg = module.Config.of_run(run)
    path = Path(run, "best.pt" if best else "policy.pt")
    if best and not path.exists():
        raise UsageError(f"--best: there is no {path}; training with --eval-every writes one")
    return module, cfg, checkpoint.load_file(path)


def load_agent(run, best: bool = False):
    """Return the trained Agent of a run, with its statistics, on the CPU.

    run     the run directory; the run need not be finished
    best    load the policy of the best evaluation instead of the last checkpoint

    Needs no environment, unless an old version made the run or its spaces are of unusual kinds.
    Warns if the present code is not that of the run.
    """
    return build_agent(run, *read_run(run, best))


def build_agent(run, module, cfg, policy: dict):
    """Return the Agent of a run of which `read_run` has returned the rest: see `load_agent`."""
    if has_changed(module.Config, run):
        warnings.warn(f"{module.__name__}, or a module that it imports, has changed since {run} "
                      "was made, so the policy may act differently; the run has its algo.py, and "
                      "its config.json names the commit", stacklevel=3)
    if policy.get("spaces"):
        agent = module.Agent(*checkpoint.from_plain(policy["spaces"]), cfg)
    else:
        with closing(make_envs(cfg, 1)) as envs:
            agent = module.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    checkpoint.load_into(agent.load_state_dict, policy["agent"], run)
    return agent.eval()
