"""Words that arrive in a real shell as they were, and the start script, which is the same few lines whatever is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heliostat.cluster.planner import plan
from heliostat.common.shell import export, quote, split
from heliostat.config.spec import ClusterSpec
from heliostat.config.tables import Environment
from heliostat.remote.start_script import BatchScript, agent_script
from heliostat.state.store import ClusterDirectory

GOLDEN = Path(__file__).parents[1] / "golden"
NASTY = [
    "", " ", "a b", "  two  spaces  ", "'", '"', "''", "it's", '"quoted"', ";", "a;id", "$HOME", "$(id)", "`id`", "${x}",
    "\\", "a\\", "\\n", "\n", "a\nb", "\t", "\r", "-rf", "--", "*", "?", "[a]", "{a,b}", "~", "~root", "!", "!!", "#x", "a#b",
    "&", "&&", "|", ">", "<(id)", "(", ")", "=", "A=b", "é", "日本", "🙂", "\u2028", "\x0b", "\x1b[31m", "a" * 5000, "%s", "^",
]  # fmt: skip
SHOW = "import json, sys; print(json.dumps(sys.argv[1:]))"


def bash(script: str, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *args], input=script, text=True, encoding="utf-8", capture_output=True, timeout=60, **options
    )


def arrive(words: list[str]) -> list[str]:
    done = bash(f"exec {quote([sys.executable, '-c', SHOW, *words])}\n")
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_nasty_words_arrive_as_they_were() -> None:
    assert arrive(NASTY) == NASTY


@pytest.mark.parametrize("word", NASTY, ids=lambda word: ascii(word)[:20])
def test_each_nasty_word_is_whole_in_a_script(word: str) -> None:
    text = BatchScript(["echo", word], setup=[": first"], venv=word or None, comment="one").render()
    assert bash(text, "-n").returncode == 0
    assert split(quote([word, word])) == [word, word]


@settings(max_examples=12)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",))), max_size=20))
def test_any_words_arrive_as_they_were(words: list[str]) -> None:
    assert arrive(words) == words


def test_exports_arrive_as_they_were() -> None:
    values = {f"V{i}": word for i, word in enumerate(NASTY)}
    show = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k[0] == 'V' and k[1:].isdigit()}))"
    done = bash(
        f"eval \"$(cat <<'END OF IT'\n{export(values)}\nEND OF IT\n)\"\n{quote([sys.executable, '-c', show])}\n"
    )
    assert json.loads(done.stdout) == values
    assert export({"PORT": 6379}) == "export PORT=6379\n"


def test_a_quote_that_is_not_closed() -> None:
    with pytest.raises(ValueError):
        split("echo 'a")


# -- the script


def rendered(tmp: Path, **values: Any) -> str:
    spec = ClusterSpec.model_validate({"name": "lab", **values})
    _, made = plan(ClusterDirectory(tmp / "clusters" / "lab"), spec)
    (file,) = made.files
    return file.text.replace(str(tmp), "/HOME").replace(sys.executable, "/PYTHON")


SCRIPTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "nodes": 3, "time": "4:00:00", "labels": {"a": "b"}, "network": {"port_offset": 100},
        "environment": {"venv": "/opt/it's a venv/", "ray": "2.60.0", "setup": ["module load cuda/12.4", "export A='b c'"],
                        "env": {"B": "x'y"}},
    },
    "conda": {"environment": {"conda": "my env"}},
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_this(tmp_path: Path, name: str) -> None:
    text, golden = rendered(tmp_path, **SCRIPTS[name]), GOLDEN / f"local-{name}.sh"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    assert bash(text, "-n").returncode == 0


def test_the_script_has_as_many_lines_for_one_node_as_for_a_thousand(tmp_path: Path) -> None:
    many = {
        "nodes": 1000,
        "cpus_per_node": 64,
        "labels": {f"l{i}": "x" for i in range(50)},
        "idle": {"timeout": "1h"},
    }
    assert rendered(tmp_path) == rendered(tmp_path, **many)
    assert len(rendered(tmp_path).splitlines()) < 30


def test_a_setup_line_that_reads_does_not_swallow_the_agents_config(tmp_path: Path) -> None:
    text = BatchScript(["cat"], setup=["cat", "read -r line; echo got:$line"]).render()
    path = tmp_path / "script.sh"
    path.write_text(text)
    assert bash("the config", str(path)).stdout == "got:\nthe config"


def test_a_venv_that_is_not_there_ends_the_script(tmp_path: Path) -> None:
    path = tmp_path / "script.sh"
    path.write_text(BatchScript(["echo", "went on"], venv=str(tmp_path / "none")).render())
    done = bash("", str(path))
    assert done.returncode == 1 and done.stdout == "" and "No such file" in done.stderr


def test_the_python_of_the_environment_runs_the_agent(tmp_path: Path) -> None:
    agent = tmp_path / "agent.pyz"
    assert agent_script(None, agent, "probe").command == [sys.executable, str(agent), "probe"]
    assert agent_script(Environment(), agent, "probe").command == [sys.executable, str(agent), "probe"]
    assert agent_script(Environment(conda="x"), agent, "node").command == ["python3", str(agent), "node"]
    script = agent_script(Environment(venv="~/my v"), agent, "node").render()
    assert "source ~/'my v/bin/activate' || exit 1" in script, "the home is that of whoever runs it"


CONDA = """#!/bin/bash
# as conda does: the hook is a function, which changes the environment of the shell that it runs in
[ "$*" = "shell.bash hook" ] || exit 1
cat <<'END'
conda() { [ "$1" = activate ] && [ -d "$CONDA_ROOT/envs/$2" ] && export PATH="$CONDA_ROOT/envs/$2/bin:$PATH"; }
END
"""


@pytest.mark.parametrize("known_by", ["PATH", "CONDA_EXE"])
def test_conda_is_activated_in_a_shell_that_does_not_know_it(tmp_path: Path, known_by: str) -> None:
    """A batch shell reads no ~/.bashrc: `conda activate` works only after the hook."""
    python = tmp_path / "envs" / "my env" / "bin" / "python3"
    conda = tmp_path / "bin" / "conda"
    for path, text in ((python, '#!/bin/bash\necho "this python: $*"; cat\n'), (conda, CONDA)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o700)
    env = {"CONDA_ROOT": str(tmp_path), "PATH": "/usr/bin:/bin"}
    env.update(
        {"CONDA_EXE": str(conda)} if known_by == "CONDA_EXE" else {"PATH": f"{conda.parent}:/usr/bin:/bin"}
    )
    script = tmp_path / "script.sh"
    script.write_text(agent_script(Environment(conda="my env"), Path("/a.pyz"), "node").render())
    done = bash("the config", str(script), env=env)
    assert done.stdout == "this python: /a.pyz node\nthe config", done.stderr
    script.write_text(agent_script(Environment(conda="none"), Path("/a.pyz"), "node").render())
    assert bash("", str(script), env=env).returncode == 1


def test_with_a_container_the_hosts_python_runs_the_agent(tmp_path: Path) -> None:
    script = agent_script(Environment(container="x.sif", setup=("module load apptainer",)), tmp_path, "node")
    assert script.command[0] == sys.executable and script.setup == ("module load apptainer",)
