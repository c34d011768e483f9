"""A command line as an engine's emulation takes it: its words, and what the line rests on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import attrs

from capture_planner.engines.engine import Engine
from capture_planner.engines.history import release_of
from capture_planner.engines.parsing import unfollowed
from capture_planner.engines.pasted.command_line import ServerCommand, server_command
from capture_planner.engines.pasted.shell import unset
from capture_planner.errors import FlagError, Problem

_FOREIGN_IMAGE = re.compile(
    r"(?<![a-z])(?:rocm|ascend|npu|xpu|hpu|gaudi|habana|tpu|neuron|llm-scaler|musa|cpu)(?![a-z])", re.IGNORECASE
)
_FOREIGN_VARIABLE = re.compile(r"(?:ASCEND|HIP|ROCR|HCCL|HABANA|HPU|TPU|NEURON|MUSA|VLLM_CPU|VLLM_TPU|VLLM_XPU)_\w+")


@attrs.frozen(kw_only=True)
class LineReading:
    """The words of a line for one engine."""

    words: tuple[str, ...]
    """The engine's own: variables that matter for graphs, then the words behind its program."""
    assumptions: tuple[str, ...] = ()
    """What the reading rests on: where a shell would read something else, and the age of the line."""
    notes: tuple[str, ...] = ()
    """What was skipped, and decides nothing."""


def read_line(engine: Engine, words: Sequence[str], others: Sequence[Engine] = ()) -> LineReading:
    """Return the engine's words in a command line, a text or the file of one; raises ``FlagError``.

    :param others: the other engines, whose commands are told from this one's.
    """
    command = server_command(engine, words, others)
    _refuse_device(command)
    _refuse_variables(engine, command.variables)
    deciding = {name: value for name, value in command.variables.items() if name in engine.flags}
    skipped = [name for name in command.variables if name not in deciding]
    hidden = [name for name in command.hidden if name in engine.flags or name in engine.unemulated_variables]
    notes = [f"skipped, as they decide nothing about graphs: {', '.join(skipped)}"] if skipped else []
    notes += _signs(engine, command.variables)
    notes += [f"set and not exported, so the server does not see them: {', '.join(hidden)}"] if hidden else []
    return LineReading(
        words=(*(f"{name}={value}" for name, value in deciding.items()), *command.words),
        assumptions=(*command.assumptions, *_age(engine, command.image)),
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


def _refuse_device(command: ServerCommand) -> None:
    """Raise ``NotEmulated`` where the image or a variable names a device that is not CUDA's."""
    signs = [command.image] if command.image and _FOREIGN_IMAGE.search(command.image) else []
    signs += [name for name in command.variables if _FOREIGN_VARIABLE.fullmatch(name)]
    if signs:
        raise unfollowed(str(signs[0]), "it is for a device that is not emulated", "only NVIDIA GPUs are")


def _refuse_variables(engine: Engine, variables: Mapping[str, str]) -> None:
    """Raise ``FlagError`` for all variables that can change graphs and are not emulated, or have gone."""
    gone = list(_gone(engine, variables))
    if gone:
        raise FlagError(gone)
    for name, harmless in engine.unemulated_variables.items():
        if variables.get(name) is not None and variables[name].lower() not in harmless:
            reason = f"{engine.name} reads it, and its effect on graphs is not emulated"
            raise unfollowed(name, reason, "leave it out to see the graphs without it")


def _gone(engine: Engine, variables: Mapping[str, str]) -> Iterator[Problem]:
    for name, old in engine.history.variables.items():
        if name in variables:
            message = f"{engine.name} {engine.version} does not read it; {old.until} was the last release that did"
            yield Problem(path=(name,), message=message, remedy=old.remedy([variables[name]]))


def _age(engine: Engine, image: str | None) -> Iterator[str]:
    """Yield what an image of an older release does otherwise by default, and that a newer one is not followed."""
    release, ours = engine.history.release_of_image(image), release_of(engine.version)
    if release is None:
        return
    theirs = release_of(release)
    subject = f"the image {image} runs {engine.name} {release}, and {engine.version} is what is emulated"
    if theirs > ours:
        yield f"{subject}; what differs is not known"
    elif theirs < ours[: len(theirs)]:
        emulated = next((each for each in engine.older if release_of(each.version)[: len(theirs)] == theirs), None)
        follow = f"; {engine.name}=={emulated.version} follows it" if emulated else ""
        yield engine.history.age(release, subject) + follow


def _signs(engine: Engine, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield what the variables of older releases say about the age of a line."""
    for name, last in engine.history.signs.items():
        if name in variables:
            yield engine.history.age(last, f"{name} is for {engine.name} {last} or older")
