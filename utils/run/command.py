"""The command line of every program here, read by tyro, and how a program ends.

A program is a dataclass, one line per setting: `name: type = default  # its text in --help`. tyro
makes a flag of each. A setting without a default needs no flag. What tyro lacks stands here: one
message per wrong line, hints for other libraries' names, groups in --help.
"""

import difflib
import inspect
import io
import re
import signal
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields, make_dataclass, replace
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import tyro

from utils import mpi
from utils.errors import UsageError
from utils.run.launch import leave
from utils.run.ranges import as_text, flag

# What other libraries call a setting.
OTHERS_SAY = {
    "lr": "learning_rate actor_lr policy_lr pi_lr q_lr", "v_lr": "critic_lr value_lr vf_lr",
    "total_steps": "timesteps total_timesteps num_timesteps max_steps num_steps steps frames",
    "num_envs": "n_envs", "num_procs": "num_cpu n_cpu num_workers",
    "rollout_steps": "n_steps num_steps steps_per_epoch horizon batch",
    "minibatch_size": "batch_size minibatch", "batch_size": "minibatch_size batch",
    "epochs": "n_epochs update_epochs", "gamma": "discount", "lam": "gae_lambda",
    "clip_ratio": "clip_range clip_coef", "max_kl": "target_kl delta",
    "ent_coef": "entropy_coef", "alpha": "ent_coef entropy_coef temperature",
    "learn_alpha": "autotune", "hidden": "hidden_sizes net_arch",
    "norm_obs": "normalize normalize_obs", "scale_rew": "normalize_reward norm_reward",
    "buffer_size": "replay_size", "update_every": "train_freq train_frequency",
    "start_steps": "learning_starts update_after", "target_every": "target_update_interval",
    "policy_delay": "policy_frequency", "act_noise": "exploration_noise",
    "eps_end": "exploration_final_eps end_e", "eps_steps": "exploration_fraction",
    "env": "env_id env_name", "env_kwargs": "max_episode_steps",
    "run_dir": "log_dir logdir save_dir exp_name out", "eval_every": "eval_freq",
    "init_from": "load pretrained", "report_every": "log_interval", "device": "cuda gpu",
    "jobs": "n_jobs workers",
}


# ---- a program and its end


@contextmanager
def program(*stopped):
    """Around the body of a program: bad input becomes one message, and each end a status.

    2 after a UsageError, 130 after Ctrl-C, and that of `Stopped` (utils/run/run.py). If one rank of
    several ends alone, the others are ended too. After Ctrl-C, the message ends with the
    exception's notes or, without any, with `stopped`. SIGTERM, where nobody else handles it, ends
    a single process in order: its temporary files go.
    """
    if mpi.size() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    except UsageError as error:
        if mpi.rank() == 0:
            print(f"error: {error}", *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
        if mpi.size() > 1:
            leave(f"error: {error}", 2)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        if hasattr(stop, "status"):
            sys.exit(stop.status)
        if mpi.size() > 1:
            raise
        print("stopped by Ctrl-C", *getattr(stop, "__notes__", stopped), sep="; ", file=sys.stderr)
        sys.exit(130)


# ---- the command line

# What a setting of a type takes.
TAKES = {int: "a whole number", float: "a number, such as 0.01 or 1e6", str: "a text",
         bool: "no value"}
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


def read_command(config_class, doc, prog, args=None, hint=None, default=None):
    """Return an instance of a dataclass, with the settings that a command line gives.

    doc      --help begins with its title and ends with all of it
    prog     how the program is called, such as "python -m utils.sweep"
    args     the words of the command line (default: those of this process)
    hint     function of the name of an unknown flag: what to say about it, if none is like it
    default  an instance whose values are the defaults (default: those of the class)
    """
    args = list(sys.argv[1:] if args is None else args)
    hints = get_type_hints(config_class)
    kinds = {field.name: hints[field.name] for field in fields(config_class)}
    flags = {name: kind for name, kind in kinds.items() if hasattr(config_class, name)}  # a default
    form = make_form(config_class, kinds, default)
    if "-h" in args or "--help" in args:
        doc = doc.strip("\n")
        _, text = ask_tyro(form, ["--help"], prog=prog, description=re.split(r"\.  |\n", doc)[0])
        sys.stdout.write(f"{text}\n{doc}\n")  # at once, so that `| head` breaks nothing
        sys.exit(0)
    given = find_flags(args, flags, hint)
    read, _ = ask_tyro(form, args)
    if read is None:
        alone, form = " ".join(kinds.keys() - flags).upper(), make_form(config_class, flags)
        for name, words in given.items():
            if ask_tyro(form, words, return_unknown_args=alone != "")[0] is None:
                raise UsageError(f"{' '.join(words)}: it takes {takes(kinds[name])}")
        raise UsageError(f"{prog} takes {alone or 'nothing'} without a flag, but got "
                         f"{' '.join(args) or 'nothing'}; --help lists the flags")
    values = {name: value for group in vars(read).values() for name, value in vars(group).items()
              if name in given or name not in flags}
    return replace(default, **values) if default else config_class(**values)


def find_flags(args, kinds, hint):
    """Return {setting: its flag and the words after it}. UsageError: there is no such flag."""
    known = {name: name for name in kinds}
    known |= {f"no_{name}": name for name in kinds if kinds[name] is bool}
    given, words = {}, []
    for word in args:
        if re.match("-+[A-Za-z]", word):  # -1e3 is a number
            typed = word.partition("=")[0]
            name = typed.strip("-").replace("-", "_")
            if name not in known or not typed.startswith("--"):
                near = " or ".join(map(flag, nearest(name, known)))
                said = f"did you mean {near}?" if near else hint and hint(name)
                raise UsageError(f"there is no {typed}; {said or '--help lists the flags'}")
            words = given[known[name]] = []  # the last one counts
        words.append(word)
    return given


def make_form(config_class, kinds, default=None):
    """Return the dataclass that tyro reads: the settings in groups, with their help.

    Those that the class names as changed `often` come first, then its own, then its parent's.
    """
    comments, own = {}, config_class.__annotations__
    for owner in config_class.__mro__[-2::-1]:
        comments |= re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(owner), re.M)
    often = [name for name in getattr(config_class, "often", ()) if name in kinds]
    other = sorted(kinds.keys() - often, key=[*own, *kinds].index)
    groups = []
    for title, names in ("often_changed", often), ("other", other):
        settings = []
        for name in names:
            value = getattr(default or config_class, name, tyro.MISSING)
            text = "" if value is None else as_text(value).strip()
            about = tyro.conf.arg(default=value, help=comments.get(name, ""),
                                  help_behavior_hint=text and f"(default: {text})")
            settings.append((name, Annotated[kinds[name], about]))
        groups.append((title, tyro.conf.OmitArgPrefixes[make_dataclass(title, settings)]))
    return make_dataclass("form", groups)


def ask_tyro(form, args, **more):
    """Return what tyro reads, or None after --help and if it refuses, and what it prints."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            read = tyro.cli(form, args=args, registry=RULES, **more,
                            config=[tyro.conf.PositionalRequiredArgs,
                                    tyro.conf.PositionalMetavarFromFieldName])
    except SystemExit:
        read = None
    return read, printed.getvalue()


def takes(kind):
    """Return what a setting of this type takes."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return " or ".join(map(str, parts))
    if get_origin(kind) is tuple:
        several = "several have spaces between them" if ... in parts else f"{len(parts)} of them"
        return f"{takes(parts[0])}; {several}"
    return TAKES[parts[0] if parts else kind]


def nearest(name, known):
    """Return those of the settings `known` that the most similar name, anybody's, means."""
    meant = {setting: [setting] for setting in known}
    for setting, others in OTHERS_SAY.items():
        for other in others.split():
            meant.setdefault(other, []).extend({setting} & {*known} - {other})
    close = difflib.get_close_matches(name, meant, 1, cutoff=0.7)
    return meant[close[0]] if close else []
