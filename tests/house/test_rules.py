"""Five rules that hold the algorithm files together.

They hold for what git tracks: a file of your own in algos/ is free until you `git add` it.
"""
import ast
import re
import subprocess
import sys

import pytest

from docs.algorithm import Algorithm, ideas
from tests.house.tree import ROOT, tracked
from utils.run.code import HELPERS

SECTIONS = ["config", "data types", "train", "losses", "kfac", "agent", "buffer"]
OPTIONAL = {"kfac", "buffer"}
MAIN = "if __name__ == '__main__':\n    main(train, Config, __doc__)"
MAY_IMPORT = {f"utils.{name}"
              for name in HELPERS - {"atari", "seeds", "wrappers"} | {"errors", "run"}}
# What a folder, or a file beside them, may import from others. Nobody may import tests.
ARROWS = {"utils": "", "tasks": "", "plot": "utils", "algos": "utils",
          "diagnose": "algos utils plot", "benchmarks": "algos diagnose utils plot",
          "docs": "benchmarks diagnose utils",
          "notebooks": "benchmarks diagnose algos utils plot tasks"}
# Names that each file defines in its own way.
OWN = {"Config", "Agent", "Critic", "update", "train", "interact", "actor_loss", "critic_loss"}
# Versions that lack lines of the others: images alone, rewards that are never scaled.
SHORTER = {("ppo_popart", "compute_targets")}


def section(file, line):
    return next(name for name, lines in file.sections if line in lines)


def has_sections_in_order(file):
    found = [name for name, _ in file.sections[2:]]
    if found != [name for name in SECTIONS if name in found or name not in OPTIONAL]:
        yield f"the banners are {found}, expected {SECTIONS}"
    if not file.doc:
        yield "there is no docstring"
    if ast.unparse(file.tree.body[-1]) != MAIN:
        yield f"the file must end with\n{MAIN}"


def annotates_shapes(file):
    for node in file.tree.body:
        if isinstance(node, ast.FunctionDef) and section(file, node.lineno) in ("train", "losses"):
            told = len(node.args.args) - len(node.args.defaults)    # a default tells the type
            missing = [arg.arg for arg in node.args.args[:told] if arg.annotation is None]
            if missing or node.returns is None:
                yield f"{node.name}: no annotation on {', '.join(missing) or 'what it returns'}"


def imports_only_helpers(file):
    yield from (f"imports {name}" for name in project_imports(file.tree) - MAY_IMPORT)


def project_imports(tree):
    """Return the full names of this project's modules that a file imports anywhere."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in ("utils", "algos"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return {name for name in names if name.split(".")[0] in {"", "tests", *ARROWS}}


def definitions(file):
    """Return top-level name -> its source, with decorators. Data types are each file's own."""
    found = {}
    for node in file.tree.body:
        of_data = section(file, node.lineno) == "data types"
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not of_data:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(file.lines[first - 1:node.end_lineno])
    return found


def family(file, files):
    """Return the name of the first ancestor, by the diffs that the docstrings name."""
    return family(files[file.parent], files) if file.parent in files else file.name


def drifted(files):
    """Yield a complaint for each name that two files of a family define differently.

    Docstrings and comments may be shorter: their lines stand in the longest version, in its order.
    """
    versions = {}
    for file in files.values():
        for name, source in definitions(file).items():
            versions.setdefault((family(file, files), name), []).append((file.name, source))
    for (_, name), sources in versions.items():
        origin, longest = max(sources, key=lambda pair: len(spoken(pair[1])))
        for other, source in sources:
            same = code(source) == code(longest) or (other, name) in SHORTER
            if name not in OWN and not (same and is_shorter(source, longest)):
                yield f"{name}: {other}.py drifted from {origin}.py; make them equal, or rename"


def spoken(source):
    return [line.strip() for line in source.splitlines() if line.strip()]


def is_shorter(source, longest):
    left = iter(spoken(longest))
    return all(line in left for line in spoken(source))


def code(source):
    """Return what Python runs."""
    return ast.dump(without_docstrings(ast.parse(source)))


def without_docstrings(tree):
    for node in ast.walk(tree):
        has = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        if has and ast.get_docstring(node):
            node.body = node.body[1:]
    return tree


ALGOS = {path.stem: Algorithm(path.stem, path.read_text(encoding="utf-8"))
         for path in tracked("algos/[a-z]*.py")}


@pytest.mark.parametrize("rule", [has_sections_in_order, annotates_shapes, imports_only_helpers],
                         ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("algo", ALGOS)
def test_every_file(algo, rule):
    complaints = "\n".join(rule(ALGOS[algo]))
    assert not complaints, f"algos/{algo}.py\n{complaints}"


def test_same_name_means_same_code():
    complaints = "\n".join(drifted(ALGOS))
    assert not complaints, complaints


def test_arrows_point_to_the_helpers():
    """Nothing in utils/ knows an algorithm by name."""
    for path in set(tracked("*.py")) - set(tracked("tests/*")):
        folder = path.relative_to(ROOT).parts[0].removesuffix(".py")
        tree, may = ast.parse(path.read_text(encoding="utf-8")), ARROWS.get(folder, "").split()
        assert {name.split(".")[0] for name in project_imports(tree)} <= {folder, *may}, path
        told = "\n".join(str(node.value) for node in ast.walk(without_docstrings(tree))
                         if isinstance(node, ast.Constant))
        known = set(re.findall(r"\w+", told)) & set(ALGOS)
        assert folder != "utils" or not known, f"{path.name} knows {known}"
        looks = "algos" in told.splitlines() and folder == "utils"
        assert not looks or path.name == "load.py", f"{path.name} looks into algos/"


def test_the_readmes_commands_and_links_exist():
    assert sorted(ideas()) == sorted(ALGOS)
    for page in ("README.md", "docs/games.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        named = re.findall(r"-m ((?:algos|utils)\.\w+)", text)
        modules = {ROOT / (name.replace(".", "/") + ".py") for name in named}
        files = {ROOT / name for name in re.findall(r"python (\w+\.py)", text)}
        links = {(ROOT / page).parent / link
                 for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)}
        missing = [path for path in modules | files | links if not path.exists()]
        assert modules and links and not missing, missing


@pytest.mark.parametrize("files,width", [("*.py", 100), ("algos/*.py", 88)])
def test_ruff(files, width):
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--line-length",
                           str(width), *tracked(files)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
