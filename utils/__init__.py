"""What the algorithm files share. All that is learning, time limits too, stands in these files.
Each imports the first three, imitation (bc, gail) also demos:

    mpi.py          optimizers and running statistics, averaged over processes; compiled losses
    envs.py         make_envs, evaluate, what each kind of environment needs
    run.py          RunConfig and Run: the directory and its lock, seeds, device, threads, whether
                    to compile, reports, save and resume
    demos.py        demonstrations of an expert, for imitation learning

Two files are commands: play.py (evaluate a run, record a video or demonstrations) and sweep.py
(many runs, their results). The others stand behind these:

    logger.py       progress.csv, episodes.csv, TensorBoard, console
    checkpoint.py   files that are written whole; checkpoints; the copy of the algorithm in a run
    cli.py          the command line of every program, and the ranges of settings
    results.py      result.json, and suites of results
    tasks.py        environments of this project: --env utils.tasks:CartPoleNoVel-v0
"""

import os
import sys

# Both are read when PyTorch is loaded. Matrix products then have the same bits with one thread as
# with two, so a run may change their number (`Threads` in utils/run.py). Where a thread waits for
# the other, it spins for some microseconds and then sleeps (benchmarks/decisions.md, Speed).
if "torch" not in sys.modules:
    os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
