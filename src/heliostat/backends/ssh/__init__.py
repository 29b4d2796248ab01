"""The ssh backend."""

from heliostat.backends.ssh.backend import BACKEND as BACKEND
