"""Make the tables and figures of benchmarks/README.md from the result files.

    python benchmarks/table.py            rewrite everything between markers,
                                          and figures/
    python benchmarks/table.py RUNS       print the table of other runs
    python benchmarks/table.py RUNS --add results
                                          add them to results.jsonl

A marker names the kind of table, the algorithms (none: all of them) and the
environments. The word `default` keeps only runs with default settings, for any
number of steps.

    <!-- made: table ppo Hopper-v4 Walker2d-v4 -->
    <!-- made: ablation ppo from=ablation -->      runs with one changed setting
    <!-- made: curves mujoco.svg ppo Hopper-v4 -->
    <!-- made: curves time.svg x=time by=num_envs from=batch ppo -->
    ...
    <!-- end -->

`x` and `by` are flags of plot.py. `from=batch` reads batch.jsonl instead of
results.jsonl. `budget=100000` keeps only runs of that many
steps. Other kinds of tables:

    difference         train100: ours minus the peer's
    eval-difference    eval: ours minus the peer's
    published          figures published by others
    standing           how many of those are lower than ours
    trimmed            beside Vel, in Vel's protocol
    scaled             rewards times a factor (utils.tasks:Scaled-v0); its
                       figure is made by: scaled-curves factor.svg

`python -m utils.sweep --results` writes the result.json of a run, and
benchmarks/sb3.py those of the peer. Brackets hold 95% percentile bootstraps
over seeds. The column `commit` names the commit that made a row.
"""
import argparse
import json
import re
import sys
from collections import defaultdict
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))    # run without installation

import plot
from utils.curves import of_result
from utils.results import read_suite, write_suite

HERE = Path(__file__).resolve().parent
README, RESULTS, FIGURES = HERE / "README.md", HERE / "results.jsonl", HERE / "figures"
PLAIN = re.compile("(total_steps=[^,]*)?")      # default settings, for any number of steps
PART = re.compile(r"(<!-- made: ([^\n]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Key = tuple[str, str, str, str]     # env, library, algo, settings


# ---- Result files

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
    found = []
    for path in sorted(folder.rglob("result.json")):
        result = {"changed": {}, "settings": {}} | json.loads(path.read_text(encoding="utf-8"))
        words = [f"{k}={v}" for k, v in sorted(result["changed"].items())]
        place = [result.get("library", "plainrl"), result["env"], result["algo"], *words]
        found.append({"id": "/".join([*place, f"seed{result['seed']}"])} | result)
    return found


def choose(groups: dict[Key, list[dict]], words: list[str]) -> dict[Key, list[dict]]:
    """Return the groups that the words of a marker name."""
    envs = {word for word in words if re.search(r"-v\d+$", word)}
    algos = {word for word in words if "=" not in word} - envs - {"default"}
    return {key: results for key, results in groups.items()
            if key[0] in (envs or key) and key[2] in (algos or key)     # none named means all
            and ("default" not in words or PLAIN.fullmatch(key[3]))}


def commits(results: list[dict]) -> str:
    """Return the cell that names the commits behind a row."""
    found = {(result.get("git_commit") or "-")[:8] for result in results}
    return " ".join(sorted(found))


# ---- Parts of the README

def table(groups: dict[Key, list[dict]]) -> str:
    """Return one row per group: train100 and eval of each seed, and their means."""
    rows = []
    for key, results in groups.items():
        train = np.array([result["train100"] for result in results], float)     # None is NaN
        final = np.array([np.mean(result["eval"]) for result in results])
        rows.append({
            "environment": key[0], "algorithm": key[2], "library": key[1],
            "settings": key[3] or "default", "steps": steps(results),
            "seeds": " ".join(str(result["seed"]) for result in results),
            "train100 of each": each(train), "train100": mean(train), "eval of each": each(final),
            "eval": mean(final), "commit": commits(results)})
    return plot.table(rows, "markdown")


def each(values: np.ndarray) -> str:
    """Return the values of all seeds as one cell, small ones with decimals; "-" for none."""
    if np.isnan(values).all():
        return "-"
    return " ".join(f"{x:.0f}" if abs(x) >= 20 or x == 0 else f"{x:.3g}" for x in values)


def mean(values: np.ndarray) -> str:
    """Return the mean as a cell, with its interval if there are at least three seeds."""
    if np.isnan(values).all():
        return "-"
    few = len(values) < 3 or np.ptp(values) == 0        # no interval for equal values either
    return plot.cell(float(values.mean()) if few else plot.estimate(values, np.mean))


def difference(groups: dict[Key, list[dict]], figure: str = "train100") -> str:
    """Compare our default settings with the peer at the same seeds and number of steps.

    One line per environment and algorithm, then the geometric mean of the ratios.
    """
    lines, ratios = [], []
    for (env, library, algo, settings), results in groups.items():
        peer = next((v for k, v in groups.items() if (k[0], k[2]) == (env, algo)
                     and k[1] != library and PLAIN.fullmatch(k[3])
                     and np.isclose(steps(v), steps(results), rtol=0.01)), None)
        if library != "plainrl" or not PLAIN.fullmatch(settings) or peer is None:
            continue
        seeds = {result["seed"] for result in results} & {result["seed"] for result in peer}
        ours, theirs = (np.array([np.mean(result[figure]) for result in each
                                  if result["seed"] in seeds]) for each in (results, peer))
        ratios.append(ours.mean() / theirs.mean())
        lines.append(f"{env}, {algo}, seeds {sorted(seeds)}: ratio of means {ratios[-1]:.2f}, "
                     f"difference {ours.mean() - theirs.mean():.0f}")
        if len(seeds) > 1:
            low, high = plot.interval([ours, theirs],
                                      lambda a, b, axis: a.mean(axis) - b.mean(axis))
            lines[-1] += f" [{low:.0f}, {high:.0f}]"
    if ratios:
        lines.append(f"geometric mean of the ratios: {np.exp(np.mean(np.log(ratios))):.2f}")
    return "\n".join(["```", *lines, "```"])


def ablation(groups: dict[Key, list[dict]]) -> str:
    """Return one row per changed setting: the mean train100 and each seed, per environment.

    The last column is the ratio to the runs with nothing changed, at equal seeds: the geometric
    mean over environments. It makes sense only if all returns are positive.
    """
    train = defaultdict(dict)       # changed setting -> environment -> {seed: train100}
    for (env, library, _, settings), results in groups.items():
        if library != "plainrl":
            continue
        changed = re.sub("(^|,)total_steps=[^,]*", "", settings).strip(",")
        if env in train[changed]:
            raise ValueError(f"{env}: two algorithms or budgets, with {changed or 'nothing'} "
                             "changed")
        train[changed][env] = {result["seed"]: result["train100"] for result in results}
    rows = []
    for changed in sorted(train):
        samples, row = [], {"changed": changed or "nothing"}
        for env in sorted(train[""]):
            found, whole = train[changed].get(env, {}), train[""][env]
            each = " ".join(f"{found[seed]:.0f}" for seed in sorted(found))
            row[env] = f"{plot.cell(float(np.mean([*found.values()])))} ({each})" if found else "-"
            if both := sorted(found.keys() & whole.keys()):
                samples += [np.array([part[seed] for seed in both]) for part in (found, whole)]
        row["ratio"] = "-" if not samples else "1.00" if not changed else tuple(
            map(float, (ratio_of_means(*samples), *plot.interval(samples, ratio_of_means))))
        rows.append(row)
    return plot.table(rows, "markdown")


def ratio_of_means(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the geometric mean of mean(sample 0) / mean(sample 1), mean(2) / mean(3), ..."""
    logs = [np.log(sample.mean(axis)) for sample in samples]
    return np.exp(np.mean(logs[::2], axis=0) - np.mean(logs[1::2], axis=0))


def steps(results: list[dict]) -> int:
    return int(results[0]["total_steps"])


def grouped(groups: dict[Key, list[dict]], x: str = "steps", by: str = "") -> plot.Groups:
    """Return the same runs in the form that plot.py uses."""
    runs = [of_result(result, x, "ep_ret") for results in groups.values() for result in results
            if result["curve"]]
    return plot.group(runs, by)


def anchors(groups: dict[Key, list[dict]]) -> list[dict]:
    """Return rows of figures published by others, with our means of all seeds beside them."""
    return [{
        "published for": f"{row['env']}-{row['env_version']}", "algorithm": runs[0].algo,
        "steps": int(row["budget_steps"]), "seeds": row["seeds"], "mean": row["mean"],
        "spread": row["spread"], "metric": row["metric"], "source": row["source"],
        "ours": f"{line} on {runs[0].env}",
        **{name: float(np.mean([getattr(run, name) for run in runs]))
           for name in ("train100", "eval")}}
        for _, line, runs, rows in plot.published(grouped(groups)) for row in rows]


def published(groups: dict[Key, list[dict]]) -> str:
    rows = anchors(groups)
    return plot.table(rows, "markdown") if rows else "Nothing is published for these."


def standing(groups: dict[Key, list[dict]]) -> str:
    """Count the figures published for the same number of steps that are lower than ours.

    Ours are means over all seeds with default settings. train100 is compared with means of
    training episodes, eval with evaluations.
    """
    rows = []
    for key, results in groups.items():
        others = [other for other in anchors({key: results})    # empty for a peer
                  if other["steps"] == steps(results)]
        if not others or not PLAIN.fullmatch(key[3]):
            continue
        row = {"environment": key[0], "algorithm": key[2], "steps": steps(results),
               "seeds": len(results)}
        for name, training in (("train100", True), ("eval", False)):
            row[name] = float(np.mean([np.mean(result[name]) for result in results]))
            means = [float(other["mean"]) for other in others
                     if plot.of_training(other) == training]
            below = sum(mean < row[name] for mean in means)
            row[f"published {'of training' if training else 'evaluations'}"] = (
                f"above {below} of {len(means)}, best {plot.cell(max(means))}"
                if means and not np.isnan(row[name]) else "-")
        rows.append(row)
    return plot.table(rows, "markdown") if rows else "Nothing is published for these."


def trimmed(groups: dict[Key, list[dict]]) -> str:
    """Return train100 of seeds 1 to 6 without the best and the worst, beside Vel's figure."""
    rows = []
    for key, results in groups.items():
        vel = [row["mean"] for row in anchors({key: results}) if row["source"] == "Vel"]
        if vel and len(results) >= 6:       # peers have no published figures here
            train = np.array([result["train100"] for result in results[:6]])
            rows.append({"environment": key[0], "algorithm": key[2],
                         "plainrl": plot.estimate(train, plot.TRIMMED), "Vel": float(vel[0])})
    return plot.table(rows, "markdown") if rows else "Vel published nothing for these."


# ---- Rewards times a factor

def by_factor(groups: dict[Key, list[dict]]) -> dict[tuple[str, str], dict[float, list[dict]]]:
    """Group runs of utils.tasks:Scaled-v0: (environment inside, algorithm) -> factor -> runs."""
    found = defaultdict(dict)
    for (_, _, algo, _), results in groups.items():
        settings = results[0]["settings"]
        inside = json.loads(settings["env_kwargs"])
        name = algo if settings.get("scale_rew", True) else f"{algo}, rewards not scaled"
        found[inside["env"], name][inside["factor"]] = results
    return {key: dict(sorted(found[key].items())) for key in sorted(found)}


def scaled(groups: dict[Key, list[dict]]) -> str:
    """Return the geometric mean over seeds of train100 / factor, and the largest ratio of two.

    A dash stands where a return is not positive.
    """
    rows = []
    for (env, name), factors in by_factor(groups).items():
        row, means = {"environment": env, "algorithm": name}, []
        for factor, results in factors.items():
            train = np.array([result["train100"] for result in results]) / factor
            means.append(float(np.exp(np.log(train).mean())) if (train > 0).all() else np.nan)
            cell = "-" if np.isnan(means[-1]) else f"{means[-1]:.0f}"
            row[f"rewards times {factor:g}"] = f"{cell} ({each(train)})"
        ratio = np.max(means) / np.min(means)           # NaN if any is
        rows.append(row | {"largest over smallest": "-" if np.isnan(ratio) else f"{ratio:.2f}"})
    return plot.table(rows, "markdown")


def scaled_curves(groups: dict[Key, list[dict]], path: Path) -> str:
    """Draw mean curves of return / factor: a row per environment, a column per algorithm."""
    found = by_factor(groups)
    envs, names = (sorted({key[i] for key in found}) for i in (0, 1))
    figure = Figure((4 * len(names), 2.8 * len(envs)), layout="constrained")
    panels = figure.subplots(len(envs), len(names), sharex="row", sharey="row", squeeze=False)
    for (env, name), factors in found.items():
        axes = panels[envs.index(env), names.index(name)]
        axes.set_title(f"{env}, {name}", fontsize=9)
        axes.set_xlabel("environment steps")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))        # 20k
        for style, (factor, results) in zip(("-", "--", ":"), factors.items()):
            at = np.linspace(0.02, 1, 50) * steps(results)
            drawn = [np.interp(at, *np.transpose(result["curve"])) / factor for result in results]
            axes.plot(at, np.mean(drawn, axis=0), style, label=f"rewards times {factor:g}",
                      gid=f"{env}, {name}, {factor:g}, mean")
    for row in panels:
        row[0].set_ylabel("return / factor")
    panels[0, 0].legend(fontsize=8)
    path.parent.mkdir(exist_ok=True)
    plot.save(figure, str(path))
    return f"![Learning curves with rewards times a factor]({path.parent.name}/{path.name})"


# ---- The README

def curves(groups: dict[Key, list[dict]], path: Path, x: str = "steps", by: str = "") -> str:
    """Write a figure and return the line of the README that shows it."""
    path.parent.mkdir(exist_ok=True)
    found = grouped(groups, x, by)
    plot.save(plot.draw(found, plot.Plot((), x=x), {}), str(path))
    return f"![Learning curves on {', '.join(found)}]({path.parent.name}/{path.name})"


def made(order: str, groups: dict[Key, list[dict]], figures: Path) -> str:
    """Return the text that belongs under the marker `order`."""
    kind, *words = order.split()
    name = words.pop(0) if kind.endswith("curves") else ""
    flags = dict(word.split("=") for word in words if "=" in word)
    folder = flags.pop("from", "")
    budget = flags.pop("budget", None)
    suite = HERE / f"{folder}.jsonl"
    if flags and kind != "curves" or folder and not suite.exists():
        raise ValueError(f"no such flag or suite: {order}")
    chosen = choose(read(suite) if folder else groups, words)
    if budget:
        chosen = {key: found for key, found in chosen.items() if steps(found) == int(budget)}
    if not chosen:
        return "Not run yet."
    if kind.endswith("curves"):
        draw = {"curves": curves, "scaled-curves": scaled_curves}[kind]
        return draw(chosen, figures / name, **flags)
    return {"table": table, "ablation": ablation, "difference": difference, "published": published,
            "standing": standing, "trimmed": trimmed, "scaled": scaled,
            "eval-difference": partial(difference, figure="eval")}[kind](chosen)


def rewrite(text: str, groups: dict[Key, list[dict]], figures: Path = FIGURES) -> str:
    """Return the README with every generated part replaced."""
    return PART.sub(lambda part: f"{part[1]}\n{made(part[2], groups, figures)}\n\n{part[3]}", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python benchmarks/table.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="folder of runs, or .jsonl file")
    parser.add_argument("--add", default="", help="suite to which the runs are added")
    args = parser.parse_args()
    if args.add:
        suite = HERE / f"{args.add}.jsonl"
        known = read_suite(suite) if suite.exists() else []
        new = {result["id"]: result for result in read_runs(args.results)}
        write_suite(suite, [*(row for row in known if row["id"] not in new), *new.values()])
        print(f"{suite}: {len(new)} results added or replaced")
    elif args.results:
        found = read(args.results)
        print(table(found) if found else f"{args.results}: there is no result.json in it")
    else:
        before = README.read_text(encoding="utf-8")
        with redirect_stderr(StringIO()) as notes:      # e.g. seeds end at different steps
            after = rewrite(before, read(RESULTS))
        README.write_text(after, encoding="utf-8")
        print(notes.getvalue() + "\n".join(part[0] for part in PART.finditer(after)))
