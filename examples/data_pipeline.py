"""Run a Ray Data pipeline on all nodes: read, transform in batches, filter, write Parquet, group.

    heliostat run --nodes 3 examples/data_pipeline.py --rows 10000000 --storage /shared/results

On several machines, --storage is a shared directory (NFS, Lustre, …) or an s3:// or gs:// address.
"""

import argparse
import json
import os
import time
from typing import Any

import ray
import ray.data
from ray.data.expressions import col


def add_columns(batch: dict[str, Any]) -> dict[str, Any]:
    """Add two columns. Columns are NumPy arrays, so no loop over rows is needed."""
    batch["square"] = batch["id"] ** 2
    batch["kind"] = batch["id"] % 3
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument(
        "--blocks", type=int, default=6, help="pieces that the rows are cut into; several a CPU are good"
    )
    parser.add_argument("--batch", type=int, default=4096, help="rows that a task gets at once")
    parser.add_argument(
        "--gpus", type=float, default=0, help="of each task that transforms; for a model, say"
    )
    parser.add_argument("--storage", default="results", help="folder of the output, seen by every node")
    args = parser.parse_args()

    ray.init()
    ray.data.DataContext.get_current().enable_progress_bars = False
    storage = args.storage if "://" in args.storage else os.path.abspath(args.storage)
    path = f"{storage}/pipeline-{time.strftime('%m%d-%H%M%S')}"

    # Nothing runs yet: this is a plan. Other sources: ray.data.read_parquet("s3://…"), read_csv, read_images, …
    plan = (
        ray.data.range(args.rows, override_num_blocks=args.blocks)
        .map_batches(add_columns, batch_size=args.batch, num_gpus=args.gpus)
        .filter(expr=col("kind") > 0)
    )
    # Run the plan as a stream: blocks pass through all steps on all nodes in parallel.
    rows = plan.materialize()  # keep the result in the object stores for the three uses below
    rows.write_parquet(path)
    written = ray.data.read_parquet(path).count()
    groups = rows.groupby("kind", num_partitions=3).sum("id").take_all()
    sums = {str(group["kind"]): group["sum(id)"] for group in groups}
    for kind, total in sorted(sums.items()):
        print(f"kind {kind}: the sum of id is {total}")
    # A training loop would read it this way: prefetched batches of tensors.
    tensors = sum(len(batch["id"]) for batch in rows.iter_torch_batches(batch_size=args.batch))
    assert tensors == written, f"{tensors} rows came as tensors, {written} were written"
    print("result " + json.dumps({"rows": written, "sums": dict(sorted(sums.items())), "path": path}))


if __name__ == "__main__":
    main()
