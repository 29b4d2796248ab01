"""The layout of `--help`: sections of options, and examples that work as they are written."""

from __future__ import annotations

import shlex

import click
import pytest

from heliostat.cli import app
from heliostat.cli.help import EXAMPLES, SECTIONS, Command


def outer() -> click.Context:
    """The context of `heliostat`, which a command inherits. Without it, click remembers `--help` without `-h`."""
    return click.Context(app.cli, info_name="heliostat", **app.cli.context_settings)


def commands() -> dict[str, click.Command]:
    context = outer()
    found = {name: app.cli.get_command(context, name) for name in app.COMMANDS}
    plain = {
        name: command for name, command in found.items() if command and not isinstance(command, click.Group)
    }
    groups = [command for command in found.values() if isinstance(command, click.Group)]
    return plain | {name: command for group in groups for name, command in group.commands.items()}


@pytest.mark.parametrize("name", sorted(commands()))
def test_a_command_has_two_examples(name: str) -> None:
    command = commands()[name]
    assert isinstance(command, Command) and len(EXAMPLES[name]) == 2
    help_text = command.get_help(click.Context(command, parent=outer(), info_name=name))
    assert all(f"  {line}\n" in help_text + "\n" for line in EXAMPLES[name])


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_is_accepted(line: str) -> None:
    words = shlex.split(line.replace('eval "$(', "").replace(')"', "").partition(" >")[0])
    assert words[0] == "heliostat"
    arguments = words[2:]
    command = app.cli.get_command(outer(), words[1])
    assert command
    if isinstance(command, click.Group):
        command, arguments = command.commands[words[2]], words[3:]
    command.make_context(words[1], arguments, parent=outer())  # raises click.UsageError


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == set(commands())


def test_options_have_sections() -> None:
    text = commands()["run"].get_help(click.Context(commands()["run"], parent=outer(), info_name="run"))
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [*SECTIONS, "Examples"]
    assert "goes to the scheduler" in " ".join(text.split())
