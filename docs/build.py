"""Write the sources of the site into a temporary folder and let Sphinx build it."""
import io
import posixpath
import re
import shutil
import tempfile
from contextlib import redirect_stderr
from html import escape
from pathlib import Path

import nbformat
from sphinx.application import Sphinx

from docs import ladder, page, results
from docs.algorithm import ROOT, algorithms, ideas
from docs.mathml import write_font

HERE = Path(__file__).resolve().parent
# Documents of the repository that become pages, and their place on the site.
DOCUMENTS = {
    "README.md": "readme.md", "docs/howto.md": "howto.md", "docs/debugging.md": "debugging.md",
    "docs/settings.md": "settings.md",
    "benchmarks/README.md": "benchmarks/results.md",
    "benchmarks/decisions.md": "benchmarks/decisions.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
SETTINGS = {
    "project": "plainrl", "html_title": "plainrl", "html_theme": "furo",
    "extensions": ["myst_nb", "docs.mathml"], "html_math_renderer": "latex2mathml",
    "nb_execution_mode": "off", "myst_enable_extensions": ["dollarmath"],
    "myst_heading_anchors": 4, "html_static_path": ["_static"], "html_css_files": ["site.css"],
    "html_js_files": ["site.js", "curves.js"], "html_copy_source": False,
    "html_show_sourcelink": False, "html_show_sphinx": False, "html_use_index": False,
    "pygments_style": "friendly",
    "suppress_warnings": ["misc.highlighting_failure"]}


def build(out: Path, only: list[str] | None = None, notebooks: bool = True) -> str:
    """Build the site in `out`. Return Sphinx's warnings.

    only        algorithms that get a page; None: all
    notebooks   render the notebooks, with the outputs that are stored in them
    """
    clear(out)
    with tempfile.TemporaryDirectory() as folder:
        source, warnings = Path(folder, "source"), io.StringIO()
        write_sources(source, only or list(algorithms()), notebooks)
        built = Path(folder, "built/html")      # myst-nb also writes beside this folder
        app = Sphinx(source, None, built, Path(folder, "doctrees"), "html", SETTINGS,
                     status=None, warning=warnings)
        app.build(force_all=True)
        shutil.copytree(built, out, dirs_exist_ok=True)
    (out / ".nojekyll").touch()     # GitHub Pages then serves _static
    return re.sub(r"\x1b\[[\d;]*m", "", warnings.getvalue())       # without colours


def clear(out: Path) -> None:
    """Empty a folder that an earlier build wrote. FileExistsError: it holds something else."""
    if out.exists() and any(out.iterdir()):
        if not (out / ".buildinfo").exists():
            raise FileExistsError(f"{out} is not empty and holds no site; choose another folder")
        shutil.rmtree(out)


def write_sources(source: Path, only: list[str], notebooks: bool) -> None:
    static = source / "_static"
    shutil.copytree(HERE / "assets", static)
    write_font(static / "fonts")
    (source / "algos").mkdir()
    with redirect_stderr(io.StringIO()):        # plot.py notes there which runs it pools
        for name in only:
            results.write_curves(name, static / "curves")
            text = page.page(algorithms()[name], results.markdown(name))
            write(source / f"algos/{name}.md", text, only, notebooks)
    for path, place in DOCUMENTS.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        if path == "README.md":     # its pictures are large, and the site shows more
            text = re.sub(r"^!\[.*\n", "", text, flags=re.M)
        write(source / place, relinked(text, path, place, notebooks), only, notebooks)
    shutil.copytree(ROOT / "benchmarks/figures", source / "benchmarks/figures")
    if notebooks:
        write_notebooks(source / "notebooks")
    write(source / "explorer.md", explorer(only), only, notebooks)
    write(source / "index.md", index(only, notebooks), only, notebooks)


def write(path: Path, text: str, only: list[str], notebooks: bool) -> None:
    """Write a page. Links to algorithms that get no page become plain text."""
    for name in algorithms().keys() - set(only):
        text = re.sub(rf'<a (?:class="\w+" )?href="(?:algos/)?{name}\.html[^"]*">(.*?)</a>',
                      r"\1", text)
        text = re.sub(rf"\[([^\]]+)\]\((?:\.\./)?algos/{name}\.md\)", r"\1", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def relinked(text: str, path: str, place: str, notebooks: bool) -> str:
    """Return a document with links to its place on the site. Others become plain text."""
    def link(found):
        picture, label, target, part = found[1], found[2], found[3], found[4] or ""
        if re.match(r"https?:", target) or not target:
            return found[0]
        named = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if picture:
            return found[0] if (ROOT / named).exists() else label
        where = site_of(named, notebooks)
        start = posixpath.dirname(place) or "."
        return f"[{label}]({posixpath.relpath(where, start)}{part})" if where else label
    return LINK.sub(link, text)


def site_of(path: str, notebooks: bool) -> str:
    """Return the page that shows a file of the repository, or ""."""
    if found := re.fullmatch(r"algos/(\w+)\.py", path):
        return f"algos/{found[1]}.md" if found[1] in algorithms() else ""
    if path.startswith("notebooks/") and path.endswith(".ipynb"):
        return path if notebooks else ""
    return DOCUMENTS.get(path, "index.md" if path == "notebooks/README.md" else "")


def write_notebooks(folder: Path) -> None:
    folder.mkdir()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with_one_title(notebook)
        nbformat.write(notebook, folder / path.name)


def with_one_title(notebook: nbformat.NotebookNode) -> None:
    """Turn every further title of a notebook into a heading, for the navigation."""
    for cell in notebook.cells[1:]:
        if cell.cell_type == "markdown" and "```" not in cell.source:
            cell.source = re.sub(r"^# ", "## ", cell.source, flags=re.M)


# ---- pages of the site's own


def index(only: list[str], notebooks: bool) -> str:
    """Return the start page: two ways in, and the ladder."""
    begin = "".join(f'<li><a href="notebooks/{name}.html">{escape(title)}</a>{escape(rest)}</li>'
                    for title, name, rest in tutorials()) if notebooks else ""
    commands = re.findall(r"^```sh\n(.+?)\n```", (ROOT / "README.md").read_text("utf-8"), re.M)
    return f"""# plainrl

{page.raw(f'''<p class="lead">Deep reinforcement learning algorithms that you can read end to end.
Each algorithm is one file. Its page shows the idea, the equations above the functions that compute
them, and every published run.</p>
<div class="ways"><section><h2>I am new</h2><p>Read the notebooks in order. Each builds an idea in
small steps, with exercises. The outputs shown are stored in the repository, and a test runs every
notebook and compares them.</p><ol>{begin}</ol></section>
<section><h2>I know RL</h2><p>Climb the ladder below. A file is its parent plus one idea, so the
new lines are the lesson. Open a file, or open the number on an edge to see the diff.</p>
<p>Start with <a href="algos/ppo.html">PPO</a> or <a href="algos/sac.html">SAC</a>, or compare
all published runs in the <a href="explorer.html">explorer</a>.</p>
<div class="command"><code>{escape(commands[0])}</code></div></section></div>''')}

## The ladder

{page.raw("<p>Each number counts the lines that a file adds to the one on its left.</p>"
          + ladder.svg())}

{table_of_ideas(only)}

{toctree("Learn", [f"{k}. {title} <notebooks/{name}>"
                    for k, (title, name, _) in enumerate(tutorials(), 1)] if notebooks else [])}
{toctree("Algorithms", [f"{ideas()[name][0]} <algos/{name}>" for name in only])}
{toctree("Results", ["Explorer <explorer>", "Benchmarks <benchmarks/results>",
                     "benchmarks/decisions"])}
{toctree("Use", ["The README <readme>", "settings", "howto", "debugging", "contributing"])}
"""


def table_of_ideas(only: list[str]) -> str:
    rows = [f"| [{ideas()[name][0]}](algos/{name}.md) | {ideas()[name][1]} |" for name in only]
    return "\n".join(["| file | idea |", "|---|---|", *rows])


def tutorials() -> list[tuple[str, str, str]]:
    """Return (title, file, what else is said) of each notebook, from notebooks/README.md."""
    text = (ROOT / "notebooks/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[\d+\. ([^\]]+)\]\((\w+)\.ipynb\)([^|]*?) \|", text, re.M)
    return rows


def toctree(caption: str, pages: list[str]) -> str:
    if not pages:
        return ""
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def explorer(only: list[str]) -> str:
    scripts = "".join(f'<script src="_static/curves/{name}.js"></script>' for name in only)
    return f"""# Explorer

{page.raw('<p>All stored runs that have a learning curve. Choose an environment and a number of '
          'steps, then lines. The address holds your choice, so you can share it.</p>'
          '<div class="chart explorer"></div><noscript><p>The explorer needs JavaScript. '
          '<a href="benchmarks/results.html">Benchmarks</a> has the same results as tables and '
          f'pictures.</p></noscript>{scripts}')}

The tables, pictures and commands are on the page [Benchmarks](benchmarks/results.md).
"""
