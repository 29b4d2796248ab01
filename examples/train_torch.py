"""Trains a small network with Ray Train on several workers; the result is the same after a worker or a node is lost.

    heliostat run --nodes 4 --gpus-per-node 8 examples/train_torch.py --workers 32 --cpus 4 --storage /shared/results

On several machines --storage is a folder that all of them see (NFS, Lustre, …) or an s3:// or gs:// address.
Run it again with the --name of a run that was cut off, and that run goes on from its last checkpoint.
"""

import argparse
import json
import logging
import os
import tempfile
import time

import ray
import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers for everybody: y = sin(x1) * x2."""
    x = torch.rand(1024, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
    return x, (x[:, :1].sin() * x[:, 1:])


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))


def train_loop(config: dict[str, float]) -> None:
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    node = next(n["NodeName"] for n in ray.nodes() if n["NodeID"] == ray.get_runtime_context().get_node_id())
    log = logging.getLogger("train_torch")  # a logger of our own: Ray Train has set up the root logger for itself
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s worker {rank}/{size} on {node} pid {os.getpid()}: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)

    model = prepare_model(network())  # on this worker's GPU, if it has one; gradients are averaged over all workers
    plain = getattr(model, "module", model)  # one worker needs no averaging, and its model is not wrapped
    optimizer = torch.optim.Adam(plain.parameters(), lr=config["lr"])
    first = 0
    if checkpoint := ray.train.get_checkpoint():  # after a failure, or when a run goes on
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt", map_location=get_device())
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    log.info("begins with epoch %d on %s", first, get_device())

    x, y = (part[rank::size].to(get_device()) for part in data())  # each worker has its share
    for epoch in range(first, int(config["epochs"])):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(config["pause"])
        log.info("epoch %d, loss %.6f", epoch, loss.item())
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, f"{folder}/state.pt")
            # all workers report, the first one brings the checkpoint
            ray.train.report({"loss": loss.item()}, Checkpoint.from_directory(folder) if rank == 0 else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--placement", default="SPREAD", choices=["PACK", "SPREAD", "STRICT_SPREAD"])
    parser.add_argument("--cpus", type=float, default=1, help="of each worker")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0, help="seconds to sleep in each epoch: time to pull a plug")
    parser.add_argument("--storage", default="results", help="folder of the checkpoints, seen by every node")
    parser.add_argument("--name", default=time.strftime("train-%m%d-%H%M%S"), help="of the run, a folder in --storage")
    parser.add_argument("--address", help="of a cluster; without it, the one that `heliostat run` has started")
    args = parser.parse_args()

    ray.init(args.address)
    gpu = ray.cluster_resources().get("GPU", 0) >= args.workers
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"lr": 0.02, "epochs": args.epochs, "pause": args.pause},
        scaling_config=ScalingConfig(
            num_workers=args.workers,
            use_gpu=gpu,
            resources_per_worker={"CPU": args.cpus, **({"GPU": 1} if gpu else {})},
            placement_strategy=args.placement,
        ),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage if "://" in args.storage else os.path.abspath(args.storage),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),  # a drained node counts as one of them (Ray 2.60)
        ),
    )
    result = trainer.fit()
    with result.checkpoint.as_directory() as folder:
        saved = torch.load(f"{folder}/state.pt", map_location="cpu")
    model = network()
    model.load_state_dict(saved["model"])
    x, y = data()
    loss = nn.functional.mse_loss(model(x), y).item()
    print("result", json.dumps({"epochs": saved["epoch"] + 1, "loss": loss, "weights": model[0].weight.sum(1).tolist()[:4], "path": result.path}))


if __name__ == "__main__":
    main()
