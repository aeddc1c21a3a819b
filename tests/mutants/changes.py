"""Find the functions of the mathematics in algos/, and make every small change to each of them.

One mutant changes one comparison, sign, operator, number, argument, call or term. Docstrings,
annotations, decorators and messages stay as they are.
"""
import ast
import copy
from contextlib import suppress
from dataclasses import dataclass, field

from tests.mutants.catalogue import TESTS, file_of

OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
         ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
         ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
         ast.In: ast.NotIn, ast.NotIn: ast.In,
         ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
TURNED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
PAIRS = [("min", "max"), ("argmin", "argmax"), ("sum", "mean"), ("softmax", "log_softmax"),
         ("exp", "expm1"), ("ones", "zeros"), ("ones_like", "zeros_like"), ("square", "abs")]
NAMES = dict(PAIRS) | {b: a for a, b in PAIRS}
LIBRARIES = ("torch", "nn.functional", "math", "mpi")
KEPT = {"args", "annotation", "returns", "decorator_list", "msg"}   # "args" of a def, not of a call


@dataclass(frozen=True)
class Function:
    """The same code in one or more files; the first names it: ppo.gae, a2c.RMSProp.step."""

    name: str
    modules: tuple
    tree: ast.FunctionDef = field(repr=False)


@dataclass(frozen=True)
class Mutant:
    function: Function
    line: int
    old: str
    new: str
    tree: ast.FunctionDef = field(repr=False)                   # the function, changed

    @property
    def key(self):
        return self.function.name, self.old, self.new


# ---- Functions

def functions():
    """Return every function and method of the mathematics, equal ones only once."""
    found = {}
    for module in TESTS:
        if file_of(module).parent.name == "algos":
            for name, tree in mathematics(file_of(module).read_text("utf-8")):
                found.setdefault((name, ast.dump(tree)), []).append((module, tree))
    return [Function(f"{places[0][0]}.{name}", tuple(module for module, _ in places), places[0][1])
            for (name, _), places in found.items()]


def mathematics(text):
    """Yield (name, tree) of each function in the mathematics section of a file."""
    titles = {n: line for n, line in enumerate(text.splitlines(), 1) if line.startswith("# ====")}
    for node in ast.parse(text).body:
        title = max((n for n in titles if n < node.lineno), default=None)
        if title and " mathematics " in titles[title]:
            parts = node.body if isinstance(node, ast.ClassDef) else [node]
            before = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            yield from ((before + part.name, part) for part in parts
                        if isinstance(part, ast.FunctionDef))


# ---- Mutants

def mutants(function):
    """Return all mutants of a function, each named by the shortest text that is unique to it."""
    trails = {ast.unparse(trail[-1][1]): trail for trail in reversed(list(changed(function.tree)))}
    trails.pop(ast.unparse(function.tree), None)
    trails = list(reversed(trails.values()))
    levels = [1 if number(trail[0][0]) is not None else 0 for trail in trails]
    while True:
        texts = [tuple(map(ast.unparse, trail[level])) for trail, level in zip(trails, levels)]
        twice = {text for text in texts if texts.count(text) > 1}
        if not twice:
            break
        levels = [level + (text in twice) for level, text in zip(levels, texts)]
    return [Mutant(function, trail[0][0].lineno, *text, trail[-1][1])
            for trail, text in zip(trails, texts)]


def changed(node):
    """Yield the (old, new) pairs of each change: the node itself, its parent, up to `node`."""
    for new in variants(node):
        yield [(node, ast.copy_location(new, node))]
    if number(node) is not None:                                # -1 is one number, changed above
        return
    for name, value in ast.iter_fields(node):
        if name in KEPT and not isinstance(node, ast.Call):
            continue
        for at, part in enumerate(value if isinstance(value, list) else [value]):
            for trail in changed(part) if isinstance(part, ast.AST) else ():
                new = trail[-1][1]
                if isinstance(value, list):
                    new = [*value[:at], new, *value[at + 1:]]
                yield [*trail, (node, with_(node, **{name: new}))]


def variants(node):
    """Yield the changes of this node itself. `changed` handles its parts."""
    if (value := number(node)) is not None:
        yield from (ast.Constant(other) for other in others(value))
        return
    match node:
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.BinOp(left, op, right):
            if type(op) in OTHER:                               # `|` of types or dicts is not
                yield with_(node, op=OTHER[type(op)]())
            yield from (left, right)
            if not isinstance(op, (ast.Add, ast.Mult)):
                yield with_(node, left=right, right=left)
        case ast.UnaryOp(ast.USub() | ast.Not(), operand):
            yield operand
        case ast.BoolOp(op, values):
            yield with_(node, op=OTHER[type(op)]())
            yield from values
        case ast.Compare():
            yield from comparisons(node)
        case ast.IfExp(_, body, orelse):
            yield with_(node, body=orelse, orelse=body)
        case ast.Attribute(value, "T"):
            yield value
        case ast.Call():
            yield from calls(node)
        case ast.Return(ast.Tuple(elts)):
            yield with_(node, value=with_(node.value, elts=elts[::-1]))
        case ast.Return(value) if value and not isinstance(value, ast.UnaryOp):
            yield with_(node, value=ast.UnaryOp(ast.USub(), value))
        case ast.Expr(ast.Call()) | ast.Assert() | ast.Break():
            yield ast.Pass()


def number(node):
    """Return the number that an expression is, with its minus sign, or None."""
    with suppress(ValueError, TypeError, SyntaxError):
        value = ast.literal_eval(node)
        return value if type(value) in (int, float) else None


def others(value):
    """Return n + 1 and 0 for an int n >= 0; n + 1, n - 1, -n if n < 0; 0, 2x, |x| for a float x."""
    if type(value) is float:
        numbers = {0.0, 2 * value, abs(value)}
    else:
        numbers = {value + 1, 0} if value >= 0 else {value + 1, value - 1, -value}
    return sorted(numbers - {value})


def is_flag(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def comparisons(node):
    """Yield other operators, and for a < b < c also the comparisons of two of the three."""
    for i, op in enumerate(node.ops):
        for to in filter(None, (OTHER[type(op)], TURNED.get(type(op)))):
            yield with_(node, ops=[*node.ops[:i], to(), *node.ops[i + 1:]])
    every = [node.left, *node.comparators]
    for i in range(len(every) if len(every) > 2 else 0):
        left, *rest = every[:i] + every[i + 1:]
        yield with_(node, left=left, ops=node.ops[1:], comparators=rest)


def calls(node):
    """Yield calls without one argument, with two swapped, of a similar function, or no call."""
    func, args, keywords = node.func, node.args, node.keywords
    yield from (with_(node, args=args[:i] + args[i + 1:]) for i in range(len(args)))
    yield from (with_(node, keywords=[word for word in keywords if word is not left])
                for left in keywords if not is_flag(left.value))
    yield from (with_(node, args=[*args[:i], args[i + 1], args[i], *args[i + 2:]])
                for i in range(len(args) - 1))
    of = func.value if isinstance(func, ast.Attribute) else None
    if name := NAMES.get(func.attr if of else func.id):
        yield with_(node, func=with_(func, **{"attr" if of else "id": name}))
    if of and ast.unparse(of) not in LIBRARIES:
        yield of
    elif args and not isinstance(args[0], ast.Starred):         # `f(*x)` is not `*x`
        yield args[0]


def with_(node, **parts):
    new = copy.copy(node)
    vars(new).update(parts)
    return new
