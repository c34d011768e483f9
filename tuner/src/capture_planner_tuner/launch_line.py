"""The command that starts an engine under a plan, without the flags that contradict it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import attrs

from capture_planner.engines.engine import Engine
from capture_planner.engines.shell import split_variables
from capture_planner.errors import FlagError
from capture_planner.records.plan import Plan


@attrs.frozen(kw_only=True)
class LaunchLine:
    """The command, or no command and the reasons, with what differs from today's flags."""

    words: tuple[str, ...] | None
    notes: tuple[str, ...] = ()

    @property
    def command(self) -> str | None:
        """The words as a shell takes them."""
        return None if self.words is None else shlex.join(self.words)


def launch_line(engine: Engine, plan: Plan, words: Sequence[str], plan_file: str) -> LaunchLine:
    """Return the ``launch`` command for an engine's own words, without the flags that contradict the plan.

    :param words: variables of the engine, then the words behind its program, as ``Emulation.command`` has them.
    """
    if engine.launch is None:
        export = ("capture-planner", "export", plan_file, "--to", engine.name)
        return LaunchLine(words=export, notes=(f"{engine.name} has no plugin that runs a plan: export its flags",))
    variables, own = split_variables(words)
    try:
        flags, contrary = fitting_flags(engine, plan, own)
    except FlagError as left:
        return LaunchLine(words=None, notes=tuple(f"launch refuses the plan: {each}" for each in left.problems))
    notes = (f"{name} is not in the launch line: {why}" for name, why in contrary.items())
    program = engine.programs[0].split()
    given = (f"{name}={value}" for name, value in variables.items())
    line = ("capture-planner", "launch", plan_file, "--", *given, *program, *flags)
    return LaunchLine(words=line, notes=tuple(notes))


def fitting_flags(engine: Engine, plan: Plan, flags: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return an engine's own flags without those that contradict the plan, and the names of these, with the reasons.

    :param engine: one that runs plans.
    :raises FlagError: other flags contradict it.
    """
    assert engine.launch is not None
    try:
        engine.launch(plan, flags)
    except FlagError as error:
        # A flag that contradicts the plan as a whole gives way to it; a contradiction that is left is an error.
        contrary = {str(each.path[0]): each.message for each in error.problems if len(each.path) == 1}
        given = [name for name in contrary if engine.fixes.without(flags, [name]) != list(flags)]
        kept = engine.fixes.without(flags, given)
        engine.launch(plan, kept)
        return kept, {name: contrary[name] for name in given}
    return list(flags), {}
