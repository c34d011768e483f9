"""``gallery``: public bugs, each planted once, and what finds them."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capture_planner._extras import refuse_without_hypothesis
from capture_planner.analysis.lint.core import link
from capture_planner.cli.common import (
    emit,
    format_option,
    prepare_torch,
    progress_bars,
    progress_option,
    seed_option,
)
from capture_planner.records.text import counted

if TYPE_CHECKING:
    from gallery import Caught, Mutant

PROFILES = ("default", "thorough")


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--catch", "catching", is_flag=True, help="Let the suite, or the lint, find each of them.")
@seed_option
@click.option(
    "--profile",
    type=click.Choice(PROFILES),
    default=PROFILES[0],
    show_default=True,
    help="How much the suite tries.",
)
@progress_option
@format_option()
def gallery(
    names: tuple[str, ...], catching: bool, seed: int, profile: str, progress: bool | None, form: str
) -> None:
    """List the mutants: public bugs of serving engines, each planted in a backend, a runner, a plan or ranks.

    With --catch, each is looked for: plans by the lint, ranks by random vectors, all others by the
    conformance suite, with one seed and profile. The exit code is 1 where one is not found.
    """
    context = click.get_current_context()
    for name in () if catching else ("seed", "profile"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name} goes with --catch.")
    refuse_without_hypothesis("the gallery")
    from gallery import MUTANTS, named

    chosen = [named(name) for name in dict.fromkeys(names)] or list(MUTANTS)
    if not catching:
        emit(form, lambda: {"mutants": [_data(mutant) for mutant in chosen]}, lambda: _listed(chosen))
        return
    found = _catch(chosen, seed, profile, progress)
    emit(
        form,
        lambda: {
            "seed": seed,
            "profile": profile,
            "mutants": [
                _data(mutant) | {"caught": _caught_data(caught, seed, profile), "seconds": round(seconds, 2)}
                for mutant, caught, seconds in found
            ],
        },
        lambda: _shown(found, seed, profile),
    )
    if any(caught is None for _, caught, _ in found):
        click.get_current_context().exit(1)


def _catch(
    chosen: list[Mutant], seed: int, profile: str, progress: bool | None
) -> list[tuple[Mutant, Caught | None, float]]:
    from capture_planner.conformance import DEFAULT, THOROUGH
    from gallery import catch

    prepare_torch(1)
    found = []
    with progress_bars(progress)("mutants", len(chosen)) as done:
        for mutant in chosen:
            started = perf_counter()
            caught = catch(mutant, seed=seed, profile=THOROUGH if profile == "thorough" else DEFAULT)
            found.append((mutant, caught, perf_counter() - started))
            done(mutant.name)
    return found


def _command(mutant: Mutant, seed: int, profile: str) -> str:
    """Return what shows it again; a plan is found whatever the seed."""
    words = ["capture-planner", "gallery", mutant.name, "--catch"]
    if mutant.kind != "plan":
        words += ["--seed", str(seed)]
        words += ["--profile", profile] if profile != PROFILES[0] and mutant.kind != "ranks" else []
    return " ".join(words)


def _data(mutant: Mutant) -> dict[str, Any]:
    return {
        "name": mutant.name,
        "class": mutant.bug_class.name,
        "planted": mutant.kind,
        "says": mutant.says,
        "threads": {thread: link(thread) for thread in mutant.threads},
    }


def _caught_data(caught: Caught | None, seed: int, profile: str) -> dict[str, Any] | None:
    if caught is None:
        return None
    command = _command(caught.mutant, seed, profile)
    return {"by": caught.by, "says": caught.says, "case": caught.case or None, "command": command}


def _listed(chosen: list[Mutant]) -> RenderableType:
    table = Table(title=counted(len(chosen), "mutant"), title_justify="left", box=None, pad_edge=False)
    for column in ("mutant", "class", "planted in", "bug"):
        table.add_column(column, justify="left", overflow="fold", no_wrap=column == "mutant")
    for mutant in chosen:
        bug = Text(f"{mutant.says}\n")
        bug.append("\n".join(link(thread) for thread in mutant.threads), style="dim")
        table.add_row(mutant.name, mutant.bug_class.name, mutant.kind, bug)
    return table


def _shown(found: list[tuple[Mutant, Caught | None, float]], seed: int, profile: str) -> RenderableType:
    parts: list[RenderableType] = []
    for mutant, caught, _ in found:
        head = Text(f"{mutant.name} ({mutant.bug_class.name}, {mutant.kind}): ", style="bold")
        head.append("not caught" if caught is None else f"caught by {caught.by}")
        parts.append(head)
        if caught is not None:
            parts.append(Text(f"  {caught.says}"))
            parts += [Text(f"  case: {caught.case}")] if caught.case else []
        parts.append(Text(f"  again: {_command(mutant, seed, profile)}"))
    missed = sum(caught is None for _, caught, _ in found)
    parts.append(Text(f"{len(found) - missed} of {len(found)} caught"))
    return Group(*parts)
