"""What a cluster may be: names, sizes, groups, labels, ports. Whatever else is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from heliostat import backends
from heliostat.common.errors import UsageError
from heliostat.config import loader
from heliostat.config.members import Member, count_members, hosts, members, worker_members
from heliostat.config.spec import ClusterSpec
from heliostat.config.tables import check_name

NASTY = [
    "", " ", "a b", " a", "a ", "a\n", "\na", "a\tb", "'a'", '"a"', "a;b", "$HOME", "$(id)", "`id`", "a\\b", "a/b", "../a",
    ".", "..", "...", "-a", "--name", "_a", "a_b", "a.b", "ä", "日本", "a\0b", "a" * 41, "a:b", "a*", "{a}", "~", "a,b", "#a",
    "a\u200bb", "а",  # the last one is Cyrillic
]  # fmt: skip
GOOD = ["a", "A", "0", "lab", "lab-1", "a" * 40, "9-9", "a-", "a--b"]


def spec(**values: Any) -> ClusterSpec:
    return ClusterSpec.model_validate(values)


def refused(**values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        spec(**values)
    return str(caught.value)


@pytest.mark.parametrize("name", NASTY)
def test_nasty_names_are_refused_everywhere(name: str) -> None:
    assert "is not a name" in refused(name=name)
    assert "is not a name" in refused(groups={name: {"nodes": 1}})


@pytest.mark.parametrize("name", [None, 7, True, ["a"], {"a": 1}, b"a"])
def test_a_name_is_text(name: Any) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        check_name(name)


@pytest.mark.parametrize("name", GOOD)
def test_good_names(name: str) -> None:
    assert spec(name=name).cluster_name == name


@given(st.text())
def test_a_name_that_passes_is_safe_as_a_word(name: str) -> None:
    try:
        check_name(name)
    except ValueError:
        return
    assert name.isascii() and name.replace("-", "").isalnum() and 0 < len(name) <= 40 and name[0] != "-"


def test_the_site_names_a_nameless_cluster() -> None:
    assert spec().cluster_name == "local" and spec(on="slurm").cluster_name == "slurm"


# every key of the file, as a person writes it -> what is found where
KEYS: list[tuple[dict[str, Any], str, Any]] = [
    ({"nodes": 3}, "nodes", 3),
    ({"min_nodes": 1}, "min_nodes", 1),
    ({"head": "platinum"}, "head.host", "platinum"),
    ({"head": {"work": False, "cpus": 2, "gpus": 0, "memory": "2G"}}, "head.memory", 2 << 30),
    ({"hosts": ["platinum", "zinc"]}, "hosts.1.host", "zinc"),
    ({"hosts": [{"host": "nickel", "gpus": 3, "user": "ann", "port": 2222, "jump": "gw"}]}, "hosts.0.jump", "gw"),
    ({"hosts": [{"host": "n", "key": "~/.ssh/k", "cpus": 8, "leave_cpus": 2, "labels": {"a": 1}}]}, "hosts.0.labels.a", "1"),
    ({"hosts": [{"host": "n", "env": {"A": 1}}]}, "hosts.0.env.A", "1"),
    ({"cpus_per_node": 4}, "cpus_per_node", 4),
    ({"gpus_per_node": 0}, "gpus_per_node", 0),
    ({"price_per_node_hour": 1}, "price_per_node_hour", 1.0),
    ({"memory_per_node": "50G"}, "memory_per_node", 50 << 30),
    ({"object_store": "1.5G"}, "object_store", 3 << 29),
    ({"time": "24:00:00"}, "time", 86400),
    ({"time": "90s"}, "time", 90),
    ({"environment": {"venv": "~/venvs/rllib"}}, "environment.venv", "~/venvs/rllib"),
    ({"environment": {"conda": "rl"}}, "environment.conda", "rl"),
    ({"environment": {"container": "ray.sif"}}, "environment.container", "ray.sif"),
    ({"environment": {"container": "docker://a/b:1"}}, "environment.container", "docker://a/b:1"),
    ({"environment": {"container": "a", "binds": ["/data", "/s:/s:ro"]}}, "environment.binds", ("/data", "/s:/s:ro")),
    ({"environment": {"container": "a", "container_options": ["-e"]}}, "environment.container_options", ("-e",)),
    ({"environment": {"venv": "a", "stage": "local"}}, "environment.stage", "local"),
    ({"environment": {"ray": "2.60.0"}}, "environment.ray", "2.60.0"),
    ({"environment": {"ray": 2.6}}, "environment.ray", "2.6"),
    ({"environment": {"requirements": "requirements.txt"}}, "environment.requirements", "requirements.txt"),
    ({"environment": {"setup": ["module load cuda/12.4"]}}, "environment.setup", ("module load cuda/12.4",)),
    ({"environment": {"env": {"OMP_NUM_THREADS": 1}}}, "environment.env.OMP_NUM_THREADS", "1"),
    ({"network": {"interface": "tailscale0"}}, "network.interface", "tailscale0"),
    ({"network": {"port_offset": 100}}, "network.port_offset", 100),
    ({"network": {"ports": "20000-22419"}}, "network.ports", "20000-22419"),
    ({"idle": {"timeout": "60m"}}, "idle.timeout", 3600),
    ({"idle": {"window": "02:30-09:00"}}, "idle.window", "02:30-09:00"),
    ({"autoscale": {"max": 8}}, "autoscale.min", 0),
    ({"groups": {"gpu": {"nodes": 2, "gpus": 4, "labels": {"kind": "gpu"}}}}, "groups.gpu.gpus", 4),
    ({"groups": {"gpu": {"memory": "1G", "cpus": 2, "resources": {"slot": 1}}}}, "groups.gpu.resources.slot", 1.0),
    ({"labels": {"team": "blue"}}, "labels.team", "blue"),
    ({"security": {"auth": "none"}}, "security.auth", "none"),
    ({"security": {"tls": True}}, "security.tls", True),
]  # fmt: skip


@pytest.mark.parametrize(("values", "key", "value"), KEYS, ids=[key for _, key, _ in KEYS])
def test_every_key(values: dict[str, Any], key: str, value: Any) -> None:
    found: Any = spec(**values)
    for part in key.split("."):
        if isinstance(found, (dict, tuple)):
            found = found[int(part)] if isinstance(found, tuple) else found[part]
        else:
            found = getattr(found, part)
    assert found == value


def test_every_key_is_tried_above() -> None:
    tried = {key.partition(".")[0] for _, key, _ in KEYS}
    assert tried == set(ClusterSpec.model_fields) - {"name", "on", "backend_tables"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"nodes": 0}, "greater than or equal to 1"),
    ({"nodes": -1}, "greater than or equal to 1"),
    ({"nodes": "many"}, "valid integer"),
    ({"nodes": 2.5}, "valid integer"),
    ({"nodes": True}, "`true` is not a number"),
    ({"nodes": 10**9}, "less than or equal to 10000"),
    ({"cpus_per_node": -1}, "greater than or equal to 0"),
    ({"cpus_per_node": False}, "`false` is not a number"),
    ({"min_nodes": 4, "nodes": 3}, "min_nodes (4) is more than the 3 requested nodes"),
    ({"memory_per_node": "lots"}, "is not a size"),
    ({"memory_per_node": 0}, "greater than 0"),
    ({"memory_per_node": float("inf")}, "out of range for a size"),
    ({"object_store": "1M"}, "1.0 MiB is too small: Ray requires at least 80M"),
    ({"time": "soon"}, "is not a duration"),
    ({"time": "0s"}, "greater than 0"),
    ({"time": 90}, "write `90m` or `90s`"),
    ({"time": "90"}, "write `90m` or `90s`"),
    ({"time": True}, "is not a duration"),
    ({"time": ["1h"]}, "valid integer"),
    ({"environment": {"venv": "a", "conda": "b"}}, "`venv` and `conda` exclude each other"),
    ({"environment": {"conda": "a", "container": "b"}}, "`conda` and `container` exclude each other"),
    ({"environment": {"stage": "local"}}, "`stage` has a meaning only with `venv`"),
    ({"environment": {"conda": "a", "stage": "local"}}, "`stage` has a meaning only with `venv`"),
    ({"environment": {"venv": "a", "stage": "nfs"}}, "'local'"),
    ({"environment": {"binds": ["/data"]}}, "`binds` has a meaning only with `container`"),
    ({"environment": {"venv": "a", "container_options": ["-e"]}}, "only with `container`"),
    ({"environment": {"container": "a", "binds": ["data"]}}, "`data` is not a bind"),
    ({"environment": {"container": "a", "binds": ["/a,/b"]}}, "`/a,/b` is not a bind"),
    ({"environment": {"container": "a", "binds": ["/a:/b:ro:x"]}}, "is not a bind"),
    ({"environment": {"env": {"A B": "1"}}}, "not the name of an environment variable"),
    ({"environment": {"env": {"A\n": "1"}}}, "not the name of an environment variable"),
    ({"environment": {"env": {"A": "\0"}}}, "not the name of an environment variable"),
    ({"environment": {"setup": "one line"}}, "valid tuple"),
    ({"network": {"port_offset": -1}}, "greater than or equal to 0"),
    ({"network": {"port_offset": 43116}}, "less than or equal to 43115"),
    ({"network": {"ports": "20000"}}, "not a range of ports"),
    ({"network": {"ports": "80-2000"}}, "not a range of ports"),
    ({"network": {"ports": "22419-20000"}}, "not a range of ports"),
    ({"network": {"ports": "20000-70000"}}, "not a range of ports"),
    ({"network": {"ports": "20000-22419\n"}}, "not a range of ports"),
    ({"network": {"ports": "20000-20062"}}, "too narrow"),
    ({"idle": {"timeout": 0}}, "greater than 0"),
    ({"idle": {"window": "2-9"}}, "not a window of the day"),
    ({"autoscale": {}}, "Field required"),
    ({"autoscale": {"min": 3, "max": 2}}, "min (3) is more than max (2)"),
    ({"hosts": [{"host": "a", "port": 0}]}, "greater than or equal to 1"),
    ({"hosts": [{"user": "ann"}]}, "Field required"),
    ({"hosts": [7]}, "valid dictionary or instance of Host"),
    ({"head": ["a"]}, "valid dictionary or instance of Head"),
    ({"security": {"auth": "off"}}, "'token' or 'none'"),
    ({"security": {"auth": "none", "tls": True}}, "`tls` needs `auth: token`"),
    ({"labels": {"ray.io/x": "1"}}, "Ray's own"),
    ({"labels": {"a b": "1"}}, "is not a label"),
    ({"labels": {"a": "b\n"}}, "is not a label"),
    ({"labels": {"a" * 64: "1"}}, "is not a label"),
    ({"labels": {"a": "x,y=z"}}, "is not a label"),
    ({"labels": {"a": "-x"}}, "is not a label"),
    ({"groups": {"g": {"labels": {"a": "é"}}}}, "is not a label"),
    ({"labels": {"a": "x/y"}}, "is not a label"),
    ({"labels": {"a/b/c": "x"}}, "is not a label"),
    ({"hosts": [{"host": "n", "labels": {"a": "-x"}}]}, "is not a label"),
    ({"groups": {"g": {"resources": {"half": 0.5}}}}, "`half` cannot be 0.5: Ray counts resources in whole numbers"),
    ({"groups": {"g": {"resources": {"x": -1}}}}, "`x` cannot be -1: Ray counts resources from 0 on"),
    ({"groups": {"g": {"resources": {"x": 1e15}}}}, "`x` cannot be 1e+15: Ray counts resources up to 100000000000000"),
    ({"groups": {"g": {"resources": {"x": float("nan")}}}}, "whole numbers"),
    ({"groups": {"g": {"resources": {"x": float("inf")}}}}, "whole numbers"),
    ({"groups": {"g": {"resources": {"CPU": 2}}}}, "`CPU` is one of Ray's own resources: write `cpus`"),
    ({"groups": {"g": {"resources": {"GPU": 2}}}}, "write `gpus`"),
    ({"groups": {"g": {"resources": {"memory": 2}}}}, "write `memory`"),
    ({"groups": {"g": {"resources": {"object_store_memory": 2}}}}, "write `object_store`"),
    ({"groups": {"g": {"resources": {"node:__internal_head__": 1}}}}, "is one of Ray's own resources"),
    ({"groups": {"g": {"nodes": -1}}}, "greater than or equal to 0"),
    ({"groups": {"g": {"memory": "x"}}}, "is not a size"),
    ({"nodes": 2, "groups": {"g": {"nodes": 2}}}, "`nodes` (2) and `groups` (head and 2 workers) disagree"),
    ({"groups": {"g": {"nodes": 1}}, "min_nodes": 3}, "more than the 2 requested nodes"),
    ({"nonsense": 1}, "Extra inputs"),
    ({"head": {"nonsense": 1}}, "Extra inputs"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), BAD, ids=[str(values)[:60] for values, _ in BAD])
def test_bad_values(values: dict[str, Any], words: str) -> None:
    assert words in refused(**values)


PER_NODE = [("cpus", "cpus_per_node", 3), ("gpus", "gpus_per_node", 2), ("memory", "memory_per_node", "2G")]


@pytest.mark.parametrize(("short", "long", "value"), PER_NODE, ids=[short for short, *_ in PER_NODE])
def test_both_spellings_of_a_key_of_one_node(short: str, long: str, value: Any) -> None:
    for key in (short, long):
        made = spec(**{key: value}, head={key: value}, groups={"a": {key: value}})
        found = [getattr(made, long), getattr(made.head, short), getattr(made.groups["a"], short)]
        assert found == [2 << 30 if short == "memory" else value] * 3
    if short != "memory":
        assert getattr(spec(hosts=[{"host": "a", long: value}]).hosts[0], short) == value


@pytest.mark.parametrize(("short", "long", "value"), PER_NODE, ids=[short for short, *_ in PER_NODE])
def test_both_spellings_at_once_are_refused(short: str, long: str, value: Any) -> None:
    both = {short: value, long: value}
    for values in (both, {"head": both}, {"groups": {"a": both}}, {"hosts": [{"host": "a", **both}]}):
        assert f"`{short}` and `{long}` are the same key: keep one" in refused(**values)


@pytest.mark.parametrize("label", ["", "a", "a.b_c-d", "a" * 63])
def test_good_labels(label: str) -> None:
    assert spec(labels={"k": label}).labels == {"k": label}


LABEL_KEYS = [
    "a",
    "a.b_c-d",
    "kind/x",
    "example.org/x",
    "a" * 63,
    "a" * 64,
    "p" * 60 + "/" + "a" * 63,
    "a/b/c",
    "a//b",
    "/a",
    "a/",
    "-a",
    "a b",
    "é",
    "",
    "a..b/x",
    "-a/x",
]
VALUES = ["", "a", "a.b_c-d", "x/y", "a" * 63, "a" * 64, "-x", "x-", "a b", "é"]
AMOUNTS = [0, 1, 2.0, 0.5, 1.5, -1, -0.5, 100e12, 100e12 + 1, 1e15, float("nan"), float("inf")]
NAMES = [
    "x",
    "CPU",
    "GPU",
    "memory",
    "object_store_memory",
    "node:__internal_head__",
    "cpu",
    "TPU",
    "a b",
    "accelerator_type:A100",
]


def refuses(check: Callable[[], object]) -> bool:
    try:
        check()
    except (ValueError, AssertionError):
        return True
    return False


@pytest.mark.needs_ray
def test_labels_are_refused_as_ray_refuses_them() -> None:
    """Against the code behind `ray start --labels`."""
    from ray._private.label_utils import validate_node_label_syntax

    for key, value in [*((key, "v") for key in LABEL_KEYS), *(("k", value) for value in VALUES)]:
        rays = refuses(lambda: validate_node_label_syntax({key: value}))  # noqa: B023
        assert refuses(lambda: spec(labels={key: value})) == rays, (key, value)  # noqa: B023


@pytest.mark.needs_ray
def test_resources_are_refused_as_ray_refuses_them() -> None:
    """Against the code behind `ray start --resources`, which ends in the middle of a start."""
    from ray._private.parameter import RayParams
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    def start(name: str, amount: float) -> None:
        RayParams(resources={name: amount})
        made = ResourceAndLabelSpec(1, 0, 1e9, 1e9, {name: amount}, {})
        made._resolve_resources(is_head=True, node_ip_address="127.0.0.1")
        made._is_resolved = True
        made.to_resource_dict()

    for name, amount in [*(("x", amount) for amount in AMOUNTS), *((name, 1.0) for name in NAMES)]:
        rays = refuses(lambda: start(name, amount))  # noqa: B023
        ours = refuses(lambda: spec(groups={"g": {"resources": {name: amount}}}))  # noqa: B023
        assert ours == rays, (name, amount)


def test_numbers_in_labels_are_words() -> None:
    assert spec(labels={"rack": 7}).labels == {"rack": "7"}


@pytest.mark.parametrize(
    ("network", "window"),
    [
        ({}, None),
        ({"port_offset": 0}, None),
        ({"port_offset": 100}, (20100, 22519)),
        ({"port_offset": 43115}, (63115, 65534)),
        ({"ports": "1024-1087"}, (1024, 1087)),
        ({"ports": "20000-65535", "port_offset": 5}, (20000, 65535)),
    ],
)
def test_port_windows(network: dict[str, Any], window: tuple[int, int] | None) -> None:
    assert spec(network=network).network.window() == window


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        spec().nodes = 2


# -- who is in the cluster


def test_plain_workers_get_what_every_node_gets() -> None:
    made = members(spec(nodes=3, cpus_per_node=4, memory_per_node="1G", labels={"a": "b"}))
    assert [(m.name, m.role) for m in made] == [("head", "head"), ("w1", "worker"), ("w2", "worker")]
    assert all((m.cpus, m.gpus, m.memory, m.labels) == (4, None, 1 << 30, {"a": "b"}) for m in made)


def test_a_head_of_its_own_kind() -> None:
    head, worker = members(spec(nodes=2, cpus_per_node=4, head={"cpus": 1, "memory": "1G"}))
    assert (head.cpus, head.memory, worker.cpus, worker.memory) == (1, 1 << 30, 4, None)
    head, worker = members(spec(nodes=2, cpus_per_node=4, head={"work": False, "cpus": 3}))
    assert (head.cpus, head.gpus, worker.cpus) == (0, 0, 4)


def test_groups_are_workers_of_several_kinds() -> None:
    groups = {
        "gpu": {"nodes": 2, "gpus": 4, "labels": {"kind": "gpu"}},
        "big": {"memory": "8G"},
        "none": {"nodes": 0},
    }
    made = members(spec(groups=groups, cpus_per_node=2, labels={"kind": "any", "team": "blue"}))
    assert [m.name for m in made] == ["head", "gpu-1", "gpu-2", "big-1"]
    assert [m.group for m in made] == [None, "gpu", "gpu", "big"]
    assert made[1].gpus == 4 and made[1].cpus == 2 and made[3].memory == 8 << 30
    assert made[1].labels == {"kind": "gpu", "team": "blue"} and made[3].labels == {
        "kind": "any",
        "team": "blue",
    }


def test_nodes_may_agree_with_groups() -> None:
    assert len(members(spec(nodes=3, groups={"g": {"nodes": 2}}))) == 3


def test_names_of_nodes_differ() -> None:
    made = members(
        spec(groups={"a": {"nodes": 12}, "a-1": {"nodes": 2}, "head": {"nodes": 1}, "w1": {"nodes": 1}})
    )
    assert len({m.name for m in made}) == len(made)


def test_workers_of_another_number() -> None:
    assert [m.name for m in worker_members(spec(nodes=2), 3)] == ["w1", "w2", "w3"]
    assert worker_members(spec(), 0) == []


# -- machines that the file lists


def lab(*machines: Any, **values: Any) -> ClusterSpec:
    return spec(on="ssh", hosts=list(machines), **values)


def names(made: ClusterSpec) -> list[str]:
    return [member.name for member in members(made)]


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("zinc", "zinc"),
        ("zinc.lab.edu", "zinc"),
        ("ann@zinc", "zinc"),
        ("ann@zinc.lab.edu", "zinc"),
        ("ann@corp@zinc", "zinc"),
        ("node_7", "node_7"),
        ("10.0.0.7", "10.0.0.7"),
        ("ann@10.0.0.7", "10.0.0.7"),
        ("2001:db8::7", "2001-db8--7"),
        ("fe80::7%eth0", "fe80--7%eth0"),
        ("this machine", "here"),
        ("localhost", "here"),
        ({"host": "zinc.lab.edu", "name": "big"}, "big"),
        ({"host": "10.0.0.7", "name": "big"}, "big"),
    ],
)
def test_the_name_of_a_machine(host: Any, name: str) -> None:
    assert names(lab(host)) == [name]


@pytest.mark.parametrize(
    "host",
    ["", " ", "-oProxyCommand=x", "a b", "a\n", "\ta", "ann@", "@", "ann@-x", "-x@a", ".", "..", "a/b", "../a", "a;b", "$(a)",
     "ssh://a", "a\0b", "other machine"],
)  # fmt: skip
def test_what_is_no_host(host: str) -> None:
    for values in ({"hosts": [host]}, {"hosts": [{"host": host, "name": "good"}]}):
        assert "not the name of a host" in (words := refused(on="ssh", **values)) or "at least 1" in words
    if host:  # an empty one is none
        assert "not the name of a host" in refused(on="ssh", hosts=["a"], head=host)


@pytest.mark.parametrize("name", ["a b", "a.b", "-a", "", "ä"])
def test_a_name_that_is_given_to_a_machine_is_a_name(name: str) -> None:
    assert "is not a name" in refused(on="ssh", hosts=[{"host": "zinc", "name": name}])


def test_two_machines_of_one_name() -> None:
    for machines in (["a", "a"], ["a.x", "a.y"], ["ann@a", "bob@a"], ["a", {"host": "b", "name": "a"}]):
        assert "two hosts have the name `a`" in refused(on="ssh", hosts=machines)
    assert "two hosts have the name `a`" in refused(on="ssh", hosts=["b", "a"], head="ann@a")
    assert names(lab("a.x", {"host": "a.y", "name": "a2"})) == ["a", "a2"]


@pytest.mark.parametrize(
    ("head", "order"),
    [
        ({}, ["a", "b", "c"]),
        ({"head": "b"}, ["b", "a", "c"]),
        ({"head": "ann@b.lab.edu"}, ["b", "a", "c"]),
        ({"head": {"host": "c"}}, ["c", "a", "b"]),
        ({"head": "other.lab.edu"}, ["other", "a", "b", "c"]),
        ({"head": "this machine"}, ["here", "a", "b", "c"]),
        ({"head": {"work": False}}, ["a", "b", "c"]),
    ],
)
def test_which_machine_is_the_head(head: dict[str, Any], order: list[str]) -> None:
    made = lab("a", "ann@b.lab.edu", {"host": "10.0.0.3", "name": "c"}, **head)
    assert names(made) == order and made.nodes == len(order)
    assert [member.role for member in members(made)] == ["head", *["worker"] * (len(order) - 1)]
    assert [member.host for member in members(made)] == hosts(made)


def test_a_head_that_is_listed_keeps_what_is_said_of_it() -> None:
    head, worker = members(lab("a", {"host": "b", "port": 2222, "cpus": 3}, head="b"))
    assert head.host and (head.host.port, head.cpus) == (2222, 3) and worker.host and worker.host.port is None


def test_fewer_nodes_than_machines_and_never_more() -> None:
    assert names(lab("a", "b", "c", nodes=2)) == ["a", "b"]
    assert names(lab("a", "b", nodes=2, head="c")) == ["c", "a"]
    assert [m.name for m in worker_members(lab("a", "b", "c", nodes=2), 9)] == ["b", "c"]
    assert "`nodes` (3) is more than the 2 hosts" in refused(on="ssh", hosts=["a", "b"], nodes=3)
    assert len(members(lab("a", "b", nodes=3, head="c"))) == 3, "a head beside them is one more"
    assert "min_nodes (3) is more than the 2 requested nodes" in refused(
        on="ssh", hosts=["a", "b"], min_nodes=3
    )


def test_what_differs_from_machine_to_machine() -> None:
    made = lab(
        {"host": "a", "cpus": 8, "gpus": 2, "labels": {"kind": "big"}},
        {"host": "b", "leave_cpus": 4, "env": {"NCCL_DEBUG": "INFO"}, "environment": {"conda": "ray"}},
        "c",
        cpus_per_node=2, memory_per_node="1G", labels={"kind": "any", "team": "blue"}, environment={"venv": "v"},
    )  # fmt: skip
    a, b, c = members(made)
    assert [(m.cpus, m.gpus, m.memory) for m in (a, b, c)] == [(8, 2, 1 << 30), (2, None, 1 << 30), (2, None, 1 << 30)]  # fmt: skip
    assert a.labels == {"kind": "big", "team": "blue"} and c.labels == {"kind": "any", "team": "blue"}
    assert a.host and b.host and c.host
    assert (a.host.leave_cpus, b.host.leave_cpus) == (0, 4)
    assert b.host.env == {"NCCL_DEBUG": "INFO"} and c.host.env == {}
    assert b.host.environment and b.host.environment.conda == "ray" and c.host.environment is None


def test_a_head_without_work_on_a_machine_of_the_file() -> None:
    head, worker = members(lab({"host": "a", "cpus": 8, "gpus": 2}, "b", head={"host": "a", "work": False}))
    assert (head.cpus, head.gpus, worker.cpus) == (0, 0, None)
    head, _ = members(lab({"host": "a", "cpus": 8}, "b", head={"cpus": 1}))
    assert head.cpus == 1, "what is said of the head counts more than what is said of its machine"


BOTH: dict[str, Any] = {"hosts": ["a", "b", "c"], "groups": {"gpu": {"nodes": 1, "gpus": 4}}}


def test_one_file_for_several_sites() -> None:
    there, here = (loader.check({"on": backend, **BOTH}, {}, backends) for backend in ("slurm", "ssh"))
    assert names(there) == ["head", "gpu-1"] and there.hosts == () and list(there.kinds) == ["gpu"]
    assert names(here) == ["a", "b", "c"] and len(here.hosts) == 3 and here.kinds == {}
    assert here.groups == there.groups
    unused = loader.check({"on": "slurm", "hosts": ["a", "a"], "nodes": 4}, {}, backends)
    assert names(unused) == ["head", "w1", "w2", "w3"]
    with pytest.raises(UsageError, match="hosts"):
        loader.check({"on": "slurm", "hosts": [3]}, {}, backends)


def test_no_machines_at_all() -> None:
    assert spec(on="ssh").hosts == () and members(spec(on="ssh"))[0].host is None


def test_a_large_cluster_is_counted_and_planned_without_a_check_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`up --nodes 100000 --dry-run` computed for over a minute: each node was checked, several times."""
    checked = 0
    original = Member.__init__

    def count(self: Member, **values: Any) -> None:
        nonlocal checked
        checked += 1
        original(self, **values)

    monkeypatch.setattr(Member, "__init__", count)
    spec = ClusterSpec.model_validate({"nodes": 10_000})
    assert count_members(spec) == len(members(spec)) == 10_000 and checked < 10
    assert [member.name for member in members(spec)][:2] == ["head", "w1"]
    groups = ClusterSpec.model_validate({"groups": {"a": {"nodes": 2}, "b": {"nodes": 3, "gpus": 1}}})
    assert count_members(groups) == len(members(groups)) == 6
    assert [(member.name, member.gpus) for member in members(groups)][-2:] == [("b-2", 1), ("b-3", 1)]


@pytest.mark.parametrize("price", [0, -1, True, "cheap", float("inf"), float("nan")])
def test_a_price_is_a_positive_number(price: object) -> None:
    assert ClusterSpec.model_validate({"price_per_node_hour": 0.25}).price_per_node_hour == 0.25
    for table in ({"price_per_node_hour": price}, {"groups": {"gpu": {"price_per_node_hour": price}}}):
        with pytest.raises(ValueError, match="price_per_node_hour"):
            ClusterSpec.model_validate(table)
