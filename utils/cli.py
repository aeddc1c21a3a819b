"""The command line of every program here, and the ranges of settings.

A program is a dataclass, one line per setting: `name: type = default  # its text in --help`. A
wrong command line is refused in one message that names the flag and, if it can be guessed, what
was meant.
"""

import argparse
import dataclasses
import difflib
import gc
import inspect
import math
import numbers
import re
import signal
import sys
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from utils import mpi
from utils.errors import UsageError
from utils.run.launch import cores, leave

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

# The ranges of settings, by name. Any other number has to be finite.
COUNTS = """total_steps num_envs num_procs rollout_steps minibatch_size batch_size
            buffer_size epochs v_steps report_every update_every target_every policy_delay
            minibatch_envs lstm_size cg_steps backtracks inverse_every eps_steps subsample
            check_every directions fisher_every"""
NONNEGATIVE = """seed torch_threads eval_every start_steps vf_coef ent_coef max_grad_norm
                 act_noise target_noise noise_clip damping replay_ratio max_slope
                 num_trajectories her_k"""
FRACTIONS = "gamma lam tau eps_end omega beta_start momentum decay popart_beta top"
POSITIVE = """hidden lr v_lr disc_lr std_init clip_ratio rmsprop_eps max_ratio max_kl v_max_kl
              alpha noise"""
SHARED = "num_envs minibatch_size minibatch_envs batch_size buffer_size directions"  # among ranks
# The first is a multiple of the second. With --resume, the settings of the run replace these.
DIVIDES = [("rollout_steps", "num_envs"), ("rollout_steps", "minibatch_size"),
           ("num_envs", "minibatch_envs"), *((name, "num_procs") for name in SHARED.split())]
# More than this cannot be meant, and would hang or crash.
MOST = {"num_envs": 1e5, "hidden": 1e5, "epochs": 1e5, "v_steps": 1e5, "rollout_steps": 1e9,
        "minibatch_size": 1e9, "batch_size": 1e9, "her_k": 1000, "directions": 1e5}
MOST_STEPS = 1e12  # of all other counts


# ---- a program and its end


@contextmanager
def program(*stopped):
    """Around the body of a program: bad input becomes one message, and each end a status.

    2 after a UsageError, 130 after Ctrl-C, and that of `Stopped` (utils/run.py). If one rank of
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
            gc.freeze()  # after --compile, Python would search for garbage for seconds at its end
            sys.exit(stop.status)
        if mpi.size() > 1:
            raise
        print("stopped by Ctrl-C", *getattr(stop, "__notes__", stopped), sep="; ", file=sys.stderr)
        sys.exit(130)


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of ending the program."""

    def error(self, message):
        raise UsageError(message.removeprefix("argument "))


def read_command(config_class, doc, prog, args=None, hint=None, default=None):
    """Return an instance of a dataclass, with the settings that a command line gives.

    doc      what --help prints beside the settings
    prog     how the program is called, such as "python -m utils.sweep"
    args     the words of the command line (default: those of this process)
    hint     function of the name of an unknown flag: what to say about it, if none is like it

    One field may be Annotated: it takes the words that stand without a flag.
    """
    parser = make_parser(config_class, doc, prog)
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # -1e3 is no flag
    given, others = parser.parse_known_intermixed_args(args)
    if others:
        word, known = others[0].partition("=")[0], [field.name for field in fields(config_class)]
        known += ["no_" + field.name for field in fields(config_class) if "bool" in str(field.type)]
        if not word.startswith("-"):
            raise UsageError(f"{word} stands without a flag; --help lists the flags")
        name = word.strip("-").replace("-", "_")
        near = " or ".join(map(flag, nearest(name, known)))
        help = f"did you mean {near}?" if near else hint and hint(name) or "--help lists the flags"
        raise UsageError(f"there is no {word}; {help}")
    given = {name: tuple(value) if isinstance(value, list) else value
             for name, value in vars(given).items()}
    return dataclasses.replace(default, **given) if default else config_class(**given)


def make_parser(config_class, doc, prog):
    """Return a parser with a flag for every setting.

    If the class names settings that are changed `often`, --help begins with them, and with the
    title of `doc`, which ends all.
    """
    often = getattr(config_class, "often", ())
    others = {name: f"; for {kind} {value}" for kind in ("games", "Atari")
              for name, value in getattr(config_class, f"for_{kind.lower()}", {}).items()}
    kinds = get_type_hints(config_class, include_extras=True)
    defaults = {field.name: field.default for field in fields(config_class)}
    comments = {}  # of the class itself before those of its parents
    for owner in config_class.__mro__[:-1]:
        lines = re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(owner), re.M)
        comments |= {name: text for name, text in lines if name not in comments}
    doc = doc.strip("\n")
    title, end = (re.split(r"\.  |\n", doc)[0], doc) if often else (doc, None)
    alone = [name for name in kinds if get_origin(kinds[name]) is Annotated]
    usage = " ".join([prog, "[-h]", *map(str.upper, alone), "[--FLAG VALUE ...]"])
    parser = Parser(prog, usage, title, end, argument_default=argparse.SUPPRESS, add_help=False,
                    allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    first = parser.add_argument_group("often changed" if often else "settings")
    rest = parser.add_argument_group("all others") if often else first
    for name in filter(defaults.__contains__, dict.fromkeys([*often, *comments, *defaults])):
        if name in alone:
            how = how_to_read(get_args(kinds[name])[0]) | {"metavar": name.upper()}
            if how.get("nargs") == "*" and defaults[name] is MISSING:
                how["nargs"] = "+"
        else:
            how = how_to_read(kinds[name])
        default, text = defaults[name], comments.get(name, "")
        if default not in ("", None, MISSING) and default is not False:  # which the comment tells
            text += f" (default: {as_text(default)}{others.get(name, '')})"
        group = first if name in often else rest
        group.add_argument(name if name in alone else flag(name), help=text.replace("%", "%%"),
                           **how)
    rest.add_argument("-h", "--help", action="help", help="print this")
    return parser


def how_to_read(kind):
    """Return how argparse is to read a setting of this type."""
    parts = get_args(kind)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"type": type(parts[0]), "choices": parts}
    if get_origin(kind) is tuple:
        return how_to_read(parts[0]) | {"nargs": "*" if ... in parts else len(parts)}
    return {"type": reader_of(parts or (kind,)), "metavar": ""}


def reader_of(kinds):
    """Return the function that turns a word into an int, a float or a text, or perhaps None."""
    def read(word):
        if word == "None" and type(None) in kinds:
            return None
        try:
            if kinds[0] is int and "e" in word.lower() and float(word).is_integer():
                return int(float(word))  # 1e4 is whole
            return kinds[0](word)
        except ValueError:
            takes = "a whole number" if kinds[0] is int else "a number, such as 0.01 or 1e6"
            takes += "; several have spaces between them" * ("," in word)
            raise argparse.ArgumentTypeError(f"{word!r} is not {takes}") from None

    return read


def nearest(name, known):
    """Return those of the settings `known` that the most similar name, anybody's, means."""
    meant = {setting: [setting] for setting in known}
    for setting, others in OTHERS_SAY.items():
        for other in others.split():
            meant.setdefault(other, []).extend({setting} & {*known} - {other})
    close = difflib.get_close_matches(name, meant, 1, cutoff=0.7)
    return meant[close[0]] if close else []


def as_text(value, gap=" "):
    """Return the same text for the same value however it was typed, such as 1e-4 and 0.0001."""
    if isinstance(value, tuple | list):
        return gap.join(map(as_text, value))
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def flag(name):
    """num_envs -> --num-envs"""
    return "--" + name.replace("_", "-")


# ---- ranges


def check_settings(cfg):
    """UsageError names the first setting of `cfg` that is out of range (see COUNTS and others)."""
    kinds = {field.name: str(field.type) for field in fields(cfg)}
    for name, kind in kinds.items():
        value = getattr(cfg, name)
        if "bool" in kind and not isinstance(value, bool):  # "False" would be true
            raise UsageError(f"{flag(name)} is {value!r}; it takes True or False")
        if "str" in kind and not isinstance(value, str):
            raise UsageError(f"{flag(name)} is {value!r}; it takes a text")
    known = [name for name, kind in kinds.items() if "int" in kind or "float" in kind]

    def there(names):
        return " ".join(name for name in names.split() if name in known)

    check_range(cfg, there(COUNTS), low=1)
    check_range(cfg, there(NONNEGATIVE), low=0)
    check_range(cfg, there(FRACTIONS), low=0, high=1)
    check_range(cfg, there(POSITIVE), above=0)
    check_range(cfg, " ".join(known))
    for name in known:
        if name == "total_steps" or "int" in kinds[name] and name != "seed":
            check_range(cfg, name, high=MOST.get(name, MOST_STEPS))
    if cfg.torch_threads > cores():  # PyTorch would crawl, or hang
        raise UsageError(f"--torch-threads is {cfg.torch_threads}; it takes 0 to {cores()}, the "
                         "cores that this process may use")
    if getattr(cfg, "norm_adv", False):  # normalised, a single advantage would become 0
        check_range(cfg, there("minibatch_size"), low=2)
    if "minibatch_envs" in known:  # T is at least 2, for the same reason
        check_range(cfg, "rollout_steps", low=2 * cfg.num_envs)
    if "buffer_size" in known:  # a step of all environments fits in
        check_range(cfg, "buffer_size", low=cfg.num_envs)


def check_multiples(settings):
    """UsageError names the first two of `settings`, a dict, that break a rule of DIVIDES."""
    for a, b in DIVIDES:
        if {a, b} <= settings.keys() and settings[a] % settings[b]:
            raise UsageError(f"{flag(a)} is {settings[a]}; it takes a multiple of {flag(b)}, which "
                             f"is {settings[b]}")


def check_range(cfg, names, low=-math.inf, high=math.inf, *, above=-math.inf):
    """UsageError unless low <= value <= high and value > above, for each setting in `names`.

    NaN, infinity and anything that is not a number are refused. A setting declared int must be
    whole, and so must `total_steps`, which may be written 1e6. Each element of a tuple is checked.
    None passes if the declaration allows it.
    """
    types = {field.name: str(field.type) for field in fields(cfg)}
    limits = ((low, "at least"), (above, "above"), (high, "at most"))
    takes = "".join(f", {word} {limit:g}" for limit, word in limits if math.isfinite(limit))
    for name in names.split():
        value = getattr(cfg, name)
        kind = numbers.Integral if "int" in types[name] else numbers.Real
        whole = kind is numbers.Integral or name == "total_steps"
        for x in value if isinstance(value, tuple | list) else [value]:
            number = isinstance(x, kind) and not isinstance(x, bool) and math.isfinite(x)
            fits = number and low <= x <= high and x > above and (not whole or x == int(x))
            if not fits and not (x is None and "None" in types[name]):
                what = "a whole number" if whole else "a number"
                raise UsageError(f"{flag(name)} is {value!r}; it takes {what}{takes}")
