"""The form: the given inputs, the defaults of the others, and the omitted ones."""

from __future__ import annotations

from typing import Any

from .expressions import UNDEFINED, ExpressionError, equal, render
from .loading import Workflow

RESOURCE = ("id", "ip", "name", "type", "provider", "schedulerType", "namespace", "user", "uri")
WORKSPACE = {"id": "user-workspace", "ip": "", "name": "user-workspace", "schedulerType": ""}
DEPTH = 30


class InputError(Exception):
    """An input is missing or invalid."""


class Form:
    """The values of the inputs, evaluated on demand: a default may be an expression of other inputs."""

    def __init__(
        self,
        workflow: Workflow,
        given: dict[str, Any],
        resources: dict[str, dict[str, Any]] | None = None,
        preset: str | None = None,
    ) -> None:
        self.form = workflow.inputs
        self.resources = resources or {}
        self.given = given
        self.secrets: set[str] = set()
        self._known: dict[tuple[str, ...], Any] = {}
        self._asked: list[tuple[str, ...]] = []
        if preset is not None:
            if preset not in workflow.configurations:
                raise InputError(
                    f"there is no configuration `{preset}`; there is {', '.join(workflow.configurations)}"
                )
            self.given = merged(workflow.configurations[preset].get("inputs") or {}, given)
        self._refuse_unknown(self.form, self.given, ())

    def values(self) -> dict[str, Any]:
        """Return all values, validated, without those that the form ignores."""
        found = {name: self.value((name,)) for name in self.form}
        return {name: value for name, value in found.items() if value is not UNDEFINED}

    def look(self, name: str, at: tuple[str, ...] = ()) -> Any:
        """Return the value of a path; `.hidden` and `.ignore` refer to the input `at`."""
        if name in (".hidden", ".ignore"):
            return self._attribute(at, name[1:])
        root, *path = name.split(".")
        if root != "inputs":
            return name  # unquoted text
        for cut in range(len(path), 0, -1):
            if self._about(tuple(path[:cut])) is not None:
                value = self.value(tuple(path[:cut]))
                for part in path[cut:]:
                    value = value.get(part, UNDEFINED) if isinstance(value, dict) else UNDEFINED
                return value
        raise ExpressionError(f"there is no input `{'.'.join(path)}`")

    def value(self, path: tuple[str, ...]) -> Any:
        if path not in self._known:
            if path in self._asked or len(self._asked) > DEPTH:
                raise InputError(f"the input `{'.'.join(path)}` is asked for by itself")
            self._asked.append(path)
            try:
                self._known[path] = self._find(path)
            finally:
                self._asked.pop()
        return self._known[path]

    # -- one input

    def _about(self, path: tuple[str, ...]) -> dict[str, Any] | None:
        about: dict[str, Any] | None = {"type": "group", "items": self.form}
        for part in path:
            if about is None or about["type"] != "group":
                return None
            about = (about.get("items") or {}).get(part)
        return about

    def _attribute(self, path: tuple[str, ...], key: str) -> Any:
        about = self._about(path) or {}
        return render(about.get(key, False), lambda name: self.look(name, path))

    def _find(self, path: tuple[str, ...]) -> Any:
        about = self._about(path)
        assert about is not None
        if len(path) > 1 and self.ignored(path[:-1]):
            return UNDEFINED
        if self.ignored(path) or about["type"] == "header":
            return UNDEFINED
        if about["type"] == "group":
            found = {name: self.value((*path, name)) for name in about.get("items") or {}}
            return {name: value for name, value in found.items() if value is not UNDEFINED}
        value = self._given(path)
        if value in (None, "") and "default" in about:
            value = self._attribute(path, "default")
        if value is None and about["type"].startswith("compute-") and about.get("autoselect"):
            value = next(iter(self.resources.values()), None)
        if value is None or value == "":
            if about.get("optional") is not True and "default" not in about:
                raise InputError(f"the input `{'.'.join(path)}` is required")
            return UNDEFINED if value is None else value
        return self._typed(path, about, value)

    def ignored(self, path: tuple[str, ...]) -> bool:
        return any(bool(self._attribute(path[:n], "ignore")) for n in range(1, len(path) + 1))

    def _given(self, path: tuple[str, ...]) -> Any:
        value: Any = self.given
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def _typed(self, path: tuple[str, ...], about: dict[str, Any], value: Any) -> Any:
        name, kind = ".".join(path), about["type"]
        if kind.startswith("compute-"):
            return self._resource(name, value)
        if kind in ("number", "integer"):
            return _number(name, about, value)
        if kind == "boolean":
            if isinstance(value, str) and value in ("true", "false"):
                return value == "true"
            if not isinstance(value, bool):
                raise InputError(f"the input `{name}` is true or false, not `{value}`")
            return value
        if isinstance(value, (dict, list)):
            raise InputError(f"the input `{name}` is a text")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if kind == "password":
            self.secrets.add(text)
        if kind == "dropdown":
            options = [option["value"] for option in about.get("options") or []]
            if not any(equal(text, option) for option in options):
                raise InputError(f"the input `{name}` is one of {', '.join(map(str, options))}, not `{text}`")
        return text

    def _resource(self, name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, str):
            if value not in self.resources:
                known = ", ".join(self.resources) or "none"
                raise InputError(f"the input `{name}`: there is no resource `{value}` here; there is {known}")
            value = {"name": value, **self.resources[value]}
        if not isinstance(value, dict) or "ip" not in value:
            raise InputError(f"the input `{name}` is a resource's name, or a table with its `ip`")
        return {**dict.fromkeys(RESOURCE, ""), "id": value.get("name", value["ip"]), **value}

    def _refuse_unknown(self, form: dict[str, Any], given: dict[str, Any], at: tuple[str, ...]) -> None:
        for key, value in given.items():
            path = (*at, key)
            if key not in form:
                raise InputError(f"there is no input `{'.'.join(path)}`; there is {', '.join(form)}")
            if form[key]["type"] == "group":
                if not isinstance(value, dict):
                    raise InputError(f"the input `{'.'.join(path)}` is a table")
                self._refuse_unknown(form[key].get("items") or {}, value, path)


def _number(name: str, about: dict[str, Any], value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        found = float(value)
    except (TypeError, ValueError):
        raise InputError(f"the input `{name}` is a number, not `{value}`") from None
    for limit, wrong in (("min", found < about.get("min", found)), ("max", found > about.get("max", found))):
        if wrong:
            raise InputError(f"the input `{name}` is {value}: {limit} {about[limit]}")
    return int(found) if found.is_integer() else found


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`, table by table; a resource is replaced as a whole."""
    both = dict(base)
    for key, value in over.items():
        deep = isinstance(value, dict) and isinstance(base.get(key), dict)
        both[key] = merged(base[key], value) if deep else value
    return both
