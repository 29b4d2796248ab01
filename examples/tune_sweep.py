"""Search a learning rate and a width with Ray Tune; stop bad trials early and resume an interrupted sweep.

    heliostat run --nodes 4 examples/tune_sweep.py --trials 64 --storage /shared/results
    heliostat run --nodes 4 examples/tune_sweep.py --resume --storage /shared/results     # after an interruption

On several machines, --storage is a shared directory (NFS, Lustre, …) or an s3:// or gs:// address.
"""

import argparse
import json
import os
import signal
import tempfile
import time

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import nn


def trainable(config: dict[str, float], pause: float) -> None:
    """Fit a sine. Report the loss and a checkpoint at every step, so that any node can resume the trial."""
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 256).unsqueeze(1)
    model = nn.Sequential(nn.Linear(1, int(config["width"])), nn.Tanh(), nn.Linear(int(config["width"]), 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    first = 1
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    print(f"trial {tune.get_context().get_trial_id()} begins with step {first}", flush=True)
    for step in range(first, int(config["steps"]) + 1):
        for _ in range(20):
            loss = nn.functional.mse_loss(model(x), x.sin())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        time.sleep(pause)
        with tempfile.TemporaryDirectory() as here:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, f"{here}/state.pt")
            tune.report({"loss": loss.item(), "step": step}, checkpoint=tune.Checkpoint.from_directory(here))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16, help="of a trial that is not stopped early")
    parser.add_argument("--pause", type=float, default=0, help="seconds that a step sleeps, to interrupt it")
    parser.add_argument("--gpus", type=float, default=0, help="of each trial; 0.25: four trials share one")
    parser.add_argument("--storage", default="results", help="folder of the results, seen by every node")
    parser.add_argument("--name", default="sweep", help="of the sweep, a folder in --storage")
    parser.add_argument("--resume", action="store_true", help="go on with the sweep of this name")
    args = parser.parse_args()

    ray.init()
    storage = args.storage if "://" in args.storage else os.path.abspath(args.storage)
    path = f"{storage}/{args.name}"
    work = tune.with_parameters(trainable, pause=args.pause)
    work = tune.with_resources(work, {"cpu": 1, "gpu": args.gpus})
    if args.resume:
        # Completed trials do not run again; interrupted trials resume from their last checkpoint.
        tuner = tune.Tuner.restore(path, work, resume_unfinished=True, resume_errored=True)
    elif tune.Tuner.can_restore(path):
        raise SystemExit(f"there is a sweep in {path}: go on with --resume, or take another --name")
    else:
        space = {"lr": tune.loguniform(1e-4, 1e-1), "width": tune.choice([4, 16, 64])}
        search = tune.search.BasicVariantGenerator(random_state=7)  # the same trials every time
        # At steps 2, 6, 18, … only the best third of the trials continues.
        asha = ASHAScheduler(time_attr="step", max_t=args.steps, grace_period=2, reduction_factor=3)
        how = {"num_samples": args.trials, "search_alg": search, "scheduler": asha}
        tuner = tune.Tuner(
            work,
            param_space={**space, "steps": args.steps},
            tune_config=tune.TuneConfig(metric="loss", mode="min", **how),
            run_config=tune.RunConfig(name=args.name, storage_path=storage, verbose=1),
        )
    cut_off = []  # set at the time limit or Ctrl-C; Tune saves the state of its trials only at SIGUSR1
    signal.signal(signal.SIGTERM, lambda *_: (cut_off.append(True), signal.raise_signal(signal.SIGUSR1)))
    results = tuner.fit()
    if cut_off:
        raise SystemExit("cut off: go on with --resume")
    if results.errors:
        raise SystemExit(f"{len(results.errors)} trials failed; the first: {results.errors[0]}")
    steps = {result.metrics["trial_id"]: result.metrics["step"] for result in results}
    for trial, step in steps.items():
        print(f"trial {trial} ended after step {step}")
    best = results.get_best_result("loss", "min")
    told = {name: best.config[name] for name in ("lr", "width")} | {"loss": best.metrics["loss"]}
    print("result " + json.dumps({"steps": steps, "best": told}))


if __name__ == "__main__":
    main()
