"""The platform's expressions: `${{ … }}` in a text, parsed with operator precedence and evaluated with short circuit.

The platform documents no precedence; this is JavaScript's, which is consistent with all known workflows:
`get`, `!`, `**`, `* / //`, `+ -`, `< <= > >= in includes`, `== != === !==`, `&&`, `||`, `??`, `? :`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

STATUS = ("always", "never", "completed", "error", "canceled")
ROOTS = ("inputs", "needs", "sessions", "env", "org", "app")
ELSEWHERE = ("github", "steps", "secrets", "runner", "jobs", "vars", "job", "matrix", "strategy")


class ExpressionError(Exception):
    """An invalid expression. The caller adds the location."""


class Undefined:
    """The value of an input that the form omits."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "undefined"


UNDEFINED = Undefined()

# --- tokens ---------------------------------------------------------------------------------------------------

TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>\d+(?:\.\d+)?(?![\w.-]))
    | (?P<text>'[^']*'|"[^"]*")
    | (?P<op>===|!==|==|!=|<=|>=|&&|\|\||\?\?|\*\*|//|!in\b|!includes\b|[-+*/<>!?:()\[\],])
    | (?P<name>\.?[\w$][\w$-]*(?:\.[\w$-]+)*)
    )""",
    re.VERBOSE,
)
OPERATORS = {"in", "includes", "get"}


@dataclass(frozen=True)
class Token:
    kind: str  # number, text, op, name, end
    text: str


def tokens(text: str) -> Iterator[Token]:
    place = 0
    text = text.rstrip()
    while place < len(text):
        found = TOKEN.match(text, place)
        if not found or not found.lastgroup:
            raise ExpressionError(f"`{text[place:].strip()[:20]}` is no part of an expression")
        kind, word = found.lastgroup, found[found.lastgroup]
        yield Token("op" if word in OPERATORS else kind, word)
        place = found.end()
    yield Token("end", "")


# --- trees ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Literal:
    value: Any


@dataclass(frozen=True)
class Name:
    """A path (`inputs.a.b`), a status name, or an unquoted text."""

    path: str


@dataclass(frozen=True)
class Apply:
    """An operator and its operands."""

    op: str
    parts: tuple[Any, ...]


Tree = Literal | Name | Apply

LEVELS = (  # lowest precedence first; `?:` is lower and `!` is higher
    ("??",),
    ("||",),
    ("&&",),
    ("==", "!=", "===", "!=="),
    ("<", "<=", ">", ">=", "in", "!in", "includes", "!includes"),
    ("+", "-"),
    ("*", "/", "//"),
    ("**",),
)


class Parser:
    def __init__(self, text: str) -> None:
        self.words = list(tokens(text))
        self.at = 0

    def whole(self) -> Tree:
        tree = self.choice()
        if self.now.kind != "end":
            raise ExpressionError(f"`{self.now.text}` is not expected here")
        return tree

    @property
    def now(self) -> Token:
        return self.words[self.at]

    def take(self, *texts: str) -> str | None:
        if self.now.kind == "op" and self.now.text in texts:
            self.at += 1
            return self.words[self.at - 1].text
        return None

    def need(self, text: str) -> None:
        if not self.take(text):
            raise ExpressionError(
                f"`{text}` is missing" + (f" before `{self.now.text}`" if self.now.text else "")
            )

    def choice(self) -> Tree:
        condition = self.level(0)
        if not self.take("?"):
            return condition
        yes = self.choice()
        self.need(":")
        return Apply("?:", (condition, yes, self.choice()))

    def level(self, number: int) -> Tree:
        if number == len(LEVELS):
            return self.unary()
        left = self.level(number + 1)
        while op := self.take(*LEVELS[number]):
            # `**` is right-associative, all others are left-associative
            right = self.level(number if op == "**" else number + 1)
            if op == "??" and any(
                isinstance(part, Apply) and part.op in ("&&", "||") for part in (left, right)
            ):
                raise ExpressionError("`??` beside `&&` or `||` needs parentheses")
            left = Apply(op, (left, right))
        return left

    def unary(self) -> Tree:
        if op := self.take("!", "-", "+"):
            return Apply(f"{op}x", (self.unary(),))
        tree = self.atom()
        while self.take("get"):
            tree = Apply("get", (tree, self.atom()))
        return tree

    def atom(self) -> Tree:
        if self.take("("):
            tree = self.choice()
            self.need(")")
            return Apply("()", (tree,))
        if self.take("["):
            parts: list[Tree] = []
            while not self.take("]"):
                parts.append(self.choice())
                if self.now.text != "]":
                    self.need(",")
            return Apply("list", tuple(parts))
        word = self.now
        if word.kind not in ("number", "text", "name"):
            raise ExpressionError(f"`{word.text}` is not expected here" if word.text else "it ends too early")
        self.at += 1
        if word.kind == "number":
            return Literal(float(word.text) if "." in word.text else int(word.text))
        if word.kind == "text":
            return Literal(word.text[1:-1])
        if word.text in ("true", "false"):
            return Literal(word.text == "true")
        return Name(word.text)


def parse(text: str) -> Tree:
    return Parser(text).whole()


def names(tree: Tree) -> Iterator[str]:
    """Yield every path, status name and unquoted text of a tree."""
    if isinstance(tree, Name):
        yield tree.path
    elif isinstance(tree, Apply):
        for part in tree.parts:
            yield from names(part)


# --- values ---------------------------------------------------------------------------------------------------

Look = Callable[[str], Any]  # returns the value of a path


def evaluate(tree: Tree, look: Look) -> Any:
    if isinstance(tree, Literal):
        return tree.value
    if isinstance(tree, Name):
        return look(tree.path)
    parts = tree.parts
    if tree.op == "?:":
        return evaluate(parts[1] if truth(evaluate(parts[0], look)) else parts[2], look)
    if tree.op == "list":
        return [evaluate(part, look) for part in parts]
    left = evaluate(parts[0], look)
    if tree.op == "()":
        return left
    if tree.op in ("&&", "||", "??"):
        enough = {"&&": not truth(left), "||": truth(left), "??": left is not UNDEFINED and left is not None}
        return left if enough[tree.op] else evaluate(parts[1], look)
    if tree.op == "!x":
        return not truth(left)
    if tree.op in ("-x", "+x"):
        return -number(left) if tree.op == "-x" else number(left)
    return BINARY[tree.op](left, evaluate(parts[1], look))


def truth(value: Any) -> bool:
    """Return the truth value as in JavaScript, except for an empty list."""
    return bool(value)


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ExpressionError(f"`{text_of(value)}` is not a number")
    if isinstance(value, (int, float)):
        return value
    try:
        return int(value) if re.fullmatch(r"\s*[-+]?\d+\s*", value) else float(value)
    except ValueError:
        raise ExpressionError(f"`{value}` is not a number") from None


def equal(left: Any, right: Any) -> bool:
    """Compare two values. A number equals its text; a boolean never equals a text, and an output `true` is text."""
    if isinstance(left, bool) != isinstance(right, bool):
        return False
    kinds = {type(left), type(right)}
    if str in kinds and kinds & {int, float}:
        try:
            return number(left) == number(right)
        except ExpressionError:
            return False
    return bool(left == right)


def same(left: Any, right: Any) -> bool:
    kinds = [float if type(value) is int else type(value) for value in (left, right)]
    return kinds[0] is kinds[1] and bool(left == right)


def order(left: Any, right: Any) -> float:
    """Return a number below, equal to or above 0. Two texts compare by characters, other values as numbers."""
    if isinstance(left, str) and isinstance(right, str):
        return (left > right) - (left < right)
    return number(left) - number(right)


def inside(item: Any, place: Any) -> bool:
    if isinstance(place, str):
        return text_of(item) in place
    if isinstance(place, (list, dict)):
        return any(equal(item, each) for each in place)
    raise ExpressionError(f"`{text_of(place)}` holds nothing")


def get(value: Any, key: Any) -> Any:
    try:
        if isinstance(value, dict):
            return value[text_of(key)]
        if isinstance(value, list):
            return value[int(number(key))]
    except (LookupError, ValueError):
        return UNDEFINED
    raise ExpressionError(f"`{text_of(value)}` has no parts to get")


def add(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        return left + right
    return number(left) + number(right)


def divide(left: Any, right: Any, whole: bool = False) -> float:
    if not number(right):
        raise ExpressionError("a division by zero")
    return number(left) // number(right) if whole else number(left) / number(right)


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "==": equal,
    "!=": lambda a, b: not equal(a, b),
    "===": same,
    "!==": lambda a, b: not same(a, b),
    "<": lambda a, b: order(a, b) < 0,
    "<=": lambda a, b: order(a, b) <= 0,
    ">": lambda a, b: order(a, b) > 0,
    ">=": lambda a, b: order(a, b) >= 0,
    "in": inside,
    "!in": lambda a, b: not inside(a, b),
    "includes": lambda a, b: inside(b, a),
    "!includes": lambda a, b: not inside(b, a),
    "+": add,
    "-": lambda a, b: number(a) - number(b),
    "*": lambda a, b: number(a) * number(b),
    "/": divide,
    "//": lambda a, b: divide(a, b, whole=True),
    "**": lambda a, b: number(a) ** number(b),
    "get": get,
}


def text_of(value: Any) -> str:
    """Format a value for insertion into a text."""
    if value is UNDEFINED or value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, (list, dict)):
        return json.dumps(value, default=lambda _: None)
    return str(value)


# --- texts with expressions -----------------------------------------------------------------------------------


def pieces(text: str) -> list[str | Tree]:
    """Split a text into plain parts and the tree of each `${{ … }}`. `${NAME}` belongs to the shell."""
    found: list[str | Tree] = []
    place = 0
    while (begin := text.find("${{", place)) >= 0:
        if begin > place:
            found.append(text[place:begin])
        end, quote = begin + 3, ""
        while not (text.startswith("}}", end) and not quote):
            if end >= len(text):
                raise ExpressionError(f"`{text[begin : begin + 30]}` has no end")
            letter = text[end]
            quote = "" if letter == quote else quote or (letter if letter in "'\"" else "")
            end += 1
        try:
            found.append(parse(text[begin + 3 : end]))
        except ExpressionError as error:
            raise ExpressionError(f"`{text[begin : end + 2]}`: {error}") from None
        place = end + 2
    if place < len(text):
        found.append(text[place:])
    return found


def render(value: Any, look: Look, absent: str = "") -> Any:
    """Replace every expression in a text, or in each item of a table or list. A text that is one expression keeps the value's type.

    absent: text to insert for an absent value; the platform inserts nothing or `undefined`."""
    if isinstance(value, dict):
        return {key: render(each, look, absent) for key, each in value.items()}
    if isinstance(value, list):
        return [render(each, look, absent) for each in value]
    if not isinstance(value, str) or "${{" not in value:
        return value
    parts = pieces(value)
    if len(parts) == 1 and not isinstance(parts[0], str):
        return evaluate(parts[0], look)
    values = (part if isinstance(part, str) else evaluate(part, look) for part in parts)
    return "".join(absent if value is UNDEFINED else text_of(value) for value in values)


def all_names(value: Any) -> Iterator[str]:
    """Yield every name in every expression of a text, a table or a list."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from all_names(each)
    elif isinstance(value, str) and "${{" in value:
        for part in pieces(value):
            if not isinstance(part, str):
                yield from names(part)
