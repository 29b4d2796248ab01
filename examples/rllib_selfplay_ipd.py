"""Train the iterated prisoner's dilemma by self-play against earlier versions of the policy (RLlib, multi-agent).

Self-play with a pool: `main` is trained against frozen snapshots of itself. Every few iterations, a copy of `main` replaces
the oldest snapshot. It learns to defect, as theory predicts for selfish learners; the example does not teach cooperation.

    heliostat run --nodes 2 examples/rllib_selfplay_ipd.py
    heliostat run --nodes 2 examples/rllib_selfplay_ipd.py --restore results/dilemma/0010 --iterations 20
"""

import argparse
import functools
import json
import os
import random

import numpy as np
import ray
import torch
from gymnasium.spaces import Box, Discrete
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_env import MultiAgentEnv

PAY = [[3.0, 0.0], [5.0, 1.0]]  # PAY[own move][opponent's move]; 0: cooperate, 1: defect
SEEN = ["start", "CC", "CD", "DC", "DD"]  # observations: own last move, then the opponent's
VIEW = np.eye(5, dtype=np.float32)  # one-hot encoding: VIEW[1 + 2 * own + opponent]


class Dilemma(MultiAgentEnv):
    """Environment with two prisoners and twenty rounds."""

    def __init__(self, config=None):
        super().__init__()
        self.agents = self.possible_agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys(self.agents, Box(0, 1, (5,), np.float32))
        self.action_spaces = dict.fromkeys(self.agents, Discrete(2))

    def reset(self, *, seed=None, options=None):
        self.round = 0
        return {"a": VIEW[0], "b": VIEW[0]}, {}

    def step(self, moves):
        self.round += 1
        a, b = int(moves["a"]), int(moves["b"])
        seen, pay = {"a": VIEW[1 + 2 * a + b], "b": VIEW[1 + 2 * b + a]}, {"a": PAY[a][b], "b": PAY[b][a]}
        return seen, pay, {"__all__": self.round == 20}, {"__all__": False}, {}


def player(agent: str, episode, past: list[str], **_) -> str:
    """Map an agent to its policy: `main` alternates between both roles; its opponent is random."""
    return "main" if hash(episode.id_) % 2 == (agent == "b") else random.choice(past)


def strategy(algo) -> dict[str, float]:
    """Return the probability that `main` defects, for each observation."""
    with torch.no_grad():
        logits = algo.get_module("main").forward_inference({"obs": torch.eye(5)})["action_dist_inputs"]
    return dict(zip(SEEN, [round(p, 4) for p in logits.softmax(1)[:, 1].tolist()], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=10, help="in all, those before a --restore counted")
    parser.add_argument("--pool", type=int, default=3, help="frozen opponents")
    parser.add_argument("--every", type=int, default=2, help="iterations from snapshot to snapshot")
    parser.add_argument("--runners", type=int, default=1, help="processes that play, on all nodes")
    parser.add_argument("--storage", default="results", help="folder of the checkpoints")
    parser.add_argument("--restore", metavar="CHECKPOINT", help="go on from there")
    args = parser.parse_args()
    ray.init()
    past = [f"past{i}" for i in range(args.pool)]
    mapping = functools.partial(player, past=past)
    algo = (
        PPOConfig()
        .environment(Dilemma)
        .env_runners(num_env_runners=args.runners)
        .multi_agent(policies={"main", *past}, policies_to_train=["main"], policy_mapping_fn=mapping)
        .training(train_batch_size_per_learner=1000, minibatch_size=200, num_epochs=6, lr=3e-3, gamma=0.9)
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .debugging(seed=1)
        .build_algo()
    )
    pay = checkpoint = None
    if args.restore:
        algo.restore_from_path(os.path.abspath(args.restore))
        print(f"restored iteration {algo.iteration}, strategy {json.dumps(strategy(algo))}", flush=True)
    while algo.iteration < args.iterations:
        pay = algo.train()["env_runners"]["module_episode_returns_mean"]["main"] / 20
        if algo.iteration % args.every == 0:
            oldest = past[algo.iteration // args.every % args.pool]
            algo.set_weights({oldest: algo.get_weights(["main"])["main"]})
            checkpoint = algo.save_to_path(os.path.abspath(f"{args.storage}/dilemma/{algo.iteration:04}"))
        print(f"iteration {algo.iteration}: main is paid {pay:.2f} a round", flush=True)
    told = {"iterations": algo.iteration, "pay": pay, "defects": strategy(algo), "checkpoint": checkpoint}
    print("result " + json.dumps(told))
    algo.stop()


if __name__ == "__main__":
    main()
