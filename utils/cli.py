"""The command line of every program here, and the ranges of settings.

A program is a dataclass, one line per setting: `name: type = default  # its text in --help`. A
wrong command line is refused in one message that names the flag and, if it can be guessed, what
was meant.
"""

import difflib
import gc
import inspect
import math
import numbers
import os
import re
import shutil
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from utils import mpi
from utils.mpi import UsageError, cores

# What other libraries and earlier versions call a setting.
OTHERS_SAY = {
    "lr": "learning_rate actor_lr policy_lr pi_lr q_lr", "v_lr": "critic_lr value_lr vf_lr",
    "total_steps": "timesteps total_timesteps num_timesteps n_timesteps steps frames",
    "num_envs": "n_envs nenvs", "num_procs": "num_cpu n_cpu num_workers processes",
    "rollout_steps": "n_steps nsteps num_steps steps_per_epoch horizon batch",
    "minibatch_size": "batch_size num_minibatches nminibatches minibatch",
    "batch_size": "minibatch_size batch", "epochs": "n_epochs update_epochs noptepochs",
    "gamma": "discount discount_factor", "lam": "gae_lambda lambda", "tau": "polyak",
    "clip_ratio": "clip_range clip_coef clip_eps", "max_kl": "target_kl delta",
    "ent_coef": "entropy_coef entropy_coeff", "alpha": "ent_coef entropy_coef temperature",
    "learn_alpha": "autotune", "vf_coef": "value_coef", "hidden": "hidden_sizes hid net_arch",
    "norm_obs": "normalize normalize_obs", "norm_adv": "normalize_advantage",
    "scale_rew": "normalize_reward norm_reward reward_scale",
    "buffer_size": "replay_size memory_size", "update_every": "train_freq train_frequency",
    "start_steps": "learning_starts update_after warmup_steps",
    "target_every": "target_update_interval target_network_frequency",
    "policy_delay": "policy_frequency", "act_noise": "exploration_noise noise",
    "eps_steps": "exploration_fraction", "eps_end": "exploration_final_eps end_e",
    "env": "env_id env_name", "env_kwargs": "max_episode_steps max_ep_len",
    "run_dir": "log_dir logdir save_path save_dir exp_name out", "eval_every": "eval_freq",
    "init_from": "load load_path pretrained", "report_every": "log_interval",
    "device": "cuda gpu", "wandb": "track use_wandb", "jobs": "n_jobs workers",
}
# Where the other name means something else.
REMARKS = {
    "polyak": "tau is 1 - polyak", "exploration_fraction": "it takes steps",
    "num_minibatches": "it takes a size", "nminibatches": "it takes a size",
    "n_steps": "steps of all environments together",
    "nsteps": "steps of all environments together",
}

# The ranges of settings, by name. Any other number has to be finite.
COUNTS = """total_steps num_envs num_procs rollout_steps minibatch_size batch_size
            buffer_size epochs v_steps report_every update_every target_every policy_delay
            minibatch_envs lstm_size cg_steps backtracks inverse_every eps_steps subsample
            check_every disc_epochs directions"""
NONNEGATIVE = """seed torch_threads eval_every start_steps vf_coef ent_coef max_grad_norm
                 act_noise target_noise noise_clip damping replay_ratio max_slope
                 num_trajectories her_k"""
FRACTIONS = "gamma lam tau eps_end omega beta_start momentum decay popart_beta top"
POSITIVE = """hidden lr v_lr disc_lr std_init clip_ratio rmsprop_eps max_ratio max_kl v_max_kl
              alpha noise"""
SHARED = ("num_envs minibatch_size minibatch_envs batch_size buffer_size "
          "directions").split()  # among ranks
DIVIDES = "rollout_steps/num_envs rollout_steps/minibatch_size num_envs/minibatch_envs".split()
# More than this cannot be meant, and would hang or crash.
MOST = {"num_envs": 1e5, "hidden": 1e5, "epochs": 1e5, "v_steps": 1e5, "rollout_steps": 1e9,
        "minibatch_size": 1e9, "batch_size": 1e9, "her_k": 1000, "directions": 1e5}
MOST_STEPS = 1e12  # of all other counts


# ---- a program and its end


@contextmanager
def program():
    """Around the body of a program: bad input becomes one message, and each end a status.

    2 after a UsageError, 130 after Ctrl-C, and that of `Stopped` (utils/run.py). If one rank of
    several ends alone, the others are ended too.
    """
    try:
        yield
    except UsageError as error:
        if mpi.rank() == 0:
            print(f"error: {error}", *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
        if mpi.size() > 1:
            mpi.leave(f"error: {error}", 2)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        if hasattr(stop, "status"):
            gc.freeze()  # after --compile, Python would search for garbage for seconds at its end
            sys.exit(stop.status)
        if mpi.size() > 1:
            raise
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)


def read_command(config_class, doc, prog, args=None, hint=None):
    """Return an instance of a dataclass, with the settings that a command line gives.

    doc      what --help prints beside the settings
    prog     how the program is called, such as "python -m utils.sweep"
    args     the words of the command line (default: those of this process)
    hint     function of the name of an unknown flag: what to say about it, or ""

    One field may be Annotated: it takes the words that stand without a flag. UsageError: a flag
    is unknown, or its value is missing, one too many or of another kind.
    """
    args = sys.argv[1:] if args is None else list(args)
    if "-h" in args or "--help" in args:
        print_help(config_class, doc, prog)
        raise SystemExit(0)
    flags, plain = flags_of(config_class)
    given, alone = {}, []
    for word, values in words_of(args):
        name = setting_of(word, flags)
        if word and not name:
            said = hint and hint(word.strip("-").replace("-", "_"))
            raise UsageError(f"there is no {word}; {said or guess(word, flags)}")
        count = most_values(flags[name]) if word else 0
        if word:
            given[name] = read_values(word, name, flags[name], values[:count])
        if values[count:] and not plain:
            raise UsageError(one_too_many(word, name, values, count))
        alone += values[count:]
    if plain:
        name, kind = plain
        several = get_origin(kind) is tuple
        required = config_class.__dataclass_fields__[name].default is MISSING
        if required and not alone and not several:
            raise UsageError(f"{prog} needs {name.upper()}; --help says more")
        if len(alone) > most_values(kind):
            raise UsageError(f"{alone[1]} stands without a flag; there is {alone[0]} already")
        if alone or required:
            given[name] = read_values(name, name, kind, alone)
    return config_class(**given)


def print_help(config_class, doc, prog):
    """Print `doc` and every setting, those of the class itself before those of its parents.

    If the class names settings changed `often`, these follow the title of `doc`, which ends all.
    """
    flags, plain = flags_of(config_class)
    often = getattr(config_class, "often", ())
    known = {}  # setting -> its lines
    for owner in config_class.__mro__[:-1]:
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(owner), re.M))
        if plain and plain[0] in comments:
            known[plain[0]] = [f"  {plain[0].upper():<20}{comments[plain[0]]}"]
        for field in fields(config_class):
            if field.name in flags and field.name in owner.__annotations__:
                games = getattr(config_class, "for_games", {}).get(field.name, "")
                known[field.name] = help_of(field, flags.pop(field.name),
                                            comments.get(field.name, ""), games)
    first = sum((known.pop(name) for name in often if name in known), [])
    usage = f"usage: {prog} [-h]{f' {plain[0].upper()}' if plain else ''} [--FLAG VALUE ...]"
    doc = doc.strip("\n")
    title = re.split(r"\.  |\n", doc)[0] if often else doc
    parts = [[title], [usage], first, sum(known.values(), []), [doc] * bool(often)]
    try:
        print("\n\n".join("\n".join(part) for part in parts if part), flush=True)
    except BrokenPipeError:  # as in `--help | head`: the reader has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


def help_of(field, kind, comment, games):
    """Return the lines of one setting: its flag, its comment, its default, and that for games."""
    default = field.default
    if isinstance(default, tuple):
        default = " ".join(map(str, default)).strip()
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    values = " | ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    head = f"  {flag(field.name)}" + f", {flag('no_' + field.name)}" * (default is True)
    head += f" {values}" * bool(values)
    games = f"; for games {games}" if games != "" else ""
    # Where the default is nothing, the comment says what that means.
    shown = default not in ("", None, MISSING) and default is not False
    known = f" (default: {default}{games})" * shown
    text = textwrap.wrap(comment + known, shutil.get_terminal_size().columns - 23) or [""]
    if len(head) > 21:
        return [head, *(" " * 22 + line for line in text)]
    return [f"{head:<22}{text[0]}", *(" " * 22 + line for line in text[1:])]


# ---- words


def words_of(args):
    """Yield (flag, its values): ("--lr", ["1"]) for "--lr 1" and "--lr=1"; "" for no flag."""
    given, values = "", []
    for word in args:
        if word.startswith("-") and not reads(float, word):
            yield given, values
            given, equals, value = word.partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    yield given, values


def flags_of(config_class):
    """Return {setting: its type}, and (name, type) of what takes words without a flag, or None."""
    kinds = get_type_hints(config_class, include_extras=True)
    flags, plain = {}, None
    for field in fields(config_class):
        kind = kinds[field.name]
        if get_origin(kind) is Annotated:
            plain = field.name, get_args(kind)[0]
        else:
            flags[field.name] = kind
    return flags, plain


def setting_of(given, flags):
    """--num-envs -> num_envs, --no-norm-obs -> norm_obs; "" if there is no such flag."""
    if not given.startswith("--"):
        return ""
    name = given[2:].replace("-", "_")
    off = name.removeprefix("no_")
    return name if name in flags else off if flags.get(off) is bool else ""


def read_values(given, name, kind, values):
    """Return the value of a setting. UsageError: the words are too few, or of another kind."""
    if kind is bool:
        return setting_of(given, {name: None}) == name
    count = most_values(kind)
    if get_origin(kind) is tuple:
        if count < sys.maxsize and len(values) < count:
            raise UsageError(f"{given} needs {count} values")
        return tuple(read_value(given, get_args(kind)[0], word, apart=True) for word in values)
    if not values:
        raise UsageError(f"{given} needs a value")
    return read_value(given, kind, values[0])


def read_value(given, kind, word, apart=False):
    """Return the value that a word is. `apart`: the flag takes several, with spaces between."""
    parts = get_args(kind)
    if type(None) in parts:
        return None if word == "None" else read_value(given, parts[0], word)
    if get_origin(kind) is Literal:
        choices = {str(part): part for part in parts}
        if word in choices:
            return choices[word]
        *some, last = choices
        takes = f"{', '.join(some)} or {last}"
    elif kind is int:
        if reads(int, word) or reads(float, word) and float(word).is_integer():  # 1e4 is whole
            return int(word) if reads(int, word) else int(float(word))
        takes = "a whole number"
    elif kind is float:
        if reads(float, word):
            return float(word)
        takes = "a number, such as 0.01 or 1e6"
    else:
        return word
    if apart:
        takes += f", or several with spaces between them: {re.sub('[][(),]+', ' ', word).strip()}"
    raise UsageError(f"{given} is {word!r}; it takes {takes}")


def one_too_many(given, name, values, count):
    """Return what to say about words that a flag, or the program itself, does not take."""
    word = values[count]
    if not given:
        meant = f"did you mean --env {word}?" if re.search(r"-v\d+$", word) else ""
        return f"{word} stands without a flag; {meant or '--help lists the flags'}"
    if name == "resume":
        return f"--resume takes no value; --run-dir {word} names the run"
    if count == 0:
        return (f"{given} takes no value, but got {word}: {flag(name)} is on, "
                f"{flag(f'no_{name}')} off")
    return f"{given} takes {count} value{'s' * (count > 1)}, but got {' '.join(values)}"


def guess(given, known):
    """Return what to say about a flag that does not exist."""
    name = given.strip("-").replace("-", "_")
    near = nearest(name, known)
    if not near:
        return "--help lists the flags"
    remark = f" ({REMARKS[name]})" if name in REMARKS else ""
    return f"did you mean {' or '.join(map(flag, near))}?{remark}"


def nearest(name, known):
    """Return the settings in `known` that a name may mean: synonyms, or else similar names."""
    ours = [setting for setting, others in OTHERS_SAY.items()
            if setting in known and name in others.split()]
    return ours or difflib.get_close_matches(name, known, 2, cutoff=0.7)


def most_values(kind):
    """Return how many values a flag takes at most."""
    if get_origin(kind) is tuple:
        return sys.maxsize if ... in get_args(kind) else len(get_args(kind))
    return int(kind is not bool)


def reads(kind, text):
    """Return whether a text is a number of this kind."""
    try:
        kind(text)
    except ValueError:
        return False
    return True


def flag(name):
    """num_envs -> --num-envs"""
    return "--" + name.replace("_", "-")


# ---- ranges


def check_settings(cfg):
    """UsageError names the first setting of `cfg` that is out of range (see COUNTS and others).

    NaN, infinity and text are refused. So is a fraction if the setting is declared int.
    """
    kinds = {"str": (str, "text"), "bool": (bool, "True or False"),
             "tuple": (tuple | list, "a tuple")}
    for field in fields(cfg):
        value, declared = getattr(cfg, field.name), getattr(field.type, "__name__", str(field.type))
        kind, takes = kinds.get(declared.partition("[")[0], (object, ""))
        if not isinstance(value, kind):
            raise UsageError(f"{flag(field.name)} is {value!r}; it takes {takes}")
    known = [field.name for field in fields(cfg) if re.search("int|float", str(field.type))]

    def there(names):
        return " ".join(name for name in names.split() if name in known)

    check_range(cfg, there(COUNTS), low=1)
    check_range(cfg, there(NONNEGATIVE), low=0)
    check_range(cfg, there(FRACTIONS), low=0, high=1)
    check_range(cfg, there(POSITIVE), above=0)
    check_range(cfg, " ".join(known))
    whole = [field.name for field in fields(cfg) if "int" in str(field.type)]
    for name in {"total_steps", *whole} & {*known} - {"seed"}:
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
    pairs = [f"{name}/num_procs" for name in SHARED] + DIVIDES
    check_divides(cfg, " ".join(pair for pair in pairs if {*pair.split("/")} <= {*known}))


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


def check_divides(cfg, pairs):
    """UsageError unless setting a is a multiple of setting b, for each "a/b" in `pairs`.

    With --resume the settings of the run replace these, and they were checked when it started.
    """
    if cfg.resume:
        return
    for pair in pairs.split():
        a, b = pair.split("/")
        value, unit = getattr(cfg, a), getattr(cfg, b)
        if value % unit:
            below = value // unit * unit
            near = f"{below} or {below + unit}" if below else unit
            raise UsageError(f"{flag(a)} is {value}; it takes a multiple of {flag(b)}, which is "
                             f"{unit}: {near}")
