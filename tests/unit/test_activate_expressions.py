"""The expressions of ACTIVATE's workflows, as the runner of integrations/activate reads them."""

from __future__ import annotations

from typing import Any

import pytest

from runner.expressions import UNDEFINED, ExpressionError, all_names, evaluate, parse, render

VALUES: dict[str, Any] = {
    "inputs.on": True,
    "inputs.off": False,
    "inputs.kind": "slurm",
    "inputs.kind2": "slurm",
    "inputs.none": "",
    "inputs.n": 4,
    "inputs.left_out": UNDEFINED,
    "inputs.where": {"ip": "10.0.0.1", "tags": ["a", "b"]},
    "needs.j.outputs.N": "3",
    "needs.j.outputs.yes": "true",
    "always": True,
    "never": False,
    "completed": True,
    "error": False,
}


def look(name: str) -> Any:
    return VALUES.get(name, name)


def value(text: str) -> Any:
    return evaluate(parse(text), look)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # compound conditions, which a runner that splits at the first operator gets wrong
        ("inputs.on != true || inputs.kind != 'slurm'", False),
        ("inputs.on == true && inputs.kind == 'slurm'", True),
        ("inputs.kind != 'slurm' && inputs.kind != 'pbs'", False),
        ("inputs.off == true && inputs.kind == 'x' || inputs.on == true", True),
        ("inputs.on == true || inputs.off == true && inputs.kind == 'x'", True),
        ("(inputs.on == true || inputs.off == true) && inputs.kind == 'x'", False),
        ("inputs.kind == inputs.kind2", True),
        ("'slurm' != inputs.kind", False),
        # each level of precedence
        ("!inputs.off && inputs.on", True),
        ("!(inputs.off || inputs.on)", False),
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("2 ** 3 ** 2", 512),
        ("10 - 3 - 2", 5),
        ("7 // 2 + 7 / 2", 6.5),
        ("1 + 1 > 1 && 2 < 3", True),
        ("1 < 2 == true", True),
        ("needs.j.outputs.N - 1", 2),
        ("inputs.n >= needs.j.outputs.N", True),
        ("inputs.on ? 'a' : inputs.off ? 'b' : 'c'", "a"),
        ("inputs.off ? 'a' : inputs.off ? 'b' : 'c'", "c"),
        ("inputs.kind == 'pbs' ? error : completed", True),
        ("inputs.left_out ?? 'localhost'", "localhost"),
        ("inputs.none ?? 'localhost'", ""),
        ("(inputs.left_out ?? 'x') || 'y'", "x"),
        # types: an output is always text
        ("needs.j.outputs.yes == 'true'", True),
        ("needs.j.outputs.yes == true", False),
        ("inputs.on == 'true'", False),
        ("inputs.n == '4'", True),
        ("inputs.n === '4'", False),
        ("inputs.n !== 4", False),
        ("inputs.left_out == ''", False),
        # lists, maps, words
        ("inputs.where get ip", "10.0.0.1"),
        ("inputs.where get tags get 1", "b"),
        ("'a' in (inputs.where get tags)", True),
        ("(inputs.where get tags) includes 'c'", False),
        ("'c' !in ['a', 'b']", True),
        ("inputs.kind !in [slurm, pbs]", False),
        ("always && !never", True),
        ("'it is: }} fine'", "it is: }} fine"),
    ],
)
def test_values(text: str, expected: Any) -> None:
    found = value(text)
    assert found == expected and isinstance(found, bool) == isinstance(expected, bool)


def test_what_is_not_needed_is_not_looked_at() -> None:
    def strict(name: str) -> Any:
        if name == "inputs.off":
            return False
        raise ExpressionError(name)

    assert evaluate(parse("inputs.off && needs.x.outputs.y"), strict) is False
    assert evaluate(parse("!inputs.off || needs.x.outputs.y"), strict) is True
    assert evaluate(parse("inputs.off ? needs.x.outputs.y : 1"), strict) == 1
    with pytest.raises(ExpressionError):
        evaluate(parse("inputs.off || needs.x.outputs.y"), strict)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a ==",
        "== a",
        "(a",
        "a)",
        "a b",
        "a && ?? b",
        "a ?? b && c",
        "a || b ?? c",
        "a ? b",
        "[1, 2",
        "a @ b",
        "'x",
    ],
)
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse(text)


@pytest.mark.parametrize("text", ["'x' - 1", "1 / 0", "true + 1", "inputs.kind get x", "1 in 2"])
def test_what_has_no_value(text: str) -> None:
    with pytest.raises(ExpressionError):
        value(text)


def test_texts() -> None:
    assert render("${{ inputs.on }}", look) is True
    assert render("${{inputs.n}}", look) == 4
    assert render("${{ inputs.where }}", look) == VALUES["inputs.where"]
    assert render("a ${{ inputs.on }} ${{ inputs.n }} ${HOME} $x", look) == "a true 4 ${HOME} $x"
    assert render("ip ${{ inputs.where }}", look) == 'ip {"ip": "10.0.0.1", "tags": ["a", "b"]}'
    assert render("<${{ inputs.left_out }}>", look) == "<>"
    assert render("<${{ inputs.left_out }}>", look, "undefined") == "<undefined>"
    assert render("${{ '}}' }}${{ \"it's\" }}", look) == "}}it's"
    assert render({"a": ["${{ inputs.n }}"], "b": 3}, look) == {"a": [4], "b": 3}
    with pytest.raises(ExpressionError, match="has no end"):
        render("x ${{ inputs.n", look)


def test_a_value_of_several_lines_is_pasted_as_it_is() -> None:
    assert render("  ${{ x }}\nend", lambda _: "one\ntwo") == "  one\ntwo\nend"


def test_names() -> None:
    text = {"a": "${{ inputs.x == 'y' && needs.j.outputs.k }} ${{ sessions.s }}", "b": [3, "${{ !always }}"]}
    assert sorted(all_names(text)) == ["always", "inputs.x", "needs.j.outputs.k", "sessions.s"]
