"""The typeset equations: their names, their rendering and their values."""
import re
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algos import a2c, ppo, td3
from docs.algorithm import algorithms, typeset

FUNCTIONS = {name: getattr(np, name) for name in ("mean", "std", "var", "clip", "log")} | {
    "min": np.minimum, "sum": lambda x: np.sum(x, -1)}


def test_every_key_names_a_function():
    known = {key for algo in algorithms().values() for name in algo.functions
             for key in (name, f"{algo.name}.{name}")}
    assert typeset().keys() <= known


@pytest.mark.parametrize("name", typeset())
def test_every_equation_becomes_mathml(name):
    pytest.importorskip("latex2mathml", reason="latex2mathml is missing: install the extra docs")
    from docs.mathml import equation
    assert "\\" not in equation(typeset()[name])


def evaluate(latex, values):
    """Evaluate a formula. `values` maps pieces of LaTeX, such as V(s'_t), to numbers or arrays.

    Pieces become names x0, x1, ..., and products get the sign that LaTeX leaves out.
    """
    latex = re.sub(r"\\left|\\right|\\,", " ", latex)
    atoms = sorted(values, key=len, reverse=True)               # the longest match first
    pattern = "|".join(rf"(?<![A-Za-z\\]){re.escape(atom)}(?![A-Za-z])" for atom in atoms)
    latex = re.sub(pattern, lambda found: f" x{atoms.index(found[0])} ", latex)
    latex = re.sub(r"\\operatorname\{(\w+)\}", r"\\\1", latex)
    latex = re.sub(r"\\sum_\w", r"\\sum", latex)
    latex = re.sub(r"\\log +(x\d+)", r"\\log(\1)", latex)
    latex = re.sub(r"\^(?:\{(-\d+)\}|(\d))", r"**(\1\2)", latex)
    latex = latex.replace("[", "(").replace("]", ")")
    while r"\frac" in latex:
        latex, found = re.subn(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1) / (\2))", latex)
        assert found, latex
    python = ""
    for token, following in pairwise([*re.findall(r"\*\*|\\?[\w.]+|\S", latex), ""]):
        product = re.match(r"\w|\)", token) and re.match(r"[\w(\\]", following)
        python += token.removeprefix("\\") + (" * " if product else " ")
    names = {f"x{k}": np.asarray(values[atom], float) for k, atom in enumerate(atoms)}
    return eval(python, FUNCTIONS | names)


def right_side(name, line):
    first = typeset()[name].strip().splitlines()[line].split(r", \quad ")[0]
    return re.split(r" (?:=|\\leftarrow) ", first, maxsplit=1)[-1]


def gae_values():
    """Return the values at the first of two steps, and the function of lambda."""
    rew, val, next_val, terminated = torch.randn(4, 2, 6)
    terminated, done = torch.zeros(2, 2, 6)
    terminated[0, :2] = done[0, :4] = 1
    values = {r"\gamma": 0.9, r"\lambda": 0.7, "r_t": rew[0], "V(s_t)": val[0],
              "V(s'_t)": next_val[0], r"\mathrm{terminated}_t": terminated[0],
              r"\mathrm{done}_t": done[0]}
    return values, lambda lam: ppo.gae(rew, val, next_val, terminated, done, 0.9, lam)


def delta():
    values, gae = gae_values()
    return values, gae(0.0)[0]                                  # A is delta if lambda = 0


def gae():
    values, gae = gae_values()
    adv = gae(0.7)
    return values | {r"\delta_t": gae(0.0)[0], "A_{t+1}": adv[1]}, adv[0]


def explained_variance():
    val, ret = torch.randn(2, 9, 1)
    return {"R": ret, "V": val}, ppo.explained_variance(val, ret)


def log_prob():
    act, mean, log_std = *torch.randn(2, 9, 3), torch.randn(3)
    values = {"a_i": act, r"\mu_i(s)": mean, r"\sigma_i": log_std.exp(), r"\pi": np.pi}
    return values, ppo.log_prob(mean, log_std, act)


def entropy():
    log_std = torch.randn(3)
    values = {r"\sigma_i": log_std.exp(), r"\pi": np.pi, "e": np.e}
    return values, ppo.entropy(torch.randn(9, 3), log_std)


def policy_loss():
    logp, adv = torch.randn(2, 9)
    return {r"\pi(a \mid s)": logp.exp(), "A": adv}, a2c.policy_loss(logp, adv)


def value_loss():
    val, ret = torch.randn(2, 9)
    return {"V(s)": val, "R": ret}, ppo.value_loss(val, ret)


def normalize_advantages():
    adv = torch.randn(1, 9)
    return {"A": adv}, ppo.normalize_advantages(adv)


def clipped_policy_loss():
    logp, old, adv = torch.randn(3, 90)
    values = {r"\mathrm{ratio}": (logp - old).exp(), "c": 0.2, "A": adv}
    return values, ppo.clipped_policy_loss(logp, old, adv, 0.2)


def approx_kl():
    logp, old = torch.randn(2, 9)
    return {r"\mathrm{ratio}": (logp - old).exp()}, ppo.approx_kl(logp, old)


def update_stats():
    """The second G of a rollout, from the values that the statistics get."""
    rew, seen = torch.randn(2, 6), []
    done = (torch.randn(2, 6) > 0).float()
    agent = SimpleNamespace(cfg=SimpleNamespace(gamma=0.9), reward_sum=torch.zeros(()), images=True,
                            reward_sum_stats=SimpleNamespace(update=seen.append))
    others = dict.fromkeys(("obs", "act", "next_obs"), torch.zeros(2, 6, 1))
    ppo.Agent.update_stats(agent, ppo.Rollout(rew=rew, terminated=done, done=done, **others))
    before, now = seen[0].view(2, 6)
    return {"r_t": rew[1], r"\gamma": 0.9, r"\mathrm{done}_{t-1}": done[0], "G_{t-1}": before}, now


def td_target():
    rew, val = torch.randn(2, 9)
    terminated = (torch.randn(9) > 0).float()
    values = {"r": rew, r"\gamma": 0.9, r"\mathrm{terminated}": terminated, "V(s')": val}
    return values, td3.td_target(rew, terminated, val, 0.9)


def q_loss():
    q, target = torch.randn(2, 9)
    return {"Q(s, a)": q, "y": target}, td3.q_loss(q, target)


def add_clipped_noise():
    act = torch.rand(9, 3) * 2 - 1
    torch.manual_seed(1)
    result = td3.add_clipped_noise(act, 0.4, 0.5)
    torch.manual_seed(1)
    return {"a": act, r"\sigma": 0.4, r"\epsilon": torch.randn(9, 3), "c": 0.5}, result


def polyak_update():
    target, source = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    before = target.weight.detach().clone()
    td3.polyak_update(target, source, 0.3)
    values = {r"w_{\mathrm{targ}}": before, "w": source.weight.detach(), r"\tau": 0.3}
    return values, target.weight.detach()


@pytest.mark.parametrize("name, line, make", [
    ("gae", 0, delta), ("gae", 1, gae), ("explained_variance", 0, explained_variance),
    ("log_prob", 1, log_prob), ("entropy", 1, entropy), ("policy_loss", 0, policy_loss),
    ("value_loss", 0, value_loss), ("normalize_advantages", 0, normalize_advantages),
    ("clipped_policy_loss", 1, clipped_policy_loss), ("approx_kl", 0, approx_kl),
    ("Agent.update_stats", 0, update_stats), ("td_target", 0, td_target), ("q_loss", 0, q_loss),
    ("add_clipped_noise", 0, add_clipped_noise), ("polyak_update", 0, polyak_update)])
def test_typeset_equation_equals_its_function(name, line, make):
    torch.manual_seed(0)
    values, expected = make()
    latex = right_side(name, line)

    def agrees(latex):
        return np.allclose(evaluate(latex, values), expected, rtol=1e-3, atol=1e-5)

    assert agrees(latex), latex
    # Each sign counts, except before a small constant that only prevents a division by 0.
    for sign in re.finditer(r" [+-] (?!10\^)", latex):
        other = " - " if sign[0] == " + " else " + "
        wrong = latex[:sign.start()] + other + latex[sign.end():]
        assert not agrees(wrong), wrong
