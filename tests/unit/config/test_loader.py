"""Defaults < file < environment < flags, where each value came from, and files that are not what they should be."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from heliostat import backends
from heliostat.cluster import planner
from heliostat.common.errors import UsageError
from heliostat.config import explain, loader
from heliostat.config.loader import FILE, MAX_FILE_BYTES, Config, load, schema
from heliostat.config.spec import ClusterSpec
from heliostat.state.ownership import UnsafePathError

# The file of the contract, as it stands there.
EXAMPLE = """\
name: lab
on: ssh                      # local | ssh | slurm | pbs | kubernetes | aws | gcp | azure
head: platinum
hosts: [platinum, {host: nickel, gpus: 3, user: ann, port: 2222, jump: gw}, zinc]
environment:                 # one of venv (made with uv or pip if absent), conda, container, or nothing: the user's own shell
  venv: ~/venvs/rllib
  ray: 2.60.0
  requirements: requirements.txt
  setup: ["module load cuda/12.4"]
network: {interface: tailscale0, port_offset: 0}    # interface may be a name or a CIDR; ports are chosen free by default
idle: {timeout: 60m, window: "02:30-09:00"}
autoscale: {min: 0, max: 8}
groups:                      # several kinds of node in one cluster
  gpu: {nodes: 2, gpus: 4, labels: {kind: gpu}}
slurm: {partition: gpu, account: abc, time: "24:00:00", via: ann@login, extra: ["--exclusive"]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / FILE


def read(file: Path, text: str | bytes, environ: dict[str, str] | None = None, **flags: Any) -> Config:
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return load(backends, file=file, environ=environ or {}, flags=flags)


def refused(file: Path, text: str | bytes, environ: dict[str, str] | None = None, **flags: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(file, text, environ, **flags)
    assert caught.value.exit_code == 2 and caught.value.message
    return caught.value


# -- what wins, and where it came from


def test_the_example_of_the_contract(file: Path) -> None:
    config = read(file, EXAMPLE)
    spec = config.spec
    assert (spec.cluster_name, spec.on, spec.head.host, len(spec.hosts)) == ("lab", "ssh", "platinum", 3)
    assert (spec.environment.ray, spec.idle.timeout, spec.groups["gpu"].gpus) == ("2.60.0", 3600, 4)
    assert spec.backend_tables["slurm"]["time"] == "24:00:00"
    assert config.origins["hosts.1.port"] == f"{FILE} line 4"
    assert config.origins["environment.setup"] == f"{FILE} line 9"
    assert config.origins["groups.gpu.labels.kind"] == f"{FILE} line 14"


def test_a_variable_that_is_no_key_is_refused(file: Path) -> None:
    error = refused(file, "", {"HELIOSTAT_NODS": "2"})
    assert (
        error.message == "unknown variable `HELIOSTAT_NODS`"
        and error.hint == "did you mean `HELIOSTAT_NODES`?"
    )
    assert read(file, "", {"HELIOSTAT_NODS": "", "HELIOSTAT_JOB": "x", "OTHER_NODS": "2"}).spec.nodes == 1
    config = read(file, "on: slurm\n", {"HELIOSTAT_SLURM__PARTITION": "gpu"})
    assert config.spec.backend_tables["slurm"] == {"partition": "gpu"}


def test_flags_win_over_environment_over_file_over_defaults(file: Path) -> None:
    text = "\nnodes: 2\ncpus_per_node: 2\nidle: {timeout: 1m}\ngpus_per_node: 1\n"
    environ = {"HELIOSTAT_CPUS_PER_NODE": "3", "HELIOSTAT_IDLE__TIMEOUT": "2m", "HELIOSTAT_TIME": "1h"}
    config = read(file, text, environ, **{"idle.timeout": "3m", "name": "x", "labels": None})
    spec = config.spec
    assert (spec.nodes, spec.cpus_per_node, spec.gpus_per_node, spec.idle.timeout, spec.time, spec.name) == (
        2, 3, 1, 180, 3600, "x"
    )  # fmt: skip
    assert config.origins == {
        "nodes": f"{FILE} line 2",
        "cpus_per_node": "$HELIOSTAT_CPUS_PER_NODE",
        "idle": f"{FILE} line 4",
        "idle.timeout": "--timeout",
        "gpus_per_node": f"{FILE} line 5",
        "time": "$HELIOSTAT_TIME",
        "name": "--name",
    }


def test_a_table_by_flag_replaces_that_of_the_file_and_its_origins(file: Path) -> None:
    config = read(file, "labels: {a: one, b: two}\n", labels={"a": "three"})
    assert config.spec.labels == {"a": "three"}
    assert config.origins == {"labels": "--labels"}


def test_a_head_named_by_a_word_can_have_more(file: Path) -> None:
    config = read(file, "head: platinum\non: ssh\n", {"HELIOSTAT_HEAD__WORK": "false"})
    assert (config.spec.head.host, config.spec.head.work) == ("platinum", False)


def test_the_last_source_of_a_key_wins_in_either_spelling(file: Path) -> None:
    text = "gpus: 1\nhead: {cpus_per_node: 2}\ngroups: {a: {memory: 1G}}\n"
    environ = {"HELIOSTAT_HEAD__CPUS": "3", "HELIOSTAT_GROUPS__A__MEMORY_PER_NODE": "2G"}
    config = read(file, text, environ, gpus_per_node=4)
    assert config.spec.gpus_per_node == 4 and config.spec.head.cpus == 3
    assert config.spec.groups["a"].memory == 2 << 30
    assert config.origins["gpus_per_node"] == "--gpus-per-node" and "gpus" not in config.origins
    assert read(file, "gpus_per_node: 1\n", {"HELIOSTAT_GPUS": "2"}).spec.gpus_per_node == 2
    base = {"gpus_per_node": 8}
    file.write_text("gpus: 1\n")
    assert load(backends, file=file, environ={}, base=base).spec.gpus_per_node == 1


def test_an_alias_is_named_as_it_is_written(file: Path) -> None:
    error = refused(file, "name: lab\ngpus: -1\n")
    assert error.message == "`gpus` cannot be used" and f"{FILE} line 2" in error.cause
    error = refused(file, "gpus: 1\ngpus_per_node: 1\n")
    assert "`gpus` and `gpus_per_node` are the same key" in error.cause


def test_the_schema_has_the_deprecated_spellings() -> None:
    document = schema({})
    tables = [document, *(document["$defs"][name] for name in ("Head", "Group", "Host"))]
    aliases = ("gpus", "gpus_per_node", "gpus_per_node", "gpus_per_node")
    for table, alias in zip(tables, aliases, strict=True):
        assert table["properties"][alias]["deprecated"] is True


@pytest.mark.parametrize(
    ("environ", "key", "value"),
    [
        ({"USER_PORT_OFFSET": "100"}, "port_offset", 100),
        ({"USER_PORT_OFFSET": ""}, "port_offset", 0),
        ({"RAY_OBJECT_STORE": "10"}, "object_store", 10 << 30),
        ({"RAY_OBJECT_STORE": "512M"}, "object_store", 512 << 20),
        ({"RAY_OBJECT_STORE": "10", "HELIOSTAT_OBJECT_STORE": "1G"}, "object_store", 1 << 30),
    ],
)
def test_variables_of_other_launchers(file: Path, environ: dict[str, str], key: str, value: int) -> None:
    config = read(file, "", environ)
    assert getattr(config.spec.network if key == "port_offset" else config.spec, key) == value
    for name in environ:
        shown = config.origins.get("network.port_offset" if key == "port_offset" else key)
        assert not environ[name] or shown in [f"${other}" for other in environ]


def test_a_bad_variable_is_named(file: Path) -> None:
    error = refused(file, "", {"USER_PORT_OFFSET": "abc"})
    assert "network.port_offset" in error.message and "$USER_PORT_OFFSET" in error.cause


def test_our_own_variables_are_not_keys(file: Path) -> None:
    environ = {
        "HELIOSTAT_HOME": "/x",
        "HELIOSTAT_NODE": "7",
        "HELIOSTAT_CLUSTER": "a",
        "HELIOSTAT_DEBUG": "1",
    }
    assert read(file, "", environ).origins == {}


def test_a_file_is_found_where_one_works(tmp_path: Path) -> None:
    assert load(backends, environ={}, search_dir=tmp_path).spec.nodes == 1
    (tmp_path / FILE).write_text("nodes: 4\n")
    assert load(backends, environ={}, search_dir=tmp_path).spec.nodes == 4


def refuse_default(folder: Path) -> UnsafePathError:
    """The error for the default file there; the same file is used when the user names it."""
    with pytest.raises(UnsafePathError) as caught:
        load(backends, environ={}, search_dir=folder)
    assert caught.value.hint == f"to use it anyway, name it: -f {FILE}"
    assert load(backends, environ={}, file=folder / FILE).spec.nodes == 4
    return caught.value


@pytest.mark.needs_linux
def test_a_default_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("nodes: 4\n")
    for path, mode in ((tmp_path / FILE, 0o666), (tmp_path, 0o777)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert f"`{path}` can be changed by everybody" in refuse_default(tmp_path).cause
        path.chmod(before)
    tmp_path.chmod(0o1777)  # as /tmp: others cannot replace our file
    assert load(backends, environ={}, search_dir=tmp_path).spec.nodes == 4


@pytest.mark.needs_linux
@pytest.mark.needs_root
def test_a_default_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "theirs").write_text("nodes: 4\n")
    os.chown(tmp_path / "theirs", 12345, 12345)
    (tmp_path / FILE).symlink_to("theirs")
    assert "belongs to user 12345" in refuse_default(tmp_path).cause
    os.chown(tmp_path / "theirs", 0, 0)
    assert load(backends, environ={}, search_dir=tmp_path).spec.nodes == 4
    os.lchown(tmp_path / FILE, 12345, 12345)
    assert "is a symbolic link of user 12345" in refuse_default(tmp_path).cause
    os.lchown(tmp_path / FILE, 0, 0)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert "belongs to root" in refuse_default(tmp_path).cause
    tmp_path.chmod(0o755)
    assert load(backends, environ={}, search_dir=tmp_path).spec.nodes == 4


@pytest.mark.needs_linux
@pytest.mark.needs_root
def test_a_default_file_replaced_between_check_and_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """find_unsafe accepts a path that does not exist: the owner of the open file counts as well."""
    (tmp_path / FILE).write_text("nodes: 4\n")
    os.chown(tmp_path / FILE, 12345, 12345)
    monkeypatch.setattr("heliostat.state.ownership.find_unsafe", lambda path: None)
    assert "belongs to user 12345" in refuse_default(tmp_path).cause


@pytest.mark.needs_linux
def test_a_default_file_of_the_user_s_private_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FILE).write_text("nodes: 4\n")
    (tmp_path / FILE).chmod(0o664)
    monkeypatch.setattr("heliostat.agent.ownership._is_private_group", lambda gid: True)
    assert load(backends, environ={}, search_dir=tmp_path).spec.nodes == 4
    monkeypatch.setattr("heliostat.agent.ownership._is_private_group", lambda gid: False)
    assert "can be changed by its group" in refuse_default(tmp_path).cause


# -- keys


@pytest.mark.parametrize(
    ("text", "key", "hint", "line"),
    [
        ("nodse: 2", "nodse", "did you mean `nodes`?", 1),
        ("name: a\nenvironmnt: {}", "environmnt", "did you mean `environment`?", 2),
        ("slrum: {}", "slrum", "did you mean `slurm`?", 1),
        ("idle:\n  timout: 60m", "idle.timout", "did you mean `timeout`?", 2),
        ("environment: {stup: []}", "environment.stup", "did you mean `setup`?", 1),
        ("groups:\n  gpu:\n    nodez: 2", "groups.gpu.nodez", "did you mean `nodes`?", 3),
        ("hosts:\n- a\n- {host: b, prot: 22}", "hosts.1.prot", "did you mean `port`?", 3),
        ("head: {hots: a}", "head.hots", "did you mean `host`?", 1),
        ("autoscale: {mx: 1, max: 2}", "autoscale.mx", "did you mean `max`?", 1),
        ("security: {auht: none}", "security.auht", "did you mean `auth`?", 1),
        ("xyzzy: 1", "xyzzy", "known keys: autoscale, ", 1),
        ("backend_tables: {local: {}}", "backend_tables", "known keys: autoscale, ", 1),
        ("? [a, b]\n: 1", "?", "known keys: ", 1),
        ("<<: {nodes: 1}", "<<", "known keys: ", 1),
        ("1: 2", "1", "known keys: ", 1),
        ("ключ: 1", "ключ", "known keys: ", 1),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(
    file: Path, text: str, key: str, hint: str, line: int
) -> None:
    error = refused(file, text)
    assert error.message == f"unknown key `{key}`"
    assert error.cause == f"from {FILE} line {line}"
    assert error.hint.startswith(hint)


def test_unknown_keys_of_a_sites_table(file: Path) -> None:
    spec = read(file, "local: {partition: gpu}").spec
    with pytest.raises(UsageError, match=r"unknown key `local\.partition`"):
        planner.backend_options(spec)


@pytest.mark.parametrize("text", ["local: 3", "slurm: [a]", "ssh: word"])
def test_a_sites_table_is_a_table(file: Path, text: str) -> None:
    assert "is not a table" in refused(file, text).message


@pytest.mark.parametrize(
    ("text", "line"), [("nodes: 1\nname: a\nnodes: 2", 3), ("idle:\n  timeout: 1\n  timeout: 2", 3)]
)
def test_a_key_that_is_given_twice(file: Path, text: str, line: int) -> None:
    error = refused(file, text)
    assert "is given twice" in error.message and error.cause == f"{FILE} line {line}"


def test_a_bad_value_says_where_it_stands(file: Path) -> None:
    error = refused(file, "name: a\n\nidle: {timeout: soon}\n")
    assert error.message == "`idle.timeout` cannot be used"
    assert "`soon` is not a duration" in error.cause and f"{FILE} line 3" in error.cause
    error = refused(file, "nodes: 2", nodes="many")
    assert "--nodes" in error.cause and "(and" not in error.message


def test_many_bad_values_are_counted(file: Path) -> None:
    assert refused(file, "nodes: x\ntime: y\nfoo: 1").message.endswith("(and 2 more)")


def test_an_unknown_site_is_told_with_those_there_are(file: Path) -> None:
    error = refused(file, "on: slrum")
    assert error.message == "there is no backend `slrum`" and error.hint == "on: slurm"
    assert "local, pbs, slurm, ssh" in error.cause and f"{FILE} line 1" in error.cause


# -- sentences of our own for what the validator finds

SENTENCES = [
    ("nodes: many", "nodes", "it must be a whole number, not `many`"),
    ("nodes: 1.5", "nodes", "it must be a whole number, not `1.5`"),
    ("nodes: [1]", "nodes", "it must be a whole number, not a list"),
    ("nodes: .inf", "nodes", "it must be a finite number, not `inf`"),
    ("nodes: 0", "nodes", "it must be at least 1, not `0`"),
    ("nodes: 10001", "nodes", "it must be at most 10000, not `10001`"),
    (f"nodes: '{'9' * 5000}'", "nodes", f"it must be a smaller number, not `{'9' * 80}`"),
    ("memory_per_node: 0", "memory_per_node", "it must be more than 0, not `0`"),
    ("memory_per_node: [1]", "memory_per_node", "it must be a whole number, not a list"),
    ("on: [local]", "on", "it must be text, not a list"),
    ("on:", "on", "it must be text, not `null`"),
    ("head: {work: perhaps}", "head.work", "it must be true or false, not `perhaps`"),
    ("head: {work: [1]}", "head.work", "it must be true or false, not a list"),
    ("idle: 60m", "idle", "it must be a table of keys, not `60m`"),
    ("labels: [a]", "labels", "it must be a table of keys, not a list"),
    ("groups: {gpu: 3}", "groups.gpu", "it must be a table of keys, not `3`"),
    ("environment: {setup: module load cuda}", "environment.setup", "it must be a list, not `module load cuda`"),
    ("environment: {stage: remote}", "environment.stage", "it must be `local`, not `remote`"),
    ("security: {auth: yes}", "security.auth", "it must be `token` or `none`, not `true`"),
    ("hosts: [{host: ''}]", "hosts.0.host", "it must be text of 1 or more characters, not ``"),
    ("groups: {gpu: {resources: {x: {}}}}", "groups.gpu.resources.x", "it must be a number, not a table of keys"),
    ("groups: {gpu: {resources: {x: y}}}", "groups.gpu.resources.x", "it must be a number, not `y`"),
    ("groups: {a b: {}}", "groups.a b", "`a b` is not a name: "),
]  # fmt: skip


@pytest.mark.parametrize(("text", "key", "sentence"), SENTENCES, ids=[text[:40] for text, *_ in SENTENCES])
def test_a_wrong_value_is_told_in_our_own_sentence(file: Path, text: str, key: str, sentence: str) -> None:
    error = refused(file, text)
    assert (error.message, error.code) == (f"`{key}` cannot be used", "usage.invalid_value")
    assert error.cause.startswith(sentence) and error.cause.endswith(f" (from {FILE} line 1)")


def test_a_key_that_is_missing(file: Path) -> None:
    error = refused(file, "autoscale: {min: 1}")
    assert (error.message, error.code) == ("`autoscale.max` is missing", "usage.missing_key")


@pytest.mark.parametrize(
    ("table", "key", "sentence"),
    [
        ("slurm: {time: [1]}", "slurm.time", "it must be text or a whole number, not a list"),
        ("slurm: {extra: --exclusive}", "slurm.extra", "it must be a list, not `--exclusive`"),
        ("slurm: {requeue: maybe}", "slurm.requeue", "it must be true or false, not `maybe`"),
        ("kubernetes: {volumes: [3]}", "kubernetes.volumes.0", "it must be text or a table of keys, not `3`"),
        ("kubernetes: {labels: {str: []}}", "kubernetes.labels.str", "it must be text, not a list"),
    ],
)
def test_a_wrong_value_of_a_sites_table(file: Path, table: str, key: str, sentence: str) -> None:
    file.write_text(f"on: {key.partition('.')[0]}\n{table}\n")
    spec = load(backends, file=file, environ={}).spec
    with pytest.raises(UsageError) as caught:
        planner.backend_options(spec)
    assert (caught.value.message, caught.value.cause) == (f"`{key}` cannot be used", sentence)


HOSTILE: list[Any] = [
    None, True, "x", "", 0, -1, 3.5, float("inf"), float("nan"), 10**30, "9" * 5000, "9" * 5000 + "-" + "9" * 5000, "9" * 5000 + ":00:00",
    "\ud800", "a\0b", b"x", [], [None], [[]], [1], ["a", {}], {}, {"a": 1}, {"a": []}, {"a": None}, {"a b": {}}, {"": {}}, {1: 2},
]  # fmt: skip
# of pydantic and of Python
THEIRS = re.compile(
    r"Input|should|valid |pydantic|Error|unable to|Exceeds|keyword|instance of|surrogate|not valid here"
)


def _every_key(model: type[BaseModel], path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    for name, field in model.model_fields.items():
        yield (*path, name)
        inside: tuple[str | int, ...] = ()
        inside = (
            ("g",) if "dict" in str(field.annotation) else (0,) if "tuple" in str(field.annotation) else ()
        )
        for inner in explain._models(field.annotation):
            yield from _every_key(inner, (*path, name, *inside))


def _nested(path: tuple[str | int, ...], value: Any) -> Any:
    for part in reversed(path):
        value = [value] if part == 0 else {part: value}
    return value


def _is_ours(error: UsageError) -> bool:
    return bool(error.message) and not THEIRS.search(f"{error.message} {error.cause} {error.hint}")


@pytest.mark.parametrize("path", list(_every_key(ClusterSpec)), ids=lambda path: ".".join(map(str, path)))
def test_no_wording_of_the_validator_reaches_a_user(path: tuple[str | int, ...]) -> None:
    for value in HOSTILE:
        try:
            loader.check(_nested(path, value), {}, backends)
        except UsageError as error:
            assert _is_ours(error), (value, error.fields())


@pytest.mark.parametrize("site", backends.names())
def test_no_wording_of_the_validator_reaches_a_user_of_a_sites_table(site: str) -> None:
    for field in fields(backends.load(site).Options):
        for value in HOSTILE:
            try:
                planner.backend_options(ClusterSpec(on=site, backend_tables={site: {field.name: value}}))
            except UsageError as error:
                assert _is_ours(error), (value, error.fields())


# -- values that YAML reads in ways nobody means


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("4:00:00", 14400), ("1:30", 90), ("24:00:00", 86400), ("1-12:00:00", 129600), ("90s", 90), ("60m", 3600), ("1.5h", 5400)],
)  # fmt: skip
def test_a_time_is_not_a_number_in_base_60(file: Path, text: str, seconds: int) -> None:
    assert read(file, f"time: {text}").spec.time == seconds
    assert read(file, f"time: '{text}'").spec.time == seconds


def test_versions_and_dates_stay_words(file: Path) -> None:
    assert read(file, "environment: {ray: 2.60.0}").spec.environment.ray == "2.60.0"
    assert read(file, "labels: {day: 2024-01-02}").spec.labels == {"day": "2024-01-02"}


def test_yes_is_not_a_number(file: Path) -> None:
    assert "`true` is not a number" in refused(file, "nodes: yes").cause


# -- files that are no files


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)
NOT_FILES: dict[str, tuple[str | bytes, str]] = {
    "noise": ("\n".join(f"key-{i}: '{'x' * 12}'" for i in range(900)), "unknown key `key-0` (and 899 more)"),
    "ten thousand lines of noise": ("\n".join(f"%$#@ {i} }}{{ [" for i in range(10_000)), "is not YAML"),
    "ten thousand items": ("- a\n" * 10_000, "is not a table of keys"),
    "ten thousand lines of prose": ("lorem ipsum\n" * 10_000, "is not a table of keys"),
    "bomb": (BOMB, "is too large"),
    "itself": ("a: &a [*a]", "is too deep"),
    "deep": ("a: " + "[" * 900 + "]" * 900, "is not YAML"),
    "binary": (bytes(range(256)) * 4, "is not YAML"),
    "nul": (b"name: a\0b", "is not YAML"),
    "latin1": ("name: caf\xe9".encode("latin-1"), "is not YAML"),
    "huge": (b"#" * (MAX_FILE_BYTES + 1), "is too large"),
    "tagged": ("name: !!python/object/apply:os.system [id]", "`name` cannot be used"),
    "tagged scalar": ("name: !lab x", "`name` is not a plain value"),
    "a word": ("hello", "is not a table of keys"),
    "two documents": ("nodes: 1\n---\nnodes: 2", "is not YAML"),
    "a tab": ("idle:\n\ttimeout: 1", "is not YAML"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FILES)
def test_files_that_are_not_what_they_should_be(file: Path, name: str) -> None:
    text, words = NOT_FILES[name]
    error = refused(file, text)
    assert words in error.message
    assert all(len(line) < 1000 and "\n" not in line for line in (error.message, error.cause, error.hint))


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "\ufeffnodes: 1", "{}"])
def test_an_empty_file_is_all_defaults(file: Path, text: str) -> None:
    assert read(file, text).spec.nodes == 1


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, words in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match="could not read") as caught:
            load(backends, file=path, environ={})
        assert words in caught.value.cause


def test_a_file_that_may_not_be_read(file: Path) -> None:
    file.write_text("nodes: 1")
    file.chmod(0)
    if os.access(file, os.R_OK):  # root may read everything
        return
    with pytest.raises(UsageError, match="could not read"):
        load(backends, file=file, environ={})


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(UsageError, match="is too large"):
        load(backends, file=Path("/dev/zero"), environ={})


# -- the schema


def _schema() -> dict[str, Any]:
    return schema({site: planner.backend_schema(site).json_schema() for site in backends.names()})


def test_the_schema_is_one_and_takes_the_example() -> None:
    found = _schema()
    jsonschema.Draft202012Validator.check_schema(found)
    example = {
        "on" if key is True else key: value for key, value in yaml.safe_load(EXAMPLE).items()
    }  # YAML 1.1
    for site in set(example) & {"local", "ssh", "slurm", "pbs", "kubernetes"} - set(backends.names()):
        del example[site]  # its table comes with its backend
    example["on"] = example["on"] if example["on"] in backends.names() else "local"
    jsonschema.validate(example, found)


@pytest.mark.parametrize(
    "value",
    [{"nodse": 1}, {"on": "mars"}, {"name": "a b"}, {"nodes": 0}, {"idle": {"x": 1}}, {"hosts": [{}]}, {"local": {"x": 1}},
     {"security": {"auth": "off"}}, {"backend_tables": {}}],
)  # fmt: skip
def test_the_schema_refuses_what_we_refuse(value: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, _schema())


@pytest.mark.parametrize(
    "value",
    [{}, {"time": "4:00:00"}, {"time": "90s"}, {"memory_per_node": "50G"}, {"head": "a"}, {"head": {"host": "a"}}, {"local": {}},
     {"groups": {"a": {"memory": "1G"}}}],
)  # fmt: skip
def test_the_schema_takes_what_we_take(value: dict[str, Any]) -> None:
    jsonschema.validate(value, _schema())
