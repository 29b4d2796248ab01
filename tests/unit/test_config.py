"""Defaults < file < environment < flags, where each value came from, and files that are not what they should be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from heliostat import backends, planning
from heliostat.config import FILE, LARGEST_FILE, Config, load, schema
from heliostat.errors import UsageError

SITES = ["local", "slurm", "ssh"]

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
    return load(SITES, file=file, environ=environ or {}, flags=flags)


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
    assert spec.sites["slurm"]["time"] == "24:00:00"
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
    assert config.spec.sites["slurm"] == {"partition": "gpu"}


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
    assert load(SITES, environ={}, look_in=tmp_path).spec.nodes == 1
    (tmp_path / FILE).write_text("nodes: 4\n")
    assert load(SITES, environ={}, look_in=tmp_path).spec.nodes == 4


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
        ("sites: {local: {}}", "sites", "known keys: autoscale, ", 1),
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
        planning.site_options(spec)


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
    assert error.message == "there is no site `slrum`" and error.hint == "--on slurm"
    assert "local, slurm, ssh" in error.cause and f"{FILE} line 1" in error.cause


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
    assert "`True` is not a number" in refused(file, "nodes: yes").cause


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
    "huge": (b"#" * (LARGEST_FILE + 1), "is too large"),
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
            load(SITES, file=path, environ={})
        assert words in caught.value.cause


def test_a_file_that_may_not_be_read(file: Path) -> None:
    file.write_text("nodes: 1")
    file.chmod(0)
    if os.access(file, os.R_OK):  # root may read everything
        return
    with pytest.raises(UsageError, match="could not read"):
        load(SITES, file=file, environ={})


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(UsageError, match="is too large"):
        load(SITES, file=Path("/dev/zero"), environ={})


# -- the schema


def _schema() -> dict[str, Any]:
    return schema({site: planning.site_table(site).json_schema() for site in backends.names()})


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
     {"security": {"auth": "off"}}, {"sites": {}}],
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
