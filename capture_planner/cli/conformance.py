"""``conformance``: put a backend through the suite on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capture_planner._extras import refuse_without_hypothesis
from capture_planner.cli.bench import Numbers
from capture_planner.cli.common import (
    FINDINGS,
    INTERRUPTED,
    emit,
    emit_file,
    environment_option,
    format_option,
    prepare_torch,
    progress_option,
    refuse_places,
    seed_option,
    threads_option,
)
from capture_planner.codec import dumps_json
from capture_planner.errors import CapturePlannerError

if TYPE_CHECKING:
    from capture_planner.report.conformance import Conformance

DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Those that rows can be compared in; as in ``conformance.stage``, which needs torch."""

MOST_DRAFTS = 8
"""More than that does not fit beside a prompt into the smallest shapes."""


MOST_HEADS = 256


class Heads(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Query heads and KV heads, as in ``4:2``."""

    name = "Q:KV"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return both."""
        if isinstance(value, tuple):
            return value
        query, _, kv = value.partition(":")
        try:
            heads = int(query), int(kv)
        except ValueError:
            self.fail(f"{value!r} is not two whole numbers, as in 4:2.", param, ctx)
        if min(heads) < 1 or max(heads) > MOST_HEADS:
            self.fail(f"{value!r}: each is a number from 1 to {MOST_HEADS}.", param, ctx)
        if heads[0] % heads[1]:
            self.fail(f"{value!r}: Q is a multiple of KV.", param, ctx)
        return heads


class Drafts(Numbers):
    """K of the scenes, with commas between them; 0 is without a drafter."""

    name = "K,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the numbers, each once, the least first."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        numbers = {int(part) for part in parts if part.isdecimal() and int(part) <= MOST_DRAFTS}
        if not all(part.isdecimal() for part in parts) or len(numbers) < len(set(map(int, parts))):
            self.fail(f"{value!r}: give whole numbers of 0 to {MOST_DRAFTS}, as in 0,1,3.", param, ctx)
        return tuple(sorted(numbers))


SHAPES = ("dtype", "heads", "head_dim", "page_size", "max_model_len", "window")
"""Options that name shapes."""

SEARCHES = ("profile", "thorough", "examples", "steps", "seed", "drafts", "shrink", "audits", "strict")
"""Options of a search; one printed case has none of it."""


@click.command()
@click.argument("backend", metavar="NAME")
@click.option(
    "--profile",
    type=click.Choice(["default", "thorough"]),
    default="default",
    show_default=True,
    help="How much is tried: 150 scenes, or 2,000.",
)
@click.option("--thorough", is_flag=True, help="The same as --profile thorough.")
@click.option("--examples", type=click.IntRange(1), help="Scenes; left out: those of the profile.")
@click.option("--steps", type=click.IntRange(1, 1000), help="Most steps of a scene.")
@seed_option
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    multiple=True,
    help="Test shapes of this dtype; may be given again.",
)
@click.option("--heads", type=Heads(), multiple=True, help="Query and KV heads; may be given again.")
@click.option("--head-dim", type=click.IntRange(1, 1024), multiple=True, help="Width of a head.")
@click.option("--page-size", type=click.IntRange(1, 1024), multiple=True, help="Tokens a page.")
@click.option(
    "--max-model-len", type=click.IntRange(8, 1 << 14), multiple=True, help="Longest sequence, in tokens."
)
@click.option(
    "--window/--no-window",
    default=None,
    help="With half of the layers in a sliding window of a page and a token, or without; left out: both.",
)
@click.option("--drafts", type=Drafts(), help="K of the scenes, as in 0,1,3; left out: 0,1,2,3,5.")
@click.option("--shrink/--no-shrink", default=True, show_default=True, help="Make a failing case small.")
@click.option(
    "--audits/--no-audits", default=True, show_default=True, help="Attack each declared field, alone."
)
@click.option(
    "--case", metavar="TEXT|@FILE", help="Do one printed case again; exit code 2 if it still fails."
)
@click.option(
    "--attack", metavar="'ROLE FIELD ATTACK'", help="With --case: do it with this attack of an audit."
)
@click.option("--strict", is_flag=True, help="Count over-declared fields as findings.")
@threads_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the report as JSON, as --format json."
)
@click.option("--html", type=click.Path(path_type=Path), help="Write the report as a page with plots.")
@progress_option
@environment_option
@format_option()
def conformance(backend: str, environment: str | None, form: str, **given: Any) -> None:
    """Say whether the backend NAME can be trusted under captured graphs, here, at these versions.

    Random deployments are captured, and served with random batches, from graphs and eager, with garbage
    in all that a forward may not depend on; every row is compared with what attention is defined as. Then
    each declared field is attack_case, alone. What fails is made small, and printed with the command that
    shows it again. The same seed does the same. Exit code 2 where something was found.

    Without options that name a shape, those are tried that the backend runs here. One that is named takes
    the place of theirs.
    """
    _refuse_unused(given)
    case = given["case"]
    file = case[1:] if case is not None and case.startswith("@") else None
    refuse_places(file, {"--output": given["output"], "--html": given["html"]}, "the case")
    refuse_without_hypothesis("the suite")
    prepare_torch(given["threads"])
    from capture_planner.cli.conforming import report as conform
    from capture_planner.report.conformance import conformance_data, conformance_page, conformance_tables

    report = conform(backend, environment, given, case if file is None else _read(file))
    emit(form, lambda: conformance_data(report), lambda: conformance_tables(report))
    if form == "text":
        _show_commands(report)
    emit_file(form, given["output"], lambda: dumps_json(conformance_data(report)) + "\n")
    emit_file(form, given["html"], lambda: conformance_page(report))
    _end(report, strict=given["strict"])


def _end(report: Conformance, *, strict: bool) -> None:
    context = click.get_current_context()
    if report.outcome.failures or (strict and report.over_declared):
        context.exit(FINDINGS)
    if report.interrupted:
        context.exit(INTERRUPTED)
    if not report.passed:
        context.exit(FINDINGS)


def _show_commands(report: Conformance) -> None:
    """Print commands on lines of their own: nobody can paste one that a table has broken."""
    commands = dict.fromkeys(report.command(finding.case) for finding in report.outcome.failures)
    for command in commands:
        click.echo(f"\nto see it again:\n\n{command}")


def _refuse_unused(given: dict[str, Any]) -> None:
    """Refuse an option that somebody gave and that would do nothing, or that another contradicts."""
    context = click.get_current_context()

    def stated(name: str) -> bool:
        return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE

    if given["case"] is None:
        if given["attack"] is not None:
            raise click.UsageError("--attack goes with --case.")
    else:
        for name in (*SEARCHES, *SHAPES):
            if stated(name):
                raise click.UsageError(f"--{name.replace('_', '-')} goes with a search, so without --case.")
    if given["thorough"] and stated("profile") and given["profile"] != "thorough":
        raise click.UsageError(f"--thorough and --profile {given['profile']}: give one.")
    if given["strict"] and not given["audits"]:
        raise click.UsageError("--strict goes with audits, which --no-audits leaves out.")


def _read(file: str) -> str:
    try:
        return Path(file).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        says = getattr(error, "strerror", None) or error
        raise CapturePlannerError(f"--case @{file}: {says}") from None
