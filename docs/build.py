"""Write the sources of the site into a temporary folder and let Sphinx build it."""
import io
import re
import shutil
import tempfile
from contextlib import redirect_stderr
from html import escape
from pathlib import Path

import nbformat
import ziamath
from sphinx.application import Sphinx

from docs import atlas, page, results
from docs.algorithm import ROOT, algorithms, ideas

HERE = Path(__file__).resolve().parent
FONT = Path(ziamath.__file__).parent / "fonts/STIXTwoMath-Regular.ttf"
# What the site has at its place in the repository, so links between them hold.
DOCUMENTS = ("README.md", "docs/course.md", "docs/training.md", "docs/howto.md", "docs/games.md",
             "docs/settings.md", "docs/cluster.md", "docs/debugging.md", "benchmarks/README.md",
             "benchmarks/all.md", "benchmarks/decisions.md", "benchmarks/tried.csv",
             "notebooks/README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff")
SETTINGS = {
    "project": "plainrl", "html_title": "plainrl", "html_theme": "furo",
    "extensions": ["myst_nb", "docs.mathml"], "html_math_renderer": "latex2mathml",
    "nb_execution_mode": "off", "myst_enable_extensions": ["dollarmath"],
    "myst_heading_anchors": 4, "html_static_path": ["_static"], "html_css_files": ["site.css"],
    "html_js_files": ["site.js", "curves.js"], "html_copy_source": False,
    "html_show_sourcelink": False, "html_show_sphinx": False, "html_use_index": False,
    "pygments_style": "friendly",
    "suppress_warnings": ["misc.highlighting_failure"]}


def build(out: Path) -> str:
    """Build the site in `out`. Return Sphinx's warnings."""
    clear(out)
    with tempfile.TemporaryDirectory() as folder:
        source, warnings = Path(folder, "source"), io.StringIO()
        write_sources(source)
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


def write_sources(source: Path) -> None:
    static = source / "_static"
    shutil.copytree(HERE / "assets", static)
    shutil.copy(FONT, static)
    shutil.copytree(ROOT / "benchmarks/figures", source / "benchmarks/figures")
    with redirect_stderr(io.StringIO()):        # plot.py notes there which runs it pools
        for name, algo in algorithms().items():
            results.write_curves(name, static / "curves")
            write(source / f"algos/{name}.md",
                  page.page(algo, results.markdown(name), atlas.links(name)))
    for path, text in atlas.pages().items():
        write(source / path, text)
    for path in DOCUMENTS:
        text = (ROOT / path).read_text(encoding="utf-8")
        write(source / path, re.sub(r"\]\((algos/\w+)\.py\)", r"](\1.md)", text))
    write_notebooks(source / "notebooks")
    write(source / "explorer.md", explorer())
    write(source / "index.md", index())


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_notebooks(folder: Path) -> None:
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


def index() -> str:
    """Return the start page: two ways in, and the ladder."""
    begin = "".join(f'<li><a href="notebooks/{name}.html">{escape(title)}</a>{escape(rest)}</li>'
                    for title, name, rest in tutorials())
    measured = bool(atlas.rows())
    bugs = (' The <a href="atlas.html">atlas</a> shows what silent bugs cost.' if measured else "")
    commands = re.findall(r"^```sh\n(.+)$", (ROOT / "README.md").read_text("utf-8"), re.M)
    return f"""# plainrl

{page.raw(f'''<p class="lead">Deep reinforcement learning algorithms that you can read end to end.
Each algorithm is one file. Its page shows the idea, the equations above the functions that compute
them, and every published run.</p>
<div class="ways"><section><h2>I am new</h2><p>Read the notebooks in order. Each builds an idea in
small steps, with exercises. The outputs shown are stored in the repository, and a test runs every
notebook and compares them.</p><ol>{begin}</ol></section>
<section><h2>I know RL</h2><p>Climb the ladder below. A file is its parent plus one idea, so the
new lines are the lesson. Open a file, or the number behind it to see the diff.</p>
<p>Start with <a href="algos/ppo.html">PPO</a> or <a href="algos/sac.html">SAC</a>, or compare
all published runs in the <a href="explorer.html">explorer</a>.{bugs}</p>
<div class="command"><code>{escape(commands[0])}</code></div>
<p>Games: with <code>pip install -e '.[minatar]'</code>, <code>python -m algos.ppo --env
MinAtar/Breakout-v1</code> learns in minutes. <a href="docs/games.html">More games</a></p>
</section></div>''')}

## The ladder

Each file adds its idea, and so many lines, to the one that it stands under.

{ladder()}

{toctree("Learn", [f"{k}. {title} <notebooks/{name}>"
                    for k, (title, name, _) in enumerate(tutorials(), 1)])}
{toctree("Algorithms", [f"{ideas()[name][0]} <algos/{name}>" for name in algorithms()])}
{toctree("Results", ["Explorer <explorer>", "Benchmarks <benchmarks/README>",
                     "benchmarks/all", "benchmarks/decisions",
                     *(["Silent bugs <atlas>"] if measured else [])])}
{toctree("Use", ["The README <README>", "docs/course", "docs/training", "docs/howto", "docs/games",
                 "docs/settings", "docs/cluster", "docs/debugging", "CONTRIBUTING", "CHANGELOG",
                 "notebooks/README"])}
"""


def ladder(parent: str = "", indent: str = "") -> str:
    """Return a nested list: a file, and below it those that it is the parent of."""
    rows = []
    for algo in algorithms().values():
        if algo.parent == parent:
            short, idea, _ = ideas()[algo.name]
            more = (f' (<a href="algos/{parent}.html#next-{algo.name}">+{len(algo.new)}</a>)'
                    if parent else "")
            rows += [f"{indent}- [{short}](algos/{algo.name}.md){more}: {idea}",
                     *ladder(algo.name, indent + "  ").splitlines()]
    return "\n".join(rows)


def tutorials() -> list[tuple[str, str, str]]:
    """Return (title, file, what else is said) of each notebook, from notebooks/README.md."""
    text = (ROOT / "notebooks/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[\d+\. ([^\]]+)\]\((\w+)\.ipynb\)([^|]*?) \|", text, re.M)
    return rows


def toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def explorer() -> str:
    scripts = "".join(f'<script src="_static/curves/{name}.js"></script>' for name in algorithms())
    return f"""# Explorer

{page.raw('<p>All stored runs that have a learning curve. Choose an environment and a number of '
          'steps, then lines. The address holds your choice, so you can share it.</p>'
          '<div class="chart explorer"></div><noscript><p>The explorer needs JavaScript. '
          '<a href="benchmarks/README.html">Benchmarks</a> has the same results as tables and '
          f'pictures.</p></noscript>{scripts}')}

The tables, pictures and commands are on the page [Benchmarks](benchmarks/README.md).
"""
