"""What the algorithm files share. An algorithm file imports three of these, or all four:

    mpi.py      optimizers that take one gradient step, averaged over processes
    envs.py     make_envs, evaluate, and what each kind of environment needs
    run.py      RunConfig and Run: directory, seeds, device, reports, save and resume
    demos.py    demonstrations of an expert, for imitation learning

run.py writes its metrics through logger.py (progress.csv, episodes.csv, TensorBoard, console).
Two files are commands. play.py is imported as well, since it loads runs:

    play.py     evaluate a run, record a video      python -m utils.play RUN
                or demonstrations
    sweep.py    many runs, their results            python -m utils.sweep --help

The others stand behind all of these. launch.py starts processes and has UsageError, checks.py
refuses bad input, rundir.py owns the run directory and config.json, source.py the copy of the
algorithm in it, checkpoint.py saves and loads tensors, and files.py writes a file whole or not at
all. flags.py reads every command line, and summary.py says how a run went. video.py serves play.py.
jobs.py (runs as processes) and results.py (result.json) serve sweep.py. curves.py reads runs for
plot.py, and tasks.py has environments for experiments.
"""
