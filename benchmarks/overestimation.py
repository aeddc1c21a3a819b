"""Draw what DDPG's and TD3's critics promise beside what their policies then get.

    python -m algos.ddpg --env Hopper-v4 --eval-every 5000 --run-dir runs/q/ddpg
    python -m algos.td3 --env Hopper-v4 --eval-every 5000 --run-dir runs/q/td3
    python -m benchmarks.overestimation runs/q/ddpg runs/q/td3

It adds their rows to overestimation.csv and draws figures/overestimation.svg from all rows. Q is a
mean over the states of ten evaluated episodes; `discounted` is the discounted return that followed
from the same states.
"""
import csv
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from utils.run.directory import read_config

HERE = Path(__file__).resolve().parent
FIELDS = ("algo", "env", "seed", "step", "q", "discounted", "eval")


def rows_of(run: str) -> list[dict]:
    """Return a row per evaluation of a run."""
    config = read_config(run)
    same = {"algo": config["algo"], **{k: str(config["settings"][k]) for k in ("env", "seed")}}
    with open(Path(run, "progress.csv"), newline="") as file:
        found = [row for row in csv.DictReader(file) if row.get("eval_q_mean")]
    return [same | {"step": row["step"], "q": f"{float(row['eval_q_mean']):.1f}",
                    "discounted": f"{float(row['eval_discounted_mean']):.1f}",
                    "eval": f"{float(row['eval_ret_mean']):.0f}"} for row in found]


def main(runs: list[str]) -> None:
    path = HERE / "overestimation.csv"
    stored = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    new = [row for run in runs for row in rows_of(run)]
    keys = {(row["algo"], row["env"], row["seed"]) for row in new}
    stored = [row for row in stored if (row["algo"], row["env"], row["seed"]) not in keys] + new
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(stored)
    algos = sorted({row["algo"] for row in stored})
    figure, axes = plt.subplots(1, len(algos), figsize=(4 * len(algos), 3), sharex=True,
                                sharey=True, squeeze=False)
    for ax, algo in zip(axes[0], algos):
        for seed in sorted({row["seed"] for row in stored if row["algo"] == algo}):
            mine = [row for row in stored if (row["algo"], row["seed"]) == (algo, seed)]
            steps = [int(row["step"]) for row in mine]
            for name, color, label in (("q", "C3", "Q promised"),
                                       ("discounted", "C0", "discounted return obtained")):
                ax.plot(steps, [float(row[name]) for row in mine], color=color, label=label)
        ax.set(title=f"{algo} on {mine[0]['env']}", xlabel="environment steps")
        ax.grid(alpha=0.3)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[0, -1].legend(handles[:2], labels[:2])
    figure.tight_layout()
    figure.savefig(HERE / "figures/overestimation.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
