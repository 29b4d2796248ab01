"""Serve a model with Ray Serve: deploy it, send requests by a handle and by HTTP, and shut it down.

heliostat run --nodes 2 examples/serve_model.py --replicas 2
heliostat run --nodes 2 examples/serve_model.py --replicas 2 --stay      # run until Ctrl-C
"""

import argparse
import json
import os
import socket
import time
import urllib.request

import ray
import torch
from ray import serve
from starlette.requests import Request


@serve.deployment
class Model:
    """Network that computes y = 2x + 1."""

    def __init__(self) -> None:
        self.device = "cuda" if ray.get_gpu_ids() else "cpu"
        self.model = torch.nn.Linear(1, 1).to(self.device)
        with torch.no_grad():
            self.model.weight.fill_(2)
            self.model.bias.fill_(1)

    @torch.no_grad()
    def predict(self, values: list[float]) -> dict[str, object]:
        x = torch.tensor(values, dtype=torch.float32, device=self.device).unsqueeze(1)
        return {"y": self.model(x).squeeze(1).tolist(), "replica": os.getpid()}

    async def __call__(self, request: Request) -> dict[str, object]:
        return self.predict((await request.json())["x"])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="of each replica; 0.5: two share one")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0: other machines may ask, and there is no password"
    )
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--stay", action="store_true", help="serve until Ctrl-C")
    args = parser.parse_args()

    ray.init()
    port = args.port or free_port()
    serve.start(http_options={"host": args.host, "port": port})
    try:
        options = {"num_cpus": 1, "num_gpus": args.gpus}
        app = Model.options(num_replicas=args.replicas, ray_actor_options=options).bind()
        handle = serve.run(app, name="model", route_prefix="/")  # returns when all replicas answer

        answers = [handle.predict.remote([float(i)]) for i in range(args.questions)]  # in parallel
        by_handle = [answer.result(timeout_s=60) for answer in answers]
        assert [answer["y"] for answer in by_handle] == [[2.0 * i + 1] for i in range(args.questions)], (
            by_handle
        )

        body = json.dumps({"x": [1, 2, 3]}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            by_http = json.load(reply)
        replicas = len({answer["replica"] for answer in by_handle})
        print(f"{args.questions} questions over the handle were answered by {replicas} replicas")
        print(f"http://127.0.0.1:{port}/ answered {by_http['y']}")
        while args.stay:
            time.sleep(1)
    finally:
        serve.shutdown()
    print(
        "result "
        + json.dumps({"handle": [a["y"][0] for a in by_handle], "http": by_http["y"], "replicas": replicas})
    )


if __name__ == "__main__":
    main()
