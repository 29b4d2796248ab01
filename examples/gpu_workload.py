"""Multiply matrices on every GPU of the cluster and print the throughput of each GPU.

Without GPUs, the program uses one CPU of each node and prints a message.

    heliostat run --nodes 2 --gpus-per-node 4 examples/gpu_workload.py --size 8192
"""

import argparse
import json
import time

import ray
import torch


@ray.remote
class Worker:
    """Actor that holds one GPU (or none) for its lifetime, so that no two actors share a GPU."""

    def multiply(self, size: int, rounds: int) -> dict[str, object]:
        context = ray.get_runtime_context()
        ids = context.get_accelerator_ids()["GPU"]
        if ids and not torch.cuda.is_available():
            raise SystemExit(
                f"Ray gave GPU {ids[0]}, but this PyTorch ({torch.__version__}) cannot use it: no CUDA in it, or no driver"
            )
        # Ray exposes only the assigned GPU to a process, always as number 0.
        device = torch.device("cuda:0" if ids else "cpu")
        torch.manual_seed(0)
        a, b = (torch.randn(size, size, device=device) / size**0.5 for _ in range(2))
        product = a @ b  # the first product also initializes the GPU
        self.wait(device)
        began = time.perf_counter()
        for _ in range(rounds):
            product = a @ product
        self.wait(device)
        seconds = time.perf_counter() - began
        # (a…ab)x must equal a(…(a(bx))): an inexpensive check of the product.
        x = torch.ones(size, 1, device=device)
        direct = b @ x
        for _ in range(rounds + 1):
            direct = a @ direct
        error = float((product @ x - direct).norm() / direct.norm())
        return {
            "node": context.get_node_id(),
            "device": f"GPU {ids[0]}: {torch.cuda.get_device_name(0)}" if ids else "CPU",
            "gflops": round(2 * size**3 * rounds / seconds / 1e9, 1),
            "error": error,
        }

    def wait(self, device: torch.device) -> None:
        """Wait for the GPU, which runs asynchronously, so that the measured time is correct."""
        if device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=512, help="rows and columns; 8192 keeps a large GPU busy")
    parser.add_argument("--rounds", type=int, default=10, help="products one after another")
    args = parser.parse_args()

    ray.init()
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    gpus = sum(int(node["Resources"].get("GPU", 0)) for node in nodes.values())
    if gpus:
        workers = [Worker.options(num_gpus=1).remote() for _ in range(gpus)]
    else:
        print(
            "no GPU in this cluster: one CPU of each node does the work (heliostat run --gpus-per-node N asks for some)"
        )
        workers = [Worker.options(num_cpus=1, scheduling_strategy="SPREAD").remote() for _ in nodes]
    answers = ray.get([worker.multiply.remote(args.size, args.rounds) for worker in workers])
    for answer in answers:
        answer["node"] = nodes[answer["node"]]["NodeName"]
    answers.sort(key=lambda answer: (answer["node"], answer["device"]))
    for answer in answers:
        print(
            f"{answer['node']}, {answer['device']}: {answer['gflops']} GFLOP/s, relative error {answer['error']:.1e}"
        )
    assert all(answer["error"] < 0.01 for answer in answers), "a product is wrong"
    print("result " + json.dumps({"gpus": gpus, "size": args.size, "workers": answers}))


if __name__ == "__main__":
    main()
