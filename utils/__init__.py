"""What the algorithm files share. What is learned is computed with the first five:

    mpi.py          processes, and averages over all of them
    stats.py        mean and variance over processes, and running ones
    optim.py        Adam and RMSProp
    nets.py         layers for vectors, encoders for images, distributions of actions
    envs.py         make_envs, rollouts as tensors

An algorithm file may also import:

    policy.py       the parent of every Agent: the spaces that it takes, and `predict`
    spaces.py       kinds of spaces, and those that stand for others
    buffers.py      what replay buffers share
    goals.py        rewards of other goals, for hindsight
    demos.py        demonstrations of an expert, for imitation learning
    errors.py       UsageError
    run/            the stage: settings, command line, directory, checkpoints, signals, reports

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
    roles.py        which settings say where a run is, or only how it is computed
"""
