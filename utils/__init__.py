"""What the algorithm files share. Four files are for readers of an algorithm:

    envs.py     make_envs, evaluate, and what each kind of environment needs
    mpi.py      optimizers that take one gradient step, averaged over processes
    run.py      RunConfig and Run: directory, seeds, device, reports, save and resume
    logger.py   metrics -> progress.csv, episodes.csv, TensorBoard and the console

Two are commands:

    play.py     evaluate a run or record a video    python -m utils.play RUN
    sweep.py    many runs, their results            python -m utils.sweep --help

The others stand behind them. run.py uses checks.py (bad input), launch.py (starts processes),
rundir.py (run directory and config.json), checkpoint.py and files.py (writing safely). play.py
uses video.py. sweep.py uses jobs.py (running processes) and results.py (result.json).
"""
