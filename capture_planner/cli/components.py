"""What the commands about an engine's line share: its name, and the components of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from capture_planner.cli.common import Output, show_lines
from capture_planner.engines import Component, engines, find_engine
from capture_planner.errors import FlagError, Problem


class EngineName(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """The name of an installed engine; engines are loaded when a value or the help needs them."""

    name = "engine"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        # The help is shown also where no engine is installed.
        return "|".join(engines()) or "ENGINE"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        find_engine(value)
        return value


def refuse_several(several: Sequence[Component], to: Output, *, of_text: bool = True) -> None:
    """Refuse an output of one document for the components of a file."""
    if to.html is not None or to.is_json or not of_text:
        names = " or ".join(each.words[0] for each in several)
        raise click.UsageError(f"the file has {len(several)} components; name one: {names}.")


def show_each(several: Sequence[Component], show: Callable[[Component], object]) -> None:
    """Show one component after the other; raises all that is wrong with them at the end."""
    problems: list[Problem] = []
    for each in several:
        file, _, _ = each.words[0].rpartition("#")
        show_lines(f"component {each.name} ({file}:{each.line})", err=False)
        try:
            show(each)
        except FlagError as error:
            problems += error.problems
            show_lines(f"refused: {error}")
        show_lines("")
    if problems:
        raise FlagError(problems)
