"""What stands around the algorithm files. CONTRIBUTING.md lists the modules that these import.

Two files are programs: play.py (evaluate a run, record a video or demonstrations, export it) and
sweep.py (many runs, their results). The others stand behind these:

    command.py      command lines, and how a program ends
    load.py         the trained policy of a run
    env_ids.py      names of environments, and what can be wrong with them
    wrappers.py     what is wrapped around environments: other spaces, the episodes that end
    seeds.py        seeds for each use and rank, and the state of random generators
    evaluate.py     returns of a policy
    logger.py       progress.csv, episodes.csv, TensorBoard, console
    atari.py        what Atari games show a learner
    files.py        files that a kill leaves whole; .jsonl and .csv
    export.py       a policy as an ONNX graph
    film.py         pictures and films of an episode
    results.py      result.json, what is published of a run
    returns.py      the curve of a run, and what it ends at
    roles.py        which settings say where a run is, or only how it is computed
"""
