"""Read an algorithm file: docstring, equations, sections, shapes, new lines, planted bugs."""
import ast
import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from diagnose import catalogue

ROOT = Path(__file__).resolve().parents[1]
BANNER = re.compile(r"^# =+ ([\w ]+) =+$")
# What the letters of a shape mean, in every file.
LETTERS = {
    "T": "steps of a rollout", "N": "parallel environments", "B": "samples of a batch",
    "TN": "all samples of a rollout",
    "M": "minibatches of an epoch", "E": "pairs of the expert", "P": "parameters of the policy",
    "k": "outputs for each sample", "d": "dimensions of an action", "size": "units of the LSTM",
    "obs_dim": "numbers in an observation", "goal_dim": "numbers in a goal",
    "act_dim": "numbers in an action",
    "prompt": "tokens of a prompt", "answer": "tokens of an answer, at most",
    "text": "tokens of prompt and answer", "groups": "prompts", "G": "answers to a prompt",
    "*obs": "the shape of one observation", "*act": "the shape of one action",
    "*shape": "any further dimensions", "1": "one row or column", "2": "h and c of the LSTM",
}
DTYPES = {"Float32", "Float64", "Int64", "Shaped"}


@dataclass(frozen=True)
class Algorithm:
    name: str
    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def doc(self) -> str:
        return ast.get_docstring(self.tree, clean=False)

    @cached_property
    def parent(self) -> str:
        """The file that the docstring diffs this one against, or ""."""
        found = re.search(rf"diff\s+algos/(\w+)\.py\s+algos/{self.name}\.py", self.doc)
        return found[1] if found else ""

    @cached_property
    def title(self) -> str:
        return re.split(r"[.:](?:\s|$)", self.doc, maxsplit=1)[0].replace("\n", " ")

    @cached_property
    def sections(self) -> list[tuple[str, range]]:
        """Return (name, line numbers) of the docstring, the imports and each banner's section."""
        starts = [("docstring", 1), ("imports", self.tree.body[0].end_lineno + 1)]
        starts += [(found[1], number) for number, line in enumerate(self.lines, 1)
                   if (found := BANNER.match(line))]
        ends = [start for _, start in starts[1:]] + [len(self.lines) + 1]
        return [(name, range(start, end)) for (name, start), end in zip(starts, ends)]

    @cached_property
    def functions(self) -> dict[str, range]:
        """Return gae, Agent.act, ... -> the lines of the function, with its decorators."""
        found = {}
        for top in self.tree.body:
            for node in top.body if isinstance(top, ast.ClassDef) else [top]:
                if isinstance(node, ast.FunctionDef):
                    name = node.name if node is top else f"{top.name}.{node.name}"
                    start = min(part.lineno for part in [node, *node.decorator_list])
                    found[name] = range(start, node.end_lineno + 1)
        return found

    @cached_property
    def equations(self) -> dict[str, str]:
        """Return function -> its equations in LaTeX, one per line."""
        found = {name: typeset().get(f"{self.name}.{name}", typeset().get(name))
                 for name in self.functions}
        return {name: latex.strip() for name, latex in found.items() if latex}

    @cached_property
    def settings(self) -> set[str]:
        config = next(node for node in self.tree.body if getattr(node, "name", "") == "Config")
        return {node.target.id for node in config.body if isinstance(node, ast.AnnAssign)}

    # ---- shapes

    @cached_property
    def aliases(self) -> dict[str, tuple[str, str]]:
        """Return PerStep -> (its annotation, its comment) for each named shape of the file."""
        found = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and shape_of(node.value):
                comment = self.lines[node.lineno - 1].partition("  # ")[2]
                found[node.targets[0].id] = ast.unparse(node.value), comment
        return found

    @cached_property
    def shape_letters(self) -> set[str]:
        """Return the letters of all annotations, as written: {"T N", "B", ...}."""
        return set(filter(None, map(shape_of, ast.walk(self.tree))))

    # ---- beside other files

    @cached_property
    def diff(self) -> list[tuple[str, int, str]]:
        """Return the diff from the parent as rows (sign, line number in this file, text)."""
        if not self.parent:
            return []
        old, rows = algorithms()[self.parent].lines, []
        matcher = difflib.SequenceMatcher(None, old, self.lines, autojunk=False)
        for group in matcher.get_grouped_opcodes(2):
            rows.append(("@", group[0][3] + 1, f"line {group[0][3] + 1}"))
            for tag, i, j, k, end in group:
                rows += [("-", k + 1, text) for text in old[i:j] if tag != "equal"]
                rows += [(" " if tag == "equal" else "+", at + 1, self.lines[at])
                         for at in range(k, end)]
        return rows

    @cached_property
    def new(self) -> list[int]:
        """Return the numbers of the lines that are new since the parent."""
        return [number for sign, number, _ in self.diff if sign == "+"]

    @cached_property
    def new_code(self) -> int:
        """Count the new lines that are code: not blank, not a comment, not in the docstring."""
        end = self.tree.body[0].end_lineno
        return sum(number > end and bool(text := self.lines[number - 1].strip())
                   and not text.startswith("#") for number in self.new)

    @cached_property
    def bugs(self) -> list[dict]:
        """Return the bugs that the tests plant in this file, with the lines of their diffs."""
        found = []
        for mutant in catalogue.read():
            if self.name in (mutant.module, *mutant.also) and mutant.old in self.text:
                wrong = self.text.replace(mutant.old, mutant.new).splitlines()
                diff = list(difflib.unified_diff(self.lines, wrong, n=2, lineterm=""))[2:]
                found.append(vars(mutant) | {"diff": diff})
        return found


def shape_of(node: ast.AST) -> str | None:
    """Return "T N" for Float32[Tensor, "T N"], else None."""
    match node:
        case ast.Subscript(ast.Name(dtype), ast.Tuple([_, ast.Constant(str(letters))])):
            return letters if dtype in DTYPES else None


def spell_letters(words: Iterable[str]) -> str:
    """Return "T = steps of a rollout, N = parallel environments"."""
    return ", ".join(f"{word} = {LETTERS[word]}" for word in words if word in LETTERS)


@cache
def typeset() -> dict[str, str]:
    """Return docs/equations.toml."""
    return tomllib.loads((ROOT / "docs/equations.toml").read_text(encoding="utf-8"))


@cache
def ideas() -> dict[str, tuple[str, str, str]]:
    """Return algorithm -> (short name, idea, command), in the order of the README's table."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"\[([^\]]+)\]\(algos/(\w+)\.py\): (.+?) *\| *`([^`]+)` *\|", text)
    return {name: (short, idea, command) for short, name, idea, command in rows}


@cache
def algorithms() -> dict[str, Algorithm]:
    return {name: Algorithm(name, (ROOT / f"algos/{name}.py").read_text(encoding="utf-8"))
            for name in ideas()}


def children(name: str) -> list[str]:
    return [other.name for other in algorithms().values() if other.parent == name]
