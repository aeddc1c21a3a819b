"""LaTeX to MathML, for equations and as a Sphinx extension."""
import re

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

WORD = r"\\mathrm\{(?:[^{}\\]|\\_){2,}\}"
AFTER_WORD = re.compile(rf"({WORD})\s+(?=[A-Za-z]|\\(?:mathrm|delta|eta|pi|sigma|nabla))")
LETTERS = re.compile(r'(?:<mi mathvariant="normal">[^<]+</mi>)+')
# A minus after =, a comma or a bracket is a sign, not a difference.
SIGN = re.compile(r"(<mo[^>]*>&#x000(?:3D|2C|28|5B);</mo>(?:<mrow>)?)<mo>(?=&#x02212;)")
NAMED = re.compile(r"<mo>([A-Za-z]{3,})</mo>")


def parts(latex: str) -> list[str]:
    r"""Split LaTeX at each \quad outside of braces and brackets, so that lines can wrap there."""
    found, depth, piece = [], 0, ""
    for token in re.findall(r"\\[A-Za-z]+|\\.|[^\\]", latex, re.S):
        depth += (token in ("{", "\\left", "\\begin")) - (token in ("}", "\\right", "\\end"))
        if token == "\\quad" and depth == 0:
            found.append(piece)
            piece = ""
        else:
            piece += token
    return [piece.strip() for piece in [*found, piece]]


def mathml(latex: str, display: str = "inline") -> str:
    """Return MathML. Words of several letters get a thin space beside letters."""
    latex = re.sub(r"\\log (?=[A-Za-z]|\\(?!left))", r"\\log \\, ", latex)
    latex = re.sub(r"(?<=[A-Za-z)]) \\log\b", r" \\, \\log", latex)
    found = LETTERS.sub(merged, convert(AFTER_WORD.sub(r"\1 \\, ", latex), display=display))
    found = found.replace('">&#x0007C;', '" lspace="0" rspace="0">&#x0007C;')     # |x|
    found = SIGN.sub(r'\1<mo form="prefix" lspace="0" rspace="0">', found)
    found = found.replace("<mi>;</mi>", '<mo lspace="0" rspace="0.2em">;</mo>')
    return NAMED.sub(r'<mo lspace="0.1em" rspace="0.17em">\1</mo>', found)


def merged(letters: re.Match) -> str:
    """Return one element for an upright word instead of one for each letter."""
    word = "".join(re.findall(r">([^<]+)</mi>", letters[0]))
    return f"<mi>{word}</mi>" if letters[0].count("<mi") > 1 else letters[0]


def equation(latex: str) -> str:
    """Return the parts of equations, each of which begins a new line."""
    lines = ["".join(f"<span>{mathml(part, 'block')}</span>" for part in parts(row))
             for row in latex.splitlines()]
    return '<span class="row"></span>'.join(lines)


# ---- Sphinx: formulas in notebooks and Markdown


def visit_inline(writer, node):
    writer.body.append(mathml(node.astext()))
    raise SkipNode


def visit_block(writer, node):
    writer.body.append(f'<div class="formula">{mathml(node.astext(), "block")}</div>')
    raise SkipNode



def setup(app):
    app.add_html_math_renderer("latex2mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True}
