"""The PBS backend."""

from heliostat.backends.pbs.backend import BACKEND as BACKEND
