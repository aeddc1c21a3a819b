"""LaTeX to MathML, for equations and as a Sphinx extension, and the font that it is drawn with."""
import re
from pathlib import Path

import ziamath
from docutils.nodes import SkipNode
from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont
from latex2mathml.converter import convert

WORD = r"\\mathrm\{(?:[^{}\\]|\\_){2,}\}"
AFTER_WORD = re.compile(rf"({WORD})\s+(?=[A-Za-z]|\\(?:mathrm|delta|eta|pi|sigma|nabla))")
BEFORE_WORD = re.compile(rf"(\d|[A-Za-z]\))\s+(?={WORD})")
LETTERS = re.compile(r'(?:<mi mathvariant="normal">[^<]+</mi>)+')
# Latin, accents, Greek, punctuation, arrows, operators, technical signs, italic and script letters.
BLOCKS = [range(0x20, 0x180), range(0x2B0, 0x400), range(0x2010, 0x2070), range(0x20D0, 0x2100),
          range(0x2100, 0x2300), range(0x2308, 0x2330), range(0x1D400, 0x1D800)]
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
    spaced = BEFORE_WORD.sub(r"\1 \\, ", AFTER_WORD.sub(r"\1 \\, ", latex))
    found = LETTERS.sub(merged, convert(spaced, display=display))
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


def write_font(folder: Path) -> None:
    """Write STIX Two Math, which the package ziamath brings, in the format of browsers."""
    options = Options(layout_features=["*"], notdef_outline=True)
    options.flavor = "woff"
    subset = Subsetter(options)
    subset.populate(unicodes=[code for block in BLOCKS for code in block])
    font = TTFont(Path(ziamath.__file__).parent / "fonts/STIXTwoMath-Regular.ttf")
    subset.subset(font)
    font.flavor = "woff"
    folder.mkdir(parents=True, exist_ok=True)
    font.save(folder / "STIXTwoMath.woff")


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
