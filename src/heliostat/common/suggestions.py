"""What a user probably meant: a known word of another tool, else the nearest of our own words.

The synonyms are commands, options and keys of Ray's launcher, SkyPilot, kubectl, Slurm and PBS.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from heliostat.common.errors import UsageError

COMMANDS = {
    "up": ("launch", "start", "create", "apply", "deploy", "provision", "symmetric-run"),
    "down": ("delete", "destroy", "terminate", "teardown", "remove", "rm", "shutdown", "kill", "end", "qdel"),
    "run": ("sbatch", "srun", "salloc", "qsub", "train", "execute"),
    "ls": ("ps", "list", "get", "clusters", "squeue", "qstat"),
    "status": ("describe", "show", "info", "state", "top", "nodes", "sinfo"),
    "stop": ("cancel", "scancel", "abort"),
    "jobs": ("queue", "job"),
    "logs": ("log", "tail", "output", "events"),
    "ssh": ("shell", "attach", "rsh", "login"),
    "cp": ("scp", "rsync", "copy", "rsync-up", "rsync-down", "download", "upload", "sync"),
    "env": ("connect", "activate", "export"),
    "dashboard": ("ui", "web", "open", "port-forward"),
    "scale": ("resize", "autoscale", "grow"),
    "join": ("add", "extend"),
    "doctor": ("check", "validate", "diagnose"),
    "setup": ("install", "prepare"),
    "init": ("new", "generate"),
    "history": ("cost", "report", "sacct", "accounting"),
    "schema": ("config", "keys"),
}
BACKENDS = {
    "kubernetes": ("k8s", "kube", "kuberay", "gke", "eks", "aks", "openshift", "kubectl"),
    "local": ("localhost", "here", "laptop", "this"),
    "slurm": ("sbatch", "srun"),
    "pbs": ("openpbs", "pbspro", "torque", "qsub"),
    "ssh": ("onprem", "on-prem", "lab", "remote", "hosts", "baremetal"),
    "aws": ("ec2", "amazon"),
    "gcp": ("gce", "google"),
    "azure": ("az", "microsoft"),
}
OPTIONS = {
    "--nodes": ("--num-nodes", "--nnodes", "--num_nodes", "--workers", "--num-workers", "--replicas"),
    "--max-nodes": ("--max-workers",),
    "--min-nodes": ("--min-workers",),
    "--cpus-per-node": ("--cpus", "--num-cpus", "--num_cpus", "--ncpus", "--cpus-per-task", "--cpu"),
    "--gpus-per-node": ("--gpus", "--num-gpus", "--num_gpus", "--ngpus", "--gpu", "--gres", "--accelerators"),
    "--memory-per-node": ("--memory", "--mem", "--ram"),
    "--object-store": ("--object-store-memory",),
    "--time": ("--walltime", "--timelimit", "--time-limit", "--max-time", "--duration"),
    "--idle-timeout": ("--idle-minutes-to-autostop", "--autostop", "--idle"),
    "--on": ("--backend", "--cloud", "--infra", "--provider", "--scheduler", "--site"),
    "--name": ("--cluster-name", "--job-name", "--jobname"),
    "--file": ("--config", "--config-file", "--yaml"),
    "--container": ("--image", "--image-id", "--container-image", "--docker"),
    "--env": ("--env-var", "--envs", "--export"),
    "--working-dir": ("--workdir", "--chdir", "--cwd"),
    "--detach": ("--background", "--no-wait", "--detach-run"),
    "--dry-run": ("--dryrun", "--dry", "--test-only"),
    "--labels": ("--label",),
    "--follow": ("--tail", "--watch"),
}
# options that a command does not have -> the key of the file
IN_THE_FILE = {
    "--env": "environment: {env: {KEY: VALUE}}",
    "--tls": "security: {tls: true}",
    "--requirements": "environment: {requirements: requirements.txt}",
    "--pip": "environment: {requirements: requirements.txt}",
    "--image-pull-secret": "kubernetes: {pull_secrets: [NAME]}",
    "--hosts": "hosts: [gold, ann@silver]",
    "--host": "hosts: [gold, ann@silver]",
}
KEYS = {
    "cpus_per_node": ("num_cpus", "ncpus", "cpu", "cpus_per_task"),
    "gpus_per_node": ("num_gpus", "ngpus", "gpu", "accelerators", "gres"),
    "memory_per_node": ("mem", "ram"),
    "nodes": ("num_nodes", "nnodes", "replicas", "workers", "num_workers"),
    "on": ("backend", "cloud", "infra", "provider", "site", "scheduler"),
    "name": ("cluster_name", "job_name"),
    "time": ("walltime", "time_limit", "timelimit", "duration"),
    "hosts": ("machines", "worker_ips", "servers"),
    "autoscale": ("max_workers", "autoscaling", "autoscaler"),
    "idle": ("idle_timeout_minutes", "autostop", "idle_timeout"),
    "environment": ("env", "runtime_env", "environments"),
    "groups": ("node_types", "available_node_types", "worker_groups"),
    "setup": ("setup_commands",),
}


def nearest(
    word: str,
    known: Collection[str],
    synonyms: Mapping[str, Collection[str]] | None = None,
    *,
    cutoff: float = 0.6,
) -> str | None:
    """The known word that this one stands for; None: there is none like it."""
    for name, others in (synonyms or {}).items():
        if word.lower() in others and name in known:
            return name
    starts = [name for name in known if len(word) > 1 and name.startswith(word.lower())]
    if len(starts) == 1:
        return starts[0]
    import difflib  # not imported by `ls`

    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return near[0] if near else None


def expand_prefix(text: str, names: Collection[str], kind: str) -> str:
    """The only one of these names that begins with the text; the text itself if it is one of them, or if none does.

    Raises UsageError if several do."""
    found = [name for name in names if text and name.startswith(text)]
    if text in names or not found:
        return text
    if len(found) > 1:
        raise UsageError(
            f"several {kind}s begin with `{text}`", cause=", ".join(found[:8]), hint="write more of the name"
        )
    return found[0]
