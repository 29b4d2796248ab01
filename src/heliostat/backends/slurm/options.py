"""The `slurm:` table of the file, and the user's own options for sbatch."""

from __future__ import annotations

from dataclasses import dataclass, field

from heliostat.backends.batch import parse_options

# options that Heliostat sets, with a hint for each
RESERVED_OPTIONS = {
    "--nodes": "--nodes N", "-N": "--nodes N", "--ntasks": "Heliostat starts one task per node", "-n": "Heliostat starts one task per node",
    "--ntasks-per-node": "Heliostat starts one task per node", "--tasks-per-node": "Heliostat starts one task per node",
    "--output": "heliostat logs", "-o": "heliostat logs", "--error": "heliostat logs", "-e": "heliostat logs",
    "--job-name": "--name NAME", "-J": "--name NAME", "--time": "--time TIME", "-t": "--time TIME", "--wrap": "heliostat run -- COMMAND",
    "--signal": "slurm.grace in the file", "--open-mode": "heliostat logs", "--parsable": "--json", "--array": "use `heliostat join` once per task",
    "-a": "use `heliostat join` once per task", "--comment": "Heliostat finds its jobs by their comment", "--input": "", "-i": "", "--export": "environment.env",
    "--chdir": "run heliostat in that directory", "-D": "run heliostat in that directory", "--cpus-per-task": "--cpus-per-node N", "-c": "--cpus-per-node N",
    "--wait": "", "-W": "", "--requeue": "slurm.requeue in the file", "--no-requeue": "slurm.requeue in the file",
}  # fmt: skip
FLAGS = frozenset(
    ("--exclusive", "--contiguous", "--overcommit", "--oversubscribe", "--hold", "-H", "--no-kill", "-k", "--spread-job", "--use-min-nodes",
     "--reboot", "-Q", "--quiet", "-v", "--verbose", "-O", "-s", "--share", "--ignore-pbs")
)  # fmt: skip


# frequent options of sbatch, for suggestions after a misspelled one
FREQUENT_OPTIONS = ("--partition", "--account", "--qos", "--constraint", "--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--mem",
          "--mem-per-cpu", "--mem-per-gpu", "--nodelist", "--exclude", "--reservation", "--dependency", "--begin", "--licenses",
          "--mail-type", "--mail-user", "--nice", "--tmp", "--clusters", "--distribution", "--mincpus", "--cores-per-socket")  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The `slurm:` table of the file."""

    partition: str | None = field(default=None, metadata={"help": "partition"})
    account: str | None = field(default=None, metadata={"help": "account to charge"})
    qos: str | None = field(default=None, metadata={"help": "quality of service"})
    time: str | int | None = field(
        default=None, metadata={"help": "time limit; the same as the spec's `time`"}
    )
    nodelist: str | None = field(default=None, metadata={"help": "nodes to use, in sinfo's notation"})
    exclude: str | None = field(default=None, metadata={"help": "nodes to exclude"})
    constraint: str | None = field(default=None, metadata={"help": "required node features"})
    gres: str | None = field(default=None, metadata={"help": "generic resources per node, e.g. gpu:a100:4"})
    clusters: str | None = field(default=None, metadata={"help": "Slurm cluster, where there are several"})
    via: str | None = field(
        default=None, metadata={"help": "user@login: run Slurm's commands there, over ssh"}
    )
    grace: str | int = field(
        default="60s", metadata={"help": "time from the warning to the job until the time limit"}
    )
    requeue: bool = field(
        default=False,
        metadata={"help": "requeue the job after preemption or a node failure"},
    )
    exclusive: bool = field(default=False, metadata={"help": "allocate whole nodes"})
    extra: tuple[str, ...] = field(default=(), metadata={"help": "other options of sbatch, unchanged"})


def _option_value(options: Options, name: str, letter: str) -> str | None:
    """The value of an option from the user's sbatch options, or else from the table."""
    given = [
        option.partition("=")[2] if option.startswith("--") else option[2:]
        for option in parse_options(options.extra, RESERVED_OPTIONS, FLAGS)
        if option.startswith((f"--{name}=", f"-{letter}"))
    ]
    value: str | None = given[-1] if given else getattr(options, name)
    return value


def partition_option(options: Options) -> str | None:
    return _option_value(options, "partition", "p")


def clusters_option(options: Options) -> str | None:
    return _option_value(options, "clusters", "M")
