"""The atlas of silent bugs: a table of the rows of benchmarks/atlas.jsonl, and a page per bug."""
import json
import re
from html import escape

from benchmarks.suite import HERE, ROOT
from docs import page
from docs.algorithm import algorithms
from utils.files import read_lines

PATH = HERE / "atlas.jsonl"
FIGURE = "benchmarks/figures/atlas.svg"
# Symptom -> what the name of the first separating metric has. The first that fits counts.
SYMPTOMS = {"a gradient norm": "grad_norm", "a loss": "loss",
            "the critic's values": r"^val|^q\d?_|^explained_variance|^td_error|^spread",
            "the policy": "^kl|^entropy|^logp|^clip_frac|^alpha|^ratio"}
COLUMNS = ("bug", "file", "environment", "share of the clean gain that is lost",
           "first metric that separates")


def rows() -> list[dict]:
    """Return the rows of atlas.jsonl: bugs that ended a run, then by what is lost."""
    return sorted(read_lines(PATH), key=lambda row: (row["lost"][0] is not None,
                                                     -(row["lost"][0] or 0)))


def pages() -> dict[str, str]:
    """Return path -> Markdown of the atlas and of each bug; nothing if there are no rows."""
    bugs = {}
    for row in rows():
        bugs.setdefault(row["bug"], []).append(row)
    found = {f"{address(bug)}.md": bug_page(bug, same) for bug, same in bugs.items()}
    return {"atlas.md": index(rows())} | found if found else {}


def links(algo: str) -> str:
    """Return a line with links from an algorithm's page, or ""."""
    bugs = dict.fromkeys(row["bug"] for row in rows() if file_of(row["bug"]) == algo)
    found = ", ".join(f'<a href="../{address(bug)}.html">{bug}</a>' for bug in bugs)
    return found and f"<p>Silent bugs of this file, measured: {found}.</p>"


def address(bug: str) -> str:
    """Return atlas/ID, or atlas/ID-in-a2c for ID@a2c."""
    return f"atlas/{re.sub(r'[^A-Za-z0-9_-]+', '-in-', bug)}"


def file_of(bug: str) -> str:
    """Return the algorithm whose file has the bug."""
    return bug.partition("@")[2] or bug.partition("-")[0]


def entry(bug: str) -> dict:
    """Return the catalogue's entry, with the lines of its diff."""
    gone = {"wrong": "The lines that this bug edits have changed since.", "found": "", "diff": []}
    return next((each for each in algorithms()[file_of(bug)].bugs
                 if each["id"] == bug.partition("@")[0]), gone)


# ---- what a row says


def number(x: float | None) -> str:
    return "-" if x is None else f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def share(x: float | None) -> str:
    return "-" if x is None else f"{round(100 * x)}%"


def interval(values: list, told) -> str:
    middle, low, high = map(told, values)
    return middle if None in values else f"{middle} [{low}, {high}]"


def lost(row: dict) -> str:
    ended = row["planted"].count(None)
    return f"ends {ended} of {len(row['planted'])} runs" if ended else interval(row["lost"], share)


def symptom(row: dict) -> str:
    _, low, high = row["lost"]
    if None in row["planted"]:
        return "the run ends"
    if low is not None and low <= 0 <= high:
        return "costs nothing here"
    return next((name for name, pattern in SYMPTOMS.items()
                 if re.search(pattern, row["metric"] or "")),
                "another metric" if row["metric"] else "no metric")


# ---- pages


def index(found: list[dict]) -> str:
    figure = (f"![Share of the clean file's gain that each bug loses]({FIGURE})"
              if (ROOT / FIGURE).exists() else "")
    return f"""# The atlas of silent bugs

Each row is a known bug: we planted it in an algorithm file and trained that file beside the clean
one, on the same task with the same seeds. The share that is lost is the difference between their
returns in the last tenth of training, divided by what the clean file gains, with its 95% bootstrap
interval over seeds.

{figure}

A metric of `progress.csv` separates the two where all seeds of one lie above all seeds of the
other for three successive twentieths of the run. A symptom is the kind of the first metric that
separates, or "costs nothing here" if the interval contains 0.

{page.raw(table(found))}
"""


def table(found: list[dict]) -> str:
    """Return the table of rows, with the attributes by which site.js filters them."""
    body = ""
    for row in found:
        algo, bug = file_of(row["bug"]), row["bug"]
        metric = f"<code>{row['metric']}</code>, step {row['step']:,}" if row["metric"] else "none"
        link = f'<a href="{address(bug)}.html" title="{escape(entry(bug)["wrong"])}">{bug}</a>'
        cells = (link, f'<a href="algos/{algo}.html">{algo}.py</a>', row["env"], lost(row), metric)
        body += (f'<tr data-algorithm="{algo}" data-symptom="{symptom(row)}">'
                 f"{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n")
    return ('<div class="scroll"><table data-filters="algorithm symptom"><thead><tr>'
            f"{''.join(f'<th>{name}</th>' for name in COLUMNS)}</tr></thead><tbody>\n{body}</tbody>"
            "</table></div>")


def bug_page(bug: str, found: list[dict]) -> str:
    """Return the page of a bug, with a section for each environment."""
    told, algo = entry(bug), file_of(bug)
    source = f"Where it was found: {escape(told['found'].rstrip('.'))}. " if told["found"] else ""
    diff = f'<div class="bug">{page.bug_diff(told)}</div>' if told["diff"] else ""
    parts = [f"---\norphan: true\n---\n\n# {bug}", page.raw(
        f'<p class="lead">{escape(told["wrong"])}</p><p>{source}It is planted in <a href="../algos/'
        f'{algo}.html">{algo}.py</a>. <a href="../atlas.html">All bugs of the atlas</a></p>{diff}')]
    for row in found:
        parts += [f"## On {row['env']}", page.raw(measured(row))]
    return "\n\n".join(parts) + "\n"


def measured(row: dict) -> str:
    """Return the curves and the numbers of a row."""
    pair = escape(json.dumps({"steps": row["steps"], "curves": row["curves"]}))
    body = ""
    for name, to in zip(("clean", "planted"), row["steps_to"]):
        ends = row[name]
        mean = None if None in ends else sum(ends) / len(ends)
        body += (f"<tr><th>{name}</th><td>{number(mean)}</td><td>{len(ends)}: "
                 f"{'; '.join(map(number, ends))}</td>"
                 f"<td>{number(to) if to else 'never'}</td></tr>")
    cost = (f"The bug {lost(row)}." if None in row["planted"] else
            f"Planted minus clean: {interval(row['difference'], number)}. The bug loses {lost(row)}"
            " of what the clean file gains. Brackets hold 95% bootstrap intervals over seeds.")
    shown = (f"The first metric of progress.csv that separates them is <code>{row['metric']}</code>"
             f", by step {row['step']:,}." if row["metric"] else
             "No metric of progress.csv separates them before the end.")
    caught = (f"<p>The test that catches it: <code>{escape(row['caught'])}</code></p>"
              if row.get("caught") else "")
    settings = f" with {escape(row['settings'])}" if row["settings"] else ""
    return (
        f'<div class="chart" data-pair="{pair}"></div><noscript><p>The curves need JavaScript.</p>'
        "</noscript><p>A curve is the mean return over seeds, for each twentieth of the run.</p>"
        '<div class="scroll"><table><thead><tr><th></th><th>return at the end</th><th>seeds, and '
        "the return of each</th><th>steps to 80% of the clean gain</th></tr></thead><tbody>"
        f"{body}</tbody></table></div><p>{cost}</p><p>{shown}</p>{caught}"
        f"<p>{row['steps']:,} steps{settings}, commit {row['commit']}. To repeat it:</p>"
        f'<div class="command"><code>python -m benchmarks.atlas train --out DIR --bugs {row["bug"]}'
        "</code></div>")
