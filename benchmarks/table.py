"""Make the tables, figures and numbers of the README and of the pages in PAGES.

    python benchmarks/table.py            rewrite everything between markers,
                                          and figures/
    python benchmarks/table.py --check    only say which parts are stale
    python benchmarks/table.py RUNS       print the table of other runs
    python benchmarks/table.py RUNS --add results
                                          add them to results.jsonl

A marker names the kind of table or the name of a figure, then the results it
shows, as patterns of algorithm/environment/settings. No settings means the
defaults; * before the algorithm adds the peers; ! before a pattern leaves out
what it matches. All are in results.jsonl.

    <!-- made: defaults * !*/MinAtar/* --> results with default settings, for
                                          any number of steps
    <!-- made: peers -->                  those beside a peer's, at equal seeds
    <!-- made: settings ppo/Swimmer-v4/gamma=* -->
                                          commands, how long they took, and
                                          what they reached
    <!-- made: standing */ALE/* -->       games by algorithms, beside Baselines
    <!-- made: games */ALE/* -->          one row per settings, with every seed
    <!-- made: mujoco.svg *ppo/Hopper-v4/ -->
                                          learning curves
    <!-- made: milestones */ALE/* -->     returns on the way
    ...
    <!-- end -->

Some kinds take no patterns:

    <!-- made: runs -->                   fill in `minutes`, `ends at` and
                                          `random play` of the table below, where
                                          a row has a command with a result
    <!-- made: caption mujoco.svg -->     what the runs of that figure end at
    <!-- made: source algos/ppo.py ppo_loss -->
                                          functions as they stand in the file
    <!-- made: size -->                   how many lines HELPERS have
    <!-- made: verdict -->                how often ours are above those of others

`python -m utils.sweep --results` writes the result.json of a run, and
benchmarks/sb3.py those of the peers. Brackets hold 95% percentile bootstraps
over seeds. The column `commit` names the commit that made a row.
"""
import argparse
import ast
import csv
import json
import re
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import redirect_stderr
from fnmatch import fnmatch
from io import StringIO
from pathlib import Path
from textwrap import fill

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))    # run without installation

import plot
from benchmarks.suite import read_suite, write_suite

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGES = ("README.md", "benchmarks/README.md", "docs/games.md", "docs/settings.md")
# What the learning of every algorithm is computed with.
HELPERS = ("utils/mpi.py", "utils/optim.py", "utils/nets.py", "utils/envs.py")
PLAIN = re.compile("(total_steps=[^,]*)?")      # default settings, for any number of steps
PART = re.compile(r"<!-- made: ([^\n]+) -->\n(.*?)<!-- end -->", re.DOTALL)
OF_CODE = ("source", "size")                    # parts that come from the code, not from results
FREE = {"run_dir", "bf16"}                      # flags that a command's result need not have
MILESTONES = (100_000, 250_000, 500_000, 750_000, 1_000_000, 2_000_000, 3_000_000)
Key = tuple[str, str, str, str]                 # env, library, algo, settings


# ---- Result files

def row_of(result: dict) -> tuple:
    """Return what only one result of a suite may have. Defaults may differ between commits."""
    return (result.get("library", "plainrl"), result["env"], result["algo"], result["seed"],
            str(sorted(result["changed"].items())))


def read(suite: Path) -> dict[Key, list[dict]]:
    """Group results by environment, library, algorithm and settings; sort each group by seed.

    suite    a .jsonl file, or a folder of runs that have a result.json
    """
    groups = defaultdict(list)
    for result in read_suite(suite) if suite.suffix == ".jsonl" else read_runs(suite):
        settings = ",".join(f"{k}={v}" for k, v in sorted(result["changed"].items()))
        key = result["env"], result.get("library", "plainrl"), result["algo"], settings
        groups[key].append(result)
    return {key: sorted(groups[key], key=lambda result: result["seed"])
            for key in sorted(groups, key=lambda key: [*map(plot.natural, key)])}


def read_runs(folder: Path) -> list[dict]:
    """Return the result.json of every run in a folder; the id names the run within a suite."""
    found = [{"changed": {}, "settings": {}} | json.loads(path.read_text(encoding="utf-8"))
             for path in sorted(folder.rglob("result.json"))]
    return [{"id": "/".join([result.get("library", "plainrl"), result["env"], result["algo"],
                             *(f"{k}={v}" for k, v in sorted(result["changed"].items())),
                             f"seed{result['seed']}"])} | result for result in found]


def of_result(result: dict) -> plot.RunData:
    """Return a run for plot.py. Stored curves have a mean per 1% of the steps; five are averaged.

    A peer stores only the settings that were changed, so they count as one setting.
    """
    peer, settings = result.get("library"), result["settings"]
    algo = f"{peer} {result['algo']}" if peer else result["algo"]
    if peer:
        settings = {"changed": ",".join(f"{k}={v}" for k, v in sorted(result["changed"].items()))}
    x, y = np.array(result["curve"], float).T
    window = min(5, len(y))
    return plot.RunData(
        Path(result["id"]), algo, result["env"], result["seed"],
        settings | {"total_steps": result["total_steps"]}, x[window - 1:],
        np.convolve(y, np.full(window, 1 / window), "valid"), x[-1], steps([result]),
        result["total_steps"], result["train100"], np.mean(result["eval"]))


def steps(results: list[dict]) -> int:
    return int(results[0]["total_steps"])


def returns(results: list[dict], name: str) -> np.ndarray:
    """Return train100, or the mean of eval, for each seed. A missing one is NaN."""
    return np.array([np.mean(np.array(result[name], float)) for result in results])


def ours(groups: dict[Key, list[dict]], plain: bool = True) -> list[tuple[str, str, list[dict]]]:
    """Return (environment, algorithm, results) of our runs with default settings, or with any."""
    return [(env, algo, results) for (env, library, algo, settings), results in groups.items()
            if library == "plainrl" and (not plain or PLAIN.fullmatch(settings))]


# ---- Cells

def commits(results: list[dict]) -> str:
    """Return the cell that names the commits behind a row."""
    named = [(result.get("git_commit") or "-").partition("-dirty") for result in results]
    return " ".join(sorted({commit[:8] + changed for commit, changed, _ in named}))


def each(values: np.ndarray) -> str:
    """Return the values of all seeds as one cell, small ones with decimals; "-" for none."""
    if np.isnan(values).all():
        return "-"
    return " ".join(f"{x:.0f}" if abs(x) >= 20 or x == 0 else f"{x:.3g}" for x in values)


def mean(values: np.ndarray) -> str:
    """Return the mean as a cell, with its interval if there are at least FEW different seeds."""
    few = len(values) < plot.FEW or np.ptp(values) == 0     # no interval for equal values either
    return plot.cell(float(values.mean()) if few else plot.estimate(values, np.mean))


def count(results: list[dict]) -> str:
    return f"{len(results)}{'*' * (len(results) < plot.FEW)}"


def rules(run: dict) -> str:
    """Return how a run on Atari differs from the old tables' rules, or ""."""
    if not run["env"].startswith("ALE/"):
        return ""
    kwargs = {"repeat_action_probability": 0.25, "episodic_life": False} | json.loads(
        run["changed"].get("env_kwargs", "{}"))
    sticky, lives_end = kwargs.pop("repeat_action_probability"), kwargs.pop("episodic_life")
    return ", ".join([f"sticky {sticky}"] * bool(sticky) + ["whole games"] * (not lives_end)
                     + [f"{k} {v}" for k, v in kwargs.items() if k != "num_threads"])


def published(run: dict, training: bool) -> list[tuple]:
    """Return others' figures: see `plot.published`. On Atari they are by the old tables' rules."""
    return [] if rules(run) else plot.published(run["env"], run["algo"], steps([run]), training)


def best(run: dict, training: bool) -> str:
    """Return the highest figure of anchors.csv for equally many steps, and its source."""
    found = published(run, training)
    return f"{plot.cell(found[0][0])} ({found[0][1]})" if found else "-"


# ---- Tables

def table(groups: dict[Key, list[dict]]) -> str:
    """Return one row per group: train100 and eval of each seed, and their means."""
    rows = []
    for (env, library, algo, settings), results in groups.items():
        train, final = returns(results, "train100"), returns(results, "eval")
        rows.append({
            "environment": env, "algorithm": algo, "library": library,
            "settings": settings or "default", "steps": steps(results),
            "seeds": " ".join(str(result["seed"]) for result in results),
            "train100 of each": each(train), "train100": mean(train),
            "eval of each": each(final), "eval": mean(final), "commit": commits(results)})
    return plot.table(rows)


def defaults(groups: dict[Key, list[dict]]) -> str:
    """Return our results with default settings beside the best that others have published."""
    rows = [{
        "environment": env, "algorithm": algo, "steps": steps(results), "seeds": count(results),
        "train100": mean(returns(results, "train100")),
        "best published, training": best(results[0], training=True),
        "eval": mean(returns(results, "eval")),
        "best published, evaluation": best(results[0], training=False),
        "commit": commits(results)} for env, algo, results in ours(groups)]
    known = [name for name in (rows or [{}])[0] if any(row[name] != "-" for row in rows)]
    return plot.table([{name: row[name] for name in known} for row in rows])


def pairs(groups: dict[Key, list[dict]]) -> Iterator[tuple[str, str, str, list[list[dict]]]]:
    """Yield (environment, algorithm, peer, [our results, theirs]), at the seeds that both have."""
    for env, algo, results in ours(groups):
        for key, peer in groups.items():
            if (key[0], *key[2:]) != (env, algo, "") or key[1] == "plainrl" or not np.isclose(
                    steps(peer), steps(results), rtol=0.01):
                continue
            seeds = {result["seed"] for result in results} & {result["seed"] for result in peer}
            yield env, algo, key[1], [[result for result in side if result["seed"] in seeds]
                                      for side in (results, peer)]


def difference(pair: list[list[dict]], name: str) -> tuple[float, float, float]:
    """Return how far our mean is above a peer's, and the ends of the interval."""
    a, b = (returns(side, name) for side in pair)
    ends = plot.interval([a, b], lambda a, b, axis: a.mean(axis) - b.mean(axis), plot.FEW)
    return float(a.mean() - b.mean()), *map(float, ends)


def peers(groups: dict[Key, list[dict]]) -> str:
    """Return our results with default settings beside a peer's, at the seeds that both have."""
    rows = []
    for env, algo, peer, pair in pairs(groups):
        row = {"environment": env, "algorithm": algo, "peer": peer, "seeds": count(pair[0])}
        for name in ("train100", "eval"):
            a, b = (float(returns(side, name).mean()) for side in pair)
            row |= {name: a, f"peer's {name}": b, f"difference of {name}": difference(pair, name)}
        rows.append(row)
    return plot.table(rows)


def settings(groups: dict[Key, list[dict]]) -> str:
    """Return the command of each of our results, the minutes of a run, and what it reached."""
    return plot.table([{
        "command": f"`{command(env, algo, results[0]['changed'])}`",
        "minutes": f"{np.median([result['seconds'] for result in results]) / 60:.1f}",
        "seeds": count(results), "train100": mean(returns(results, "train100")),
        "eval": mean(returns(results, "eval")), "commit": commits(results),
    } for env, algo, results in ours(groups, plain=False)])


def played() -> dict[tuple[str, str], str]:
    """Return (environment, who plays) -> the mean score of random play, or of a person."""
    with open(plot.ANCHORS, encoding="utf-8", newline="") as file:
        return {(row["env"], row["algo"]): row["mean"] for row in csv.DictReader(file)
                if row["metric"] == "play"}


def standing(groups: dict[Key, list[dict]]) -> str:
    """Return a row per game and a column per algorithm: our mean train100 / that of Baselines.

    All runs are by the old rules. Ours is bold if it is at least theirs, and above random play.
    Games for which Baselines have no figure after as many steps are left out.
    """
    plays, found = played(), defaultdict(list)
    for env, algo, results in ours(groups, plain=False):
        found[steps(results), env, algo] += [run for run in results if not rules(run)]
    algos = sorted({algo for _, _, algo in found})
    rows = []
    for budget, env in sorted({key[:2] for key, runs in found.items() if runs}):
        name = env.rpartition("-v")[0]
        random = plays.get((name, "random play"), "nan")
        row = {"game": name.partition("/")[2] + f", {budget:,}" * (budget != 10**6),
               "random play": random}
        for algo in algos:
            mine = returns(found[budget, env, algo], "train100")
            theirs = plot.published(env, algo, budget, training=True)
            cell = each(np.array([mine.mean()])) if len(mine) else "-"
            if len(mine) and theirs and mine.mean().round() >= theirs[0][0]:  # theirs are rounded
                cell = f"**{cell}**" if mine.mean() > float(random) + 1 else cell
            row[algo] = cell + (f" / {theirs[0][0]:g}" if theirs else "")
        rows.append(row | {"a person": plays.get((name, "person"), "-")})
    return plot.table([row for row in rows if " / " in "".join(row.values())])


def games(groups: dict[Key, list[dict]]) -> str:
    """Return our results on games: all seeds of an algorithm with the same flags in a row.

    A game is as in the old tables, or else its name says what differs. Hours are those of a core.
    A row whose `machine` is not a CPU says GPU instead.
    """
    found = defaultdict(list)
    for env, algo, results in ours(groups, plain=False):
        for run in results:
            own = {name: value for name, value in run["changed"].items()
                   if name not in ("env_kwargs", "total_steps", "bf16")}
            found[env, rules(run), algo, flags(own), steps([run])].append(run)
    rows = []
    for (env, differs, algo, text, budget), runs in sorted(found.items(), key=lambda x: x[0]):
        runs.sort(key=lambda run: run["seed"])
        hours = ["GPU" if run.get("machine", "CPU") != "CPU" else f"{run['seconds'] / 3600:.1f}"
                 + " float32" * (not (run["changed"] | run["backend"]).get("bf16")) for run in runs]
        rows.append({
            "game": env.partition("/")[2] + f", {differs}" * bool(differs), "algorithm": algo,
            "flags": f"`{text}`" * bool(text), "steps": budget,
            "seed": " ".join(str(run["seed"]) for run in runs),
            "train100": each(returns(runs, "train100")), "eval": each(returns(runs, "eval")),
            "hours of a core": " ".join(hours), "commit": commits(runs)})
    return plot.table(rows)


def milestones(groups: dict[Key, list[dict]]) -> str:
    """Return the training returns around each of MILESTONES: the lowest and highest of all seeds.

    A return is the mean over 50,000 steps around the milestone; at the end of a run, over its last
    50,000. Seeds of an algorithm on a game share a row if they took equally many steps.
    """
    found = defaultdict(list)
    for env, algo, results in ours(groups, plain=False):
        found[algo, env, steps(results)] += results
    return plot.table([{
        "algorithm": algo, "game": env, "seeds": len(runs),
        **{f"{at:,}": spread([around(run, at) for run in runs]) if at <= budget else ""
           for at in MILESTONES}} for (algo, env, budget), runs in found.items()])


def around(run: dict, at: int) -> float:
    """Return the mean of a run's curve around a number of steps."""
    ends, values = np.array(run["curve"], float).T
    middles = ends - np.diff(ends).min() / 2            # each value is of the steps before `ends`
    low, high = (at - 25_000, at + 25_000) if at < steps([run]) else (at - 50_000, np.inf)
    return float(values[(low <= middles) & (middles <= high)].mean())


def spread(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return (low if low == high else f"{low} to {high}").replace("-0", "0")


def command(env: str, algo: str, changed: dict) -> str:
    return " ".join([f"python -m algos.{algo} --env {env}", flags(changed)]).rstrip()


def flags(changed: dict) -> str:
    words = []
    for name, value in changed.items():
        flag, values = name.replace("_", "-"), value if isinstance(value, list) else [value]
        words += ([f"--{'no-' * (not value)}{flag}"] if isinstance(value, bool) else
                  [f"--{flag}", *(shlex.quote(x) if isinstance(x, str) else
                                  f"{x:g}".replace("e+0", "e") for x in values)])
    return " ".join(words)


# ---- Tables whose commands are typed

def runs(text: str, groups: dict[Key, list[dict]], page: str) -> str:
    """Return a table with new cells in the columns `minutes`, `ends at` and `random play`.

    Each row that has a command gets the results of that command. `ends at` is the mean train100
    over seeds; a star marks fewer than FEW. Where there is no result, a cell is "-".
    """
    lines, values = text.strip().splitlines(), dict(re.findall(r"^(\w+)='(.*)'$", page, re.M))
    columns = lines[0].split("|")
    for at, line in enumerate(lines):
        if told := re.search(r"`(python -m algos\.[^`]+)`", line):
            algo, given = read_command(told[1], values)
            env = given.get("env", "").rpartition("-v")[0]
            new = {"random play": played().get((env, "random play"), "-"),
                   **summary(matching(algo, given, groups), bool(given.get("bf16")))}
            cells = [column.replace(name, new[name]) if (name := column.strip()) in new else cell
                     for column, cell in zip(columns, line.split("|"), strict=True)]
            lines[at] = "|".join(cells).rstrip()
    return "\n".join(lines)


def read_command(text: str, values: dict[str, str]) -> tuple[str, dict]:
    """Return the algorithm and the settings of a command. "$OLD" stands for values["OLD"]."""
    _, _, module, *words = (values.get(word[1:], word) if word.startswith("$") else word
                            for word in shlex.split(text))
    given = {}
    for word in words:
        if word.startswith("--no-"):
            given[word[5:].replace("-", "_")] = False
        elif word.startswith("--"):
            flag = word[2:].replace("-", "_")
            given[flag] = True
        else:
            given[flag] = word if given[flag] is True else f"{given[flag]} {word}"
    return module.removeprefix("algos."), given


def matching(algo: str, given: dict, groups: dict[Key, list[dict]]) -> list[dict]:
    """Return our results that have the settings of a command, and changed no other ones."""
    given = {name: bare(value) for name, value in given.items() if name not in FREE}
    env, found = given.pop("env", None), []
    for results in (results for key, results in groups.items()
                    if key[:3] == (env, "plainrl", algo)):
        for run in results:
            had = {name: bare(value) for name, value in run["settings"].items()}
            changed = {name for name in run["changed"] if name not in FREE and had.get(name) != {}}
            if changed <= given.keys() and all(had.get(name) == given[name] for name in given):
                found.append(run)
    return found


def bare(value) -> object:
    """Return a setting in a form that is equal in a command and in a result.

    Threads of the emulator change no result.
    """
    if isinstance(value, str) and value.startswith("{"):
        return {key: x for key, x in json.loads(value).items() if key != "num_threads"}
    words = value if isinstance(value, list) else str(value).split()
    try:
        return tuple(float(word) for word in words)
    except ValueError:
        return str(value)


def summary(results: list[dict], bf16: bool) -> dict[str, str]:
    """Return the minutes of a run on a CPU, and what the runs end at."""
    minutes = [run["seconds"] / 60 for run in results if run.get("machine", "CPU") == "CPU"
               and bool((run["changed"] | run.get("backend", {})).get("bf16")) == bf16]
    middle = np.median(minutes) if minutes else np.nan
    end = float(returns(results, "train100").mean()) if results else np.nan
    return {"minutes": f"{middle:.1f}" if middle < 9.5 else f"{middle:.0f}" if minutes else "-",
            "ends at": plot.cell(end) + "*" * (0 < len(results) < plot.FEW)}


# ---- Sentences

def caption(groups: dict[Key, list[dict]]) -> str:
    """Return what the runs of a figure end at, for each environment and line."""
    told = defaultdict(list)
    for (env, library, algo, _), results in groups.items():
        values = returns(results, "train100")
        told[env].append(f"{library if library != 'plainrl' else algo + ' here'} "
                         f"{values.mean():.0f} ({len(values)} seeds: {spread(list(values))})")
    return wrapped("*Mean return of the last 100 training episodes (seeds: lowest to highest). "
                   + ". ".join(f"{env}: {', '.join(lines)}" for env, lines in told.items()) + ".*")


def wrapped(text: str, indent: str = "") -> str:
    return fill(text, 128, subsequent_indent=indent, break_on_hyphens=False)


def verdict(groups: dict[Key, list[dict]]) -> str:
    """Return how often our results are at least those of others."""
    found = list(pairs(groups))
    names = sorted({peer for _, _, peer, _ in found}, reverse=True)
    gaps = np.array([difference(pair, "train100") for *_, pair in found])
    chosen, seeds = choose(drawn("standing"), groups), Counter()
    for env, algo, results in ours(chosen, plain=False):
        seeds[env, algo, steps(results)] += sum(not rules(run) for run in results)
    few = sorted(filter(None, seeds.values()))
    cells = re.findall(r"(-?\d[.\d]*)\** / (-?\d[.\d]*)", standing(chosen))
    above = sum(round(float(mine)) >= float(theirs) for mine, theirs in cells)
    return "\n".join([
        wrapped(f"- Of {len(gaps)} comparisons with {' and '.join(names)} at equal seeds, "
                f"mostly 3, {(gaps[:, 1] > 0).sum()} are clear wins and {(gaps[:, 2] < 0).sum()} "
                "are clear losses: their 95% interval excludes 0.", "  "),
        wrapped(f"- On Atari, {above} of {len(cells)} results (of {few[0]} to {few[-1]} seeds) "
                "reach those of OpenAI Baselines after as many steps.", "  ")])


def source(path: str, *names: str) -> str:
    """Return functions as they stand in a file, without decorators."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    found = {node.name: "\n".join(lines[node.lineno - 1:node.end_lineno])
             for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.FunctionDef)}
    return "```python\n" + "\n\n\n".join(found[name] for name in names) + "\n```"


def size() -> str:
    """Return how long the helpers are, to ten lines."""
    found = [path for path in HELPERS if (ROOT / path).exists()]
    lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in found)
    behind = sum(len(path.read_text(encoding="utf-8").splitlines())
                 for path in (ROOT / "utils").rglob("*.py")) - lines
    return wrapped(f"An algorithm is one file, plus about {round(lines, -1):,} lines of helpers "
                   f"that you may read once: {', '.join(f'`{path}`' for path in found)}. Behind "
                   f"them, {round(behind, -2):,} lines wrap environments, keep runs and play them.")


# ---- The pages

def curves(groups: dict[Key, list[dict]], path: Path, save: bool = True) -> str:
    """Write a figure and return the line of the README that shows it."""
    found = plot.group([of_result(result) for results in groups.values() for result in results
                        if result["curve"]])
    line = f"![Learning curves on {', '.join(found)}]({path.parent.name}/{path.name})"
    if not save:
        return line
    path.parent.mkdir(exist_ok=True)
    asked = plot.Plot((), smooth=(1,), anchors=all(env.startswith("ALE/") for env, *_ in groups))
    figure = plot.draw(found, asked)
    for ax in figure.axes:
        ax.set_ylabel(ax.get_ylabel() and "return, mean over 5% of the steps")
    plot.save(figure, str(path))
    return line


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


def drawn(what: str) -> list[str]:
    """Return the patterns of the marker of a figure or table in benchmarks/README.md."""
    orders = (part[1].split() for part in PART.finditer(
        (HERE / "README.md").read_text(encoding="utf-8")))
    return next(patterns for kind, *patterns in orders if kind == what)


def made(order: str, old: str, page: str, groups: dict[Key, list[dict]], folder: Path,
         save: bool) -> str:
    """Return the text that belongs under the marker `order` instead of `old`."""
    kind, *words = order.split()
    match kind:
        case "source":
            return source(*words)
        case "size":
            return size()
        case "runs":
            return runs(old, groups, page)
        case "caption":
            return caption(choose(drawn(*words), groups))
        case "verdict":
            return verdict(groups)
    chosen = choose(words, groups)
    if kind.endswith(".svg"):
        return curves(chosen, folder / "figures" / kind, save)
    kinds = {"defaults": defaults, "peers": peers, "settings": settings, "games": games,
             "standing": standing, "milestones": milestones}
    return kinds[kind](chosen)


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python benchmarks/table.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="folder of runs, or .jsonl file")
    parser.add_argument("--add", default="", help="suite to which the runs are added")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is stale")
    args = parser.parse_args()
    if args.add:
        suite = HERE / f"{args.add}.jsonl"
        known = read_suite(suite) if suite.exists() else []
        new = {row_of(result): result for result in read_runs(args.results)}
        write_suite(suite, [*(row for row in known if row_of(row) not in new), *new.values()])
        print(f"{suite}: {len(new)} results added or replaced")
    elif args.results:
        found = read(args.results)
        print(table(found) if found else f"{args.results}: there is no result.json in it")
    else:
        found, old = read(HERE / "results.jsonl"), 0
        for name in PAGES:
            page = (ROOT / name).read_text(encoding="utf-8")
            with redirect_stderr(StringIO()) as notes:      # e.g. seeds end at different steps
                text = rewrite(page, found, save=not args.check)
            changed = stale(page, text)
            old += len(changed)
            print(notes.getvalue() + f"{name}: {len(changed)} parts "
                  + ("are stale" if args.check else "changed"), *changed, sep="\n    ")
            if not args.check:
                (ROOT / name).write_text(text, encoding="utf-8")
        sys.exit(args.check and old > 0)
