"""The catalogue of bugs: what stands in the .toml files beside this one, and where it is planted.

An entry replaces a text that stands once in the file of its module:

    [[mutant]]
    id = "ppo-truncation-is-an-end"     # unique in both catalogues, begins with the module
    old = '''...'''                     # stands exactly once in the file
    new = '''...'''
    wrong = "what goes wrong, in a sentence"
    found = "a codebase, a paper, a near miss of our own; or why it is easily written"
    also = ["a2c", "vpg"]               # optional: other modules with the same text, once in each
    crashes = true                      # optional: the file's own `assert` may be what catches it

Entries are never taken away: where the text has changed, `old` and `new` follow it. `second/`
holds the bugs of someone who had not seen the tests.
"""
import hashlib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

# module: its files of behaviour tests, in the order in which they find most in least time. The
# name ppo_math stands for test_ppo_math.py, in whichever folder of tests/.
# Tests of style are none: they see that two files differ, not that anything goes wrong.
TESTS = {
    "ppo": "ppo_math ppo_update collect onpolicy run learn bad_input",
    "a2c": "a2c onpolicy",
    "vpg": "vpg onpolicy",
    "trpo": "trpo onpolicy",
    "ddpg": "ddpg replay",
    "td3": "td3 ddpg replay",
    "sac": "sac ddpg replay",
    "dqn": "dqn replay",
    "dqn_atari": "dqn_atari dqn replay",
    "dqn_per": "dqn_per dqn replay",
    "logger": "logger saving run",
    "run": "saving mpi logger run bad_input onpolicy a2c",
    "checkpoint": "checkpoint saving run bad_input",
    "files": "checkpoint saving run",
    "mpi": "mpi saving onpolicy a2c ddpg run",
    "launch": "mpi saving run bad_input",
    "checks": "checks bad_input",
    "envs": "envs play run collect replay ppo_update",
    "rundir": "rundir saving run bad_input",
    "play": "play",
    "video": "play",
    "plot": "plot",
    "sweep": "sweep",
    "jobs": "sweep",
    "results": "sweep",
}


@dataclass(frozen=True)
class Mutant:
    id: str
    module: str
    old: str
    new: str
    wrong: str
    found: str
    also: list = field(default_factory=list)
    crashes: bool = False


@dataclass(frozen=True)
class Planting:
    """A mutant in some of its files, all at once; `module` is whose tests have to see it."""

    id: str
    module: str
    files: tuple
    mutant: Mutant | None


def read(second=False):
    """All entries of a catalogue; KeyError or TypeError where a field lacks or is unknown."""
    folder = HERE / "second" if second else HERE
    return [Mutant(module=path.stem, **entry) for path in sorted(folder.glob("*.toml"))
            for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]


def file_of(module, root=ROOT):
    """algos/ppo.py, utils/mpi.py, plot.py."""
    places = root / "algos", root / "utils", root
    return next(path for place in places if (path := place / f"{module}.py").exists())


def test_file(name, root=ROOT):
    """The path of test_<name>.py in whichever folder of the tests, from the root of the tree."""
    path, = (root / "tests").glob(f"*/test_{name}.py")
    return str(path.relative_to(root))


def planted(mutant, text):
    """The text of a file with the bug in it; ValueError unless there is one place for it."""
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"`old` stands {count} times in the file, not once")
    return text.replace(mutant.old, mutant.new)


def plantings(mutants):
    """Each mutant in its own file, alone in each file that shares the text, and in all at once."""
    for mutant in mutants:
        yield Planting(mutant.id, mutant.module, (mutant.module,), mutant)
        for other in mutant.also:
            yield Planting(f"{mutant.id}@{other}", other, (other,), mutant)
        if mutant.also:
            every = (mutant.module, *mutant.also)
            yield Planting(f"{mutant.id}@all", mutant.module, every, mutant)


def sample(all_of_them, size):
    """Always the same `size` of them, of as many modules as there are."""
    def drawn(text):
        return hashlib.sha256(text.encode()).hexdigest()

    rounds, seen = [], {}
    for planting in sorted(all_of_them, key=lambda p: drawn(p.id)):
        seen[planting.module] = seen.get(planting.module, 0) + 1
        rounds.append((seen[planting.module], drawn(planting.module), planting))
    return [planting for *_, planting in sorted(rounds, key=lambda row: row[:2])[:size]]
