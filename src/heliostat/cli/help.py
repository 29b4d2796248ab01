"""The layout of `--help`: options in sections, and two examples for each command."""

from __future__ import annotations

import click

from heliostat.cli.names import ARGUMENTS_KEY

SECTIONS = {
    "Cluster": (
        "file", "on", "name", "nodes", "min_nodes", "max_nodes", "time", "idle_timeout", "wait_timeout", "detach",
        "cluster",
    ),
    "Resources of each node": ("cpus_per_node", "gpus_per_node", "memory_per_node", "object_store", "labels"),
    "Environment": ("setup", "ray_version", "venv", "conda", "container"),
    "Network": ("interface", "port_offset"),
    "Output": ("dry_run", "json", "quiet", "verbose", "debug", "help"),
}  # fmt: skip
MIN_SECTION = 8  # a command with fewer options of its own has one section for them
EXAMPLES = {
    "advise": ("heliostat advise lab", "heliostat advise lab --for 60s"),
    "completion": (
        "heliostat completion bash >> ~/.bashrc",
        "heliostat completion zsh > ~/.zfunc/_heliostat",
    ),
    "cp": ("heliostat cp lab:head:results.csv .", "heliostat cp data/ lab:w1:/scratch/"),
    "dashboard": ("heliostat dashboard lab", "heliostat dashboard lab --port 8265"),
    "doctor": ("heliostat doctor", "heliostat doctor heliostat.yaml"),
    "down": ("heliostat down lab", "heliostat down --all"),
    "env": ('eval "$(heliostat env lab)"', "heliostat env lab --json"),
    "exec": ("heliostat exec lab -- nvidia-smi", "heliostat exec lab -- df -h /tmp"),
    "history": ("heliostat history", "heliostat history --csv runs.csv"),
    "init": ("heliostat init", "heliostat init --on slurm"),
    "jobs": ("heliostat jobs lab", "heliostat jobs lab --json"),
    "join": ("heliostat join lab --nodes 2", "heliostat join lab --nodes 1 --partition=gpu train.py"),
    "logs": ("heliostat logs lab run -f", "heliostat logs lab head"),
    "ls": ("heliostat ls", "heliostat ls --all"),
    "rllib": ("heliostat plan rllib lab", "heliostat plan rllib lab --strategy rollouts"),
    "train": ("heliostat plan train lab", "heliostat plan train lab --cpus-per-worker 4"),
    "restart": ("heliostat restart lab", "heliostat restart lab --node w2"),
    "run": (
        "heliostat run train.py --lr 0.1",
        "heliostat run --on slurm --nodes 4 --gpus-per-node 2 --time 4:00:00 --partition=gpu train.py",
    ),
    "scale": ("heliostat scale lab 8", "heliostat scale lab 2 --group gpu"),
    "schema": ("heliostat schema", "heliostat schema > heliostat.schema.json"),
    "setup": ("heliostat setup", "heliostat setup lab.yaml"),
    "status": ("heliostat status lab", "heliostat status lab --watch"),
    "ssh": ("heliostat ssh lab w1", "heliostat ssh lab -- htop"),
    "stop": ("heliostat stop lab JOB", "heliostat stop lab run"),
    "submit": (
        "heliostat submit lab -- python train.py",
        "heliostat submit lab --wait --env LR=0.1 -- python train.py",
    ),
    "up": ("heliostat up --nodes 4", "heliostat up -f lab.yaml --dry-run"),
    "wait": ("heliostat wait lab --timeout 30m", "heliostat wait lab JOB --for ended"),
}
_SECTION_OF = {name: title for title, names in SECTIONS.items() for name in names}


class Command(click.Command):
    """A command whose options have sections, and that has examples."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS_KEY] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        rows = [
            (option.opts[-1][2:].replace("-", "_"), row)
            for option in options
            if (row := option.get_help_record(ctx))
        ]
        output = SECTIONS["Output"]
        own = [name for name, _ in rows if name not in output]
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, row in rows:
            title = _SECTION_OF.get(name, "Options")
            is_plain = len(own) < MIN_SECTION and name not in output
            sections.setdefault("Options" if is_plain else title, []).append(row)
        for title in ("Options", *SECTIONS):
            if title in sections:
                with formatter.section(title):
                    formatter.write_dl(sections[title])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        format_examples(self.name or "", formatter)


def format_examples(command: str, formatter: click.HelpFormatter) -> None:
    """Writes the examples as they are typed: they are never wrapped."""
    with formatter.section("Examples"):
        for line in EXAMPLES[command]:
            formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
