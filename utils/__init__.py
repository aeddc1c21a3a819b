"""What the algorithm files share. Each imports the first three, imitation (bc, gail) also demos:

    mpi.py      optimizers and running statistics, averaged over processes
    envs.py     make_envs, evaluate, and what each kind of environment needs
    run.py      RunConfig and Run: directory, seeds, device, reports, save and resume
    demos.py    demonstrations of an expert, for imitation learning

run.py writes its metrics through logger.py (progress.csv, episodes.csv, TensorBoard, console).
Two files are commands. play.py is imported as well, since it loads runs:

    play.py     evaluate a run, record a video      python -m utils.play RUN
                or demonstrations
    sweep.py    many runs, their results            python -m utils.sweep --help

The others stand behind these. For run.py: launch.py starts the processes of a run with MPI and has
UsageError, checks.py refuses bad settings and spaces, rundir.py owns the run directory and
config.json, source.py the copy of the algorithm in it (which play.py can run), checkpoint.py saves
and loads tensors, and summary.py prints how the run went. files.py writes a file whole or not at
all, and flags.py reads every command line. video.py serves play.py. jobs.py (runs as processes)
and results.py (result.json, suites) serve sweep.py.
tasks.py has environments of this project: --env utils.tasks:CartPoleNoVel-v0.
"""

import gc
import sys

# PyTorch's import makes some 150,000 objects that stay. The garbage collector would go over them
# again and again, in this import and in those that follow: a quarter of the time of --help. So it
# waits, and leaves these objects alone for good. If PyTorch is here already, it is too late.
if "torch" not in sys.modules:
    collecting = gc.isenabled()
    gc.disable()
    try:
        import torch  # noqa: F401

        gc.freeze()
    finally:
        if collecting:
            gc.enable()
