"""Gives a spec without an environment the one that the user expects."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.cluster import planner
from heliostat.common.events import Emit, Event
from heliostat.config.active_environment import CONDA, VENV, Found, check_visible, choose

if TYPE_CHECKING:
    from heliostat.cluster.access import Access
    from heliostat.config.loader import Config

OWN = "that of Heliostat"


class ActiveEnvironment:
    def __init__(self, access: Access, emit: Emit) -> None:
        self._access, self._emit = access, emit

    def apply(self, config: Config, start: Path) -> Config:
        """The config with the user's environment, where the nodes see this host's directories and the spec names none.

        start: the directory of the script. Raises HeliostatError if no environment has Ray, or if the nodes cannot see it."""
        spec = config.spec
        if not self._is_open(config):
            return config
        known = self._access.store.find(spec.cluster_name)
        if (
            known is not None
        ):  # a repeated `up` continues with the cluster's environment, whatever is active now
            recorded = planner.spec_of(known.record()).environment
            kind = next((kind for kind in (VENV, CONDA) if getattr(recorded, kind)), None)
            return (
                self._with(config, Found(kind, Path(getattr(recorded, kind)), "the cluster"))
                if kind
                else config
            )
        has_ray = importlib.util.find_spec("ray") is not None
        choice = choose(start, os.environ, Path(sys.prefix), has_ray)
        for note in choice.notes:
            self._emit(Event("note", note))
        if choice.found is None:
            self._emit(Event("detail", f"environment: {sys.prefix} ({OWN})"))
            return config
        if not self._access.registry.load(spec.on).is_this_host:
            check_visible(choice.found, spec.on)
        return self._with(config, choice.found)

    def _is_open(self, config: Config) -> bool:
        """Whether the spec leaves the environment to us."""
        spec, environment = config.spec, config.spec.environment
        backend = self._access.registry.load(spec.on)
        is_given = environment.venv or environment.conda or environment.container or environment.setup
        has_gateway = spec.backend_tables.get(spec.on, {}).get("via")
        return bool(backend.starts_ray and backend.shares_files and not is_given and not has_gateway)

    def _with(self, config: Config, found: Found) -> Config:
        self._emit(Event("detail", f"environment: {found.path} ({found.origin})"))
        environment = config.spec.environment.model_copy(update={found.kind: str(found.path)})
        origins = {**config.origins, f"environment.{found.kind}": found.origin}
        return replace(
            config, spec=config.spec.model_copy(update={"environment": environment}), origins=origins
        )
