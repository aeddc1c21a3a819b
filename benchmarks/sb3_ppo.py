"""The peer of the published PPO figures: stable-baselines3's PPO with VecNormalize.

Same environments, same protocol and CleanRL's settings: 8 environments x 256 steps, minibatches of
64, 10 epochs, 3e-4 annealed to zero, two hidden layers of 64, observations and rewards normalised.
Writes OUT/episodes.csv (step,time,env,ep_ret,ep_len) and OUT/result.json (train100, eval, ...).

    python benchmarks/sb3_ppo.py --env HalfCheetah-v4 --seed 1 --out runs/sb3/HalfCheetah-v4/seed1
"""
import argparse
import csv
import json
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize


class Episodes(BaseCallback):
    """Raw returns and lengths of finished episodes, as SB3's Monitor reports them."""

    def __init__(self):
        super().__init__()
        self.rows, self.start = [], time.time()

    def _on_step(self) -> bool:
        for i, info in enumerate(self.locals["infos"]):
            if "episode" in info:
                now = round(time.time() - self.start, 3)
                episode = info["episode"]
                self.rows.append([self.num_timesteps, now, i, episode["r"], episode["l"]])
        return True


def make_peer(env, seed, num_envs=8, batch=2048, minibatch=64, epochs=10):
    """SB3's PPO as it is compared: the same totals whatever the number of environments."""
    envs = VecNormalize(make_vec_env(env, n_envs=num_envs, seed=seed), gamma=0.99)
    return PPO("MlpPolicy", envs, seed=seed, device="cpu",
               n_steps=batch // num_envs, batch_size=minibatch, n_epochs=epochs,
               learning_rate=lambda left: 3e-4 * left, gamma=0.99, gae_lambda=0.95, clip_range=0.2,
               ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5)


def curve(rows: list[list], total: int) -> list[list]:
    """At most 100 pairs: a step, the mean return of the episodes that ended in the 1% before."""
    bins = np.ceil(np.array([row[0] for row in rows]) / (total / 100)).astype(int)
    returns = np.array([row[3] for row in rows])
    return [[round(k * total / 100), round(float(returns[bins == k].mean()), 3)]
            for k in np.unique(bins)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=float, default=1e6)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--torch-threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.torch_threads)
    model, log = make_peer(args.env, args.seed, args.num_envs), Episodes()
    model.learn(int(args.total_steps), callback=log)
    seconds = time.time() - log.start
    test = VecNormalize(make_vec_env(args.env, n_envs=1, seed=args.seed + 10_000),
                        training=False, norm_reward=False)
    test.obs_rms = model.get_vec_normalize_env().obs_rms     # the statistics as they ended, frozen
    returns, _ = evaluate_policy(model, test, n_eval_episodes=10, deterministic=True,
                                 return_episode_rewards=True, warn=False)
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "episodes.csv", "w", newline="") as file:
        csv.writer(file).writerows([["step", "time", "env", "ep_ret", "ep_len"], *log.rows])
    result = dict(library="stable-baselines3", algo="ppo", env=args.env, seed=args.seed,
                  total_steps=model.num_timesteps, seconds=round(seconds, 1),
                  train100=float(np.mean([row[3] for row in log.rows[-100:]])),
                  eval=[round(float(value), 3) for value in returns],
                  curve=curve(log.rows, model.num_timesteps),
                  versions=dict(stable_baselines3=stable_baselines3.__version__,
                                torch=torch.__version__, gymnasium=gym.__version__))
    (args.out / "result.json").write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
