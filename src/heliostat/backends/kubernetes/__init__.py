"""The Kubernetes backend: KubeRay starts Ray."""

from heliostat.backends.kubernetes.backend import BACKEND as BACKEND
