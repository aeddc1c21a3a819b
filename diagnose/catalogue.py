"""The catalogue of planted bugs: read the files in bugs/ and plant what they describe.

An entry replaces a text that stands exactly once in the file of its module:

    [[mutant]]
    id = "ppo-truncation-is-an-end"     # unique; starts with the module's name
    old = '''...'''                     # stands exactly once in the file
    new = '''...'''
    wrong = "what goes wrong, in one sentence"
    found = "the issue, codebase or paper that has this bug"
    also = ["a2c", "vpg"]               # optional: other modules with the same text, once in each
    crashes = true                      # optional: an assertion or a check of ours may stop it

Every bug has a source in the world. One kind stands once, with `also` for the files that share it.
Bugs are those of the algorithms and of what they compute with; ordinary tests have to do for the
rest of utils/. If the text changes, change `old` and `new` with it: `python -m tests.mutants
--stands` lists the entries whose text is gone.
"""
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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
    """A mutant to plant in these files at once. The tests of `module` have to catch it."""

    id: str
    module: str
    files: tuple
    mutant: Mutant


def read():
    """Return all entries.

    KeyError, TypeError: a field is missing or unknown. ValueError: an id stands twice.
    """
    found = [Mutant(module=path.stem, **entry) for path in sorted(ROOT.glob("diagnose/bugs/*.toml"))
             for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]
    ids = [mutant.id for mutant in found]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"ids that stand twice: {' '.join(twice)}")
    return found


def file_of(module, root=ROOT):
    """Return the path of a module: algos/ppo.py or utils/mpi.py."""
    places = root / "algos", root / "utils"
    return next(path for place in places if (path := place / f"{module}.py").exists())


def edited(text, edits):
    """Return the text with (old, new) edits. ValueError: an old one does not stand in it once."""
    for old, new in edits:
        if (count := text.count(old)) != 1:
            raise ValueError(f"this stands {count} times in the file, not once: {old}")
        text = text.replace(old, new)
    return text


def planted(mutant, text):
    """Return the text with the bug in it."""
    return edited(text, [(mutant.old, mutant.new)])


def plantings(mutants):
    """Yield each mutant in its own file. If others share the text: also in each, and in all."""
    for mutant in mutants:
        yield Planting(mutant.id, mutant.module, (mutant.module,), mutant)
        for other in mutant.also:
            yield Planting(f"{mutant.id}@{other}", other, (other,), mutant)
        if mutant.also:
            every = (mutant.module, *mutant.also)
            yield Planting(f"{mutant.id}@all", mutant.module, every, mutant)
