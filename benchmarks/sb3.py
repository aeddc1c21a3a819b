"""Run a peer of the published figures: stable-baselines3, or sb3-contrib.

    python benchmarks/sb3.py --algo ppo --env HalfCheetah-v4 --seed 1 --out DIR

Environments, protocol and sizes equal ours. The on-policy peers normalise
observations and rewards (VecNormalize). The off-policy peers normalise nothing.

    ppo    8 environments x 256 steps, minibatches of 64, 10 epochs, learning
           rate 3e-4 -> 0; other settings as in CleanRL, except that the value
           loss is not clipped and has twice the weight
    a2c    16 environments x 5 steps, lam 0.95, learning rate 7e-4 -> 0,
           otherwise its defaults
    trpo   8 environments x 256 steps, otherwise RL Zoo's tuned settings for
           MuJoCo (20 epochs of the value function)
    ppo_lstm    sb3-contrib's RecurrentPPO with one LSTM of 128 for actor and
           critic, 8 environments x 64 steps, minibatches of 128 samples, 10
           epochs, learning rate 1e-3 -> 0; it has no layer before the LSTM
    ddpg, td3, sac    our sizes and update rates; learning rate 1e-3
    dqn    our settings, without Double DQN and the dueling network, which the
           peer lacks

On Atari, ppo, a2c and dqn_atari have our settings for it; from Python,
`library` may be sbx for ppo and dqn_atari.

It writes DIR/episodes.csv (step,time,env,ep_ret,ep_len) and DIR/result.json
(train100, eval, ...).
"""
import argparse
import csv
import json
import sys
import time
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

NUM_ENVS = {"ppo": 8, "ppo_lstm": 8, "trpo": 8, "a2c": 16}     # the others have one
NORMALIZED = tuple(NUM_ENVS)
CONTRIB = {"trpo": sb3_contrib.TRPO, "ppo_lstm": sb3_contrib.RecurrentPPO}
SCALED_KL = {"HalfCheetah-v4": 0.04}                # RL Zoo's target_kl; 0.01 for the others


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

    def __init__(self, env, num_envs):
        self.envs = gym.make_vec(env, num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        super().__init__(num_envs, self.envs.single_observation_space,
                         self.envs.single_action_space)

    def reset(self):
        return self.envs.reset(seed=1)[0]

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


def make_game_peer(algo, env, num_envs, library=stable_baselines3):
    """Return the peer's PPO, A2C or DQN for an Atari game, with our settings."""
    envs, common = Games(env, num_envs), {"seed": 1, "device": "cpu"}
    if algo == "ppo":
        return library.PPO(
            "CnnPolicy", envs, n_steps=1024 // num_envs, batch_size=256, n_epochs=4,
            learning_rate=lambda left: 2.5e-4 * left, clip_range=0.1, ent_coef=0.01, **common)
    if algo == "a2c":
        return stable_baselines3.A2C(
            "CnnPolicy", envs, n_steps=80 // num_envs, gae_lambda=0.95, ent_coef=0.01,
            learning_rate=lambda left: 7e-4 * left, **common)
    return library.DQN(
        "CnnPolicy", envs, learning_rate=lambda left: 1e-4 * left, buffer_size=20_000,
        learning_starts=500, batch_size=32, train_freq=4, target_update_interval=1000,
        exploration_fraction=0.1, exploration_final_eps=0.01, **common)


def make_peer(algo, env, seed, num_envs=None, library=stable_baselines3, **given):
    """Return the peer with the settings of the comparison; `given` overrides them.

    library    stable_baselines3, or sbx for ppo, dqn, ddpg, td3 and sac
    """
    num_envs = num_envs or NUM_ENVS.get(algo, 1)
    if env.startswith("ALE/"):
        if algo not in ("ppo", "a2c", "dqn_atari") or (
                algo == "a2c" and library is not stable_baselines3):
            raise SystemExit(f"there is no such peer of {algo} on {env}")
        return make_game_peer(algo, env, num_envs, library)
    envs = make_vec_env(env, n_envs=num_envs, seed=seed)
    common = {"seed": seed, "device": "cpu", "gamma": 0.99}
    if algo in NORMALIZED:
        envs = VecNormalize(envs, gamma=0.99)
    if algo == "ppo":
        own = dict(n_steps=2048 // num_envs, batch_size=64, n_epochs=10, clip_range=0.2,
                   learning_rate=lambda left: 3e-4 * left, gae_lambda=0.95, ent_coef=0.0,
                   vf_coef=0.5, max_grad_norm=0.5)
    elif algo == "ppo_lstm":
        own = dict(n_steps=512 // num_envs, batch_size=128, n_epochs=10, clip_range=0.2,
                   learning_rate=lambda left: 1e-3 * left, gae_lambda=0.95, ent_coef=0.0,
                   vf_coef=0.5, max_grad_norm=0.5,
                   policy_kwargs=dict(lstm_hidden_size=128, net_arch=[64], shared_lstm=True,
                                      enable_critic_lstm=False))
    elif algo == "a2c":
        own = dict(n_steps=80 // num_envs, gae_lambda=0.95, learning_rate=lambda left: 7e-4 * left)
    elif algo == "trpo":
        own = dict(n_steps=2048 // num_envs, batch_size=128, cg_max_steps=25, cg_damping=0.1,
                   n_critic_updates=20, learning_rate=1e-3, gae_lambda=0.95,
                   target_kl=SCALED_KL.get(env, 0.01))
    elif algo == "dqn":
        own = dict(learning_rate=lambda left: 1e-3 * left, buffer_size=50_000, batch_size=128,
                   learning_starts=1000, train_freq=max(1, 2 // num_envs),
                   gradient_steps=max(1, num_envs // 2),
                   target_update_interval=250, exploration_fraction=8000 / 5e4,
                   exploration_final_eps=0.04, policy_kwargs={"net_arch": [128, 128]})
    else:
        own = dict(learning_rate=1e-3, buffer_size=1_000_000, batch_size=256,
                   learning_starts=10_000, tau=0.005, train_freq=1, gradient_steps=1,
                   policy_kwargs={"net_arch": [256, 256]})
    if algo in ("ddpg", "td3"):     # SAC explores by its stochastic policy
        num_acts = envs.action_space.shape[0]
        own["action_noise"] = NormalActionNoise(np.zeros(num_acts), 0.1 * np.ones(num_acts))
    peer = CONTRIB.get(algo) or getattr(library, algo.upper())
    policy = "MlpLstmPolicy" if algo == "ppo_lstm" else "MlpPolicy"
    return peer(policy, envs, **common | own | given)


def evaluate(model, algo, env, seed, episodes):
    """Return the deterministic policy's returns, with the final statistics frozen."""
    test = make_vec_env(env, n_envs=1, seed=seed + 10_000)
    if algo in NORMALIZED:
        test = VecNormalize(test, training=False, norm_reward=False)
        test.obs_rms = model.get_vec_normalize_env().obs_rms
    returns, _ = evaluate_policy(model, test, n_eval_episodes=episodes, deterministic=True,
                                 return_episode_rewards=True, warn=False)
    return [round(float(value), 3) for value in returns]


def curve(rows: list[list], total: int) -> list[list]:
    """Return at most 100 pairs: a step, and a mean return.

    The mean is over the episodes that ended in the 1% of the run before that step.
    """
    bins = np.ceil(np.array([row[0] for row in rows]) / (total / 100)).astype(int)
    returns = np.array([row[3] for row in rows])
    return [[round(k * total / 100), round(float(returns[bins == k].mean()), 3)]
            for k in np.unique(bins)]


def main():
    parser = argparse.ArgumentParser(prog="python benchmarks/sb3.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", required=True,
                        help="ppo, ppo_lstm, a2c, trpo, ddpg, td3, sac or dqn")
    parser.add_argument("--env", required=True, help="Gymnasium id")
    parser.add_argument("--seed", type=int, default=1, help="seed (default: 1)")
    parser.add_argument("--total-steps", type=float, default=1e6, help="environment steps")
    parser.add_argument("--num-envs", type=int, help="environments (default: as listed above)")
    parser.add_argument("--episodes", type=int, default=10, help="episodes of the evaluation")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = make_peer(args.algo, args.env, args.seed, args.num_envs)
    log = Episodes()
    model.learn(int(args.total_steps), callback=log)
    seconds = time.time() - log.start
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "episodes.csv", "w", newline="") as file:
        csv.writer(file).writerows([["step", "time", "env", "ep_ret", "ep_len"], *log.rows])
    library = sb3_contrib if args.algo in CONTRIB else stable_baselines3
    changed = {"num_envs": args.num_envs} if args.num_envs else {}
    result = dict(library="sb3-contrib" if args.algo in CONTRIB else "stable-baselines3",
                  algo=args.algo, env=args.env, seed=args.seed,
                  settings=changed, changed=changed,
                  total_steps=model.num_timesteps, seconds=round(seconds, 1),
                  train100=float(np.mean([row[3] for row in log.rows[-100:]])),
                  eval=evaluate(model, args.algo, args.env, args.seed, args.episodes),
                  curve=curve(log.rows, model.num_timesteps), command=" ".join(sys.argv[1:]),
                  versions={library.__name__: library.__version__, "torch": torch.__version__,
                            "gymnasium": gym.__version__})
    (args.out / "result.json").write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
