"""Make the tables, figures and numbers of the pages in PAGES.

    python -m benchmarks.table                      rewrite all between markers, and figures/
    python -m benchmarks.table --check              only say which parts are stale
    python -m benchmarks.table --add RUNS results   add a folder of runs to results.jsonl

A marker names a kind of table, or a figure, and the rows of results.jsonl that it shows, as
patterns of algorithm/environment/settings. No settings means the defaults; * before the algorithm
adds the peers; ! before a pattern leaves out what it matches.

    <!-- made: beside ppo/Hopper-v4/ -->        default settings beside others' results
    <!-- made: evals ppo/Hopper-v4/ -->         the same for evaluations
    <!-- made: settings ppo/*/gamma=* -->       commands, minutes, and what they reached
    <!-- made: mujoco.svg *ppo/Hopper-v4/ -->   learning curves
    ...
    <!-- end -->

Some kinds take no patterns:

    <!-- made: runs -->                         fill in `minutes` and `ends at` of this table,
                                                where a row has a command with a result
    <!-- made: caption mujoco.svg -->           what the runs of that figure end at
    <!-- made: verdict -->                      clear wins and losses beside peers
    <!-- made: source algos/ppo.py ppo_loss --> functions as they stand in the file
    <!-- made: size -->                         how many lines utils/ has
    <!-- made: atlas -->                        what bugs cost, and whether the doctor names them
    <!-- made: symptoms -->                     the first metric that shows a bug, by metric
    <!-- made: speed -->                        ratios of speed.jsonl (benchmarks/speed.py)
    <!-- made: takes -->                        the spaces that each algorithm takes
    <!-- made: details ppo -->                  what each detail of details.toml costs

Of rows with the same settings, those of this code alone are shown, if they are at least half
(benchmarks/agree.py). All others have their commit beside them. Brackets hold 95% percentile
bootstraps over seeds.
"""
import argparse
import ast
import json
import math
import re
import shlex
import sys
from collections import defaultdict
from contextlib import redirect_stderr
from fnmatch import fnmatch
from importlib import import_module
from io import StringIO
from pathlib import Path
from textwrap import fill

import numpy as np
from scipy.stats import ttest_ind

import plot
from benchmarks import details, suite
from benchmarks.suite import HERE, ROOT, flags, read, verdict
from diagnose import catalogue, doctor
from utils.command import flag
from utils.files import read_lines, read_table
from utils.run.code import ARITHMETIC, HELPERS
from utils.roles import PLACE, ROUNDING
from utils.spaces import KINDS

PAGES = ("README.md", "benchmarks/README.md", "benchmarks/all.md", "docs/games.md",
         "docs/settings.md", "docs/debugging.md", "docs/howto.md")
# Default settings, for any number of steps and rules of a game.
PLAIN = re.compile(r"(env_kwargs=\{[^}]*\},?)?(total_steps=[^,]*)?")
PART = re.compile(r"<!-- made: ([^\n]+) -->\n(.*?)<!-- end -->", re.DOTALL)
FREE = {flag(name) for name in PLACE | ROUNDING}    # flags that a command's result need not have
OLD_RULES = {"repeat_action_probability": 0, "episodic_life": True, "num_threads": 1}   # of Atari
Key = tuple[str, str, str, str]                 # env, library, algo, settings


# ---- Results

def of_result(result: dict) -> plot.RunData:
    """Return a run for plot.py. Stored curves have a mean per 1% of the steps; five are averaged.

    A peer stores only the settings that were changed, so they count as one setting.
    """
    peer, settings = result.get("library"), result["settings"]
    algo = f"{peer} {result['algo']}" if peer else result["algo"]
    x, y = np.array(result["curve"], float).T
    window = min(5, len(y))
    return plot.RunData(
        Path(result["id"]), algo, result["env"], result["seed"],
        ({"changed": suite.settings_of(result)} if peer else settings)
        | {"total_steps": result["total_steps"]}, x[window - 1:],
        np.convolve(y, np.full(window, 1 / window), "valid"), x[-1], steps([result]),
        result["total_steps"], *(returns([result], name)[0] for name in ("ends at", "eval")))


def steps(results: list[dict]) -> int:
    return int(results[0]["total_steps"])


def returns(results: list[dict], name: str) -> np.ndarray:
    """Return for each seed the mean of "eval", or what training "ends at"."""
    return np.array([suite.ends_at(result) if name == "ends at" else np.mean(result["eval"])
                     for result in results])


def ours(groups: dict[Key, list[dict]], plain: bool = True) -> list[tuple[str, str, list[dict]]]:
    """Return (environment, algorithm, results) of our runs with default settings, or with any."""
    return [(env, algo, results) for (env, library, algo, settings), results in groups.items()
            if library == "plainrl" and (not plain or PLAIN.fullmatch(settings))]


# ---- Cells

def older(results: list[dict]) -> str:
    """Return the commits of those of our results that are not known to be of this code."""
    named = [(result.get("git_commit") or "-").partition("-dirty") for result in results
             if "library" not in result and not verdict(result)]
    return " ".join(sorted({commit[:8] + changed for commit, changed, _ in named}))


def code(results: list[dict]) -> str:
    """Return the cell that says whether results are of this code, or of which commits."""
    return "-" if "library" in results[0] else older(results) or "this"


def estimate(values: np.ndarray) -> tuple[float, float, float]:
    """Return the mean and its interval, which is NaN for fewer than FEW different seeds."""
    if np.ptp(values) == 0:     # no interval for equal values either
        return float(values.mean()), np.nan, np.nan
    return plot.estimate(values, np.mean)


def mean(values: np.ndarray, bold: bool = False) -> str:
    return f"**{plot.cell(estimate(values))}**" if bold else plot.cell(estimate(values))


def minutes(results: list[dict]) -> str:
    """Return the minutes, at least 0.1, of the quickest run on a CPU: others may have shared it."""
    found = [run["seconds"] / 60 for run in results if run.get("machine", "CPU") == "CPU"]
    least = max(0.1, min(found, default=np.nan))
    return "-" if not found else f"{least:.1f}" if least < 9.5 else f"{least:.0f}"


def count(results: list[dict]) -> str:
    return f"{len(results)}{'*' * (len(results) < plot.FEW)}"


def published(run: dict, training: bool) -> list[tuple]:
    """Return others' figures: see `plot.published`. On Atari they are by OLD_RULES."""
    rules = {"num_threads": 1} | json.loads(run["changed"].get("env_kwargs", "{}"))
    if run["env"].startswith("ALE/") and rules != OLD_RULES:
        return []
    return plot.published(run["env"], run["algo"], steps([run]), training)


# ---- Tables

def peer_of(env: str, algo: str, results: list[dict], groups: dict[Key, list[dict]]) -> list[dict]:
    """Return a peer's results after as many steps, or []."""
    return next((peer for key, peer in groups.items() if (key[0], *key[2:]) == (env, algo, "")
                 and key[1] != "plainrl" and np.isclose(steps(peer), steps(results), rtol=0.01)),
                [])


def difference(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """Return mean(a) - mean(b) and its 95% interval (Welch's t), NaN for fewer than ENOUGH of each.

    Unlike a bootstrap, it needs no random numbers that could decide a close case.
    """
    if min(len(a), len(b)) < plot.ENOUGH or np.ptp(a) == np.ptp(b) == 0:
        return float(a.mean() - b.mean()), np.nan, np.nan
    low, high = ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    return float(a.mean() - b.mean()), float(low), float(high)


def won(a: np.ndarray, b: np.ndarray) -> int:
    """Return 1 if a is clearly above b, -1 if it is clearly below, else 0."""
    _, low, high = difference(a, b)
    return int(low > 0) - int(high < 0)


def beside(groups: dict[Key, list[dict]], name: str = "ends at") -> str:
    """Return our default results beside the best published and a peer's; a clear win is bold."""
    rows = []
    for env, algo, results in ours(groups):
        peer = peer_of(env, algo, results, groups)
        mine, theirs = returns(results, name), returns(peer, name)
        clear = won(mine, theirs) if peer else 0
        known = published(results[0], name == "ends at")
        rows.append({
            "environment": env, "algorithm": algo, "steps": steps(results),
            "seeds": count(results), name: mean(mine, clear > 0),
            "best published": f"{plot.cell(known[0][0])} ({known[0][1]})" if known else "-",
            "peer": mean(theirs, clear < 0) if peer else "-",
            "peer's seeds": count(peer) if peer else "-", "code": code(results)})
    return plot.table(rows)


def settings(groups: dict[Key, list[dict]]) -> str:
    """Return the command of each group of results, the minutes of a run, and what it reached."""
    return plot.table([{
        "command": f"`{command(results[0])}`", "minutes": minutes(results),
        "seeds": count(results), **{name: mean(returns(results, name))
                                    for name in ("ends at", "eval")}, "code": code(results),
    } for results in groups.values()])


def command(result: dict) -> str:
    """Return the command that makes a result, but for its seed."""
    words = ["--env", result["env"], *flags(result["changed"])]
    if "library" not in result:
        return shlex.join(["python", "-m", f"algos.{result['algo']}", *words])
    total = f"{result['total_steps']:.2g}".replace("+0", "")
    return shlex.join(["python", "-m", "benchmarks.sb3", "--algo", result["algo"], *words,
                       "--total-steps", total, "--out", "runs/sb3"])


def told_older(results: list[dict]) -> str:
    """Return a sentence that names the older commits behind results, if any."""
    return f" Runs of older commits: {older(results)}." if older(results) else ""


# ---- Tables whose commands are typed

def runs(text: str, groups: dict[Key, list[dict]], page: str) -> str:
    """Return a table with new cells in the columns `minutes` and `ends at`.

    Each row with a command gets its results. `ends at` is a mean over seeds, of eval where training
    has no episodes, with their number behind it, and a dagger if older code made them. "$OLD"
    stands for the page's OLD='...'.
    """
    lines, values = text.strip().splitlines(), dict(re.findall(r"^(\w+)='(.*)'$", page, re.M))
    columns = lines[0].split("|")
    for at, line in enumerate(lines):
        if told := re.search(r"`(python -m algos\.[^`]+)`", line):
            words = [values.get(word.removeprefix("$"), word) for word in shlex.split(told[1])]
            found = matching(words, groups)
            ends = returns(found, "ends at") if found else np.array(np.nan)
            if found and np.isnan(ends).all():      # it trains on no episodes of its own
                ends = returns(found, "eval")
            end = float(ends.mean())
            alike = [run for run in found if ("--bf16" in words) == bool(
                (run["changed"] | run.get("backend", {})).get("bf16"))]
            new = {"minutes": minutes(alike), "ends at": (
                plot.cell(end) + f" ({len(found)})" * bool(found) + "†" * bool(older(found)))}
            cells = [column.replace(name, new[name]) if (name := column.strip()) in new else cell
                     for column, cell in zip(columns, line.split("|"), strict=True)]
            lines[at] = "|".join(cells).rstrip()
    return "\n".join(lines)


def matching(words: list[str], groups: dict[Key, list[dict]]) -> list[dict]:
    """Return our results of a command. Settings that its results had by default may be in it."""
    given = by_flag(words)
    found = [run for env, algo, results in ours(groups, plain=False) for run in results
             if words[2:5] == [f"algos.{algo}", "--env", env]
             and by_flag(flags(run["changed"])).items() <= given.items()
             and given.items() <= by_flag(flags(run["settings"])).items()]
    return [run for run in found if verdict(run)] or found


def by_flag(words: list[str]) -> dict[str, object]:
    """Return flag -> its values, in a form that is equal in a command and in a result."""
    found = {}
    for word in words:
        if word.startswith("--"):
            name, found[word] = word, []
        elif word.startswith("{"):      # threads of the emulator change no result
            found[name] = {k: x for k, x in json.loads(word).items() if k != "num_threads"}
        elif found:
            found[name].append(float(word) if re.fullmatch(r"-?[\d.]+(e-?\d+)?", word) else word)
    return {name: x for name, x in found.items() if name not in FREE and x != {}}


# ---- Sentences

def caption(groups: dict[Key, list[dict]]) -> str:
    """Return what a figure of runs beside a peer's shows, and on what terms."""
    seeds = " or ".join(map(str, sorted({len(results) for results in groups.values()})))
    tried = {row["tried"] for row in read_table(HERE, "tried.csv")
             if any(row["algorithm"] == key[2] and row["environment"] == key[0] for key in groups)
             and not row["tried"].startswith(("speed:", "default", "stable-baselines3"))}
    return wrapped(
        f"*{seeds} seeds each; band: standard deviation. We chose our settings on these tasks, "
        f"from {len(tried)} that we [tried](benchmarks/tried.csv). stable-baselines3 uses [the "
        "same, unless its own suit it better](benchmarks/README.md#protocol). [How our PPO differs "
        "from that of OpenAI Baselines](docs/training.md#ppo-as-others-have-it)."
        + told_older(sum(groups.values(), [])) + "*")


def wrapped(text: str, indent: str = "") -> str:
    return fill(text, 128, subsequent_indent=indent, break_on_hyphens=False)


def wins(groups: dict[Key, list[dict]]) -> str:
    """Return where ours ends clearly above or below a peer, and where the means say so."""
    pairs = [(results, peer) for env, algo, results in ours(groups)
             if (peer := peer_of(env, algo, results, groups))]
    names = ", ".join(sorted({peer[0]["library"] for _, peer in pairs}, reverse=True))
    told = f"{names} ran beside {len(pairs)} of our rows. "
    fair = [pair for pair in pairs if min(map(len, pair)) >= plot.ENOUGH]
    if not fair:
        return wrapped(f"{told}To say who is better would take {plot.ENOUGH} seeds of each."
                       + told_older(sum((results for results, _ in pairs), [])))
    where = defaultdict(list)
    for pair in fair:
        (run, *_), both = pair[0], [returns(side, "ends at") for side in pair]
        sign = won(*both)
        where[sign].append(f"{run['algo']} on {run['env']} by {plot.cell(difference(*both))}")
    better, worse = ("; ".join(where[sign]) or "none" for sign in (1, -1))
    above = defaultdict(list)
    for mine, peer in pairs:
        if returns(peer, "ends at").mean() > returns(mine, "ends at").mean():
            above[mine[0]["env"]].append(mine[0]["algo"])
    named = ", ".join(f"{env} ({', '.join(algos)})" for env, algos in above.items()) or "none"
    return wrapped(
        f"Peers ({names}) ran beside {len(pairs)} [rows](benchmarks/README.md). {len(fair)} "
        f"have {plot.ENOUGH} or more seeds each. Ours is higher (Welch's 95% interval): {better}. "
        f"Lower: {worse}. We [tuned](benchmarks/tried.csv) ours more. "
        f"The peer's mean is higher in {sum(map(len, above.values()))} of {len(pairs)}: {named}."
        + told_older(sum((results for results, _ in fair), [])))


def takes() -> str:
    """Return which algorithms of the README take which spaces, as their Agents declare."""
    found, readme = defaultdict(list), (ROOT / "README.md").read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"\]\(algos/(\w+)\.py\):", readme))):
        kinds = import_module(f"algos.{name}").Agent.takes
        found[kinds["obs"], kinds["act"]].append(name)
    return plot.table([{"algorithms": ", ".join(names)} | {
        side: ", ".join(KINDS[kind].partition(" (")[0] for kind in kinds.split())
        for side, kinds in zip(("observations", "actions"), both)}
        for both, names in sorted(found.items(), key=lambda pair: pair[1])])


def source(path: str, *names: str) -> str:
    """Return functions as they stand in a file, without decorators."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    found = {node.name: "\n".join(lines[node.lineno - 1:node.end_lineno])
             for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.FunctionDef)}
    return "```python\n" + "\n\n\n".join(found[name] for name in names) + "\n```"


def size() -> str:
    """Return how long the helpers are, to ten lines."""
    lines = {path: len(path.read_text("utf-8").splitlines())
             for path in (ROOT / "utils").rglob("*.py")}
    near, learning = (sum(lines[ROOT / f"utils/{name}.py"] for name in names)
                      for names in (ARITHMETIC, HELPERS))
    names = ", ".join(f"`{name}.py`" for name in ARITHMETIC)
    return wrapped(f"An algorithm is one file, plus about {round(near, -1):,} shared lines (in "
                   f"`utils/`: {names}). Behind them, {round(learning - near, -1):,} lines wrap "
                   f"environments and store steps; {round(sum(lines.values()) - learning, -2):,} "
                   "keep runs and play them.")


# ---- The pages

def bugs() -> str:
    """Return what planted bugs cost, and how often diagnose/doctor.py names them."""
    rows = read_lines(HERE / "atlas.jsonl")
    ended = [row for row in rows if None in row["lost"]]
    costly = [row for row in rows if row not in ended and row["lost"][0] > 0.4]
    free = [row for row in rows if row not in ended and row["lost"][1] <= 0 <= row["lost"][2]]
    algos = {row["bug"].partition("@")[2] or row["bug"].partition("-")[0] for row in rows}
    told = doctor.summary(read_lines(doctor.SCORES))
    return wrapped(
        "We planted known bugs, trained each with at least five seeds beside the file without it, "
        "and tested on seeds that the program had not seen (`python -m diagnose.doctor score DIR`)."
        f" {told}. A bug that costs little hardly changes the metrics, so the program names bugs "
        "even if a run looks healthy. If it has not seen the task, or this number of steps, it "
        "compares only metrics without a unit, such as `kl`. Then its answer is less reliable."
    ) + "\n\n" + wrapped(
        f"What do they cost? Of {len(rows)} planted bugs in {len(algos)} algorithms, {len(ended)} "
        f"ended a run, {len(costly)} cost more than 40% of what healthy runs gain, and for "
        f"{len(free)} the interval contains 0: on their task they cost nothing that these seeds "
        "can show.")


def speeds() -> str:
    """Return a table of speed.jsonl."""
    peers = {"sb3": "stable-baselines3", "sbx": "SBX"}
    return plot.table([{
        "algorithm": row["algo"], "`python -m benchmarks.speed`": f"`{row['command']}`",
        "peer": peers[row["peer"]], "ratios": " ".join(f"{x:.2f}" for x in row["ratios"]),
        "median": f"{np.median(row['ratios']):.2f}", "commit": row["commit"][:8],
    } for row in read_lines(HERE / "speed.jsonl")])


def detailed(algo: str, groups: dict[Key, list[dict]]) -> str:
    """Return what an algorithm ends at with each detail that was trained, as it is, and published.

    The ratio is that of details.py: to our runs with the same seeds.
    """
    found = [each for each in details.compared() if each[0]["algo"] == algo and each[2]]
    if not found:
        return "None has been trained."
    study, same = found[0][0], (1.0, np.nan, np.nan)
    ours = {env: returns(groups[env, "plainrl", algo, ""], "ends at") for env in study["envs"]}
    rows = [{"detail": name, "what is changed": says, "seeds": str(len(ends[study["envs"][0]]))}
            | {env: mean(np.array(ends[env])) for env in ours} | {"ratio": plot.cell(told)}
            for name, says, ends, told in [("none", "nothing", ours, same), *(
                (f"`{detail['name']}`", detail["says"], *rest) for detail, *rest in found)]]
    for source in study["published"]:
        theirs = {env: value for env in ours for value, name, _ in
                  plot.published(env, algo, 1e6, training=True) if name == source}
        rows.append({"detail": "published", "what is changed": source, "seeds": "-"}
                    | {env: plot.cell(theirs.get(env, np.nan)) for env in ours} | {"ratio": "-"})
    return plot.table(rows)


def symptoms() -> str:
    """Return a table of the bugs that a metric shows, ordered by metric, the costliest first."""
    wrong = {mutant.id: mutant.wrong for mutant in catalogue.read()}
    found = sorted((row for row in read_lines(HERE / "atlas.jsonl") if row["metric"]),
                   key=lambda row: (row["metric"], row["above"], -(row["lost"][0] or math.inf)))
    return plot.table([{
        "against healthy runs": f"`{row['metric']}` is {'higher' if row['above'] else 'lower'}",
        "after": f"{row['step'] / row['steps']:.0%}", "planted": f"`{row['bug']}`",
        "what is wrong": wrong[row["bug"].partition("@")[0]], "task": row["env"],
        "loses": "the run ends" if None in row["lost"] else "{:.0%} [{:.0%}, {:.0%}]".format(
            *row["lost"])} for row in found])


def curves(groups: dict[Key, list[dict]], path: Path, save: bool = True) -> str:
    """Write a figure and return the line of a page that shows it."""
    shown = [result for results in groups.values() for result in results if result["curve"]]
    found = plot.group([of_result(result) for result in shown])
    line = f"![Learning curves on {', '.join(found)}]({path.parent.name}/{path.name})"
    if save:
        path.parent.mkdir(exist_ok=True)
        games = all(env.startswith("ALE/") for env, *_ in groups)
        figure = plot.draw(found, plot.Plot((), smooth=(1,), anchors=games))
        for ax in figure.axes:
            ax.set_ylabel(ax.get_ylabel() and "return, mean over 5% of the steps")
        plot.save(figure, str(path))
    return f"{line}\n\n{wrapped(told_older(shown)[1:])}".strip()


def choose(patterns: list[str], groups: dict[Key, list[dict]]) -> dict[Key, list[dict]]:
    """Return the groups that a marker names. ValueError: a pattern matches none."""
    names = {key: f"{key[1]} {key[2]}/{key[0]}/{key[3]}".removeprefix("plainrl ") for key in groups}
    without = [pattern[1:] for pattern in patterns if pattern[0] == "!"]
    chosen = {key: results for key, results in groups.items()
              if any(fnmatch(names[key], pattern) for pattern in patterns or "*")
              and not any(fnmatch(names[key], pattern) for pattern in without)}
    idle = [pattern for pattern in patterns
            if not any(fnmatch(name, pattern.removeprefix("!")) for name in names.values())]
    if idle or not chosen:
        raise ValueError(f"no result matches {' '.join(idle)} of: {' '.join(patterns)}")
    return chosen


def drawn(figure: str) -> list[str]:
    """Return the patterns of the marker of a figure in benchmarks/README.md."""
    orders = (part[1].split() for part in PART.finditer(
        (HERE / "README.md").read_text(encoding="utf-8")))
    return next(patterns for kind, *patterns in orders if kind == figure)


def made(order: str, old: str, page: str, groups: dict[Key, list[dict]], folder: Path,
         save: bool) -> str:
    """Return the text that belongs under the marker `order` instead of `old`."""
    kind, *words = order.split()
    if kind.endswith(".svg"):
        return curves(choose(words, groups), folder / "figures" / kind, save)
    kinds = {"beside": lambda: beside(choose(words, groups)),
             "evals": lambda: beside(choose(words, groups), "eval"),
             "settings": lambda: settings(choose(words, groups)),
             "runs": lambda: runs(old, groups, page), "verdict": lambda: wins(groups),
             "caption": lambda: caption(choose(drawn(*words), groups)),
             "source": lambda: source(*words), "size": size, "atlas": bugs,
             "symptoms": symptoms, "speed": speeds, "takes": takes,
             "details": lambda: detailed(*words, groups)}
    return kinds[kind]()


def rewrite(text: str, groups: dict[Key, list[dict]], folder: Path = HERE,
            save: bool = True) -> str:
    """Return a page with every generated part replaced; write its figures."""
    def again(part: re.Match) -> str:
        blank = "\n" * part[2].startswith("\n")         # a page may save these lines
        text = made(part[1], part[2], part.string, groups, folder, save)
        return f"<!-- made: {part[1]} -->\n{blank}{text}\n{blank}<!-- end -->"
    return PART.sub(again, text)


def stale(text: str, again: str) -> list[str]:
    """Return the orders of the parts that a page lacks or has otherwise."""
    return [part[1] for part, new in zip(PART.finditer(text), PART.finditer(again))
            if part[2] != new[2]]


def update(save: bool) -> int:
    """Rewrite all pages, or only print what is stale. Return the number of such parts."""
    found, count = read(HERE / "results.jsonl"), 0
    for name in PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        with redirect_stderr(StringIO()) as notes:      # e.g. seeds end at different steps
            text = rewrite(page, found, save=save)
        changed = stale(page, text)
        count += len(changed)
        print(notes.getvalue() + f"{name}: {len(changed)} parts "
              + ("changed" if save else "are stale"), *changed, sep="\n    ")
        if save:
            (ROOT / name).write_text(text, encoding="utf-8")
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs=2, metavar=("RUNS", "SUITE"), help="such as runs results")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is stale")
    args = parser.parse_args()
    if args.add:
        suite.add(Path(args.add[0]), HERE / f"{args.add[1]}.jsonl")
    else:
        if not args.check:
            suite.retire(HERE / "results.jsonl")
        sys.exit(update(save=not args.check) > 0 and args.check)
