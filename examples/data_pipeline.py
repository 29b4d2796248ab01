"""A pipeline of Ray Data over all nodes: read, transform in batches, filter, group, write Parquet, read it back.

    heliostat run --nodes 3 examples/data_pipeline.py --rows 10000000 --storage /shared/results

On several machines --storage is a folder that all of them see (NFS, Lustre, …) or an s3:// or gs:// address.
"""

import argparse
import json
import os
import time

import ray
import ray.data


def add_columns(batch: dict[str, "object"]) -> dict[str, "object"]:
    """Columns are NumPy arrays: no loop over rows."""
    batch["square"] = batch["id"] ** 2
    batch["kind"] = batch["id"] % 3
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=4096, help="rows that a task gets at once")
    parser.add_argument("--gpus", type=float, default=0, help="of each task that transforms; for a model, say")
    parser.add_argument("--storage", default="results", help="folder of the output, seen by every node")
    args = parser.parse_args()

    ray.init()
    ray.data.DataContext.get_current().enable_progress_bars = False
    storage = args.storage if "://" in args.storage else os.path.abspath(args.storage)
    path = f"{storage}/pipeline-{time.strftime('%m%d-%H%M%S')}"

    # nothing runs yet: this is a plan. Another source: ray.data.read_parquet("s3://…"), read_csv, read_images, …
    plan = (
        ray.data.range(args.rows)
        .map_batches(add_columns, batch_size=args.batch, num_gpus=args.gpus)
        .filter(expr="kind > 0")
    )
    plan.write_parquet(path)  # now it runs, streaming: blocks go through all steps, on all nodes, at the same time

    back = ray.data.read_parquet(path)
    rows = back.count()
    sums = {str(row["kind"]): row["sum(id)"] for row in back.groupby("kind").sum("id").take_all()}
    for kind, total in sorted(sums.items()):
        print(f"kind {kind}: the sum of id is {total}")
    # a loop that trains would take it so: batches of tensors, read ahead of it
    tensors = sum(len(batch["id"]) for batch in back.iter_torch_batches(batch_size=args.batch))
    assert tensors == rows, f"{tensors} rows came as tensors, {rows} were written"
    print("result", json.dumps({"rows": rows, "sums": sums, "path": path}))


if __name__ == "__main__":
    main()
