"""The command line of every program here, read by tyro, and how a program ends.

A program is a dataclass, one line per setting: `name: type = default  # its text in --help`. tyro
makes a flag of each. A setting without a default needs no flag. What tyro lacks stands here: one
line per refusal, and what a class may add: `often`, the settings that come first in --help, and
`others_say`, the names that other libraries have for a setting, for hints.
"""

import difflib
import inspect
import io
import re
import signal
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import MISSING, fields, make_dataclass
from typing import Annotated, get_type_hints

import tyro

from utils import mpi
from utils.errors import UsageError

# ---- a program and its end


@contextmanager
def program(*stopped):
    """Around the body of a program: bad input becomes one message, and each end a status.

    2 after a UsageError or MemoryError, 130 after Ctrl-C, and that of `Stopped` (run/signals.py).
    If one rank of several ends so, all do. After Ctrl-C, the message ends with the exception's
    notes or, without any, with `stopped`. SIGTERM, where nobody else handles it, ends a single
    process in order: its temporary files go.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
    if mpi.size() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    except UsageError as error:
        leave("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]), 2)
    except MemoryError as error:  # as under `ulimit -v`
        said = f"error: out of memory: {error}"
        leave("\n".join([said, *getattr(error, "__notes__", [])]), 2)
    except KeyboardInterrupt as stop:
        if hasattr(stop, "status"):
            sys.exit(stop.status)
        leave("; ".join(["stopped by Ctrl-C", *getattr(stop, "__notes__", stopped)]), 130)


def leave(text: str, status: int) -> None:
    """Print why, and end all ranks: the others would wait for the next message of this one."""
    if mpi.rank() > 0:
        time.sleep(3)  # if rank 0 fails too, it says so for all
        text = f"rank {mpi.rank()} of {mpi.size()}: {text}"
    print(text, file=sys.stderr, flush=True)
    if mpi.size() > 1:
        time.sleep(0.5)  # mpiexec loses output that it has not passed on when it ends
        mpi.comm().Abort(status)
    sys.exit(status)


# ---- the command line


def as_text(value, gap=" "):
    """Return the same text for the same value however it was typed, such as 1e-4 and 0.0001."""
    if isinstance(value, tuple | list):
        return gap.join(map(as_text, value))
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def flag(name):
    """num_envs -> --num-envs"""
    return "--" + name.replace("_", "-")


def as_flags(name, value):
    """Return a setting as words of a command: --num-envs 8, --no-norm-adv."""
    if isinstance(value, bool):
        return [flag(name if value else f"no_{name}")]
    return [flag(name), *map(as_text, value if isinstance(value, tuple | list) else [value])]


RULES = tyro.constructors.ConstructorRegistry()


@RULES.primitive_rule
def rule_of_int(info):
    """Tell tyro how to read an int: 1e6 is one."""
    def read(words):
        whole = "e" in words[0].lower() and float(words[0]).is_integer()
        return int(float(words[0]) if whole else words[0])

    if info.type is int:
        return tyro.constructors.PrimitiveConstructorSpec(
            1, "INT", read, lambda value: isinstance(value, int), lambda value: [str(value)])


def read_command(config_class, *how, **more):
    """Return an instance of a dataclass with what `read_settings` returns."""
    return config_class(**read_settings(config_class, *how, **more))


def read_settings(config_class, doc, prog, args=None, default=None):
    """Return {setting: value} for a dataclass and a command line. UsageError has one line.

    doc      --help begins with its title and ends with all of it
    prog     how the program is called, such as "python -m utils.sweep"
    args     the words of the command line (default: those of this process)
    default  an instance whose values are the defaults (default: those of the class)
    """
    doc, printed = doc.strip("\n"), io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            read, unknown = tyro.cli(
                make_form(config_class, default), prog=prog, args=args, registry=RULES,
                description=re.split(r"\.  |\n", doc)[0], return_unknown_args=True,
                config=[tyro.conf.PositionalRequiredArgs, tyro.conf.PositionalMetavarFromFieldName])
    except SystemExit as end:
        if end.code:  # printed: a title, a rule, what is wrong, a rule, and more
            wrong = " ".join(re.split(r"\n[ -]*\n", printed.getvalue())[1].split())
            if re.search(r"\d,\d", wrong):
                wrong += "; several values have spaces between them"
            wrong = wrong.removeprefix("Error parsing ").replace("'other.", "'")  # its group
            raise UsageError(wrong) from None
        sys.stdout.write(f"{printed.getvalue()}\n{doc}\n")  # at once: `| head` breaks nothing
        raise
    if unknown:
        refuse(unknown[0], config_class)
    return vars(read.often_changed) | vars(read.other)


def shown_default(text):
    """Return what --help says about a default: nothing if it is "" or None."""
    empty = text.strip("' ") in ("", "None")
    return "" if empty else f"(default: {text.removesuffix('.0')})"


def make_form(config_class, default):
    """Return the dataclass that tyro reads: the settings in groups, with their comments as help.

    Those that the class names as changed `often` come first, then its own, then its parent's.
    """
    kinds, comments = get_type_hints(config_class), {}
    for owner in config_class.__mro__[-2::-1]:
        comments |= re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(owner), re.M)
    names = [field.name for field in fields(config_class)]
    often = [name for name in getattr(config_class, "often", ()) if name in names]
    other = sorted({*names} - {*often}, key=[*config_class.__annotations__, *names].index)
    groups = []
    for title, names in ("often_changed", often), ("other", other):
        settings = [(name, Annotated[kinds[name], tyro.conf.arg(
            default=getattr(default or config_class, name, tyro.MISSING),
            help=comments.get(name, ""), help_behavior_hint=shown_default)]) for name in names]
        groups.append((title, tyro.conf.OmitArgPrefixes[make_dataclass(title, settings)]))
    return make_dataclass("form", groups)


def refuse(word, config_class):
    """UsageError says that a word is no flag or its value, and which flag has a name like it."""
    name, known = word.partition("=")[0].strip("-").replace("-", "_"), {}
    others = getattr(config_class, "others_say", {})
    for field in fields(config_class):
        if field.default is not MISSING:
            names = field.name, *others.get(field.name, "").split()
            known |= dict.fromkeys(names, field.name)
    if not word.startswith("-"):
        raise UsageError(f"{word} belongs to no flag; what is on or off takes no value, as in "
                         "--resume or --no-resume")
    close = difflib.get_close_matches(name, known, 1, cutoff=0.7)
    said = f"did you mean {flag(known[close[0]])}?" if close else "--help lists the flags"
    raise UsageError(f"there is no flag {word}; {said}")
