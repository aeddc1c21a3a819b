"""The rules that every algorithm file follows, and a proof that each rule can fail.

A rule is a function that takes a file and yields complaints. `test_every_file` applies all rules
to the algorithms that git tracks. `test_rule_can_fail` plants a fault in TOY, a small file that
follows all rules. The rules do not apply to your own files in algos/ until you `git add` them.
"""
import ast
import difflib
import io
import itertools
import re
import subprocess
import symtable
import sys
import tokenize
import warnings

import pytest

from tests.house.tree import ROOT, in_readme, tracked

SECTIONS = ["config", "agent", "data", "mathematics", "update", "train"]
BANNER = re.compile(rf"^# =+ ({'|'.join(SECTIONS)}) =+$")
MAIN = "if __name__ == '__main__':\n    main(train, Config, __doc__)"
HELPERS = ("utils.demos", "utils.envs", "utils.logger", "utils.mpi", "utils.run")
# Machinery that a reader of an algorithm should not see. It belongs behind the four helpers.
MACHINERY = re.compile(r"\.grad\b|backward\(|\bflat\b|compile|num_procs"
                       r"|mpi\.(?:share|average|launch)|os\.sysconf")
ON_GRADIENTS = {"trpo", "acktr"}                                # these compute with gradients
LONGEST = 330, 460                                              # lines of code; lines in all
LONGER = dict.fromkeys("trpo dqn_per rainbow ppo_lstm gail acer acktr sac_her".split(), (390, 540))
WIDEST = 88                                                     # columns
WIDEST_TEXT = 80                                                # of the docstring, for terminals
MOST_TUPLES = 3                                                 # a, b = x, y
# Names that each file defines in its own way, and names that only a family of files shares.
OWN = {"Config", "Agent", "update", "train", "actor_loss", "critic_loss"}
SHARED_BY_A_FAMILY = {"ActorOut", "ReplayBuffer", "Transitions", "interact"}
OWN_OF_A_FILE = {("dqn_atari", "interact")}                     # its buffer needs ends of episodes
PARENTS = {"a2c": "vpg", "acer": "a2c", "acktr": "a2c", "ppo": "a2c", "ppo_popart": "ppo",
           "ppo_lstm": "ppo", "gail": "ppo", "trpo": "vpg", "dqn_atari": "dqn", "dqn_per": "dqn",
           "td3": "ddpg", "sac": "td3", "sac_her": "sac"}
NEW = 0.25                                                      # most new lines in a child
MORE_NEW = {"acer": 0.47, "acktr": 0.45, "trpo": 0.31,          # child -> its own limit
            "dqn_per": 0.35, "dqn_atari": 0.40, "ppo_popart": 0.20, "ppo_lstm": 0.35, "gail": 0.35}
FOREIGN_NAMES = set(                                            # the vocabulary renames these
    "state s o o2 ob x a ac action r reward d dones v vpred backup logprobs neglogpac "
    "episodic_return polyak global_step".split()
)
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:work|tmp|root|home/\w+|Users/\w+)/")


class File:
    """An algorithm file: its lines, syntax tree, and the line numbers of its sections."""

    def __init__(self, name, text):
        self.name, self.text, self.lines = name, text, text.splitlines()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")                     # `compiles_silently` reports these
            self.tree = ast.parse(text)
        self.doc = ast.get_docstring(self.tree, clean=False) or ""
        self.code_start = self.tree.body[0].end_lineno if self.doc else 0
        self.banners = [(i, found[1]) for i, line in enumerate(self.lines, 1)
                        if (found := BANNER.match(line))]
        ends = [i for i, _ in self.banners[1:]] + [self.tree.body[-1].lineno]
        self.sections = {name: range(start, end) for (start, name), end in zip(self.banners, ends)}

    def code(self):
        """Return the lines of code: not blank, not a comment, not in the module docstring."""
        return [line for line in self.counted() if not line.lstrip().startswith("#")]

    def counted(self, among=None):
        """Return the lines of a range, or of all, that are not blank and not in the docstring."""
        numbers = range(self.code_start + 1, len(self.lines) + 1) if among is None else among
        return [self.lines[i - 1] for i in numbers if self.lines[i - 1].strip()]

    def within(self, *names):
        """Return the syntax nodes in these sections."""
        return [node for node in ast.walk(self.tree)
                if any(getattr(node, "lineno", 0) in self.sections.get(s, ()) for s in names)]


def functions(nodes):
    return [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


# ---- Length and shape

def fits_in_one_sitting(file):
    longest, longest_in_all = LONGER.get(file.name, LONGEST)
    if len(file.code()) > longest:
        yield f"{len(file.code())} lines of code, {longest} at most"
    if len(file.lines) > longest_in_all:
        yield f"{len(file.lines)} lines in all, {longest_in_all} at most"


def is_not_wide(file):
    for i, line in enumerate(file.lines, 1):
        widest = WIDEST_TEXT + 3 * (i == 1) if i <= file.code_start else WIDEST    # 3: quotes
        if len(line) > widest:
            yield f"line {i}: {len(line)} columns, {widest} at most"


def has_one_statement_per_line(file):
    """`a, b = x, y` saves a line but is harder to read than two lines."""
    packed = [node.lineno for node in ast.walk(file.tree) if isinstance(node, ast.Assign)
              and isinstance(node.value, ast.Tuple)
              and any(isinstance(target, ast.Tuple) for target in node.targets)]
    if len(packed) > MOST_TUPLES:
        yield f"{len(packed)} lines `a, b = x, y`, {MOST_TUPLES} at most; see lines {packed}"


def has_every_section_in_order(file):
    found = [name for _, name in file.banners]
    if found != SECTIONS:
        yield f"banners {found}, expected {SECTIONS}"
    if not file.doc:
        yield "no module docstring"
    if ast.unparse(file.tree.body[-1]) != MAIN:
        yield f"the file must end with\n{MAIN}"


def is_mostly_algorithm(file):
    own = sum(len(file.counted(file.sections.get(name, ()))) for name in SECTIONS[1:5])
    share = own / len(file.counted())
    if share < 0.6:
        yield f"sections agent to update are {share:.0%} of the lines; at least 60%"


def speaks_of_no_machinery(file):
    for i, line in enumerate(file.lines, 1):
        found = MACHINERY.search(line)
        if found and file.name not in ON_GRADIENTS:
            yield f"line {i} mentions {found[0]}, which belongs in a helper"


BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Match, ast.FunctionDef, ast.ClassDef)


def nesting(node):
    """Return how deeply blocks are nested below a node. An elif is as deep as its if."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = (isinstance(node, ast.If) and isinstance(child, ast.If)
                   and node.col_offset == child.col_offset)
        deepest = max(deepest, nesting(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def has_short_flat_functions(file):
    for node in functions(ast.walk(file.tree)):
        length = node.end_lineno - node.lineno + 1
        if length > 60:
            yield f"{node.name}: {length} lines, 60 at most"
        if nesting(node) > 3:
            yield f"{node.name}: blocks nested {nesting(node)} deep, 3 at most"


# ---- What a file may do

def imports_only_helpers(file):
    for name in project_imports(file.tree):
        if name not in HELPERS:
            yield f"imports {name}"


def project_imports(tree):
    """Return the full names of this project's modules that a file imports anywhere."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "utils":
            names += [f"utils.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    ours = {"", "algos", "utils", "plot", "tests", "benchmarks"}
    return [name for name in names if name.split(".")[0] in ours]


def runs_nothing_on_import(file):
    definitions = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    for node in file.tree.body[bool(file.doc):-1]:
        constant = (isinstance(node, (ast.Assign, ast.AnnAssign))
                    and not any(isinstance(part, ast.Call) for part in ast.walk(node)))
        if not constant and not isinstance(node, definitions):
            yield f"line {node.lineno} runs on import"


def captures_no_state(file):
    yield from captured(symtable.symtable(file.text, file.name, "exec"))


def captured(table, nested=False):
    """Yield a complaint for each name that a nested function takes from its outer function."""
    comprehensions = {"listcomp", "setcomp", "dictcomp", "genexpr"}
    for child in table.get_children():
        is_function = child.get_type() == "function"
        if nested and is_function and child.get_name().strip("<>") not in comprehensions:
            for name in child.get_frees():
                yield f"line {child.get_lineno()}: {child.get_name()} captures {name}; use partial"
        yield from captured(child, nested or is_function)


def logs_little(file):
    calls = [node for node in ast.walk(file.tree) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Attribute) and names_log(node.func)]
    if len(calls) > 4:
        yield f"{len(calls)} calls that log, 4 at most"
    for node in file.within("mathematics", "update"):
        if names_log(node):
            yield f"line {node.lineno}: do not log here; return the metrics"


def names_log(node):
    return (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            and node.value.id == "run" and node.attr in ("store", "report"))


def compiles_silently(file):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            compile(file.text, file.name, "exec")
        except (SyntaxError, Warning) as error:
            yield f"{error}"


# ---- What a reader relies on

def explains_every_setting(file):
    configs = [node for node in file.tree.body if getattr(node, "name", "") == "Config"]
    fields = [node for config in configs for node in config.body if isinstance(node, ast.AnnAssign)]
    helped = {token.start[0] for token in comments(file.text) if token.string.strip("# ")}
    for node in fields:
        if node.lineno not in helped:
            yield f"line {node.lineno}: {node.target.id} has no comment; --help prints it"
    for config in configs:
        if [ast.unparse(base) for base in config.bases] != ["RunConfig"]:
            yield "Config does not inherit the settings of every run from RunConfig"


def comments(text):
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token for token in tokens if token.type == tokenize.COMMENT]


def annotates_shapes(file):
    for node in functions(set(file.tree.body) & set(file.within("data", "mathematics", "update"))):
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        told = {arg.arg for arg in args[len(args) - len(node.args.defaults):]}  # defaults tell
        bare = {arg.arg for arg in args if arg.annotation is None} - told
        if bare:
            yield f"{node.name}: no annotation on {', '.join(sorted(bare))}"
        if node.returns is None:
            yield f"{node.name}: no annotation on the return value"


# An indented line that ends in a number in parentheses.
EQUATION = re.compile(r"^[ ]+\S.*(?<!Eq\.)[ ]\((\d+)\)$", re.MULTILINE)


def equations(file):
    """Return the numbers of the docstring's equations. A child may state its own ones first."""
    return [int(number) for number in EQUATION.findall(file.doc)]


def cites_every_equation(file):
    stated = equations(file)
    if sorted(stated) != list(range(1, len(stated) + 1)) or not stated:
        yield f"the docstring numbers its equations {stated}"
    code = "\n".join(file.lines[file.code_start:])
    groups = re.findall(r"Eqs?\. (\(\d+\)(?:(?:, | and )\(\d+\))*)", code)
    cited = {int(number) for group in groups for number in re.findall(r"\d+", group)}
    if cited != set(stated):
        yield f"the docstring states equations {stated}, the code cites {sorted(cited)}"


def speaks_the_vocabulary(file):
    paragraphs = re.split(r"\n\s*\n", file.doc)
    letters = {word for paragraph in paragraphs if EQUATION.search(paragraph)
               for word in re.findall(r"[A-Za-z]\w*", paragraph) if len(word) <= 2}
    saved = {part for function in functions(ast.walk(file.tree))    # of a state dict
             if function.name in ("state_dict", "load_state_dict") for part in ast.walk(function)}
    for node in set(ast.walk(file.tree)) - saved:
        name = bound_name(node)
        free = name in letters and node.lineno in {*file.sections.get("mathematics", ()),
                                                   *file.sections.get("update", ())}
        if name in FOREIGN_NAMES and not free:
            yield f"line {node.lineno}: the vocabulary has another name for {name}"


def bound_name(node):
    """Return the name that a node binds: a variable, argument, field or attribute; else None."""
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(getattr(node, "ctx", None), ast.Store):
        return getattr(node, "id", getattr(node, "attr", None))
    return None


RULES = [
    fits_in_one_sitting, is_not_wide, has_one_statement_per_line, has_every_section_in_order,
    is_mostly_algorithm, speaks_of_no_machinery, has_short_flat_functions, imports_only_helpers,
    runs_nothing_on_import, captures_no_state, logs_little, compiles_silently,
    explains_every_setting, annotates_shapes, cites_every_equation, speaks_the_vocabulary,
]


# ---- Between files

def definitions(file, section=None):
    """Return top-level name -> source, with decorators and the comment right above."""
    found = {}
    for node in file.tree.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names = [getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)]
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        while file.lines[:first - 1] and is_comment(file.lines[first - 2]):
            first -= 1
        if section is None or node.lineno in file.sections.get(section, ()):
            source = "\n".join(file.lines[first - 1:node.end_lineno])
            found.update({name: source for name in names if name})
    return found


def is_comment(line):
    return line.startswith("#") and not BANNER.match(line)


def drifted(files):
    """Yield a complaint for each name that two files define differently.

    The longest version is the reference. Another version may be identical. It may also be shorter:
    it then has the same decorators, and all its lines stand in the reference in the same order.
    """
    versions = {}
    for file in files:
        for name, source in definitions(file).items():
            family = root_of(file.name) if name in SHARED_BY_A_FAMILY else ""
            if (file.name, name) not in OWN_OF_A_FILE:
                versions.setdefault((family, name), []).append((file.name, source))
    for (_, name), sources in versions.items():
        origin, longest = max(sources, key=lambda pair: len(spoken_lines(pair[1])))
        for other, source in sources:
            if name not in OWN and source != longest and not is_shorter(source, longest):
                yield f"{name}: {other}.py drifted from {origin}.py; make them equal, or rename"


def described(file):
    """Return {name: text} of the helpers that the comment above `from utils` describes."""
    first = next(i for i, line in enumerate(file.lines) if line.startswith("from utils"))
    block = itertools.takewhile(lambda line: line.startswith("# "), reversed(file.lines[:first]))
    helpers, name = {}, ""
    for line in reversed(list(block)):
        start, text = re.fullmatch(r"# ([\w.]*) +(\S.*)", line).groups()
        name = start or name                                    # else the line before goes on
        helpers[name] = f"{helpers.get(name, '')} {text}".strip()
    return helpers


def misdescribed(files):
    """Yield a complaint for each helper that two files describe differently, or one lacks."""
    texts = {}
    for file in files:
        code = "\n".join(line for line in file.text.replace(file.doc, "").splitlines()
                         if not line.startswith("#"))
        for name, text in described(file).items():
            origin, first = texts.setdefault(name, (file.name, text))
            if text != first:
                yield f"{file.name}.py and {origin}.py describe {name} differently"
            if not re.search(rf"\b{re.escape(name)}\b", code):
                yield f"{file.name}.py describes {name}, which it does not use"


def root_of(algo):
    """Return the first ancestor of an algorithm in PARENTS."""
    return root_of(PARENTS[algo]) if algo in PARENTS else algo


def spoken_lines(source):
    return [line.strip() for line in source.splitlines() if line.strip()]


def is_shorter(source, longest):
    """Return whether `source` is the longest version with some lines left out."""
    few, many = spoken_lines(source), spoken_lines(longest)
    left = iter(many)
    return (len(few) < len(many) and decorators(few) == decorators(many)
            and all(line in left for line in few))


def decorators(lines):
    head = itertools.takewhile(lambda line: line.startswith(("@", "#")), lines)
    return [line for line in head if line.startswith("@")]


def bare_code(file):
    """Return the lines of a file without blank lines, comments and docstrings."""
    lines = list(file.lines)
    for token in comments(file.text):
        row, column = token.start
        lines[row - 1] = lines[row - 1][:column]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(file.tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1:last] = [""] * (last - first + 1)
    return [line.rstrip() for line in lines if line.strip()]


def share_of_new_lines(child, parent):
    """Return the fraction of a child's code lines that its parent lacks; order counts."""
    old, new = bare_code(parent), bare_code(child)
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return 1 - sum(block.size for block in blocks) / len(new)


# ---- Tests of the files

ALGOS = {path.stem: File(path.stem, path.read_text(encoding="utf-8"))
         for path in tracked("algos/*.py") if path.stem != "__init__"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("algo", ALGOS)
def test_every_file(algo, rule):
    complaints = "\n".join(rule(ALGOS[algo]))
    assert not complaints, f"algos/{algo}.py\n{complaints}"


def test_every_file_is_in_the_readmes_table():
    assert sorted(in_readme()) == sorted(ALGOS)


def test_same_name_means_same_code():
    complaints = "\n".join(drifted(ALGOS.values()))
    assert not complaints, complaints


def test_a_helper_is_described_alike_in_all_files():
    complaints = "\n".join(misdescribed(ALGOS.values()))
    assert not complaints, complaints
    assert {"make_envs", "mpi.Adam"} <= set().union(*map(described, ALGOS.values()))


@pytest.mark.parametrize("child", PARENTS)
def test_a_child_is_its_parent_plus_an_idea(child):
    parent = PARENTS[child]
    if not {child, parent} <= set(ALGOS):
        pytest.skip(f"{child}.py and {parent}.py do not both exist yet")
    limit, new = MORE_NEW.get(child, NEW), share_of_new_lines(ALGOS[child], ALGOS[parent])
    assert new <= limit, f"{new:.0%} of {child}.py is not in {parent}.py, {limit:.0%} at most"


def marked_equations(text):
    """Return the pairs (algorithm, equation) of all `pytest.mark.eq(...)` in a test file."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
             and ast.unparse(node.func) == "pytest.mark.eq"]
    marks = [[ast.literal_eval(arg) for arg in call.args] for call in calls]
    return {(algo, number) for algo, *numbers in marks for number in numbers}


def test_every_equation_has_a_hand_value():
    marked = set().union(*(marked_equations(path.read_text(encoding="utf-8"))
                           for path in tracked("tests/*.py")))
    stated = {(algo, number) for algo, file in ALGOS.items() for number in equations(file)}
    assert marked == stated


def test_helpers_know_no_algorithm():
    for path in tracked("utils/*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {name.split(".")[0] for name in project_imports(tree)}
        assert names <= {"utils"}, f"{path.name} imports {names}"
        spoken = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not spoken & set(ALGOS), f"{path.name} knows an algorithm by name"


def test_no_path_of_a_machine():
    kinds = {".py", ".md", ".toml", ".cff", ".json", ".csv", ".ipynb", ".sh", ""}
    for path in tracked():
        if path.suffix in kinds:
            found = MACHINE_PATH.search(path.read_text(encoding="utf-8"))
            assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_ruff():
    files = [*tracked("*.py"), *tracked("*.ipynb")]
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", *files], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")         # [text](path#section)
PATH = re.compile(r"`([\w./]+/[\w.]+\.(?:py|md|csv|toml|ipynb|svg))`")


DOCUMENTS = [path for path in tracked("*.md") if path.name != "CHANGELOG.md"]    # tells of the past


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_files_that_are_there(path):
    """Links are relative to the document. A path in backticks is relative to the root."""
    text = path.read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not (path.parent / link).exists()]
    missing += [name for name in PATH.findall(text) if not (ROOT / name).exists()]
    assert not missing


# ---- Tests of the rules

TOY = File("toy", '''"""A toy that learns the mean reward.

It is wrong at first; it moves a step towards what it sees.

    y = r + gamma val                                               (1)
    L = mean (val - y)^2                                            (2)

Read after    nothing. It is Eq. (3) of no paper.
"""
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from utils import mpi
from utils.run import Run, RunConfig, main

# ==== config ==================================================


@dataclass(frozen=True)
class Config(RunConfig):
    """Settings."""

    lam: float = 0.95  # GAE's lambda


# ==== agent ===================================================

class Agent(nn.Module):
    def __init__(self, obs_space, act_space, cfg):
        super().__init__()
        self.val = nn.Linear(3, 1)                              # [B, 1]
        self.widths = [size + cfg.lam for size in (1, 2, 3)]

    def forward(self, obs):
        val = self.val(obs)
        return val[:, 0]                                        # [B]


# ==== data ====================================================

# A comment above collect.
@torch.no_grad()
def collect(agent: Agent, obs: Tensor) -> Tensor:
''' + "    obs = obs + 1\n" * 20 + '''
    for t in range(3):
        if t == 0:
            with torch.no_grad():
                obs = obs + t
        elif t == 1:
            obs = obs + 1
        elif t == 2:
            obs = obs + 2
    return torch.log(obs)


# ==== mathematics =============================================

def td_target(rew: Float32[Tensor, "B"], val: Float32[Tensor, "B"],
              gamma: float) -> Tensor:
    """Eq. (1). The reward and what follows."""
    r = rew
    return r + gamma * val


def v_loss(val: Float32[Tensor, "B"], target: Float32[Tensor, "B"]) -> Tensor:
    """Eqs. (1) and (2)."""
    assert val.shape == target.shape
    return (val - target).square().mean()


# ==== update ==================================================

def update(agent: Agent, obs: Tensor) -> dict[str, Tensor]:
    loss = v_loss(agent(obs), obs[:, 0])
    loss = mpi.moments(loss)
    return {"v_loss": loss}


# ==== train ===================================================

def train(cfg):
    ordered = sorted(range(3), key=lambda index: -index)
    ordered = list(map(partial(max, 1), ordered))
    with Run(cfg) as run:
        for step in ordered:
            run.report(step)


if __name__ == "__main__":
    main(train, Config, __doc__)
''')

LOOPS = "".join("    " * depth + f"for t{depth} in ():\n" for depth in range(1, 5)) + " " * 20
FAULTS = [                                                      # rule, text, replacement
    (fits_in_one_sitting, "    return {", "    loss = loss\n" * 330 + "    return {"),
    (fits_in_one_sitting, "    return {", "    # why\n\n" * 230 + "    return {"),
    (is_not_wide, "# [B]", "# [B]" + " batch" * 6),
    (is_not_wide, "It is wrong at first", "It is wrong at first" + " and at last" * 4),
    (has_one_statement_per_line, "    r = rew\n", "    r, val = rew, val\n" * 4),
    (has_every_section_in_order, "# ==== data", "# ---- data"),
    (has_every_section_in_order, "# ==== update =", "# ==== data ="),
    (has_every_section_in_order, "Config, __doc__)", "Config, '')"),
    (is_mostly_algorithm, "    with Run", "    cfg = cfg\n" * 40 + "    with Run"),
    (speaks_of_no_machinery, "    loss = mpi", "    loss.backward()\n    loss = mpi"),
    (speaks_of_no_machinery, "mpi.moments", "mpi.average"),
    (has_short_flat_functions, "    loss = mpi", "    loss = loss\n" * 60 + "    loss = mpi"),
    (has_short_flat_functions, "    loss = mpi", LOOPS + "loss = loss\n    loss = mpi"),
    (imports_only_helpers, "from utils import mpi", "from utils import mpi, checkpoint"),
    (imports_only_helpers, "import torch\n", "import torch\nimport algos.ppo\n"),
    (imports_only_helpers, "import torch\n", "import torch\nfrom . import ppo\n"),
    (runs_nothing_on_import, "# ==== agent", "torch.set_num_threads(1)\n# ==== agent"),
    (runs_nothing_on_import, "# ==== agent", "ZERO = torch.zeros(1)\n# ==== agent"),
    (captures_no_state, "lambda index: -index", "lambda index: -index * cfg"),
    (captures_no_state, "    loss = mpi", "    def step():\n        return loss\n    loss = mpi"),
    (logs_little, "run.report(step)", "run.report(step)\n" + "            run.store()\n" * 4),
    (logs_little, "    loss = mpi", "    run.store(loss=loss)\n    loss = mpi"),
    (compiles_silently, '"Eqs. (1)', '"Eqs. \\eta (1)'),
    (compiles_silently, "if t == 0", "if t is 0"),
    (explains_every_setting, "  # GAE's lambda", ""),
    (explains_every_setting, "Config(RunConfig)", "Config"),
    (annotates_shapes, "gamma: float) -> Tensor", "gamma) -> Tensor"),
    (annotates_shapes, "obs: Tensor) -> Tensor", "obs: Tensor)"),
    (cites_every_equation, "(2)\n", "(3)\n"),
    (cites_every_equation, '"""Eqs. (1) and (2)."""', '"""Eq. (1)."""'),
    (cites_every_equation, '"""Eqs. (1) and (2)."""', '"""Eqs. (1), (2) and (3)."""'),
    (speaks_the_vocabulary, "    r = rew\n    return r ", "    d = rew\n    return d "),
    (speaks_the_vocabulary, "def forward(self, obs)", "def forward(self, x)"),
    (speaks_the_vocabulary, "val = self.val(obs)", "r = val = self.val(obs)"),
    (speaks_the_vocabulary, "self.widths =", "self.state ="),
]


def planted(old, new):
    assert old in TOY.text, f"TOY does not contain {old!r}"
    return File("toy", TOY.text.replace(old, new, 1))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_can_pass(rule):
    assert not list(rule(TOY))


@pytest.mark.parametrize("rule,old,new", FAULTS)
def test_rule_can_fail(rule, old, new):
    assert list(rule(planted(old, new)))


def test_every_rule_is_tested():
    assert {rule for rule, _, _ in FAULTS} == set(RULES)


def test_docstring_blank_lines_and_comments_are_no_code():
    assert len(File("f", '"""One.\n\nTwo.\n"""\n\nx = 1  # z\n\n# y\n').code()) == 1
    assert not list(fits_in_one_sitting(File("dqn_per", "x = 1\n" * 390)))
    assert list(fits_in_one_sitting(File("dqn", "x = 1\n" * 390)))


def test_tuples_that_belong_together_are_no_packed_lines():
    text = "obs, info = envs.reset()\n" * 9 + "a, b = x, y\n" * 3
    assert not list(has_one_statement_per_line(File("f", text)))


@pytest.mark.parametrize("old,new,drifts", [
    ("@torch.no_grad()\n", "", True),                           # a decorator
    ("# A comment above", "# Another comment above", True),
    ("obs = obs + 2", "obs = obs + 2  # why", True),
    ("obs = obs + t", "obs = t + obs", True),
    ("        elif t == 2:\n            obs = obs + 2\n", "", False),       # a shorter version
    ("def collect", "def collect_rollout", False),              # code of another name may differ
    ("mpi.moments(loss)", "mpi.moments(2 * loss)", False),      # `update` is each file's own
])
def test_drift_is_seen(old, new, drifts):
    assert bool(list(drifted([TOY, planted(old, new)]))) == drifts


@pytest.mark.parametrize("old,new,wrong", [
    ("", "", False),
    ("over all\n", "over\n", True),                             # another text
    ("#              processes", "#              processors", True),  # in its second line
    ("mpi.moments(loss)", "mpi.average(loss)", True),           # it is not used
])
def test_another_description_is_seen(old, new, wrong):
    toy = planted("from utils import mpi", "# mpi.moments  count, mean, variance over all\n"
                  "#              processes\nfrom utils import mpi").text
    assert described(File("a", toy)) == {"mpi.moments": "count, mean, variance over all processes"}
    assert bool(list(misdescribed([File("a", toy), File("b", toy.replace(old, new))]))) == wrong


def test_new_lines_are_counted():
    old = File("old", '"""Old."""\na = 1\nb = 2\nc = 3\n')
    new = File("new", '"""New, and longer.\n"""\n\n# why\na = 1  # one\nb = 4\nc = 3\nd = 5\n')
    assert bare_code(new) == ["a = 1", "b = 4", "c = 3", "d = 5"]
    assert share_of_new_lines(new, old) == 0.5
    assert share_of_new_lines(old, old) == 0


def test_marks_are_found():
    text = "@pytest.mark.eq('ppo', 1, 2)\ndef test(): pass\n# pytest.mark.eq('ppo', 3)\n"
    assert marked_equations(text) == {("ppo", 1), ("ppo", 2)}


@pytest.mark.parametrize("text,found", [
    ("cd /" + "home/me/plainrl", True), ('open("/' + 'tmp/log")', True),
    ("https://example.org/root/", False), ("algos/root/x", False),
])
def test_machine_path_is_seen(text, found):
    assert bool(MACHINE_PATH.search(text)) == found
