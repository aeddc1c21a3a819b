"""What the settings that no algorithm learns with are for: one list, on which programs agree."""

PLACE = {"env", "seed", "run_dir", "resume", "overwrite"}  # which run it is; a sweep gives them
ROUNDING = {"device", "torch_threads", "bf16", "async_envs"}  # they change numbers by rounding only
WATCH = {"eval_every"}  # what is measured beside training, of which they change no number
