"""Evaluate the right-hand side of an equation written in a small subset of LaTeX."""
import re

import numpy as np

COMMAND = re.compile(r"\\operatorname\{\w+\}(?:_a)?|\\(?:max|min)_a|\\[A-Za-z]+|\d+(?:\.\d+)?|\S")


def clauses(latex):
    """Split an equation at its column separators."""
    return re.split(r"[,;]? \\quad ", latex)


def right_side(clause):
    """Return what follows the first = or arrow, or the clause itself."""
    return re.split(r" (?:=|\\leftarrow) ", clause, maxsplit=1)[-1]


def case(latex, row):
    """Return one row of a cases environment, without its condition."""
    body = re.search(r"\\begin\{cases\}(.*?)\\end\{cases\}", latex)[1]
    return body.split(r"\\")[row].split("&")[0].strip()


def evaluate(latex, values):
    """`values` maps pieces of LaTeX, such as V(s'_t), to numbers or arrays."""
    return Parser(latex, values).whole()


class Parser:
    def __init__(self, latex, values):
        latex = re.sub(r"\\left|\\right|\\,", " ", latex).replace("[", "(").replace("]", ")")
        self.values, self.tokens, self.at = values, [], 0
        atoms = sorted(values, key=len, reverse=True)           # the longest match first
        while latex := latex.lstrip():
            token = next((atom for atom in atoms if self.begins(latex, atom)), None)
            token = token or COMMAND.match(latex)[0]
            self.tokens.append(token)
            latex = latex[len(token):]

    @staticmethod
    def begins(latex, atom):
        """\\pi is no beginning of \\pitch."""
        rest = latex[len(atom):]
        return latex.startswith(atom) and not (atom[-1].isalpha() and rest[:1].isalpha())

    def peek(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, *wanted):
        token = self.peek()
        assert not wanted or token in wanted, f"{token} instead of {wanted}: {self.tokens}"
        self.at += 1
        return token

    def whole(self):
        value = self.sum()
        assert self.peek() is None, f"not understood: {self.tokens[self.at:]}"
        return value

    def sum(self):
        sign = self.take() if self.peek() in ("+", "-") else "+"
        value = self.product() if sign == "+" else -self.product()
        while self.peek() in ("+", "-"):
            sign = self.take()
            value = value + self.product() if sign == "+" else value - self.product()
        return value

    def product(self):
        value = self.power()
        while self.peek() not in (None, "+", "-", ",", ")", "}", "|"):
            value = value * self.power()
        return value

    def power(self):
        value = self.factor()
        if self.peek() == "^":
            self.take()
            value = value ** (self.group() if self.peek() == "{" else self.factor())
        return value

    def group(self):
        self.take("{")
        value = self.sum()
        self.take("}")
        return value

    def arguments(self):
        self.take("(")
        found = [self.sum()]
        while self.peek() == ",":
            self.take()
            found.append(self.sum())
        self.take(")")
        return found

    def factor(self):
        token = self.take()
        if token in self.values:
            return self.values[token]
        if token[0].isdigit():
            return float(token)
        if token == "(":
            self.at -= 1
            value, = self.arguments()
            return value
        if token == "|":
            value = abs(self.sum())
            self.take("|")
            return value
        if token == r"\frac":
            return self.group() / self.group()
        if token == r"\sqrt":
            return np.sqrt(self.group())
        if token in (r"\log", r"\tanh", r"\operatorname{atanh}"):
            name = {r"\log": np.log, r"\tanh": np.tanh}.get(token, np.arctanh)
            return name(self.power())
        if token in (r"\min", r"\max"):
            return (np.minimum if token == r"\min" else np.maximum)(*self.arguments())
        if token == r"\operatorname{clip}":
            return np.clip(*self.arguments())
        if token == r"\operatorname{std}":
            return np.std(self.power())
        if token == r"\operatorname{mean}":
            return np.mean(self.product())                      # of the whole product
        if token == r"\operatorname{mean}_a":
            return np.mean(self.product(), -1, keepdims=True)
        if token == r"\max_a":
            return np.max(self.product(), -1)
        raise AssertionError(f"not understood: {token}")
