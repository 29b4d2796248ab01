"""Train a small network with Ray Train on several workers; the loss of a worker or a node does not change the result.

    heliostat run --nodes 4 --gpus-per-node 8 examples/train_torch.py --workers 32 --cpus 4 --storage /shared/results

On several machines, --storage is a shared directory (NFS, Lustre, …) or an s3:// or gs:// address.
"""

import argparse
import json
import logging
import os
import tempfile
import time

import ray.train
import torch
from ray.train.torch import TorchTrainer, get_device, prepare_model


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(1024, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
    return x, x[:, :1].sin() * x[:, 1:]


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def train_loop(config: dict[str, float]) -> None:
    context, first = ray.train.get_context(), 0
    rank, size = context.get_world_rank(), context.get_world_size()
    node = {n["NodeID"]: n["NodeName"] for n in ray.nodes()}[ray.get_runtime_context().get_node_id()]
    # Prefix each message with the worker; force replaces Ray Train's own handler, which has no prefix.
    who = f"worker {rank}/{size} on {node} pid {os.getpid()}"
    logging.basicConfig(format=f"{who}: %(message)s", level=logging.INFO, force=True)
    model = prepare_model(network())  # on this worker's GPU, if any; averages gradients over all workers
    inner = getattr(model, "module", model)  # the model of a single worker is not wrapped
    optimizer = torch.optim.Adam(inner.parameters(), lr=config["lr"])
    if checkpoint := ray.train.get_checkpoint():  # after a failure, or when a run is resumed
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt", map_location=get_device())
        inner.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    logging.info("begins with epoch %d on %s", first, get_device())
    x, y = (part[rank::size].to(get_device()) for part in data())  # each worker gets its share
    for epoch in range(first, int(config["epochs"])):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(config["pause"])
        logging.info("epoch %d, loss %.6f", epoch, loss.item())
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, f"{folder}/state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report({"loss": loss.item()}, checkpoint)  # all report; rank 0 adds the checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--placement", default="SPREAD", choices=["PACK", "SPREAD", "STRICT_SPREAD"])
    parser.add_argument("--cpus", type=float, default=1, help="of each worker")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0, help="seconds that an epoch sleeps, to pull a plug")
    parser.add_argument("--storage", default="results", help="folder of the checkpoints, seen by every node")
    parser.add_argument("--name", default=time.strftime("train-%m%d-%H%M%S"), help="the same again goes on")
    parser.add_argument("--address", help="of Ray; without it, the cluster that `heliostat run` has started")
    args = parser.parse_args()
    ray.init(args.address)
    result = TorchTrainer(
        train_loop,
        train_loop_config={"lr": 0.02, "epochs": args.epochs, "pause": args.pause},
        scaling_config=ray.train.ScalingConfig(
            num_workers=args.workers,
            use_gpu=ray.cluster_resources().get("GPU", 0) >= args.workers,
            resources_per_worker={"CPU": args.cpus},  # and one GPU, with use_gpu
            placement_strategy=args.placement,
        ),
        run_config=ray.train.RunConfig(
            name=args.name,
            storage_path=args.storage if "://" in args.storage else os.path.abspath(args.storage),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=3),  # Ray 2.60 also counts a drained node
        ),
    ).fit()
    with result.checkpoint.as_directory() as folder:
        saved = torch.load(f"{folder}/state.pt", map_location="cpu")
    model, (x, y) = network(), data()
    model.load_state_dict(saved["model"])
    loss = torch.nn.functional.mse_loss(model(x), y).item()
    print("result " + json.dumps({"epochs": saved["epoch"] + 1, "loss": loss, "path": result.path}))


if __name__ == "__main__":
    main()
