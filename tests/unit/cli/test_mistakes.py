"""The usual mistakes of a new user, and the answer to each: one table, in snapshots/mistakes.txt.

UPDATE_SNAPSHOTS=1 writes it anew; read the difference before you keep it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from heliostat import backends
from heliostat.cli import app
from heliostat.cli.run import find_misplaced
from heliostat.common.errors import UsageError
from heliostat.config import loader
from heliostat.remote.transport import Local

SNAPSHOT = Path(__file__).parents[1] / "snapshots" / "mistakes.txt"

# words of other tools as commands
COMMANDS = """
launch train.py
start
create
apply -f cluster.yaml
deploy
sbatch job.sh
srun train.py
qsub job.sh
salloc
ps
list
get clusters
squeue
cancel lab
scancel 1234
delete lab
destroy lab
terminate lab
teardown lab
rm lab
kill lab
shutdown
describe lab
show lab
info
top
log lab
tail lab
shell lab
attach lab
port-forward lab
resize lab 4
autoscale lab
check
validate heliostat.yaml
install
new
cost
config
statsu
dwon lab
submitt lab -- python a.py
xyzzy
"""
# options
OPTIONS = """
up --on k8s --dry-run
up --on kube --dry-run
up --on eks --dry-run
up --on ec2 --dry-run
up --on google --dry-run
up --on az --dry-run
up --on openpbs --dry-run
up --on torque --dry-run
up --on localhost --dry-run
up --on slrum --dry-run
up --on mars --dry-run
up --on --dry-run
up --backend slurm
up --cloud aws
up --num-nodes 4
up --nodez 4
up --nodes four
up --nodes 0
up --nodes -1
up --nodes 1.5
up --nodes
up --cpus 4
up --num-cpus 4
up --gpus 2
up --gres=gpu:2
up --mem 10G
up --memory-per-node lots
up --memory-per-node 0
up --object-store 10M --dry-run
up --walltime 1:00:00
up --time never
up --time -5m
up --time 0
up --idle-timeout soon
up --cluster-name lab
up --name 'a b'
up --name -x
up --name ''
up --config cluster.yaml
up --image ray.sif
up --labels kind
up --labels =gpu
up --port-offset 99999 --dry-run
up --interface nothing0 --dry-run --nodes x
up --max-nodes 1 --on kubernetes --dry-run
up --max-nodes 8 --dry-run
up -f missing.yaml
up -f .
up missing.yaml
up --wait-timeout soon
up --wait-timeout 0
up --on slurm --nodez 4 --dry-run
up --on local --partition gpu
up -N 4
up -n 4
up --json --quiet --nodez
run
run missing.py
run train.py.bak
run -- no-such-command-xyz
run --nodez 4 train.py
run --env FOO train.py
run --cluster nothing train.py
run --on k8s train.py
run --gpus 1 train.py
run --partition=gpu train.py
run --on local -q gpu train.py
run --nodes 2
run --detach
"""
CLUSTERS = """
status nothing
status a b
down nothing
down
down --all nothing
logs
logs nothing
logs nothing -f
scale nothing 4
scale
scale nothing four
scale nothing -1
restart nothing
jobs nothing
jobs
stop nothing job
stop
submit
submit nothing
submit nothing -- python train.py
submit nothing --env FOO -- python train.py
join nothing
join nothing --on slurm
exec nothing -- hostname
exec
env nothing
dashboard nothing
dashboard nothing --port x
advise nothing
plan
doctor nothing
history --csv
schema extra
completion tcsh
completion
init --on mars
init --on k8s
ls lab
--hlep
-x
"""
FILES = {
    "cpus and cpus_per_node": "cpus: 4\ncpus_per_node: 4\n",
    "cpu: 4": "cpu: 4\n",
    "num_cpus: 4": "num_cpus: 4\n",
    "gpu: 1": "gpu: 1\n",
    "num_gpus: 1": "num_gpus: 1\n",
    "mem: 4G": "mem: 4G\n",
    "workers: 4": "workers: 4\n",
    "replicas: 4": "replicas: 4\n",
    "backend: slurm": "backend: slurm\n",
    "cluster_name": "cluster_name: lab\n",
    "walltime": 'walltime: "1:00:00"\n',
    "on: k8s": "on: k8s\n",
    "hosts: gold": "on: ssh\nhosts: gold\n",
    "hosts: [{hst: gold}]": "on: ssh\nhosts: [{hst: gold}]\n",
    "hosts: [3]": "on: ssh\nhosts: [3]\n",
    "hosts twice": "on: ssh\nhosts: [gold, gold]\n",
    "no hosts": "on: ssh\n",
    "hosts without on": "hosts: [gold]\n",
    "a tab": "name:\tlab\n\tnodes: 2\n",
    "no colon": "name lab\n",
    "a list": "- name: lab\n",
    "not closed": "name: [lab\n",
    "nodes: many": "nodes: many\n",
    "nodes: 1.5": "nodes: 1.5\n",
    "nodes: true": "nodes: true\n",
    "nodes: []": "nodes: []\n",
    "name: 3": "name: 3\n",
    "name: a b": "name: a b\n",
    "time: an hour": "time: an hour\n",
    "idle: 60": "idle: 60\n",
    "idle: {minutes: 60}": "idle: {minutes: 60}\n",
    "environment: ray": "environment: ray\n",
    "environment: {pip: [torch]}": "environment: {pip: [torch]}\n",
    "environment: {venv: a, conda: b}": "environment: {venv: a, conda: b}\n",
    "environment: {setup: module load}": "environment: {setup: module load cuda}\n",
    "slurm: gpu": "on: slurm\nslurm: gpu\n",
    "slurm: {partion: gpu}": "on: slurm\nslurm: {partion: gpu}\n",
    "autoscale: 8": "on: kubernetes\nautoscale: 8\n",
    "autoscale: {min: 3, max: 1}": "on: kubernetes\nautoscale: {min: 3, max: 1}\n",
    "autoscale on local": "autoscale: {max: 4}\n",
    "groups: [a]": "groups: [a]\n",
    "groups: {a: {gpu: 1}}": "groups: {a: {gpu: 1}}\n",
    "labels: gpu": "labels: gpu\n",
    "labels: {a b: c}": "labels: {a b: c}\n",
    "network: {ports: 80}": "network: {ports: 80}\n",
    "security: {auth: password}": "security: {auth: password}\n",
    "runtime_env": "runtime_env: {pip: [torch]}\n",
    "available_node_types": "available_node_types: {}\n",
    "two values": "nodes: 2\nnodes: 3\n",
}
VARIABLES = {
    "HELIOSTAT_NODS": "2",
    "HELIOSTAT_NODES": "many",
    "HELIOSTAT_ON": "k8s",
    "HELIOSTAT_BACKEND": "slurm",
    "HELIOSTAT_NUM_GPUS": "1",
}


def answer(command: str) -> str:
    """The exit code and what is printed, by the command line in this process."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            code = app.run(shlex.split(command))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    printed = [stream.buffer.getvalue().decode() for stream in streams]
    return f"[{code}]\n{''.join(printed)}".rstrip() + "\n"


def answers(home: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(mistake, answer) of the whole table."""
    found = []
    for command in (COMMANDS + OPTIONS + CLUSTERS).split("\n"):
        if not command:
            continue
        found.append((f"$ heliostat {command}", answer(command)))
    for title, text in FILES.items():
        (directory / "heliostat.yaml").write_text(text)
        found.append((f"heliostat.yaml: {title}", answer("up --dry-run")))
    (directory / "heliostat.yaml").unlink()
    for name, value in VARIABLES.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            found.append((f"{name}={value}", answer("up --dry-run")))
    known = {str(home): "HOME", str(directory): "HERE", sys.executable: "PYTHON"}
    plain = []
    for title, text in found:
        for path, shown in known.items():
            text = text.replace(path, shown)
        plain.append((title, re.sub(r"run-\d{4}-\d{6}-[0-9a-f]{4}", "run-NAME", text)))
    return plain


@pytest.mark.needs_linux
def test_the_table_of_mistakes(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "train.py").write_text("print('trained')\n")
    monkeypatch.chdir(directory)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("COLUMNS", "110")
    table = answers(home, directory, monkeypatch)
    assert len(table) >= 120
    text = "\n".join(f"{title}\n{printed}" for title, printed in table)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOT.write_text(text)
    assert text == SNAPSHOT.read_text()
    for title, printed in table:
        assert (
            printed.startswith("[2]") or printed.startswith("[5]") or printed.startswith(("[1]", "[127]"))
        ), title
        assert "Traceback" not in printed and "pydantic" not in printed, title


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("train.py --nodes 4", "--nodes"),
        ("train.py --lr 0.1 --on=slurm", "--on"),
        ("train.py --lr 0.1", ""),
        ("train.py -- --nodes 4", ""),
        ("-- python train.py --nodes 4", ""),
        ("", ""),
    ],
)
def test_an_option_after_the_script(line: str, option: str) -> None:
    assert find_misplaced(line.split()) == option


def test_a_key_that_is_no_file(tmp_path: Path) -> None:
    hosts = [{"host": "gold", "key": str(tmp_path / "key")}]
    spec = loader.check({"on": "ssh", "hosts": hosts}, {}, backends)
    with pytest.raises(UsageError, match="the key of `gold` is not a file"):
        backends.load("ssh").require(spec, Local())
    (tmp_path / "key").write_text("")
    backends.load("ssh").require(spec, Local())
