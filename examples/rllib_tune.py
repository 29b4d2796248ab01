"""Tune PPO of RLlib on CartPole with Ray Tune: one trial per learning rate, in parallel if resources allow.

    heliostat run --nodes 4 examples/rllib_tune.py --lr 1e-4 3e-4 1e-3 3e-3 --iterations 50 --storage /shared/results

On several machines, --storage is a shared directory (NFS, Lustre, …) or an s3:// or gs:// address.
A trial needs one CPU, and one for each of its runners; `heliostat status` shows the free CPUs.
"""

import argparse
import json
import os
import time

import ray
from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig

RETURN = "env_runners/episode_return_mean"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 1e-3], help="the learning rates to try")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--target", type=float, default=450, help="a trial that has this mean return is done")
    parser.add_argument("--runners", type=int, default=1, help="of each trial")
    parser.add_argument("--gpus-per-learner", type=float, default=0)
    parser.add_argument("--storage", default="results", help="folder of the results, seen by every node")
    args = parser.parse_args()

    ray.init()
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=args.runners, num_envs_per_env_runner=4)
        .learners(num_learners=0, num_gpus_per_learner=args.gpus_per_learner)
        .training(
            lr=tune.grid_search(args.lr),
            train_batch_size_per_learner=2000,
            minibatch_size=128,
            num_epochs=8,
            vf_loss_coeff=0.01,
        )
        .debugging(seed=1)
    )
    tuner = tune.Tuner(
        config.algo_class,  # with the name "PPO", Ray would import all its algorithms, one of which needs Pillow
        param_space=config,  # an argument of Tuner; `tune.run` does not have it
        tune_config=tune.TuneConfig(metric=RETURN, mode="max"),
        run_config=tune.RunConfig(
            name=time.strftime("rllib-tune-%m%d-%H%M%S"),
            storage_path=args.storage if "://" in args.storage else os.path.abspath(args.storage),
            stop={"training_iteration": args.iterations, RETURN: args.target},  # whichever comes first
            verbose=1,  # 2 prints a table of all settings, hundreds of rows, for each trial
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        ),
    )
    results = tuner.fit()
    if results.errors:
        raise SystemExit(f"{len(results.errors)} trials failed; the first: {results.errors[0]}")
    returns = {
        f"{r.config['lr']:g}": round(r.metrics["env_runners"]["episode_return_mean"], 1) for r in results
    }
    for lr, mean in returns.items():
        print(f"lr {lr}: mean return {mean}")
    best = results.get_best_result()
    print(
        "result "
        + json.dumps({"returns": returns, "best": best.config["lr"], "checkpoint": best.checkpoint.path})
    )


if __name__ == "__main__":
    main()
