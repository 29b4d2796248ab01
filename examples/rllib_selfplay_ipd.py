"""The iterated prisoner's dilemma, learned against earlier versions of oneself (RLlib, several agents).

Self-play here means an opponent pool: `main` learns, and plays against one of a few frozen snapshots of itself; every few
iterations the oldest snapshot becomes a copy of `main`. Each player sees the last move of both. What it learns is to
defect, as theory says of selfish learners: this is an example of the machinery, not a way to make agents cooperate.

    heliostat run --nodes 2 examples/rllib_selfplay_ipd.py --storage /shared/results
    heliostat run --nodes 2 examples/rllib_selfplay_ipd.py --storage /shared/results --restore --iterations 20
"""

import argparse
import json
import os
import random

import numpy as np
import ray
import torch
from gymnasium.spaces import Box, Discrete
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_env import MultiAgentEnv

COOPERATE, DEFECT = 0, 1
PAY = {(0, 0): (3, 3), (0, 1): (0, 5), (1, 0): (5, 0), (1, 1): (1, 1)}
SEEN = ["start", "CC", "CD", "DC", "DD"]  # what a player sees: its own last move, then the other's


def view(mine: int | None, other: int | None) -> np.ndarray:
    return np.eye(5, dtype=np.float32)[0 if mine is None else 1 + 2 * mine + other]


class Dilemma(MultiAgentEnv):
    """Two prisoners, twenty rounds."""

    def __init__(self, config: dict | None = None) -> None:
        super().__init__()
        self.agents = self.possible_agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys(self.agents, Box(0, 1, (5,), np.float32))
        self.action_spaces = dict.fromkeys(self.agents, Discrete(2))

    def reset(self, *, seed=None, options=None):
        self.round = 0
        return dict.fromkeys(self.agents, view(None, None)), {}

    def step(self, moves):
        self.round += 1
        a, b = int(moves["a"]), int(moves["b"])
        pay = dict(zip(self.agents, map(float, PAY[a, b]), strict=True))
        over = self.round == 20
        return {"a": view(a, b), "b": view(b, a)}, pay, {"__all__": over}, {"__all__": False}, {}


def player(agent: str, episode, pool: int, **_) -> str:
    """`main` is now the one and now the other; its opponent is any of the pool."""
    return "main" if hash(episode.id_) % 2 == (agent == "b") else f"past{random.randrange(pool)}"


def strategy(algo) -> dict[str, float]:
    """How likely `main` defects, for each thing it may see."""
    with torch.no_grad():
        logits = algo.get_module("main").forward_inference({"obs": torch.eye(5)})["action_dist_inputs"]
    return dict(zip(SEEN, [round(p, 4) for p in logits.softmax(1)[:, DEFECT].tolist()], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=10, help="in all, those before a --restore counted")
    parser.add_argument("--pool", type=int, default=3, help="frozen opponents")
    parser.add_argument("--snapshot-every", type=int, default=2, help="iterations; then the oldest opponent is replaced")
    parser.add_argument("--runners", type=int, default=1, help="processes that play, on all nodes")
    parser.add_argument("--storage", default="results", help="folder of the checkpoints, seen by every node")
    parser.add_argument("--restore", action="store_true", help="go on from the checkpoint in --storage")
    args = parser.parse_args()

    ray.init()
    past = [f"past{i}" for i in range(args.pool)]
    pool = args.pool
    config = (
        PPOConfig()
        .environment(Dilemma)
        .env_runners(num_env_runners=args.runners)
        .multi_agent(
            policies={"main", *past},
            policy_mapping_fn=lambda agent, episode, **_: player(agent, episode, pool),
            policies_to_train=["main"],
        )
        .training(train_batch_size_per_learner=1000, minibatch_size=200, num_epochs=6, lr=3e-3, gamma=0.9)
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .debugging(seed=1)
    )
    algo = config.build_algo()
    path = f"{args.storage if '://' in args.storage else os.path.abspath(args.storage)}/dilemma"
    if args.restore:
        algo.restore_from_path(path)
        print(f"restored iteration {algo.iteration}, strategy {json.dumps(strategy(algo))}", flush=True)
    while algo.iteration < args.iterations:
        result = algo.train()
        if algo.iteration % args.snapshot_every == 0:
            oldest = past[algo.iteration // args.snapshot_every % args.pool]
            algo.set_weights({oldest: algo.get_weights(["main"])["main"]})
        algo.save_to_path(path)
        pay = result["env_runners"]["module_episode_returns_mean"]["main"] / 20
        print(f"iteration {algo.iteration}: main is paid {pay:.2f} a round", flush=True)
    print("result", json.dumps({"iterations": algo.iteration, "pay": pay, "defects": strategy(algo), "checkpoint": path}))
    algo.stop()


if __name__ == "__main__":
    main()
