"""The server's own command in what people paste: a container's command, a script, a service's file, a line in quotes.

What stands before the server's program is skipped, whatever it is: variables, ``docker run`` and its options,
``mpirun``, ``nohup``, ``numactl``. Of the variables those count that can reach the server.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

import attrs

from capture_planner import codec
from capture_planner.engines.engine import Engine
from capture_planner.engines.parsing import refusal
from capture_planner.engines.pasted.containers import container_commands
from capture_planner.engines.pasted.shell import ASSIGNMENT, ShellCommand, ShellText, read_shell

_RUN = ("docker", "podman", "nerdctl")
_SWITCHES = tuple(
    f"--{name}"
    for name in (
        *("detach", "init", "interactive", "tty", "rm", "privileged", "read-only", "publish-all", "no-healthcheck"),
        *("sig-proxy", "oom-kill-disable", "disable-content-trust", "quiet", "replace", "no-hosts", "rmi"),
    )
)
"""Options of ``docker run`` that take no value, those of one letter apart; every other takes one."""
_LETTERS = frozenset("ditPq")
MOST_NAME = 240
"""Characters that the name of a file can have on any system; a longer word is a text."""
_NO_TEXT = (".gguf", ".json", ".safetensors")


@attrs.frozen(kw_only=True)
class ServerCommand:
    """An engine's own words in a command line, and what was around them."""

    words: tuple[str, ...]
    """Behind the program."""
    variables: Mapping[str, str] = attrs.Factory(dict)
    image: str | None = None
    """The container's image."""
    assumptions: tuple[str, ...] = ()
    """What is read otherwise than a shell would."""
    hidden: tuple[str, ...] = ()
    """Variables of a script that no command sees."""


def server_command(engine: Engine, words: Sequence[str], others: Sequence[Engine] = ()) -> ServerCommand:
    """Return the command that starts an engine's server, in words of a command line, a text, or the file of one.

    One word is a text where it has spaces, ``-`` is standard input, and the file of a script or of a service is read.
    Words in which no program starts are the engine's own.

    :param others: engines whose commands are named where one stands there instead.
    :raises FlagError: none or several commands start the engine's server.
    """
    text = _text(words)
    if text is None:
        return _only(engine, ShellText((ShellCommand(words=tuple(words)),)), others)
    return _only(engine, container_commands(text) or read_shell(text), others)


def _text(words: Sequence[str]) -> str | None:
    """Return the text that one word stands for; None where the words are a command line's."""
    if len(words) != 1:
        return None
    (word,) = words
    if word == "-":
        return codec.read_stream(sys.stdin.buffer, "<stdin>")
    if "\n" in word or len(word) > MOST_NAME or (len(word.split()) > 1 and not Path(word).is_dir()):
        return word
    path = Path(word)
    if word.startswith("-") or path.suffix in _NO_TEXT or "\0" in word or not path.is_file():
        return None
    text = codec.read(word)
    # Another file in YAML is one of flags, or a plan.
    return None if path.suffix in (".yaml", ".yml") and container_commands(text) is None else text


def _only(engine: Engine, text: ShellText, others: Sequence[Engine]) -> ServerCommand:
    """Return the one command of a text that starts the engine; without one, the one that names no program."""
    commands = [each for command in text.commands for each in _unwrapped(command)]
    found = [each for command in commands for each in _started(engine, command)]
    if not found:
        _refuse_others(engine, commands, others)
        found = [each for command in text.commands for each in _bare(command, alone=len(text.commands) == 1)]
    distinct = list({(each.words, tuple(each.variables.items())): each for each in found}.values())
    if len(distinct) > 1:
        listed = "; ".join(shlex.join(each.words) for each in distinct)
        raise refusal(engine.programs[0], f"{len(distinct)} commands start it: {listed}", "give one of them")
    if not distinct:
        raise refusal(
            engine.programs[0], "no command here starts it", f"give its command line: {engine.programs[0]} ..."
        )
    return attrs.evolve(distinct[0], assumptions=text.assumptions, hidden=text.hidden)


def _unwrapped(command: ShellCommand) -> Iterator[ShellCommand]:
    """Yield a command, and those that stand in one of its words: behind ``bash -c``, ``ssh`` or ``tmux``."""
    yield command
    for word in command.words:
        if " " in word and not word.lstrip().startswith(("{", "[", "-")):
            given = {**command.variables, **_given(command.words)}
            for each in read_shell(word).commands:
                yield attrs.evolve(each, variables={**given, **each.variables})


def _started(engine: Engine, command: ShellCommand) -> Iterator[ServerCommand]:
    """Yield the engine's command in words, behind its program, where one of its programs is in them."""
    words = list(command.words)
    image, at = _image(words)
    rest = [*_entrypoint(words[:at]), *words[at:]]
    for index in range(len(rest)):
        count = next(filter(None, (_length(each, rest[index:], index) for each in engine.programs)), 0)
        if count:
            given = {**command.variables, **_given([*words[:at], *rest[:index]])}
            yield ServerCommand(words=tuple(rest[index + count :]), variables=given, image=image)
            return


def _bare(command: ShellCommand, *, alone: bool) -> Iterator[ServerCommand]:
    """Yield the words of a command that names no program: the arguments of an image, or flags by themselves."""
    words = list(command.words)
    image, at = _image(words)
    while at < len(words) and image is None and ASSIGNMENT.fullmatch(words[at]):
        at += 1
    if image is not None or alone:
        given = {**command.variables, **_given(words[:at])}
        yield ServerCommand(words=tuple(words[at:]), variables=given, image=image)


def _refuse_others(engine: Engine, commands: Sequence[ShellCommand], others: Sequence[Engine]) -> None:
    """Raise ``FlagError`` where a command starts another engine, or another program of this one."""
    heads = {program.split()[0]: each for each in (engine, *others) for program in each.programs}
    for command in commands:
        for other in others:
            if any(_started(other, command)):
                raise refusal(other.programs[0], f"this starts {other.name}", f"name {other.name} as the engine")
        words = [word for word in command.words if not ASSIGNMENT.fullmatch(word)]
        head = _plain(words[0]) if words else ""
        if head in heads and head != "serve":
            says = f"expected one of {', '.join(each for each in engine.programs if ' ' in each or '-' in each)}"
            raise refusal(shlex.join(words[:3]), f"this starts no server of {engine.name}", says)


def _length(program: str, words: Sequence[str], index: int) -> int:
    """Return how many of the words are the program, or 0; ``index``: of the first word in the command."""
    parts = program.split()
    if parts[:2] == ["python", "-m"]:
        module, *rest = parts[2:]
        count = 2 if list(words[:2]) == ["-m", module] else int(words[0].endswith(f"{module.replace('.', '/')}.py"))
        return count + len(rest) if count and list(words[count : count + len(rest)]) == rest else 0
    if len(parts) == 1 and index and "-" not in program:  # ``serve`` is a word like others, but in front
        return 0
    return len(parts) if [_plain(words[0]), *words[1 : len(parts)]] == parts else 0


def _plain(word: str) -> str:
    """Return the name of a program without its folder and version."""
    return re.sub(r"^python[\d.]*$", "python", PurePath(word).name)


def _image(words: Sequence[str]) -> tuple[str | None, int]:
    """Return the image of ``docker run``, and where the words behind it begin."""
    at = next((index for index, word in enumerate(words) if PurePath(word).name in _RUN), None)
    if at is None or "run" not in words[at + 1 : at + 3]:
        return None, 0
    at = words.index("run", at) + 1
    while at < len(words) and words[at].startswith("-"):
        name, equals, _ = words[at].partition("=")
        alone = equals or name in _SWITCHES or (not name.startswith("--") and set(name[1:]) <= _LETTERS)
        at += 1 if alone or (not name.startswith("--") and len(name) > 2 and set(name[1:]) - _LETTERS) else 2
    return (words[at], at + 1) if at < len(words) else (None, 0)


def _entrypoint(words: Sequence[str]) -> list[str]:
    """Return the words of ``docker run --entrypoint``."""
    for index, word in enumerate(words):
        if word.startswith("--entrypoint"):
            return (word.partition("=")[2] or " ".join(words[index + 1 : index + 2])).split()
    return []


def _given(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that words in front of a program set: ``A=1``, ``-e A=1``, ``--env=A=1``."""
    plain = (re.sub(r"^(?:--env=|-[ex](?=[A-Z]))", "", word) for word in words)
    return dict(word.split("=", 1) for word in plain if re.match(r"[A-Z_][A-Z0-9_]*=", word))
