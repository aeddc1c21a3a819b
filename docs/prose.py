"""Turn an algorithm's docstring into HTML: paragraphs, listings, links, symbols."""
import re
from html import escape

from docs.algorithm import Algorithm, algorithms

GREEK = {"alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "eps": "ε", "eta": "η",
         "lam": "λ", "mu": "μ", "omega": "ω", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ",
         "grad": "∇", "ell": "ℓ", "sum": "Σ"}
BASE = "|".join([*GREEK, "argmax", "max", "min", "mean", "[A-Za-z]'?"])
SUBSCRIPT = re.compile(rf"(?<!\w)({BASE})_(\{{[^}}]+\}}|\w+?)(_targ)?(?!\w)")
SYMBOL = re.compile(rf"\b({'|'.join(name for name in GREEK if name != 'sum')})\b(?!_)")
SIGNS = {"&lt;-": "←", "-&gt;": "→", "&lt;=": "≤", "&gt;=": "≥"}
HEAD = re.compile(r"(The problem|The idea|Departures from the papers?|Healthy values)\b[.:]?")


def prose(algo: Algorithm) -> str:
    """Return the docstring after its first paragraph as HTML."""
    paragraphs = [part.splitlines() for part in re.split(r"\n\s*\n", algo.doc.strip("\n"))]
    return "\n".join(block(algo, lines) for lines in paragraphs[1:])


def source(algo: Algorithm) -> str:
    """Return the papers that the docstring's first paragraph names."""
    first = " ".join(re.split(r"\n\s*\n", algo.doc)[0].split())
    return inline(algo, first.removeprefix(algo.title).strip(" .:"))


def block(algo: Algorithm, lines: list[str]) -> str:
    if re.match(r"(Run|Diff|Next)\s", lines[0]):      # what to read next is at the page's top
        whole = "\n".join(lines).replace("\\\n", "")
        found = re.findall(r"python -m .*?(?= {2,}\(|$)", whole, re.M)
        return "".join(f'<div class="command"><code>{escape(" ".join(line.split()))}</code></div>'
                       for line in found)
    if all(line.startswith("    ") for line in lines):
        return listing(algo, lines)
    text = " ".join(line.strip() for line in lines)
    head = HEAD.match(text)
    start = f"<strong>{head[0]}</strong>" if head else ""
    return f"<p>{start}{inline(algo, text[head.end() if head else 0:])}</p>"


def listing(algo: Algorithm, lines: list[str]) -> str:
    """Return indented lines. Functions of the file are links."""
    def link(found):
        line = algo.functions.get(found[0]) or algo.functions.get(f"Agent.{found[0]}")
        return f'<a class="toline" href="#L{line.start}">{found[0]}</a>' if line else found[0]

    text = escape("\n".join(line[4:] for line in lines), quote=False)
    text = re.sub(r"\w+(?= {2}|$)", link, text, flags=re.M)
    return f'<pre class="formula">{text}</pre>'


def inline(algo: Algorithm, text: str) -> str:
    """Return a sentence as HTML: code, links and symbols."""
    html = []
    for k, part in enumerate(re.split(r"`([^`]+)`", text)):
        if k % 2:
            letter = f"{GREEK[part]} (" if part in GREEK else ""
            html.append(f"{letter}<code>{escape(part)}</code>{')' if letter else ''}")
        else:
            html.append(symbols(algo, linked(escape(part, quote=False))))
    return "".join(html)


def linked(text: str) -> str:
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>',
                  text)
    text = re.sub(r"doi:(\S+?)(?=[).]*(?:\s|$))", r'<a href="https://doi.org/\1">doi:\1</a>', text)
    text = re.sub(r"algos/(\w+)\.py", lambda found: f'<a href="{found[1]}.html">{found[1]}.py</a>'
                  if found[1] in algorithms() else found[0], text)
    return re.sub(r"benchmarks/(README|decisions)\.md",
                  r'<a href="../benchmarks/\1.html">\g<0></a>', text)


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
