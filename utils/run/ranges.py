"""The ranges of settings: UsageError names the first that is out of its range."""

import math
import numbers
from dataclasses import fields

from utils.errors import UsageError
from utils.run.launch import cores

# The ranges of settings, by name.
RANGES = {
    **dict.fromkeys("""total_steps num_envs num_procs torch_threads rollout_steps minibatch_size
                     batch_size buffer_size epochs v_steps report_every update_every target_every
                     policy_delay minibatch_envs lstm_size cg_steps backtracks inverse_every
                     eps_steps subsample check_every directions fisher_every
                     num_quantiles""".split(),
                    {"low": 1}),
    **dict.fromkeys("""seed eval_every start_steps vf_coef ent_coef max_grad_norm
                     act_noise target_noise noise_clip damping replay_ratio max_slope
                     num_trajectories her_k""".split(), {"low": 0}),
    **dict.fromkeys("gamma lam tau eps_end omega beta_start momentum decay popart_beta top".split(),
                    {"low": 0, "high": 1}),
    **dict.fromkeys("""hidden lr v_lr disc_lr std_init clip_ratio rmsprop_eps max_ratio max_kl
                     v_max_kl noise""".split(), {"above": 0}),
}
# More than this cannot be meant, and would hang or crash. Any other whole number has MOST_COUNT.
MOST = {"num_envs": 1e5, "hidden": 1e5, "epochs": 1e5, "v_steps": 1e5, "rollout_steps": 1e9,
        "minibatch_size": 1e9, "batch_size": 1e9, "her_k": 1000, "directions": 1e5,
        "num_quantiles": 1000, "total_steps": 1e12, "seed": math.inf}
MOST_COUNT = 1e12
SHARED = "num_envs minibatch_size minibatch_envs batch_size buffer_size directions"  # among ranks
# The first is a multiple of the second.
DIVIDES = [("rollout_steps", "num_envs"), ("rollout_steps", "minibatch_size"),
           ("num_envs", "minibatch_envs"), *((name, "num_procs") for name in SHARED.split())]


def as_text(value, gap=" "):
    """Return the same text for the same value however it was typed, such as 1e-4 and 0.0001."""
    if isinstance(value, tuple | list):
        return gap.join(map(as_text, value))
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def flag(name):
    """num_envs -> --num-envs"""
    return "--" + name.replace("_", "-")


def check_settings(cfg):
    """UsageError names the first setting that is out of range, of another type, or no multiple."""
    kinds = {field.name: str(field.type) for field in fields(cfg)}
    for name, kind in kinds.items():
        value = getattr(cfg, name)
        if "bool" in kind and not isinstance(value, bool):  # "False" would be true
            raise UsageError(f"{flag(name)} is {value!r}; it takes True or False")
        if "str" in kind and not isinstance(value, str):
            raise UsageError(f"{flag(name)} is {value!r}; it takes a text")
        if "int" in kind or "float" in kind:
            most = MOST.get(name, MOST_COUNT if "int" in kind else math.inf)
            check_range(cfg, name, **{"high": most} | RANGES.get(name, {}))
    check_range(cfg, "torch_threads", 1, cores())  # with more, PyTorch would crawl or hang
    if {"norm_adv", "minibatch_size"} <= kinds.keys() and cfg.norm_adv:
        check_range(cfg, "minibatch_size", low=2)  # normalised, a single advantage would become 0
    if "minibatch_envs" in kinds:  # T is at least 2, for the same reason
        check_range(cfg, "rollout_steps", low=2 * cfg.num_envs)
    if "buffer_size" in kinds:  # a step of all environments fits in
        check_range(cfg, "buffer_size", low=cfg.num_envs)
    settings = vars(cfg)
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
    kinds = {field.name: str(field.type) for field in fields(cfg)}
    limits = ((low, "at least"), (above, "above"), (high, "at most"))
    bounds = "".join(f", {word} {limit:g}" for limit, word in limits if math.isfinite(limit))
    for name in names.split():
        value, kind = getattr(cfg, name), kinds[name]
        whole = "int" in kind or name == "total_steps"
        for x in value if isinstance(value, tuple | list) else [value]:
            number = isinstance(x, numbers.Integral if "int" in kind else numbers.Real)
            fits = (number and not isinstance(x, bool) and math.isfinite(x)
                    and low <= x <= high and x > above and not (whole and x % 1))
            if not fits and not (x is None and "None" in kind):
                what = "a whole number" if whole else "a number"
                raise UsageError(f"{flag(name)} is {value!r}; it takes {what}{bounds}")
