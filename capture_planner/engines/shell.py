"""The words of commands in a shell's text, read without running anything.

Substitutions such as ``$(hostname)`` stay as they are written, and so do variables that the text does not set. Of those
that count are done: arithmetic, and ``$(seq ...)``.
"""

from __future__ import annotations

import ast
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from capture_planner.engines.parsing import refusal
from capture_planner.errors import FlagError, Problem
from capture_planner.records._base import grouped

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
"""A word that sets a variable."""

VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}]*))?\})")
"""``$NAME``, ``${NAME}`` or ``${NAME:-default}``."""

_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
_QUOTED = r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\."
_SUBSTITUTION = (
    # Parentheses in quotes, as in an awk program, do not count; unbalanced quotes fall back to counting all.
    rf"(?>\$\((?:{_QUOTED}|[^()'\"\\]|\((?:{_QUOTED}|[^()'\"\\])*\))*+\)"
    r"|\$\((?:[^()]|\([^()]*\)|\(\([^()]*\)\))*+\)|`[^`]*`)"
)
_DOUBLE = rf'"(?:\\.|{_SUBSTITUTION}|[^"\\])*+"'
_PART = re.compile(rf"'[^']*'|{_DOUBLE}|{_SUBSTITUTION}|\\.|[^\s'\"\\;&|<>()`$]+|\$", re.DOTALL)
_TOKEN = re.compile(
    r"[ \t]+|(?P<redirect>&>>?|\d*(?:>>?|<)(?:&[\d-])?)|(?P<end>[\n;&|()]+)|(?<!\S)#[^\n]*"
    rf"|(?P<word>(?:{_PART.pattern})+)",
    re.DOTALL,
)
_ARRAY = re.compile(r"^[ \t]*(?:declare -a |local |readonly )?(\w+)(\+?)=\(([^()]*)\)", re.MULTILINE)
_ARRAY_USE = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_PROMPT = re.compile(r"[ \t]*(?:```\w*|\$|\u276f|%)(?:[ \t]+|$)")
_OPEN_PROMPT = re.compile(r"^[ \t]*>[ \t]+")
_FLAG = re.compile(r"[ \t]*--?[A-Za-z]")

COMMENT = "a comment between the lines of the command is left out; a shell ends the command there"
FLAG_LINE = "a line that begins with a flag continues the line above it; a shell begins a command there"
SPACES = "spaces behind a backslash are left out; a shell ends the command there"


@attrs.frozen(kw_only=True)
class ShellCommand:
    """One command of a text, or an argument list."""

    words: tuple[str, ...]
    """Of a server: behind its program."""
    variables: Mapping[str, str] = attrs.Factory(dict)
    """The environment's variables that the text sets for it."""
    image: str | None = None
    """The container's image."""
    component: str = ""
    """Its name among several in a file, such as ``decode``; empty where the text names none."""
    line: int = 1
    """Number of its line in the text, from 1."""
    form: str = ""
    """Form of a deployment that a plan can be put into: kubernetes, kserve, helm or dynamo; empty for others."""
    at: tuple[str | int, ...] = ()
    """Path of its container in the file: the number of the document, from 0, then keys and positions."""
    assumptions: tuple[str, ...] = ()
    """Places where a shell would read something else."""
    hidden: tuple[str, ...] = ()
    """Variables of a script that no command sees."""


@attrs.frozen
class ShellText:
    """Commands of a text."""

    commands: tuple[ShellCommand, ...]
    assumptions: tuple[str, ...] = ()
    """Places where a shell would read something else."""
    hidden: tuple[str, ...] = ()
    """Variables that are set and not exported, so that no command sees them."""


def read_shell(text: str, given: Mapping[str, str] | None = None) -> ShellText:
    """Return the commands of a text in an environment; raises ``FlagError`` for open quotes and endless values."""
    # Web pages and word processors write no-break spaces.
    plain = text.replace("\r\n", "\n").replace("\u00a0", " ")
    joined, assumptions = _joined(_without_arrays(_without_documents(plain)))
    commands: list[ShellCommand] = []
    known = _Variables(given or {})
    exported: dict[str, str] = {}
    for tokens in _commands(joined):
        words = [word for token in tokens for word in _expanded(token, known)]
        own, rest = split_variables(words)
        if not rest:
            known |= own
        elif rest[0] in ("export", "declare", "typeset", "set", "unset"):
            given = dict(word.split("=", 1) for word in rest[1:] if ASSIGNMENT.fullmatch(word))
            known |= given
            if rest[0] == "export":
                exported |= given | {name: known[name] for name in rest[1:] if name in known}
        else:
            # Variables in front of a command count for that command alone.
            commands.append(ShellCommand(words=rest, variables=exported | own))
    return ShellText(tuple(commands), tuple(assumptions), tuple(name for name in known if name not in exported))


def split_variables(command: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables that words in front of a command set, and the words behind them."""
    count = next((index for index, word in enumerate(command) if not ASSIGNMENT.fullmatch(word)), len(command))
    return dict(word.split("=", 1) for word in command[:count]), tuple(command[count:])


def unset(words: Iterable[str]) -> list[str]:
    """Return the variables that words still name: those that no text sets."""
    return list(dict.fromkeys(match[1] or match[2] for word in words for match in VARIABLE.finditer(word)))


def expand(text: str, value: Callable[[str, str], str]) -> str:
    """Return a text with its variables expanded; ``value`` of a name and its default, or else of itself as written."""
    return VARIABLE.sub(lambda match: value(match[1] or match[2], match[0] if match[3] is None else match[3]), text)


_SEQ = re.compile(r"(?:\$\(|`)\s*seq\s+(?:-s\s*(?P<between>'[^']*'|\"[^\"]*\"|\S)\s+)?(?P<ends>[^()`]+?)\s*[)`]")
_ARITHMETIC = re.compile(r"\$\(\((?P<sum>(?:[^()]|\([^()]*\))*)\)\)")
MOST_NUMBERS = 10_000
"""Numbers that ``seq`` is followed to."""
MOST_SUM = 200
"""Characters of arithmetic that is done, and digits of a number in it."""


def _counted(text: str, known: Mapping[str, str]) -> str:
    """Return a text with the results of arithmetic and of ``seq``; what has no whole result stays as it is."""

    def result(match: re.Match[str]) -> str:
        value = _value(match["sum"], known)
        return match[0] if value is None else str(value)

    def sequence(match: re.Match[str]) -> str:
        ends = [_value(each, known) for each in match["ends"].split()]
        numbers = [each for each in ends if each is not None]
        if len(numbers) != len(ends) or len(ends) > 3:
            return match[0]
        first, step = numbers[0] if len(ends) > 1 else 1, numbers[1] if len(ends) == 3 else 1
        # ``seq`` includes its end, and refuses steps of 0.
        counted = range(first, numbers[-1] + (1 if step > 0 else -1), step) if step else range(0)
        if not step or len(counted) > MOST_NUMBERS:
            return match[0]
        return ((match["between"] or " ").strip("'\"") or " ").join(map(str, counted))

    return _SEQ.sub(sequence, _ARITHMETIC.sub(result, text))


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # A shell cuts quotients off.
    ast.Mod: lambda left, right: left - right * int(left / right),
    ast.Div: lambda left, right: int(left / right),
}


def _value(text: str, known: Mapping[str, str]) -> int | None:
    """Return the result of a shell's arithmetic; None where a name is not known, or it has another operator."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)) if abs(number) < 1 << 63:
                return number
            case ast.Name(id=name) if len(known.get(name, "")) < MOST_SUM:
                return int(known.get(name, ""))
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                return _OPERATORS[type(sign)](value(left), value(right))
        raise ValueError(text)

    try:
        return value(ast.parse(text.replace("$", "").strip(), mode="eval").body) if len(text) < MOST_SUM else None
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def _joined(text: str) -> tuple[str, list[str]]:
    """Join the lines of one command, and say where a shell would not."""
    joined, is_open = "", False
    assumptions: list[str] = []
    for line in text.split("\n"):
        plain = (_OPEN_PROMPT if is_open else _PROMPT).sub("", line, count=1).rstrip()
        # Inside a command people comment flags out; a shell would end the command there.
        if plain.lstrip().startswith("#"):
            assumptions += [COMMENT] if is_open else []
            continue
        if joined and not is_open and _FLAG.match(plain):
            assumptions.append(FLAG_LINE)
            # People paste lines without their backslashes.
            joined += " "
        elif not is_open:
            joined += "\n"
        is_open = plain.endswith("\\")
        if is_open and line.rstrip("\r") != plain and line.endswith((" ", "\t")):
            assumptions.append(SPACES)
        joined += plain.removesuffix("\\")
    return joined, list(dict.fromkeys(assumptions))


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, as they are written."""
    words: list[str] = []
    place, drops = 0, False
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise FlagError([Problem(path=(text[place : place + 40].split("\n")[0],), message="a quote is not closed")])
        place = match.end()
        if match["redirect"]:
            # The word behind a redirection is a file, except where it names a descriptor: ``2>&1``.
            drops = "&" not in match["redirect"][1:]
        elif match["end"]:
            if words:
                yield words
            words = []
        elif match["word"]:
            if not drops:
                words.append(match["word"])
            drops = False
    if words:
        yield words


def _without_documents(text: str) -> str:
    """Leave out the lines between ``<<EOF`` and ``EOF``."""
    lines, kept, index = text.split("\n"), [], 0
    places = grouped(range(len(lines)), lambda number: lines[number].strip(" \t"))
    while index < len(lines):
        line, end = lines[index], index
        for match in _HEREDOC.finditer(line):
            ends = places.get(match[2], [])
            at = bisect_right(ends, index)
            if at < len(ends):
                line, end = line[: match.start()] + line[match.end() :], ends[at]
                break
        kept.append(line)
        index = end + 1
    return "\n".join(kept)


def _without_arrays(text: str) -> str:
    """Put the words of each array in where all of it is named: ``"${args[@]}"``."""
    arrays = _Variables()

    def use(match: re.Match[str]) -> str:
        return arrays.value(match[1], match[0])

    def define(match: re.Match[str]) -> str:
        lines = (re.sub(r"(?:^|\s)#.*", "", line) for line in match[3].split("\n"))
        words = _ARRAY_USE.sub(use, " ".join(map(str.strip, lines)))
        # ``args+=(...)`` appends.
        arrays[match[1]] = f"{arrays.value(match[1], '')} {words}" if match[2] else words
        return ""

    return _ARRAY_USE.sub(use, _ARRAY.sub(define, text))


MOST_EXPANDED = 4 << 20
"""Characters of the values of all variables in a text; ``A=$A$A``, again and again, has no end."""


class _Variables(dict[str, str]):
    """Variables of a text, and how much their values may still add to it."""

    _left = MOST_EXPANDED

    def value(self, name: str, otherwise: str) -> str:
        """Return the value of a variable; of an unknown one, what stands there."""
        found = self.get(name, otherwise)
        self._left -= len(found)
        if self._left < 0:
            raise refusal(f"${name}", "the values of variables are too long", "write the words of the command")
        return found


def _expanded(token: str, known: _Variables) -> list[str]:
    """Return the words of one: several where it is a variable without quotes that has several."""
    match = VARIABLE.fullmatch(token)
    # Without quotes a shell splits the value into words, and nothing is no word.
    if match is not None and ((match[1] or match[2]) in known or match[3] is not None):
        return known.value(match[1] or match[2], match[3] or "").split()
    word = _unquoted(token, known)
    return word.split() if _SEQ.fullmatch(token) else [word]


def _unquoted(token: str, known: _Variables) -> str:
    """Return a word without its quotes, with the variables that are known."""

    def expanded(text: str) -> str:
        values = expand(text, known.value)
        return _counted(values, known) if "$(" in values or "`" in values else values

    parts: list[str] = []
    plain = ""
    for match in _PART.finditer(token):
        part = match[0]
        if part[0] in "'\"\\":
            parts.append(expanded(plain))
            plain = ""
        if part[0] == "'":
            parts.append(part[1:-1])
        elif part[0] == '"':
            parts.append(expanded(re.sub(r'\\([\\"$`])', r"\1", part[1:-1])))
        elif part[0] == "\\":
            parts.append(part[1:])
        else:
            plain += part
    return "".join([*parts, expanded(plain)])
