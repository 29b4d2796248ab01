"""The context of the user's kubeconfig, and the first spec file for it."""

from __future__ import annotations

from heliostat.backends.detection import NODES, Detected, spec_line, yaml_string
from heliostat.backends.kubernetes.api import kube_contexts
from heliostat.config.spec import DEFAULT_RAY

MAX_CONTEXTS = 8  # of those that a comment lists


def detect(files: str) -> Detected | None:
    """The current context of these kubeconfig files, separated as in KUBECONFIG; None: there is none."""
    context, contexts = kube_contexts(files)
    if not context:
        return None
    namespace = contexts[context]
    others = [other for other in contexts if other != context]
    also = f"; others there: {', '.join(others[:MAX_CONTEXTS])}" if others else ""
    lines = (
        NODES,
        spec_line("cpus_per_node: 2", "request and limit of each pod"),
        spec_line("memory_per_node: 4G", "a third of it for Ray's object store"),
        spec_line("# gpus_per_node: 1", "nvidia.com/gpu; other vendors: kubernetes: {gpu: amd.com/gpu}"),
        spec_line("# autoscale: {min: 0, max: 8}", "number of workers, by demand"),
        "kubernetes:",
        spec_line(f"  context: {yaml_string(context)}", f"the current context of your kubeconfig{also}"),
        spec_line(
            f"  {'' if namespace else '# '}namespace: {yaml_string(namespace or 'default')}",
            "the context's namespace" if namespace else "the context has none",
        ),
        spec_line(
            f"  # image: rayproject/ray:{DEFAULT_RAY}", "pods start faster if the image has your packages"
        ),
        spec_line("  # volumes: ['my-claim:/data']", "files that outlive the pods"),
        "# environment:",
        spec_line("#   requirements: requirements.txt", "installed in each pod as it starts"),
        spec_line('# time: "4:00:00"', "maximum duration of a `run`"),
    )
    return Detected(f"the context {context}" + (f", namespace {namespace}" if namespace else ""), lines)
