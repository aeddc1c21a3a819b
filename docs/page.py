"""The page of an algorithm: idea, source, shapes, curves and planted bugs."""
import re
from functools import cache
from html import escape

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from docs import prose
from docs.algorithm import LETTERS, Algorithm, algorithms, children, ideas, spell_letters
from docs.mathml import equation

FENCE = "`" * 6
# What a section holds, said above it.
LEADS = {
    "config": "The settings, each with its meaning; `--help` prints them.",
    "data types": "The rollout or the batch: what every array means.",
    "train": "The loop; how data are collected; `update`, one learning phase.",
    "losses": "The losses and their mathematics.",
    "agent": "The networks, and how the policy acts."}


def page(algo: Algorithm, results: str, measured: str = "") -> str:
    """Return the Markdown of an algorithm's page.

    results     the table of its runs
    measured    links to what its bugs cost
    """
    short, idea, _ = ideas()[algo.name]
    return "\n\n".join([
        f"# {algo.title}",
        raw(f'<p class="lead">{prose.inline(algo, idea[0].upper() + idea[1:])}.</p>'
            f'<p class="paper">{prose.source(algo)}</p>{family(algo)}'),
        "## The idea", raw(prose.prose(algo)),
        f"## The source of {algo.name}.py", raw(switch(algo)),
        *(part for name, lines in algo.sections for part in section(algo, name, lines)),
        *next_files(algo),
        "## Shapes", raw(shapes(algo)),
        "## Learning curves", raw(chart(algo)), results,
        *(["## Silent bugs", raw(measured + silent_bugs(algo))] if algo.bugs else [])])


def raw(html: str) -> str:
    return f"{FENCE}{{raw}} html\n{html}\n{FENCE}"


def family(algo: Algorithm) -> str:
    """Return links to the parent, this file and its children."""
    def link(name):
        return f'<a href="{name}.html">{name}</a>'
    steps = [link(algo.parent)] if algo.parent else []
    steps.append(f"<strong>{algo.name}</strong>")
    if below := children(algo.name):
        steps.append(", ".join(map(link, below)))
    return f'<p class="family">{" → ".join(steps)} <a href="../index.html">the ladder</a></p>'


# ---- the source


@cache
def highlighted(algo: Algorithm) -> list[str]:
    """Return each line as HTML."""
    return highlight(algo.text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n")


def linked(algo: Algorithm, line: str) -> str:
    """Return a line in which a call of a function with an equation links to it."""
    def link(found):
        names = [name for name in algo.equations if name.rpartition(".")[2] == found[1]]
        return found[0] if len(names) != 1 else (
            f'<a class="eqref" href="#eq-{names[0]}">{found[0]}</a>')

    return re.sub(r'<span class="n">(\w+)</span>(?=<span class="p">\()', link, line)


def section(algo: Algorithm, name: str, lines: range) -> list[str]:
    """Return the heading and the lines of a section."""
    code = f'<div class="highlight"><pre class="source">{rows(algo, lines)}</pre></div>'
    if name == "docstring":
        new = sum(number in algo.new for number in lines)
        told = f", {new} of them new since {algo.parent}.py" if algo.parent else ""
        code = (f'<details class="docstring"><summary>{len(lines)} lines, as above'
                f"{told}</summary>{code}</details>")
    lead = LEADS.get(name)
    return [f"### {name}", raw((f"<p>{prose.inline(algo, lead)}</p>" if lead else "") + code)]


def rows(algo: Algorithm, lines: range) -> str:
    """Return lines as HTML, with its equations above a function.

    Runs of lines that the parent has too get a bar that unfolds them. An equation is folded
    if its whole function is.
    """
    new, html, run = set(algo.new), [], []
    starts = {algo.functions[name].start: name for name in algo.equations}

    def close():
        if run and algo.parent:
            count = sum('class="line"' in row for row in run)
            noun = "line" if count == 1 else "lines"
            html.append(f'<button class="fold" aria-expanded="false">… {count} {noun} as in '
                        f'{algo.parent}.py</button><span class="same">{"".join(run)}</span>')
        else:
            html.extend(run)
        run.clear()

    for number in lines:
        if name := starts.get(number):
            if new.isdisjoint(algo.functions[name]):
                run.append(typeset(algo, name))
            else:
                close()
                html.append(typeset(algo, name))
        kind = "line new" if number in new else "line"
        row = (f'<span class="{kind}" id="L{number}"><a class="ln" href="#L{number}" '
               f'tabindex="-1" data-n="{number}"></a>'
               f"{linked(algo, highlighted(algo)[number - 1])}\n</span>")
        if number in new:
            close()
            html.append(row)
        else:
            run.append(row)
    close()
    return "".join(html)


def typeset(algo: Algorithm, name: str) -> str:
    """Return the equations of a function."""
    return (f'<span class="eq" id="eq-{name}" tabindex="0" role="group" '
            f'aria-label="Equations of {name}">{equation(algo.equations[name])}</span>')


def switch(algo: Algorithm) -> str:
    """Return the switch between the whole file and new lines, and links to the next files."""
    parts = ['<button data-view="whole" aria-pressed="true">whole file</button>']
    if algo.parent:
        parts.append(f'<button data-view="new" aria-pressed="false">only what is new since '
                     f'{algo.parent}.py: {len(algo.new)} lines</button>')
    parts += [f'<a href="#next-{name}">what {name}.py adds</a>' for name in children(algo.name)]
    note = ("<p>An equation stands above the function that computes it. Hover over underlined "
            "names, or reach them with Tab: a call shows its equation.</p>")
    if algo.parent:
        note += (f'<p><a id="new"></a>{len(algo.new)} lines are new since <a href="'
                 f'{algo.parent}.html">{algo.parent}.py</a>: {algo.new_code} of code, the others '
                 f'docstring, comments and blank lines. <a href="{algo.parent}.html#next-'
                 f'{algo.name}">The diff</a> also shows the lines that are gone.</p>')
    return (f'{note}<div class="switch" role="group" aria-label="Lines to show">'
            f'{"".join(parts)}</div>')


def next_files(algo: Algorithm) -> list[str]:
    """Return the diff from this file to each of its children."""
    below = [algorithms()[name] for name in children(algo.name)]
    if not below:
        return []
    return ["## What the next files add", *(raw(diff(algo, child)) for child in below)]


def diff(algo: Algorithm, child: Algorithm) -> str:
    docstring, code = [], []
    end = child.tree.body[0].end_lineno
    for sign, number, text in child.diff:
        html = docstring if number <= end else code
        if sign == "@":
            html.append(f'<span class="hunk">{escape(text)}\n</span>')
            continue
        inner = escape(text) if sign == "-" else highlighted(child)[number - 1]
        kind = {"+": "add", "-": "del", " ": "ctx"}[sign]
        at = "" if sign == "-" else number
        html.append(f'<span class="{kind}" data-n="{at}">{sign} {inner}\n</span>')
    gone = sum(sign == "-" for sign, *_ in child.diff)
    parts = [f'<div class="highlight"><pre class="diff">{"".join(html)}</pre></div>'
             for html in (docstring, code)]
    words = sum(number <= end for number in child.new)
    return (f'<details class="next" id="next-{child.name}"><summary><strong>{child.name}.py'
            f"</strong> adds {len(child.new)} lines, {child.new_code} of them code, and drops "
            f'{gone}</summary><p><a href="{child.name}.html">{escape(child.title)}</a>: '
            f"{prose.inline(child, ideas()[child.name][1])}. Line numbers are those of "
            f'{child.name}.py.</p><details class="docdiff"><summary>docstring: {words} new lines'
            f"</summary>{parts[0]}</details>{parts[1]}</details>")


def shapes(algo: Algorithm) -> str:
    """Return the file's named shapes, and the letters that occur in its shapes."""
    used = {letter for written in algo.shape_letters for letter in written.split()}
    names = "".join(f"<tr><td><code>{name}</code></td><td><code>{escape(written)}</code></td>"
                    f"<td>{escape(comment or 'a single number')}</td></tr>"
                    for name, (written, comment) in algo.aliases.items())
    letters = spell_letters(word for word in LETTERS if word in used and not word.isdigit())
    return (f"<p>The tests check every shape at every call. Letters: {letters}.</p>"
            f'<div class="scroll"><table><thead><tr><th>name</th><th>annotation</th><th>meaning'
            f"</th></tr></thead><tbody>{names}</tbody></table></div>")


# ---- runs and bugs


def chart(algo: Algorithm) -> str:
    return (f'<div class="chart" data-algo="{algo.name}"></div><noscript><p>The curves need '
            "JavaScript. The table below has the results of every run.</p></noscript>"
            f'<script src="../_static/curves/{algo.name}.js"></script>')


def silent_bugs(algo: Algorithm) -> str:
    """Return every planted bug, folded."""
    return ("<p>Broken reinforcement learning code rarely crashes; it learns less. "
            f"<code>python -m tests.mutants</code> plants {len(algo.bugs)} bugs in this file, one "
            "at a time, and each has to make a test fail. Open a bug to see the change.</p>"
            + "".join(map(bug, algo.bugs)))


def bug(bug: dict) -> str:
    return (f'<details class="bug"><summary>{escape(bug["wrong"])}</summary>{bug_diff(bug)}'
            f"<p>Where it was found: {escape(bug['found'].rstrip('.'))}.</p></details>")


def bug_diff(bug: dict) -> str:
    html = []
    for line in bug["diff"]:
        kind = {"+": "add", "-": "del", "@": "hunk"}.get(line[0], "ctx")
        text = re.sub(r"^@@ -(\d+).*", r"line \1", line)
        html.append(f'<span class="{kind}">{escape(text)}\n</span>')
    return f'<div class="highlight"><pre class="diff">{"".join(html)}</pre></div>'
