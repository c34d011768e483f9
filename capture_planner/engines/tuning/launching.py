"""The command that starts an engine under a plan, from the command that starts it today."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import attrs

from capture_planner.engines.engine import Engine
from capture_planner.engines.launch import leading_variables
from capture_planner.errors import FlagError, Problem
from capture_planner.records.plan import Plan


@attrs.frozen(kw_only=True)
class LaunchLine:
    """The command, or no command and the reasons, with what differs from today's flags."""

    command: str | None
    notes: tuple[str, ...] = ()


def launch_line(engine: Engine, plan: Plan, words: Sequence[str], plan_file: str) -> LaunchLine:
    """Return the ``launch`` command for an engine's own words, without the flags that contradict the plan.

    :param words: variables of the engine, then the words behind its program, as ``Emulation.command`` has them.
    """
    if engine.launch is None:
        export = shlex.join(["capture-planner", "export", plan_file, "--to", engine.name])
        return LaunchLine(command=export, notes=(f"{engine.name} has no plugin that runs a plan: export its flags",))
    count = leading_variables(words)
    variables, flags = list(words[:count]), list(words[count:])
    notes: list[str] = []
    try:
        engine.launch(plan, flags)
    except FlagError as error:
        flags, notes = _without(flags, error.problems)
        try:
            engine.launch(plan, flags)
        except FlagError as left:
            return LaunchLine(command=None, notes=tuple(f"launch refuses the plan: {each}" for each in left.problems))
    program = engine.programs[0].split()
    words = ["capture-planner", "launch", plan_file, "--", *variables, *program, *flags]
    return LaunchLine(command=shlex.join(words), notes=tuple(notes))


def _without(flags: Sequence[str], problems: Sequence[Problem]) -> tuple[list[str], list[str]]:
    """Return the flags without those of the problems, each with its values, and what was left out."""
    contrary = {str(problem.path[0]): problem.message for problem in problems if len(problem.path) == 1}
    kept: list[str] = []
    notes: list[str] = []
    inside = False
    for word in flags:
        if word.startswith("-"):
            name = word.partition("=")[0].replace("_", "-")
            inside = name in contrary
            if inside:
                notes.append(f"{name} is not in the launch line: {contrary[name]}")
        if not inside:
            kept.append(word)
    return kept, notes
