"""The typeset equations: their names, their rendering and their signs."""
import ast
import re

import pytest

from docs.algorithm import algorithms, typeset
from docs.mathml import equation

# Commands that only place or name things; a docstring has no word for them.
UNSPOKEN = (r"\\(?:left|right|operatorname|mathrm|mathcal|frac|mid|parallel|sim|cdot)\b"
            r"|\\[,.]|[_^{}]")


@pytest.mark.parametrize("name", typeset())
def test_every_equation_becomes_mathml(name):
    assert "\\" not in equation(typeset()[name])


def words(text):
    """Return the words of an equation, in LaTeX or in a docstring: (sign before it, word)."""
    text = re.sub(r"\\leftarrow|<-", "=", re.sub(r"\\text\{[^}]*\}", " ", text))
    for latex, plain in ((r"\epsilon", "eps"), (r"\lambda", "lam"), (r"\nabla", "grad"),
                         ("10^{-", "tiny"), ("1e-", "tiny")):
        text = text.replace(latex, plain)
    text = re.sub(r"[^\w\s+=-]", " ", re.sub(UNSPOKEN, " ", text))
    return re.findall(r"([-+]?) *(\w+|=)", re.sub(r"\s+", " ", text.replace("_", " ")))


def docstrings(function):
    """Return the words of all docstrings of the files that have this function."""
    for algo in algorithms().values():
        if {function, function.removeprefix(f"{algo.name}.")} & set(algo.functions):
            nodes = (node for node in ast.walk(algo.tree)
                     if isinstance(node, ast.FunctionDef | ast.ClassDef))
            yield words(" . ".join(ast.get_docstring(node) or "" for node in nodes))


def test_signs_are_those_of_the_docstrings():
    """Wherever an equation's words stand in a docstring, one such place has its signs too."""
    compared = 0
    for name, latex in typeset().items():
        texts = list(docstrings(name))
        assert texts, f"{name} names no function"
        for part in re.split(r",? *\\quad|\n", latex.strip()):
            signed, there = words(part), []
            for text in texts:
                windows = (text[i:i + len(signed)] for i in range(len(text)))
                there += [window for window in windows
                          if [word for _, word in window] == [word for _, word in signed]]
            if len(signed) > 2 and there:
                compared += 1
                assert signed in there, f"{name}: {part}"
    assert compared > 70
