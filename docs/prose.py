"""Turn an algorithm's docstring into HTML: paragraphs, typeset equations, links, symbols."""
import re
from html import escape

from docs.algorithm import EQUATION, Algorithm, algorithms
from docs.mathml import equation

GREEK = {"alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "eps": "ε", "eta": "η",
         "lam": "λ", "mu": "μ", "omega": "ω", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ",
         "grad": "∇", "ell": "ℓ", "sum": "Σ"}
BASE = "|".join([*GREEK, "argmax", "max", "min", "mean", "[A-Za-z]'?"])
SUBSCRIPT = re.compile(rf"(?<!\w)({BASE})_(\{{[^}}]+\}}|\w+?)(_targ)?(?!\w)")
SYMBOL = re.compile(rf"\b({'|'.join(name for name in GREEK if name != 'sum')})\b(?!_)")
SIGNS = {"&lt;-": "←", "-&gt;": "→", "&lt;=": "≤", "&gt;=": "≥"}
LAST = re.compile(r"^(Read after|Read next|Try|Reproduce|Record)\b")
ITEM = re.compile(r"^\s*- |^\(\d+\) [A-Z]")
# A short first sentence without a verb is the heading of its paragraph.
HEAD = re.compile(r"^(?!So |[^.:]*\b(?:is(?! specific)|explains)\b)((?:\S+ ){0,5}\S+?[.:])(?= |$)")


def prose(algo: Algorithm) -> str:
    """Return the docstring after its first paragraph as HTML."""
    paragraphs = [part.splitlines() for part in re.split(r"\n\s*\n", algo.doc.strip("\n"))]
    return "\n".join(block(algo, lines) for lines in paragraphs[1:])


def source(algo: Algorithm) -> str:
    """Return the papers that the docstring's first paragraph names."""
    first = " ".join(re.split(r"\n\s*\n", algo.doc)[0].split())
    return inline(algo, first.removeprefix(algo.title).strip(" .:"))


def block(algo: Algorithm, lines: list[str]) -> str:
    if LAST.match(lines[0]):
        whole = "\n".join(lines).replace("\\\n", "")      # a command may go on in the next line
        return "".join(map(command, whole.splitlines()))
    if all(line.startswith("    ") for line in lines):
        return equations(algo, lines) if any(map(EQUATION.match, lines)) else formula(lines)
    html, items = [], [[]]
    for line in lines:
        complete = not items[-1] or items[-1][-1].endswith((".", ":"))
        if ITEM.match(line) and complete:
            items.append([])
        items[-1].append(line.strip())
    for item in filter(None, items):
        text = " ".join(item)
        if text.startswith("- "):
            html.append(f'<p class="item">{inline(algo, text[2:])}</p>')
        else:
            head = HEAD.match(text)
            start = f"<strong>{inline(algo, head[1])}</strong>" if head else ""
            html.append(f"<p>{start}{inline(algo, text[len(head[1]) if head else 0:])}</p>")
    return "\n".join(html)


def command(line: str) -> str:
    """Return a line of the last paragraph. Commands are code, with a button that copies them."""
    found = re.search(r"python -m .*?(?= {2,}\(|$)", line)
    if not found:
        return ""       # what to read before and after stands at the top of the page
    label = re.match(r"(Try|Reproduce) ", line)
    return (f'<div class="command"><span>{label[1] if label else ""}</span>'
            f'<code>{escape(" ".join(found[0].split()))}</code></div>')


def formula(lines: list[str]) -> str:
    text = "\n".join(line[4:] for line in lines)
    return f'<pre class="formula">{escape(text)}</pre>'


def equations(algo: Algorithm, lines: list[str]) -> str:
    html, rest = [], []
    for line in lines:
        rest.append(line)
        if found := EQUATION.match(line):
            html.append(typeset(algo, int(found[1])))
            rest = []
    return "\n".join(html) + (formula(rest) if rest else "")


def typeset(algo: Algorithm, number: int) -> str:
    """Return an equation, its number, and links to the lines of code that cite it."""
    links = {}          # function -> its lines
    for line in algo.cited[number]:
        name = escape(algo.function_at(line))
        label = line if name in links else f"{name} {line}"
        links.setdefault(name, []).append(f'<a class="toline" href="#L{line}">{label}</a>')
    return (f'<div class="eq" id="eq-{number}"><div class="eq-math" tabindex="0" role="group" '
            f'aria-label="Equation {number}">{equation(algo.equations[number])}</div>'
            f'<a class="eq-n" href="#eq-{number}">({number})</a>'
            f'<div class="eq-lines">in code: {" · ".join(map(", ".join, links.values()))}</div>'
            "</div>")


def inline(algo: Algorithm, text: str) -> str:
    """Return a sentence as HTML: code, links, references to equations, and symbols."""
    html = []
    for k, part in enumerate(re.split(r"`([^`]+)`", text)):
        if k % 2:
            letter = f"{GREEK[part]} (" if part in GREEK else ""
            html.append(f"{letter}<code>{escape(part)}</code>{')' if letter else ''}")
        else:
            html.append(symbols(algo, linked(algo, escape(part, quote=False))))
    return "".join(html)


def linked(algo: Algorithm, text: str) -> str:
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>',
                  text)
    text = re.sub(r"doi:(\S+?)(?=[).]*(?:\s|$))", r'<a href="https://doi.org/\1">doi:\1</a>', text)
    text = re.sub(r"algos/(\w+)\.py", lambda found: f'<a href="{found[1]}.html">{found[1]}.py</a>'
                  if found[1] in algorithms() else found[0], text)
    for name, page in (("README", "results"), ("NOTES", "notes")):
        text = text.replace(f"benchmarks/{name}.md",
                            f'<a href="../benchmarks/{page}.html">benchmarks/{name}.md</a>')
    return re.sub(r"(?<!\w)\((\d+)\)", lambda found: f'<a class="eqref" href="#eq-{found[1]}">'
                  f"({found[1]})</a>" if int(found[1]) in algo.equations else found[0], text)


def symbols(algo: Algorithm, text: str) -> str:
    """Return text with Greek letters, subscripts and powers. Tags stay as they are."""
    def subscript(found):
        if found[0] in algo.settings:
            return found[0]
        below = found[2].strip("{}") + (",targ" if found[3] else "")
        return f"{GREEK.get(found[1], found[1])}<sub>{GREEK.get(below, below)}</sub>"

    parts = re.split(r"(<[^>]+>)", text)
    for k, part in enumerate(parts):
        if not part.startswith("<"):
            part = SUBSCRIPT.sub(subscript, part)
            part = re.sub(r"\b\w+_\w+\b", lambda found: f"<code>{found[0]}</code>"
                          if found[0] in algo.settings else found[0], part)
            part = SYMBOL.sub(lambda found: GREEK[found[1]], part)
            part = re.sub(r"(?<=[\w)])\^(-?\w+|\{[^}]*\})",
                          lambda found: f"<sup>{found[1].strip('{}')}</sup>", part)
            for sign, better in SIGNS.items():
                part = part.replace(sign, better)
            parts[k] = part
    return "".join(parts)
