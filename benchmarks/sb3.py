"""Run a peer of the published figures: stable-baselines3, or sb3-contrib.

    python -m benchmarks.sb3 --algo ppo --env HalfCheetah-v4 --seed 1 --out DIR

Environments, protocol and sizes equal ours, and so do the settings that both have: `as_theirs`
takes them from the Config of our file. Where a peer lacks a setting of ours, it has its default:
DQN is neither double nor dueling. OWN names the settings that are the peer's own, since they suit
it better. The on-policy peers normalise observations and rewards (VecNormalize), as ours do; the
off-policy peers normalise nothing.

It writes DIR/episodes.csv (step,time,env,ep_ret,ep_len) and DIR/result.json (train100, eval, ...).
"""
import argparse
import csv
import json
import sys
import time
from importlib import import_module
from pathlib import Path

import gymnasium as gym
import numpy as np
import sb3_contrib
import stable_baselines3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from utils.returns import curve
from utils.run.directory import plain_settings

ON_POLICY = "a2c", "ppo", "ppo_lstm", "trpo"
CONTRIB = {"trpo": sb3_contrib.TRPO, "ppo_lstm": sb3_contrib.RecurrentPPO}
# On MuJoCo, A2C has its default batch and rate, TRPO the settings of RL Zoo, PPO no target_kl.
OWN = {"ppo": {"vf_coef": 0.5},
       "a2c": {"n_steps": 5, "learning_rate": lambda left: 7e-4 * left},
       "trpo": {"n_critic_updates": 20, "batch_size": 128, "cg_max_steps": 25, "cg_damping": 0.1}}
OWN_KL = {"HalfCheetah-v4": 0.04}                   # RL Zoo's target_kl; ours for the others


class Episodes(BaseCallback):
    """Collect raw returns and lengths of finished episodes, as SB3's Monitor reports them."""

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


class Games(VecEnv):
    """The same preprocessed games as ours, in C++, which are faster than the peer's own."""

    def __init__(self, env, num_envs, seed):
        self.first_seed = seed
        self.envs = gym.make_vec(env, num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        super().__init__(num_envs, self.envs.single_observation_space,
                         self.envs.single_action_space)

    def reset(self):
        return self.envs.reset(seed=self.first_seed)[0]

    def step_async(self, actions):
        self.actions = actions

    def step_wait(self):
        obs, rew, terminated, truncated, infos = self.envs.step(self.actions)
        told = [{"TimeLimit.truncated": bool(cut)} for cut in truncated & ~terminated]
        for i in np.flatnonzero(terminated | truncated):
            told[i]["terminal_observation"] = infos["final_obs"][i]
        return obs, rew, terminated | truncated, told

    def close(self):
        self.envs.close()

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.num_envs

    def get_attr(self, attr_name, indices=None):
        return [None] * self.num_envs

    set_attr = env_method = None  # nobody calls them


def as_theirs(algo, cfg, num_acts=1):
    """Return our settings of an algorithm by the names that the peer has for them.

    num_acts    dimensions of a continuous action
    """
    rate = cfg.v_lr if algo == "trpo" else cfg.lr
    annealed = getattr(cfg, "anneal_lr", False)
    named = {"learning_rate": (lambda left: rate * left) if annealed else rate, "gamma": cfg.gamma}
    if algo in ON_POLICY:
        per_env = cfg.rollout_steps // cfg.num_envs
        named |= {"n_steps": per_env, "gae_lambda": cfg.lam}
    else:
        named |= {"buffer_size": cfg.buffer_size, "batch_size": cfg.batch_size,
                  "learning_starts": cfg.start_steps,
                  "train_freq": max(1, cfg.update_every // cfg.num_envs),
                  "gradient_steps": max(1, cfg.num_envs // cfg.update_every)}
    if algo in ("a2c", "ppo", "ppo_lstm"):
        named |= {"ent_coef": cfg.ent_coef, "vf_coef": cfg.vf_coef,
                  "max_grad_norm": cfg.max_grad_norm}
    match algo:
        case "a2c":
            named |= {"rms_prop_eps": cfg.rmsprop_eps}
        case "ppo":
            named |= {"batch_size": cfg.minibatch_size, "n_epochs": cfg.epochs,
                      "clip_range": cfg.clip_ratio,
                      "policy_kwargs": {"log_std_init": float(np.log(cfg.std_init))}}
        case "ppo_lstm":    # one LSTM for actor and critic, without a layer before it
            named |= {"batch_size": cfg.minibatch_envs * per_env, "n_epochs": cfg.epochs,
                      "clip_range": cfg.clip_ratio, "policy_kwargs": {
                          "lstm_hidden_size": cfg.lstm_size, "net_arch": [*cfg.hidden],
                          "shared_lstm": True, "enable_critic_lstm": False}}
        case "trpo":        # its KL is a mean over dimensions, the KL of our damping is a sum
            named |= {"n_critic_updates": cfg.v_steps * cfg.minibatch_size // cfg.rollout_steps,
                      "batch_size": cfg.minibatch_size, "cg_max_steps": cfg.cg_steps,
                      "cg_damping": cfg.damping / num_acts, "target_kl": cfg.max_kl,
                      "line_search_max_iter": cfg.backtracks}
        case "dqn" | "dqn_atari":
            named |= {"target_update_interval": cfg.target_every,
                      "exploration_fraction": min(1, cfg.eps_steps / cfg.total_steps),
                      "exploration_final_eps": cfg.eps_end}
        case _:
            named |= {"tau": cfg.tau}
    if algo in ("ddpg", "td3"):     # SAC explores by its stochastic policy
        named["action_noise"] = NormalActionNoise(
            np.zeros(num_acts), cfg.act_noise * np.ones(num_acts))
    if algo in ("dqn", "ddpg", "td3", "sac"):
        named["policy_kwargs"] = {"net_arch": [*cfg.hidden]}
    return named


def peers_own(algo, cfg) -> dict:
    """Return the settings in which a peer keeps its own: none on games."""
    if cfg.env.startswith("ALE/"):
        return {}
    own_kl = {"target_kl": OWN_KL[cfg.env]} if algo == "trpo" and cfg.env in OWN_KL else {}
    return OWN.get(algo, {}) | own_kl


def make_peer(algo, cfg, library=stable_baselines3, own=True):
    """Return the peer of a run with our settings `cfg`; with `own`, it has OWN where that differs.

    library    stable_baselines3, or sbx for ppo, dqn, ddpg, td3 and sac
    """
    game = cfg.env.startswith("ALE/")
    if game and (algo not in ("ppo", "a2c", "dqn_atari")
                 or (algo == "a2c" and library is not stable_baselines3)):
        raise SystemExit(f"there is no such peer of {algo} on {cfg.env}")
    envs = (Games(cfg.env, cfg.num_envs, cfg.seed) if game
            else make_vec_env(cfg.env, n_envs=cfg.num_envs, seed=cfg.seed))
    if algo in ON_POLICY and not game:
        envs = VecNormalize(envs, gamma=cfg.gamma)
    named = as_theirs(algo, cfg, (envs.action_space.shape or (1,))[0])
    if own:
        named |= peers_own(algo, cfg)
    peer = CONTRIB.get(algo) or getattr(library, algo.removesuffix("_atari").upper())
    policy = "CnnPolicy" if game else "MlpLstmPolicy" if algo == "ppo_lstm" else "MlpPolicy"
    return peer(policy, envs, seed=cfg.seed, device="cpu", **named)


def evaluate(model, algo, env, seed, episodes):
    """Return the deterministic policy's returns, with the final statistics frozen."""
    test = make_vec_env(env, n_envs=1, seed=seed + 10_000)
    if algo in ON_POLICY:
        test = VecNormalize(test, training=False, norm_reward=False)
        test.obs_rms = model.get_vec_normalize_env().obs_rms
    returns, _ = evaluate_policy(model, test, n_eval_episodes=episodes, deterministic=True,
                                 return_episode_rewards=True, warn=False)
    return [round(float(value), 3) for value in returns]


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sb3", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", required=True,
                        help="ppo, ppo_lstm, a2c, trpo, ddpg, td3, sac or dqn")
    parser.add_argument("--env", required=True, help="Gymnasium id")
    parser.add_argument("--seed", type=int, default=1, help="seed (default: 1)")
    parser.add_argument("--total-steps", type=float, default=1e6, help="environment steps")
    parser.add_argument("--num-envs", type=int, help="environments (default: ours)")
    parser.add_argument("--episodes", type=int, default=10, help="episodes of the evaluation")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    args = parser.parse_args()
    if args.env.startswith("ALE/"):
        parser.error("games are for benchmarks/speed.py alone")
    torch.set_num_threads(1)
    changed = {"num_envs": args.num_envs} if args.num_envs else {}
    cfg = import_module(f"algos.{args.algo}").Config.for_env(
        args.env, seed=args.seed, total_steps=args.total_steps, **changed)
    model = make_peer(args.algo, cfg)
    log = Episodes()
    model.learn(int(args.total_steps), callback=log)
    seconds = time.time() - log.start
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "episodes.csv", "w", newline="") as file:
        csv.writer(file).writerows([["step", "time", "env", "ep_ret", "ep_len"], *log.rows])
    library = sb3_contrib if args.algo in CONTRIB else stable_baselines3
    result = dict(library="sb3-contrib" if args.algo in CONTRIB else "stable-baselines3",
                  algo=args.algo, env=args.env, seed=args.seed,
                  settings=plain_settings(cfg), changed=changed,      # `as_theirs` took them, but
                  own=[*peers_own(args.algo, cfg)],                   # these are the peer's
                  total_steps=model.num_timesteps, seconds=round(seconds, 1),
                  train100=float(np.mean([row[3] for row in log.rows[-100:]])),
                  eval=evaluate(model, args.algo, args.env, args.seed, args.episodes),
                  curve=curve([row[0] for row in log.rows], [row[3] for row in log.rows],
                             model.num_timesteps),
                  command=" ".join(sys.argv[1:]).replace(str(args.out), "DIR"),
                  versions={library.__name__: library.__version__, "torch": torch.__version__,
                            "gymnasium": gym.__version__})
    (args.out / "result.json").write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
