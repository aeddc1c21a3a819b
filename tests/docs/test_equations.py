"""The typeset equations: their numbers, their rendering and their values."""
import importlib
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.docs.latex import case, clauses, evaluate, right_side
from tests.house.test_rules import ALGOS, equations

FOLDER = Path(__file__).parents[2] / "docs/equations"
ON_POLICY = "vpg a2c acktr ppo trpo ppo_lstm gail".split()
CLIPPED = "ppo ppo_popart ppo_lstm gail".split()
DQN = "dqn dqn_atari dqn_per".split()
OFF_POLICY = "ddpg td3 sac sac_her".split()


def load(algo):
    """Return the LaTeX of each equation."""
    with open(FOLDER / f"{algo}.toml", "rb") as file:
        return {int(n): latex for n, latex in tomllib.load(file)["equations"].items()}


@pytest.mark.parametrize("algo", sorted(ALGOS))
def test_numbers_are_those_of_the_docstring(algo):
    assert sorted(load(algo)) == sorted(equations(ALGOS[algo]))


def plain_equations(doc):
    """Return {n: text} of the numbered equations of a docstring: indented, ending with (n)."""
    texts, lines = {}, []
    for line in doc.splitlines():
        lines = [*lines, line] if line.startswith("    ") else []
        number = re.search(r"\((\d+)\)$", line)
        if lines and number:
            texts[int(number[1])] = "\n".join(lines)
            lines = []
    return texts


def decimals(text):
    return set(re.findall(r"\d+\.\d+", text))


@pytest.mark.parametrize("algo", sorted(ALGOS))
def test_decimal_constants_are_those_of_the_docstring(algo):
    plain = plain_equations(ALGOS[algo].doc)
    typeset = load(algo)
    assert set(plain) == set(typeset)
    assert {n: decimals(plain[n]) for n in plain} == {n: decimals(typeset[n]) for n in typeset}


def test_a_decimal_constant_is_seen():
    doc = "Text.\n\n    m = 2 x,\n    step = 0.8^k m   (1)\n    q = r   (2)\nIn 0.9."
    plain = plain_equations(doc)
    assert {n: decimals(text) for n, text in plain.items()} == {1: {"0.8"}, 2: set()}


def test_every_file_belongs_to_an_algorithm():
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(ALGOS)


@pytest.mark.parametrize("algo", sorted(ALGOS))
def test_every_equation_becomes_mathml(algo):
    convert = pytest.importorskip(
        "latex2mathml.converter", reason="latex2mathml is missing: install the extra docs").convert
    for number, latex in load(algo).items():
        assert "\\" not in convert(latex), f"({number})"


def numbers(*shape):
    return torch.randn(*shape)


def advantages(algo, lam):
    """Return the values of (1) and (2) at the first of two steps, and A and R of both."""
    bits = {"terminated": torch.zeros(2, 6), "done": torch.zeros(2, 6)}
    bits["terminated"][0, :2] = bits["done"][0, :4] = 1
    val, next_val, rew = numbers(2, 6), numbers(2, 6), numbers(2, 6)
    module = importlib.import_module(f"algos.{algo}")
    extra = {"memory": numbers(2, 6, 3)} if "memory" in module.Rollout.__annotations__ else {}
    rollout = module.Rollout(obs=numbers(2, 6, 3), act=numbers(2, 6, 1), rew=rew,
                             next_obs=numbers(2, 6, 3), **bits, **extra)
    adv, ret = module.compute_advantages(rollout, val, next_val, 0.9, lam)
    values = {r"\gamma": 0.9, r"\lambda": lam, "r_t": rew[0], "V(s_t)": val[0],
              "V(s'_t)": next_val[0], r"\mathrm{terminated}_t": bits["terminated"][0],
              r"\mathrm{done}_t": bits["done"][0], "A_{t+1}": adv[1], "A_t": adv[0]}
    return values, adv, ret


def delta(m, algo):
    values, adv, _ = advantages(algo, 0.0)                      # A is delta if lam = 0
    return values, adv[0]


def gae(m, algo):
    values, adv, _ = advantages(algo, 0.7)
    return values | {r"\delta_t": evaluate(typeset(algo, 1, 0), arrays(values))}, adv[0]


def target_return(m, algo):
    values, _, ret = advantages(algo, 0.7)
    return values, ret[0]


def value_loss(m, algo):
    val, ret = numbers(9), numbers(9)
    return {"V(s)": val, "R": ret}, m.value_loss(val, ret)


def obs_scaling(m, algo):
    obs, mean, var = numbers(9) * 20, numbers(9), torch.rand(9)
    obs[0], var[0] = mean[0] + 1e-4, 0                          # here 10^{-8} counts
    values = {r"\mathrm{obs}": obs, r"\mathrm{mean}": mean, r"\mathrm{var}": var}
    return values, m.standardize(obs, mean, var)


def policy_loss(m, algo):
    logp, adv = -torch.rand(9), numbers(9)
    return {r"\pi(a \mid s)": logp.exp(), "A": adv}, m.policy_loss(logp, adv)


def surrogate(m, algo):
    logp, old, adv = numbers(9), numbers(9), numbers(9)
    values = {r"\pi(a \mid s)": logp.exp(), r"\pi_{\mathrm{old}}(a \mid s)": old.exp(), "A": adv}
    return values, m.surrogate(logp, old, adv)


def normal_advantages(m, algo):
    adv = numbers(1, 9)
    return {"A": adv}, m.normalize_advantages(adv)


def clipped_loss(m, algo):
    logp, old, adv = numbers(90), numbers(90), numbers(90)
    values = {r"\mathrm{ratio}": (logp - old).exp(), "c": 0.2, "A": adv}
    return values, m.clipped_policy_loss(logp, old, adv, 0.2)


def approx_kl(m, algo):
    logp, old = numbers(9), numbers(9)
    return {r"\mathrm{ratio}": (logp - old).exp()}, m.approx_kl(logp, old).mean()


def td_target(m, algo):
    rew, terminated, val = numbers(9), (numbers(9) > 0).float(), numbers(9)
    values = {"r": rew, r"\gamma": 0.9, r"\mathrm{terminated}": terminated,
              "V(s')": val, "U(s')": val}
    return values, m.td_target(rew, terminated, val, 0.9)


def q_loss(m, algo):
    q, q1, q2, y = numbers(4, 9)
    expected = m.q_loss(q, y) if algo == "ddpg" else m.q_loss(q1, y) + m.q_loss(q2, y)
    return {"Q(s, a)": q, "Q_1(s, a)": q1, "Q_2(s, a)": q2, "y": y}, expected


def polyak(m, algo):
    target, source = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    values = {r"w_{\mathrm{targ}}": target.weight.detach().clone(), "w": source.weight.detach(),
              r"\tau": 0.3}
    m.polyak_update(target, source, 0.3)
    return values, target.weight.detach()


def soft_value(m, algo):
    q1, q2, logp = numbers(9), numbers(9), numbers(9)
    values = {r"Q_{1,\mathrm{targ}}(s', a')": q1, r"Q_{2,\mathrm{targ}}(s', a')": q2,
              r"\alpha": 0.3, r"\pi(a' \mid s')": logp.exp()}
    return values, m.soft_value(q1, q2, logp, torch.tensor(0.3))


def soft_loss(m, algo):
    q1, q2, logp = numbers(9), numbers(9), numbers(9)
    values = {"Q_1(s, a)": q1, "Q_2(s, a)": q2, r"\alpha": 0.3, r"\pi(a \mid s)": logp.exp()}
    return values, -m.soft_value(q1, q2, logp, torch.tensor(0.3)).mean()


def dueling(m, algo):
    val, adv = numbers(9, 1), numbers(9, 4)
    return {"V(s)": val, "A(s, a)": adv}, m.dueling_q(val, adv)


def huber_near(m, algo):
    x = torch.rand(9) * 2 - 1
    return {"x": x}, m.huber(x, torch.zeros(9))


def huber_far(m, algo):
    x = 1 + torch.rand(9)
    return {"x": -x}, m.huber(-x, torch.zeros(9))


def epsilon(m, algo):
    values = {r"\epsilon_{\mathrm{end}}": 0.1, "t": 30, r"\epsilon_{\mathrm{steps}}": 100}
    return values, m.epsilon(30, 0.1, 100)


def priority(m, algo):
    q, y = numbers(9), numbers(9)
    y[0] = q[0]                                                 # here 10^{-6} counts
    return {"Q(s_i, a_i)": q, "y_i": y, r"\omega": 0.6}, m.priority_of(q - y, 0.6)


def beta(m, algo):
    values = {r"\beta_{\mathrm{start}}": 0.4, "t": 30, r"\mathrm{total\_steps}": 100}
    return values, m.anneal_beta(30, 0.4, 100)


def reward_positive(m, algo):
    logit = numbers(9)
    return {"D(s, a)": logit.sigmoid()}, m.imitation_reward(logit, True)


def reward_negative(m, algo):
    logit = numbers(9)
    return {"D(s, a)": logit.sigmoid()}, m.imitation_reward(logit, False)


def retrace(m, algo):
    """Return the values of (1) and (2) at the first of two steps, and delta, R of it."""
    bits = {"terminated": torch.zeros(2, 6), "done": torch.zeros(2, 6)}
    bits["terminated"][0, :2] = bits["done"][0, :4] = 1
    q, next_val, rew, ratio = numbers(2, 6), numbers(2, 6), numbers(2, 6), torch.rand(2, 6) * 2
    rollout = m.Rollout(obs=numbers(2, 6, 3), act=torch.zeros(2, 6, dtype=torch.int64), rew=rew,
                        next_obs=numbers(2, 6, 3), **bits)
    one, two = (m.compute_retrace(rollout, q, next_val, ratio, 0.9, lam) for lam in (0.0, 0.7))
    values = {r"\gamma": 0.9, r"\lambda": 0.7, "r_t": rew[0], "Q(s_t, a_t)": q[0],
              "V(s'_t)": next_val[0], r"\mathrm{terminated}_t": bits["terminated"][0],
              r"\mathrm{done}_t": bits["done"][0], r"\rho_{t+1}": ratio[1],
              r"\delta_t": (one - q)[0], "E_{t+1}": (one - q)[1], "E_t": (two - q)[0]}
    return values, one[0] - q[0], two[0] - q[0], two[0]


def retrace_delta(m, algo):
    values, delta, *_ = retrace(m, algo)
    return values, delta


def retrace_error(m, algo):
    values, _, error, _ = retrace(m, algo)
    return values, error


def retrace_target(m, algo):
    values, *_, ret = retrace(m, algo)
    return values, ret


def average_policy(m, algo):
    values, expected = polyak(m, algo)
    return values | {r"w_{\mathrm{avg}}": values.pop(r"w_{\mathrm{targ}}")}, expected


def q_value_loss(m, algo):
    q, ret = numbers(9), numbers(9)
    return {"Q(s, a)": q, "R": ret}, m.value_loss(q, ret)


def action_gradient(m, algo):
    log_pi, weight = numbers(9, 4).log_softmax(-1), numbers(9, 4)
    values = {"u(a)": weight, r"\pi(a \mid s)": log_pi.exp(),
              r"\sum_b u(b)": weight.sum(-1, keepdim=True)}
    return values, m.logit_gradient(weight, log_pi)


def trust_region(m, algo):
    g, k = numbers(9, 4), numbers(9, 4)
    values = {"g": g, "k^T g": (k * g).sum(-1, keepdim=True), r"\mathrm{max\_slope}": 0.1,
              "k^T k": k.square().sum(-1, keepdim=True), "k": k}
    return values, m.project(g, k, 0.1)


# Algorithms, number, clause (or "row" of the cases), values and the function's result.
TABLE = [
    (ON_POLICY + ["ppo_popart"], 1, 0, delta), (ON_POLICY + ["ppo_popart"], 2, 0, gae),
    (ON_POLICY + ["ppo_popart"], 2, 1, target_return), (ON_POLICY, 5, 0, value_loss),
    (ON_POLICY + ["ppo_popart"], 6, 0, obs_scaling), (["bc"], 1, 0, obs_scaling),
    (["vpg", "a2c", "acktr"], 8, 0, policy_loss), (["trpo"], 8, 0, surrogate),
    (CLIPPED, 8, 0, normal_advantages), (CLIPPED, 10, 0, clipped_loss),
    (CLIPPED, 12, 0, approx_kl),
    (["acer"], 1, 0, retrace_delta), (["acer"], 2, 0, retrace_error),
    (["acer"], 2, 1, retrace_target), (["acer"], 3, 0, average_policy),
    (["acer"], 5, 0, q_value_loss), (["acer"], 6, 0, obs_scaling),
    (["acer"], 9, 2, action_gradient), (["acer"], 11, 0, trust_region),
    (["gail"], 14, 0, reward_positive), (["gail"], 14, 2, reward_negative),
    (OFF_POLICY + DQN, 1, 0, td_target), (OFF_POLICY, 2, 0, q_loss), (OFF_POLICY, 3, 0, polyak),
    (["sac", "sac_her"], 6, 0, soft_value), (["sac", "sac_her"], 7, 0, soft_loss),
    (DQN, 3, "row 0", huber_near), (DQN, 3, "row 1", huber_far), (DQN, 4, 0, dueling),
    (DQN, 6, 0, epsilon), (["dqn_per"], 7, "row 0", priority), (["dqn_per"], 10, 0, beta),
]
CASES = [pytest.param(algo, *row, id=f"{algo}-{row[0]}-{row[2].__name__}")
         for algos, *row in TABLE for algo in algos]


def arrays(values):
    """Tensors as NumPy arrays with double precision."""
    return {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}


def typeset(algo, number, part):
    latex = load(algo)[number]
    if isinstance(part, str):
        return case(latex, int(part.split()[1]))
    return right_side(clauses(latex)[part])


def agrees(latex, values, expected):
    return np.allclose(evaluate(latex, arrays(values)), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("algo, number, part, make", CASES)
def test_typeset_equation_equals_its_function(algo, number, part, make):
    torch.manual_seed(0)
    values, expected = make(importlib.import_module(f"algos.{algo}"), algo)
    latex = typeset(algo, number, part)
    assert agrees(latex, values, expected), latex
    # Each sign counts, except before a small constant that only prevents a division by 0.
    for sign in re.finditer(r" [+-] (?!10\^)", latex):
        other = " - " if sign[0] == " + " else " + "
        wrong = latex[:sign.start()] + other + latex[sign.end():]
        assert not agrees(wrong, values, expected), wrong
