"""The command line of every program here. tyro makes the flags; this file has what it leaves out.

--help prints a program's docstring as it stands. A wrong command line is refused in one line that
names the flag and, if it can be guessed, what was meant.
"""

import difflib
import os
import re
import sys
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import tyro

from utils.checks import flag
from utils.launch import UsageError

# What other libraries call a setting. Of several, those that the program has are suggested.
OTHERS_SAY = {
    "lr": "learning_rate actor_lr policy_lr pi_lr q_lr step_size",
    "v_lr": "critic_lr value_lr vf_lr",
    "total_steps": "timesteps total_timesteps num_timesteps n_timesteps steps frames num_steps",
    "num_envs": "n_envs num_env nenvs",
    "rollout_steps": "n_steps nsteps num_steps steps_per_epoch horizon",
    "minibatch_size": "batch_size mini_batch_size num_minibatches nminibatches",
    "batch_size": "minibatch_size mini_batch_size",
    "epochs": "n_epochs update_epochs noptepochs",
    "v_steps": "train_v_iters",
    "gamma": "discount discount_factor",
    "lam": "gae_lambda lambda",
    "clip_ratio": "clip clip_range clip_coef clip_eps",
    "max_kl": "target_kl",
    "damping": "cg_damping",
    "ent_coef": "entropy entropy_coef entropy_coeff ent_coeff",
    "alpha": "ent_coef entropy entropy_coef temperature",
    "learn_alpha": "autotune",
    "vf_coef": "value_coef v_coef",
    "norm_adv": "normalize_advantage",
    "norm_obs": "normalize normalize_obs",
    "scale_rew": "normalize_reward norm_rew norm_reward reward_scale",
    "max_grad_norm": "grad_clip clip_grad",
    "hidden": "hidden_sizes hidden_size hidden_dim hid net_arch layers network",
    "buffer_size": "replay_size memory_size",
    "start_steps": "learning_starts update_after warmup_steps",
    "update_every": "train_freq train_frequency",
    "target_every": "target_update_interval target_network_frequency",
    "tau": "polyak",
    "policy_delay": "policy_frequency",
    "act_noise": "exploration_noise",
    "target_noise": "policy_noise target_policy_noise",
    "eps_end": "epsilon end_e exploration_final_eps",
    "eps_steps": "exploration_fraction",
    "env": "env_id env_name",
    "env_kwargs": "max_episode_steps max_ep_len",
    "run_dir": "log_dir logdir save_path save_dir exp_name out output",
    "resume": "checkpoint continue",
    "init_from": "load load_path load_model pretrained",
    "eval_every": "eval_freq eval_interval",
    "report_every": "log_interval log_every",
    "num_procs": "num_cpu n_cpu ncpu cpus num_workers n_procs processes",
    "torch_threads": "threads",
    "device": "cuda gpu",
    "wandb": "track use_wandb wandb_project wandb_project_name",
    "jobs": "n_jobs workers num_workers",
    "video": "render",
}
# Where the other name means something else.
REMARKS = {
    "polyak": "tau is 1 - polyak",
    "exploration_fraction": "it takes steps",
    "num_minibatches": "it takes a size", "nminibatches": "it takes a size",
    "n_steps": "steps of all environments together",
    "nsteps": "steps of all environments together",
}


def read_command(config_class, doc, prog, args=None, hint=None):
    """Return an instance of a dataclass, with the settings that a command line gives.

    doc      what --help prints first
    prog     how the program is called, such as "python -m utils.sweep"
    args     the words of the command line (default: those of this process)
    hint     function of the name of an unknown flag: what to say about it, or ""

    UsageError: a flag is unknown, or its value is missing, one too many or of another kind.
    """
    args = sys.argv[1:] if args is None else list(args)
    if "-h" in args or "--help" in args:
        print_help(config_class, doc, args, prog)
    for given, values in words_of(args):
        check_words(config_class, given, values, hint)
    args = spelled_out(config_class, args)
    return tyro.cli(config_class, description="", args=args, prog=prog)


def print_help(config_class, doc, args, prog):
    """Print `doc` and all flags, and end the program."""
    try:
        print(doc)  # tyro would join its lines
        try:
            tyro.cli(config_class, description="", args=args, prog=prog)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # as in `--help | head`: the reader has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


def spelled_out(config_class, args):
    """Return a command line with its whole numbers in digits: 1e4 is 10000. tyro wants them so."""
    flags, _ = flags_of(config_class)
    words = []
    for given, values in words_of(args):
        kind = flags.get(setting_of(given, flags))
        if int in (kind, *get_args(kind)):
            values = [str(whole(value)) if is_whole(value) else value for value in values]
        words += [given, *values] if given else values
    return words


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


def check_words(config_class, given, values, hint=None):
    """UsageError if a flag is unknown, or does not take these values."""
    flags, takes_words = flags_of(config_class)
    name = setting_of(given, flags)
    if given and not name:
        wanted = given.strip("-").replace("-", "_")
        said = hint(wanted) if hint else ""
        raise UsageError(f"there is no {given}; {said or guess(wanted, flags)}")
    most = most_values(flags[name]) if name else 0
    if not values and 0 < most < sys.maxsize:
        raise UsageError(f"{given} needs a value")
    for value in values[:most]:
        takes = what_it_takes(flags[name], value)
        if takes:
            raise UsageError(f"{given} is {value}; it takes {takes}")
    if len(values) > most and not takes_words:
        raise UsageError(one_too_many(given, name, values, most))


def flags_of(config_class):
    """Return {setting: its type}, and whether the program also takes words without a flag."""
    plain = get_type_hints(config_class)
    marked = get_type_hints(config_class, include_extras=True)  # Positional is such a mark
    names = [field.name for field in fields(config_class)]
    flags = {name: plain[name] for name in names if plain[name] == marked[name]}
    return flags, len(flags) < len(names)


def setting_of(given, flags):
    """--num-envs -> num_envs, --no-norm-obs -> norm_obs; "" if there is no such flag."""
    name = given.removeprefix("--").replace("-", "_")
    off = name.removeprefix("no_")
    if name in flags and given.startswith("--"):
        return name
    return off if flags.get(off) is bool and given.startswith("--") else ""


def given_settings(config_class, args):
    """Return the names of the settings that a command line gives."""
    flags, _ = flags_of(config_class)
    return frozenset(setting_of(given, flags) for given, _ in words_of(args)) - {""}


def one_too_many(given, name, values, most):
    """Return what to say about values that a flag, or the program itself, does not take."""
    value = values[most]
    if not name:
        is_env = re.search(r"-v\d+$", value)
        return f"{value} stands without a flag; " + (
            f"did you mean --env {value}?" if is_env else "--help lists the flags")
    if most > 0:
        return f"{given} takes {most} value{'s' * (most > 1)}, but got {' '.join(values)}"
    if name == "resume":
        return f"--resume takes no value; --run-dir {value} names the run"
    return f"{given} takes no value, but got {value}: {flag(name)} is on, {flag(f'no_{name}')} off"


def guess(name, known):
    """Return what to say about a setting that does not exist."""
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
    if kind is bool:
        return 0
    if get_origin(kind) is tuple:
        return sys.maxsize if ... in get_args(kind) else len(get_args(kind))
    return 1


def what_it_takes(kind, text):
    """Return "" if a text is a value of this type, or else what such a flag takes."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        choices = [str(part) for part in parts]
        return "" if text in choices else f"{', '.join(choices[:-1])} or {choices[-1]}"
    if get_origin(kind) is tuple:
        takes = what_it_takes(parts[0], text)
        apart = text.strip("[]()").replace(",", " ")
        return takes and f"{takes}, or several with spaces between them: {apart}"
    if type(None) in parts:
        return "" if text == "None" else what_it_takes(parts[0], text)
    if kind is float and not reads(float, text):
        return "a number, such as 0.01 or 1e6"
    if kind is int and not is_whole(text):
        return "a whole number"
    return ""


def is_whole(text):
    """Return whether a text is a whole number, such as 10000 or 1e4."""
    return reads(float, text) and float(text).is_integer()


def whole(text):
    """Return the whole number that a text is. 2^53 and more keep all digits if they are given."""
    return int(text) if reads(int, text) else int(float(text))


def reads(kind, text):
    """Return whether a text is a number of this kind."""
    try:
        kind(text)
    except ValueError:
        return False
    return True
