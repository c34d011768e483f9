"""Command lines of engines: the server's own command in what people paste.

People paste a container's command, a script, a service's file (Kubernetes, Docker Compose), or a line in quotes. What
stands before the server's program is skipped, whatever it is: variables, ``docker run`` and its options, ``mpirun``,
``nohup``, ``numactl``. Of the variables those count that can reach the server. Nothing is run (``shell``).
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath

import attrs

from capture_planner import codec
from capture_planner.engines.engine import OTHER_DEVICE, Engine
from capture_planner.engines.history import release_of
from capture_planner.engines.launch import APPLY, PLAN
from capture_planner.engines.manifests import container_commands
from capture_planner.engines.parsing import refusal, unfollowed
from capture_planner.engines.shell import ASSIGNMENT, ShellCommand, ShellText, read_shell, unset
from capture_planner.errors import FlagError, Problem

_SHELLS = ("bash", "sh", "dash", "zsh")
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


def server_command(engine: Engine, words: Sequence[str], others: Iterable[Engine] = ()) -> ShellCommand:
    """Return the command that starts an engine's server, in words of a command line, a text, or the file of one.

    One word is a text where it has spaces, ``-`` is standard input, and the file of a script or of a service is read.
    Of a file with several components ``FILE#NAME`` is one. Words in which no program starts are the engine's own.

    :param others: engines whose commands are named where one stands there instead.
    :raises FlagError: none or several commands start the engine's server.
    """
    found = server_commands(engine, words, others)
    if len(found) > 1:
        listed = "; ".join(f"{each.component}: " * bool(each.component) + shlex.join(each.words) for each in found)
        # A text has no name to add one to.
        named = len(words[0]) <= MOST_NAME and Path(words[0]).is_file()
        names = [f"{words[0]}#{each.component}" for each in found if each.component and named]
        remedy = f"name one of them: {' or '.join(names)}" if len(names) == len(found) else "give one of them"
        raise refusal(engine.programs[0], f"{len(found)} commands start it: {listed}", remedy)
    return found[0]


def server_commands(engine: Engine, words: Sequence[str], others: Iterable[Engine] = ()) -> tuple[ShellCommand, ...]:
    """Return the different commands that start an engine's server, one for each component; raises ``FlagError``."""
    word, component = _component(words)
    text = _text([word] if component else words)
    if text is None:
        return _distinct(_found(engine, ShellText((ShellCommand(words=tuple(words)),)), others))
    found = _found(engine, container_commands(text, word) or read_shell(text), others)
    if not component:
        return _distinct(found)
    named = _distinct(each for each in found if each.component == component)
    if not named:
        known = ", ".join(each.component for each in _distinct(found))
        raise refusal(f"{word}#{component}", f"no component of this name starts {engine.name}", f"name one of {known}")
    return named


def servers(path: str, engines: Iterable[Engine]) -> tuple[tuple[Engine, ShellCommand], ...]:
    """Return the different servers that a file starts, each with its engine: by a program, or by an engine's image.

    A file that starts none of the engines has none; what names neither a program nor an image could be anything's.
    """
    every, text = tuple(engines), codec.read(path)
    read = container_commands(text, path)
    if read is None and Path(path).suffix in (".yaml", ".yml", ".json"):
        return ()
    found: dict[object, tuple[Engine, ShellCommand]] = {}
    for command in (read or read_shell(text)).commands:
        own = [(engine, one) for each in _unwrapped(command) for engine in every for one in _started(engine, each)]
        # An image counts only where no program is named: the words may start something else in it.
        own = own or [(engine, each) for engine in every for each in _in_own_image(engine, command)]
        # A script may start the same server in two branches.
        found |= {(engine.name, one.component, one.words, *one.variables.items()): (engine, one) for engine, one in own}
    return tuple(found.values())


def _in_own_image(engine: Engine, command: ShellCommand) -> Iterator[ShellCommand]:
    """Yield the flags of an engine's image, whose entry point is its server."""
    for each in _bare(command, alone=False):
        name = (each.image or "").partition(":")[0]
        # The pattern of images has the release behind the name.
        if each.words[:1] and each.words[0].startswith("-") and engine.history.release_of_image(f"{name}:0.0"):
            yield each


def _component(words: Sequence[str]) -> tuple[str, str]:
    """Return a file, and the name of the component that ``FILE#NAME`` adds to it; of other words neither."""
    if len(words) != 1 or len(words[0]) > MOST_NAME or "\0" in words[0]:
        return "", ""
    file, _, name = words[0].rpartition("#")
    # A file may have # in its own name.
    named = bool(file) and not Path(words[0]).exists() and Path(file).is_file()
    return (file, name) if named else (words[0], "")


def started(command: Sequence[str], engines: Iterable[Engine]) -> tuple[Engine, int] | None:
    """Return the engine that a command starts and the number of its program's words; None for another program."""
    # A program may have its folder in front, and ``python`` its version behind.
    words = [*map(_plain, command[:1]), *command[1:]]
    for engine in engines:
        for program in engine.programs:
            parts = program.split()
            # ``serve`` by itself is any program's word.
            if len(parts) > 1 and words[: len(parts)] == parts:
                return engine, len(parts)
    return None


def script_command(words: Sequence[str], engines: Sequence[Engine]) -> tuple[Engine, ShellCommand] | None:
    """Return the one engine's server that a shell script starts: ``bash serve.sh``, or the script by itself.

    None where the words are no shell script, or it starts none of the engines, or several servers. A server inside a
    container is none: its program is not here.
    """
    words = words[1:] if len(words) == 2 and PurePath(words[0]).name in _SHELLS else words
    path = Path(words[0]) if len(words) == 1 and len(words[0]) <= MOST_NAME else None
    if path is None or path.suffix not in ("", ".sh", ".bash") or not path.is_file():
        return None
    text = read_shell(codec.read(path))
    commands = [each for command in text.commands for each in _unwrapped(command)]
    found = [(engine, each) for engine in engines for command in commands for each in _started(engine, command)]
    if len(found) != 1 or found[0][1].image is not None:
        return None
    engine, command = found[0]
    return engine, attrs.evolve(command, assumptions=text.assumptions, hidden=text.hidden)


def _text(words: Sequence[str]) -> str | None:
    """Return the text that one word stands for; None where the words are a command line's."""
    if len(words) != 1:
        return None
    (word,) = words
    if word == "-":
        return codec.read_stream(sys.stdin.buffer, "<stdin>")
    # Longer than any file's name, or with spaces and no folder of that name: a text.
    if "\n" in word or len(word) > MOST_NAME or (len(word.split()) > 1 and not Path(word).is_dir()):
        return word
    path = Path(word)
    if word.startswith("-") or path.suffix in _NO_TEXT or "\0" in word or not path.is_file():
        return None
    text = codec.read(word)
    # Another file in YAML is one of flags, or a plan.
    return None if path.suffix in (".yaml", ".yml") and container_commands(text, word) is None else text


def _found(engine: Engine, text: ShellText, others: Iterable[Engine]) -> tuple[ShellCommand, ...]:
    """Return the commands of a text that start the engine; without one, the one that names no program."""
    commands = [each for command in text.commands for each in _unwrapped(command)]
    found = [each for command in commands for each in _started(engine, command)]
    if not found:
        _refuse_others(engine, commands, others)
        found = [each for command in text.commands for each in _bare(command, alone=len(text.commands) == 1)]
    if not found:
        program = engine.programs[0]
        raise refusal(program, "no command here starts it", f"give its command line: {program} ...")
    return tuple(attrs.evolve(each, assumptions=text.assumptions, hidden=text.hidden) for each in found)


def _distinct(commands: Iterable[ShellCommand]) -> tuple[ShellCommand, ...]:
    """Return the first of those that are the same: a script may start a server in two branches."""
    found: dict[object, ShellCommand] = {}
    for each in commands:
        found.setdefault((each.words, tuple(each.variables.items())), each)
    return tuple(found.values())


_PASSED = re.compile(r'"\$(?:[@*]|\{[@*]\})"|\$(?:[@*]|\{[@*]\})')
MOST_DEEP = 3
"""Scripts inside scripts that are read."""


def _unwrapped(command: ShellCommand, deep: int = 0) -> Iterator[ShellCommand]:
    """Yield a command, and those that stand in one of its words: behind ``bash -c``, ``eval``, ``ssh`` or ``tmux``."""
    yield command
    given = {**command.variables, **_given(command.words)}
    for index, word in enumerate(command.words if deep < MOST_DEEP else ()):
        # JSON and flags have spaces too, and no command.
        if " " not in word or word.lstrip().startswith(("{", "[", "-")):
            continue
        text = word
        if _PASSED.search(word):
            # The word behind a script is its name, and those behind that are its arguments.
            passed = shlex.join(command.words[index + 2 :])
            # A text that is evaluated has them inside its quotes.
            passed = re.sub(r'(["\\])', r"\\\1", passed) if "eval " in word else passed
            text = _PASSED.sub(lambda _, passed=passed: passed, word)  # type: ignore[misc]
        for each in read_shell(text, given).commands:
            inner = attrs.evolve(command, words=each.words, variables={**given, **each.variables})
            yield from _unwrapped(inner, deep + 1)


def _started(engine: Engine, command: ShellCommand) -> Iterator[ShellCommand]:
    """Yield the engine's command in words, behind its program, where one of its programs is in them."""
    words = list(command.words)
    image, at = _image(words)
    rest = [*_entrypoint(words[:at]), *words[at:]]
    programs = [program.split() for program in engine.programs]
    longest = max(map(len, programs))
    for index in range(len(rest)):
        # Not all that follow: a text may have a million words.
        some = rest[index : index + longest]
        plain = [_plain(some[0]), *some[1:]]
        count = next(filter(None, (_length(each, some, plain, index) for each in programs)), 0)
        if count:
            given = {**command.variables, **_given([*words[:at], *rest[:index]])}
            own = tuple(_unwrapped_flags(engine, rest[index : index + count], rest[index + count :]))
            yield attrs.evolve(command, words=own, variables=given, image=image or command.image)
            return


def _unwrapped_flags(engine: Engine, program: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """Yield the engine's own flags behind a program that wraps it, such as one of Dynamo's workers."""
    flags = next((each for name, each in engine.wrappers.items() if name.split()[-1] == program[-1]), None)
    skipped = 0
    for word in words:
        name, equals, value = word.partition("=")
        kind = None if flags is None else flags.get(name, 1 if name.startswith("--dyn-") else None)
        if isinstance(kind, str):
            # Without a name it is the first word.
            if kind or equals:
                yield f"{kind}{equals}{value}" if kind else value
        elif kind is not None:
            skipped = 0 if equals else kind
            continue
        elif not skipped or word.startswith("--"):
            yield word
        # The value of a wrapper's own flag is none of the engine's words.
        skipped = max(skipped - 1, 0)


def _bare(command: ShellCommand, *, alone: bool) -> Iterator[ShellCommand]:
    """Yield the words of a command that names no program: the arguments of an image, or flags by themselves."""
    words = list(command.words)
    image, at = _image(words)
    while at < len(words) and image is None and ASSIGNMENT.fullmatch(words[at]):
        at += 1
    # Bare flags among other commands of a script could be anything's.
    if image is not None or alone:
        given = {**command.variables, **_given(words[:at])}
        yield attrs.evolve(command, words=tuple(words[at:]), variables=given, image=image)


def _refuse_others(engine: Engine, commands: Sequence[ShellCommand], others: Iterable[Engine]) -> None:
    """Raise ``FlagError`` where a command starts another engine, or another program of this one."""
    others = tuple(others)
    heads = {program.split()[0]: each for each in (engine, *others) for program in each.programs}
    for command in commands:
        for other in others:
            if any(_started(other, command)):
                raise refusal(other.programs[0], f"this starts {other.name}", f"name {other.name} as the engine")
        words = [word for word in command.words if not ASSIGNMENT.fullmatch(word)]
        head = _plain(words[0]) if words else ""
        # ``serve`` is a program of one engine and a word of all others.
        if head in heads and head != "serve":
            says = f"expected one of {', '.join(each for each in engine.programs if ' ' in each or '-' in each)}"
            raise refusal(shlex.join(words[:3]), f"this starts no server of {engine.name}", says)


def _length(parts: list[str], words: list[str], plain: list[str], index: int) -> int:
    """Return how many of the words are the program of these parts, or 0.

    :param plain: the words, the first without its folder and version.
    :param index: the place of the first word in the command.
    """
    # A module can also be named behind any launcher's ``-m``, or by its file.
    if parts[:2] == ["python", "-m"]:
        module, *rest = parts[2:]
        count = 2 if words[:2] == ["-m", module] else int(words[0].endswith(f"{module.replace('.', '/')}.py"))
        return count + len(rest) if count and words[count : count + len(rest)] == rest else 0
    if len(parts) == 1 and index and "-" not in parts[0]:  # ``serve`` is a word like others, but in front
        return 0
    return len(parts) if plain[: len(parts)] == parts else 0


_PYTHON = re.compile(r"^python[\d.]*$")


def _plain(word: str) -> str:
    """Return the name of a program without its folder and version; of a text, for each of up to a million words."""
    return _PYTHON.sub("python", word.rstrip("/").rpartition("/")[2])


def _image(words: Sequence[str]) -> tuple[str | None, int]:
    """Return the image of ``docker run``, and where the words behind it begin."""
    at = next((index for index, word in enumerate(words) if _plain(word) in _RUN), None)
    # ``docker compose run`` and ``docker container run`` have a word in between.
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
    # ``-e`` of docker and ``-x`` of mpirun may be written together with the name.
    plain = (re.sub(r"^(?:--env=|-[ex](?=[A-Z]))", "", word) for word in words)
    return dict(word.split("=", 1) for word in plain if re.match(r"[A-Z_][A-Z0-9_]*=", word))


_FOREIGN_IMAGE = re.compile(
    r"(?<![a-z])(?:rocm|ascend|npu|xpu|hpu|gaudi|habana|tpu|neuron|llm-scaler|musa|cpu)(?![a-z])", re.IGNORECASE
)
_FOREIGN_VARIABLE = re.compile(
    r"(?:ASCEND|HIP|ROCR|HCCL|HABANA|HPU|TPU|NEURON|MUSA|AITER|VLLM_(?:CPU|TPU|XPU|ROCM|ASCEND)|SGLANG_(?:ROCM|NPU))_\w+"
    r"|SGLANG_USE_AITER\w*"
)


@attrs.frozen(kw_only=True)
class LineReading:
    """The words of a line for one engine."""

    words: tuple[str, ...]
    """The engine's own: variables that matter for graphs, then the words behind its program."""
    assumptions: tuple[str, ...] = ()
    """Assumptions of the reading: places where a shell would read something else, and the age of the line."""
    notes: tuple[str, ...] = ()
    """Skipped parts that decide nothing."""


def read_line(engine: Engine, words: Sequence[str], others: Iterable[Engine] = ()) -> LineReading:
    """Return the engine's words in a command line, a text or a file, as ``server_command``; raises ``FlagError``."""
    return read_command(engine, server_command(engine, words, others))


def read_command(engine: Engine, command: ShellCommand) -> LineReading:
    """Return the engine's words in a server's command; raises ``FlagError`` for variables that are not emulated."""
    own = {name: value for name, value in command.variables.items() if not _FOREIGN_VARIABLE.fullmatch(name)}
    _refuse_variables(engine, own)
    deciding = {name: value for name, value in command.variables.items() if name in engine.flags}
    sign = other_device(command)
    if sign is not None and OTHER_DEVICE not in engine.flags:
        raise unfollowed(sign, "it is for a device that is not emulated", "only NVIDIA GPUs are")
    deciding |= {} if sign is None else {OTHER_DEVICE: sign}
    runs = engine.launch is not None and bool(own.get(PLAN)) and own.get(APPLY) != "0"
    skipped = [name for name in command.variables if name not in deciding and not (runs and name == PLAN)]
    hidden = [name for name in command.hidden if name in engine.flags or name in engine.unemulated_variables]
    notes = [f"skipped, as they decide nothing about graphs: {', '.join(skipped)}"] if skipped else []
    notes += _signs(engine, command.variables)
    notes += [f"set and not exported, so the server does not see them: {', '.join(hidden)}"] if hidden else []
    says = f"{PLAN} is set, so the server has the graphs of {own.get(PLAN)}"
    planned = [f"{says}; by its flags alone it would have those said here"] if runs else []
    return LineReading(
        words=(*(f"{name}={value}" for name, value in deciding.items()), *command.words),
        assumptions=(*command.assumptions, *planned, *_age(engine, command.image)),
        notes=tuple(notes),
    )


def with_unset(error: FlagError, words: Sequence[str]) -> FlagError:
    """Return an error with the remedy for values that are variables which the line does not set."""
    names = unset(words)

    def placed(problem: Problem) -> Problem:
        named = [name for name in names if re.search(rf"\$\{{?{name}\b", f"{problem.file} {problem.message}")]
        if not named:
            return problem
        return attrs.evolve(problem, remedy=f"the line does not set {named[0]}: write {named[0]}=VALUE in front of it")

    return type(error)(placed(problem) for problem in error.problems)


def other_device(command: ShellCommand) -> str | None:
    """Return the image or the variable that names a device that is not NVIDIA's, or None."""
    signs = [command.image] if command.image and _FOREIGN_IMAGE.search(command.image) else []
    signs += [name for name in command.variables if _FOREIGN_VARIABLE.fullmatch(name)]
    return signs[0] if signs else None


def _refuse_variables(engine: Engine, variables: Mapping[str, str]) -> None:
    """Raise ``FlagError`` for all variables that can change graphs and are not emulated, or have gone."""
    gone = list(_gone(engine, variables))
    if gone:
        raise FlagError(gone)
    for name, harmless in engine.unemulated_variables.items():
        # Some values are the default, and change nothing.
        if variables.get(name) is not None and variables[name].lower() not in harmless:
            reason = f"{engine.name} reads it, and its effect on graphs is not emulated"
            raise unfollowed(name, reason, "leave it out to see the graphs without it")


def _gone(engine: Engine, variables: Mapping[str, str]) -> Iterator[Problem]:
    for name, old in engine.history.variables.items():
        if name in variables:
            message = f"{engine.name} {engine.version} does not read it; {old.until} was the last release that did"
            yield Problem(path=(name,), message=message, remedy=old.remedy([variables[name]]))


def _age(engine: Engine, image: str | None) -> Iterator[str]:
    """Yield the changed defaults of an image of an older release, and that a newer one is not followed."""
    release, ours = engine.history.release_of_image(image), release_of(engine.version)
    if release is None:
        return
    theirs = release_of(release)
    subject = f"the image {image} runs {engine.name} {release}, and {engine.version} is what is emulated"
    # Of a release after the emulated one nothing is known; of one before, what changed since.
    if theirs > ours:
        yield f"{subject}; what differs is not known"
    elif theirs < ours[: len(theirs)]:
        ways = ((engine.older, "follows it"), (engine.by_table(), "answers by its table"))
        known = ((each.version, way) for every, way in ways for each in every)
        fitting = (f"; {engine.name}=={v} {way}" for v, way in known if release_of(v)[: len(theirs)] == theirs)
        yield engine.history.age(release, subject) + next(fitting, "")


def _signs(engine: Engine, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield what the variables of older releases say about the age of a line."""
    for name, last in engine.history.signs.items():
        if name in variables:
            yield engine.history.age(last, f"{name} is for {engine.name} {last} or older")
