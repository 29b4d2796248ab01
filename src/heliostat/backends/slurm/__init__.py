"""The Slurm backend."""

from heliostat.backends.slurm.backend import BACKEND as BACKEND
