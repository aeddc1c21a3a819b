"""Metrics of a run: progress.csv, episodes.csv, TensorBoard and the table on the console.

progress.csv has one row per report. A number that was stored becomes the column `name`, the mean
of all values stored since the last report. An array becomes `name_mean`, `name_std`, `name_min`
and `name_max` over all its elements (the standard deviation divides by their number n, not n - 1).
Both are taken over all ranks, in float64. `time` is in seconds, with those of --eval-every; a
resumed run goes on counting. episodes.csv has one row per episode, with `success` (1 or 0) if the
environment tells it.
"""

import csv
import io
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from utils.files import read_table, write_text

EPISODE = ["step", "time", "env", "ep_ret", "ep_len"]
PROGRESS = ["step", "time", "steps_per_second", "ep_ret_mean", "ep_ret_std", "ep_ret_min",
            "ep_ret_max", "ep_len_mean", "ep_len_std", "ep_len_min", "ep_len_max"]
EVALUATED = ["eval_ret_mean", "eval_ret_std", "eval_ret_min", "eval_ret_max"]  # --eval-every
LINES = 50  # on the console, in a run


class Logger:
    """Collects metrics on every rank and writes them to a run directory on rank 0."""

    def __init__(self):
        self.values = {}  # name -> what this rank has stored since the last report
        self.unseen = []  # the rows since the last line on the console
        self.shown = None  # the names on the console, above their columns
        self.lines = 0

    def open(self, cfg, step, stack):
        """Open the files of a run that starts at `step`. `stack`, an ExitStack, closes them."""
        from torch.utils.tensorboard import SummaryWriter  # takes a fifth of a second

        run_dir, self.total_steps, self.printed = Path(cfg.run_dir), int(cfg.total_steps), step
        columns = PROGRESS + EVALUATED * (cfg.eval_every > 0)  # from the first row on
        self.progress = Table(run_dir / "progress.csv", columns, step)
        self.episodes = Table(run_dir / "episodes.csv", EPISODE, step)
        # TensorBoard hides older events after this step: a kill left them behind.
        self.board = SummaryWriter(run_dir, purge_step=step + 1, flush_secs=30)
        self.bar = tqdm(total=self.total_steps, initial=step, unit=" steps", disable=None)
        stack.callback(self.board.close)
        stack.callback(self.bar.close)

    def store(self, **values):
        """Keep numbers, tensors or arrays until the next report. Ranks may store other names."""
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                value = torch.from_numpy(np.array(value, dtype=np.float64))
            # A clone, since the caller may fill the same buffer again before the report.
            self.values.setdefault(name, []).append(value.detach().clone())

    def take(self):
        """Return {name: summary} of what this rank has stored, and forget it."""
        summaries = {name: summarize(values) for name, values in self.values.items()}
        self.values = {}
        return summaries

    def write(self, row, ended):
        """Append `row` to progress.csv, TensorBoard and the console, and the ended episodes.

        ended    (step, env, ep_ret, ep_len) per episode, and success if the environment tells it
        """
        names = [*EPISODE, "success"]
        self.episodes.write([dict(zip(names, (step, row["time"], *end))) for step, *end in ended])
        self.progress.write([row])
        for name in row.keys() - {"step"}:
            self.board.add_scalar(name, row[name], row["step"])
        self.unseen.append(row)
        part, printed = (at * LINES // self.total_steps for at in (row["step"], self.printed))
        if part > printed or self.lines == 0:
            self.print(row["step"])
        self.bar.update(row["step"] - self.bar.n)

    def print(self, step):
        """One line on the console: means of the reports since the last line.

        The titles are repeated every 20 lines, and where a new column comes.
        """
        names = [name for name in self.progress.columns[3:]
                 if not name.endswith(("_std", "_min", "_max"))]
        first = ("ep_ret_mean", "ep_len_mean", "eval_ret_mean", "success")
        names = sorted(names, key=lambda name: name not in first)[:9]
        if names != self.shown or self.lines % 20 == 0:
            titles = ["step", "steps/s", *(name.removesuffix("_mean") for name in names)]
            self.widths = [max(9, len(title)) for title in titles]
            tqdm.write(" ".join(map(str.rjust, titles, self.widths)))
        cells = [f"{step:,}"]
        for name in ("steps_per_second", *names):
            values = [row[name] for row in self.unseen if name in row]
            mean = np.mean(values) if values else 0.0
            text = f"{mean:,.0f}" if 1e3 <= abs(mean) < 1e7 else f"{mean:.4g}"
            cells.append(text if values else "")
        tqdm.write(" ".join(map(str.rjust, cells, self.widths)))
        sys.stdout.flush()
        self.shown, self.printed, self.unseen = names, step, []
        self.lines += 1


def summarize(values):
    """Return what `merge` needs of the values of one rank: (is_distribution, all numbers)."""
    flat = torch.cat([value.reshape(-1).to(values[0].device) for value in values])
    return any(value.ndim for value in values), flat.double().cpu().numpy()


def merge(name, summaries):
    """Return the columns of one metric, from the summaries of the ranks that stored it."""
    numbers = np.concatenate([flat for _, flat in summaries])
    if not numbers.size:
        return {}
    with np.errstate(all="ignore"):  # the report refuses, by name, what is not finite
        if not any(is_distribution for is_distribution, _ in summaries):
            return {name: float(numbers.mean())}
        return {f"{name}_{what}": float(getattr(numbers, what)())
                for what in ("mean", "std", "min", "max")}


class Table:
    """A csv file that grows. It is closed after each write, so a kill loses no row."""

    def __init__(self, path, columns, step):
        """Keep the rows up to `step` of a file that exists already."""
        self.path = path
        old = read_table(path.parent, path.name) if path.exists() else []
        # A kill may have cut off the last row.
        old = [row for row in old if None not in row.values() and int(row["step"]) <= step]
        self.rewrite(dict.fromkeys([*columns, *(name for row in old for name in row)]), old)

    def rewrite(self, columns, rows):
        self.columns = list(columns)
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())

    def write(self, rows):
        """Append dicts. A column that appears late is empty in the rows before."""
        columns = dict.fromkeys([*self.columns, *(name for row in rows for name in row)])
        if len(columns) > len(self.columns):
            self.rewrite(columns, read_table(self.path.parent, self.path.name))
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerows(rows)
