"""Train CartPole with PPO of RLlib; exit with 0 if the mean return reaches the target, else with 1 and a reason.

    heliostat run --nodes 2 examples/rllib_cartpole.py
    heliostat run --nodes 4 --gpus-per-node 1 examples/rllib_cartpole.py --runners 16 --learners 2 --gpus-per-learner 1

--env selects any Gymnasium environment. The example uses RLlib's new API stack; the old one is deprecated.
"""

import argparse
import json
import os
import time

import ray
from ray.rllib.algorithms.ppo import PPOConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument(
        "--target", type=float, default=150, help="mean return of the last episodes; CartPole's most is 500"
    )
    parser.add_argument("--iterations", type=int, default=40, help="give up after so many")
    parser.add_argument(
        "--runners", type=int, default=2, help="processes that play, one CPU each, on all nodes"
    )
    parser.add_argument("--learners", type=int, default=0, help="processes that learn; 0: the script itself")
    parser.add_argument("--gpus-per-learner", type=float, default=0)
    parser.add_argument(
        "--log-level", default="WARN", choices=["DEBUG", "INFO", "WARN", "ERROR"], help="RLlib's own"
    )
    parser.add_argument(
        "--storage", default="results", help="folder of the checkpoint; with --learners, seen by every node"
    )
    args = parser.parse_args()

    ray.init()
    config = (
        PPOConfig()
        .environment(args.env)
        .env_runners(num_env_runners=args.runners, num_envs_per_env_runner=4)
        .learners(num_learners=args.learners, num_gpus_per_learner=args.gpus_per_learner)
        .training(
            train_batch_size_per_learner=2000,
            minibatch_size=128,
            num_epochs=8,
            lr=1e-3,
            gamma=0.99,
            lambda_=0.95,
            vf_loss_coeff=0.01,
        )
        .debugging(log_level=args.log_level, seed=1)
        # Minimum number of steps per iteration, and number of episodes in the reported mean.
        .reporting(min_sample_timesteps_per_iteration=2000, metrics_num_episodes_for_smoothing=20)
    )
    algo = config.build_algo()
    storage = args.storage if "://" in args.storage else os.path.abspath(args.storage)
    best, steps, iteration = float("-inf"), 0, 0
    try:
        for iteration in range(1, args.iterations + 1):
            result = algo.train()
            mean = result["env_runners"].get(
                "episode_return_mean", float("nan")
            )  # missing until an episode has ended
            steps = int(result["num_env_steps_sampled_lifetime"])
            best = max(best, mean)
            print(f"iteration {iteration}: mean return {mean:.1f} after {steps} steps", flush=True)
            if mean >= args.target:
                break
        path = algo.save_to_path(f"{storage}/cartpole-{time.strftime('%m%d-%H%M%S')}")
    finally:
        algo.stop()
    if best < args.target:
        raise SystemExit(
            f"not learned: the best mean return was {best:.1f}, not {args.target:g}, after {iteration} iterations "
            f"and {steps} steps; more --iterations, or other settings in .training(…)"
        )
    print(
        "result "
        + json.dumps({"return": round(best, 1), "iterations": iteration, "steps": steps, "checkpoint": path})
    )


if __name__ == "__main__":
    main()
