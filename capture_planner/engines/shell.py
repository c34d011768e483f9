"""A shell's text, as people paste it: the commands in it, with the variables that the text sets put in.

Not a shell: nothing is run, substitutions such as ``$(hostname)`` stay as they are written, and so do variables that
the text does not set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from capture_planner.errors import FlagError, Problem

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
"""A word that sets a variable."""

VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}]*))?\})")
"""``$NAME``, ``${NAME}`` or ``${NAME:-default}``."""

_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n.*?\n[ \t]*\2[ \t]*(?=\n|$)", re.DOTALL)
_SUBSTITUTION = r"\$\((?:[^()]|\([^()]*\)|\(\([^()]*\)\))*\)|`[^`]*`"
_DOUBLE = rf'"(?:\\.|{_SUBSTITUTION}|[^"\\])*"'
_PART = re.compile(rf"'[^']*'|{_DOUBLE}|{_SUBSTITUTION}|\\.|[^\s'\"\\;&|<>()`$]+|\$", re.DOTALL)
_TOKEN = re.compile(
    r"[ \t]+|(?P<redirect>&>>?|\d*(?:>>?|<)(?:&[\d-])?)|(?P<end>[\n;&|()]+)|(?<!\S)#[^\n]*"
    rf"|(?P<word>(?:{_PART.pattern})+)",
    re.DOTALL,
)
_ARRAY = re.compile(r"^[ \t]*(?:declare -a |local |readonly )?(\w+)(\+?)=\(([^()]*)\)", re.MULTILINE)
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
    variables: Mapping[str, str] = attrs.Factory(dict)
    """The environment's variables that the text sets for it."""


@attrs.frozen
class ShellText:
    """Commands of a text."""

    commands: tuple[ShellCommand, ...]
    assumptions: tuple[str, ...] = ()
    """Places where a shell would read something else."""
    hidden: tuple[str, ...] = ()
    """Variables that are set and not exported, so that no command sees them."""


def read_shell(text: str) -> ShellText:
    """Return the commands of a text; raises ``FlagError`` for a quote that nothing closes."""
    plain = text.replace("\r\n", "\n").replace("\u00a0", " ")
    joined, assumptions = _joined(_without_arrays(_HEREDOC.sub(r"\3", plain)))
    commands: list[ShellCommand] = []
    known: dict[str, str] = {}
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


def _without_arrays(text: str) -> str:
    """Put the words of each array in where all of it is named: ``"${args[@]}"``."""
    arrays: dict[str, str] = {}
    for match in _ARRAY.finditer(text):
        lines = (re.sub(r"(?:^|\s)#.*", "", line) for line in match[3].split("\n"))
        # ``args+=(...)`` appends.
        before = arrays.get(match[1], "") if match[2] else ""
        arrays[match[1]] = " ".join([before, *map(str.strip, lines)])
    text = _ARRAY.sub("", text)
    for name, words in arrays.items():
        text = re.sub(rf'"?\$\{{{name}\[[@*]\]\}}"?', lambda _, words=words: words, text)  # type: ignore[misc]
    return text


def _expanded(token: str, known: Mapping[str, str]) -> list[str]:
    """Return the words of one: several where it is a variable without quotes that has several."""
    match = VARIABLE.fullmatch(token)
    # Without quotes a shell splits the value into words.
    if match is not None and (match[1] or match[2]) in known:
        return known[match[1] or match[2]].split()
    return [_unquoted(token, known)]


def _unquoted(token: str, known: Mapping[str, str]) -> str:
    """Return a word without its quotes, with the variables that are known."""

    def expanded(text: str) -> str:
        return VARIABLE.sub(lambda match: known.get(match[1] or match[2], match[3] or match[0]), text)

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
