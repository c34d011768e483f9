"""``tune``: sizes by measurements, next to what runs today."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import attrs
import click

from capture_planner import codec
from capture_planner.cli import options
from capture_planner.cli.common import FINDINGS, OwnOptions, emit, emit_file, refuse_outputs
from capture_planner.cli.options import FILE, POSITIVE, SIZE, ParsedText, option
from capture_planner.cli.tune_inputs import (
    PLAIN_MODEL,
    TuneSubject,
    accepted_of,
    command_words,
    costs_of,
    folder_conflict,
    load_of,
    subject_of,
)
from capture_planner.engines import engines, is_engine
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.tuning.launching import LaunchLine, launch_line
from capture_planner.engines.tuning.tune import Tuning, TuningBounds
from capture_planner.engines.tuning.tune import tune as compare_tables
from capture_planner.engines.tuning.verdict import SPREAD, TuneVerdict
from capture_planner.errors import InvalidDocument, PlanningError, Problem
from capture_planner.measuring.fits import entry_family
from capture_planner.measuring.traffic import SourceOptions
from capture_planner.modes import Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import ScheduleSource
from capture_planner.records.profile import family_name
from capture_planner.records.spec import Budget, Policy, Roles, Sizes, Spec
from capture_planner.report.page import page as html
from capture_planner.report.terminal import tables
from capture_planner.report.tune import StepCount, TuneReport, tune_report

MIB = 1 << 20
PLAN_FILE, SPEC_FILE, LAUNCH_FILE = "plan.yaml", "spec.yaml", "launch.sh"
TRAFFIC_FILE, PROFILE_FILE = "traffic.yaml", "profile.yaml"
FILES = (SPEC_FILE, TRAFFIC_FILE, PROFILE_FILE, PLAN_FILE, LAUNCH_FILE)


class TuneCommand(OwnOptions):
    """A command about a file, or about the command line of an engine."""

    own_short = ("-h", "-o")

    def takes_foreign_words(self, args: Sequence[str]) -> bool:
        return any(is_engine(word) for word in args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = [word for each in args for word in command_words(each)]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if self.takes_foreign_words(args):
                raise
            hint = f"For an engine's command line, name it first: one of {', '.join(engines())}."
            raise click.UsageError(f"{error.format_message()} {hint}", ctx) from None


def _objective(text: str) -> str:
    Sizes(policy=Policy.MEASURED, objective=text)
    return text


@click.command(cls=TuneCommand, short_help="Choose sizes by measurements, and compare them with today's.")
@click.argument("words", metavar="ENGINE FLAGS... | SPEC | OBSERVATION", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--traffic",
    "sources",
    metavar="FILE",
    multiple=True,
    help="A traffic file, or any source that traffic reads; may be repeated. Default: the batches of OBSERVATION.",
)
@click.option("--profile", "profile_file", metavar="FILE", help="Costs. Default: the shipped profile that is nearest.")
@click.option("--max-graphs", type=POSITIVE, help="Most graphs.")
@click.option("--memory", type=SIZE, help="Most memory for graphs, such as 1GiB.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="Most time to capture.")
@click.option(
    "--objective",
    type=ParsedText("mean|pNN|regret", _objective),
    help="What to make least: the mean step, a percentile such as p99, or the worst step against a graph of its size. "
    "Default: the spec's, or mean.",
)
@click.option("--query-len", type=POSITIVE, help="Tokens of each decode (1 + K), where a log does not have them.")
@option("--decode-log-interval", type=POSITIVE, default=40, help="SGLang's own option: decodes for one log line.")
@option("--step-ms", type=click.FloatRange(0.001), default=20.0, help="For traces of requests: time of a step.")
@click.option("-o", "--output", type=FILE, metavar="FOLDER", help="Write spec, plan and launch line into this folder.")
@click.option("--page", type=FILE, metavar="FILE", help="Write the comparison as an HTML page with plots.")
@options.environment
@options.download
@options.formats()
def tune(words: tuple[str, ...], output: Path | None, page: Path | None, form: str, **values: Any) -> None:
    """Choose capture sizes by traffic and a profile, and compare them with what is captured today.

    Today is what an engine captures by itself with these flags, what it captured where it was observed, or the plan
    of SPEC as it is written. Proposed is the measured table with the fewest graphs that is as fast as any within
    the bounds; without bounds, within the memory and the time of capture of today. Sizes are chosen by the first two
    thirds of the traffic, and both sides are judged on the last third.

    The verdict is change, keep or too_little_data, which has exit code 2. Only a change is written to FOLDER.
    """
    _refuse_outputs((*values["sources"], values["profile_file"], *words[:1]), output, page)
    name, sources = values["profile_file"], values["sources"]
    given = None if name is None else codec.load_profile(name)
    subject = subject_of(words, values["environment"], given)
    if not sources and not subject.is_observed:
        raise click.UsageError("Missing option '--traffic'.")
    near = costs_of(subject, subject.derive(PLAIN_MODEL).spec.model, given, name)
    derived = subject.derive(near.profile.model)
    load = load_of(subject, sources or [str(subject.file)], _source_options(subject, values))
    accepted = accepted_of(load.traffic, derived.spec.speculative)
    objective = values["objective"] or derived.spec.sizes.objective or "mean"
    spec = _wanted(derived.spec, subject.today, {**values, "objective": objective})
    costs = Costs(near.profile)
    measurements = Measurements(profile=near.profile, traffic=load.traffic)
    backends = registry.load_backends()
    try:
        tuning = compare_tables(
            subject.today,
            lambda count, kept: make_plan(_within(spec, count, kept), subject.environment, backends, measurements),
            costs,
            load.chosen.counts,
            load.judged.counts,
            bounds=_bounds(spec.budget),
            objective=objective,
            accepted=accepted or 0.0,
        )
    except PlanningError as error:
        raise InvalidDocument(_of_profile(problem, near.name) for problem in error.problems) from None
    assumptions = [*subject.notes, *(each for each in (near.assumption,) if each is not None)]
    assumptions += [
        *load.assumptions,
        *subject.today.assumptions,
        *derived.assumptions,
        *_assumed(tuning, costs, subject.today, accepted),
    ]
    if load.simulated:
        assumptions.append(f"steps of traces are those of a simple scheduler, of {values['step_ms']:g} ms each")
    line = _launch(subject, tuning, output)
    report = TuneReport(
        tuning=tuning,
        model=derived.spec.model.name,
        machine=subject.environment.name,
        today=subject.name,
        steps=StepCount(chosen=load.chosen.total, judged=load.judged.total, held_out=load.held_out),
        assumptions=tuple(assumptions),
        notes=(*load.notes, *tuning.notes, *(line.notes if line else ())),
        commands=_commands(line, output),
    )
    emit(form, lambda: report, lambda: tables(tune_report(report)))
    if output is not None:
        _write(output, form, tuning, spec, measurements, line)
    if page is not None:
        if _is_inside(page, output):
            page.parent.mkdir(exist_ok=True)
        emit_file(form, page, lambda: html(tune_report(report)))
    if tuning.verdict is TuneVerdict.TOO_LITTLE_DATA:
        click.get_current_context().exit(FINDINGS)


def _is_inside(page: Path | None, output: Path | None) -> TypeGuard[Path]:
    """Say whether the page goes into the folder, which may not exist yet."""
    return page is not None and output is not None and page.absolute().parent == output.absolute()


def _refuse_outputs(sources: Sequence[str | None], output: Path | None, page: Path | None) -> None:
    """Refuse a folder or a page that cannot be written, or that would overwrite what is read."""
    own = (page.name,) if _is_inside(page, output) else ()
    if output is not None:
        if set(own) & set(FILES):
            raise click.UsageError(f"--page {page} is also a file of --output; name another.")
        problem = folder_conflict(output, (*FILES, *own))
        if problem is not None:
            raise click.UsageError(f"--output {problem}.")
        if own and not output.exists():
            return
    for source in sources:
        refuse_outputs(source, {"--page": page}, "what is read")


def _of_profile(problem: Problem, file: str) -> Problem:
    """Return a problem of planning as one of the profile, where it is about that."""
    if problem.path != ("sizes", "profile"):
        return problem
    remedy = "measure one of this deployment: capture-planner profile SPEC -o FILE"
    return attrs.evolve(problem, path=(), file=file, remedy=remedy)


def _source_options(subject: TuneSubject, values: Mapping[str, Any]) -> SourceOptions:
    return SourceOptions(
        query_len=values["query_len"],
        decode_log_interval=values["decode_log_interval"],
        deployment=subject.today,
        step_seconds=values["step_ms"] / 1000,
    )


def _wanted(spec: Spec, today: Emulation, values: Mapping[str, Any]) -> Spec:
    """Return the spec with measured sizes, under the bounds of the command line, or else its own.

    A schedule that is measured stays as it is today: steps of other draft lengths give other tokens, and the sides
    would not be judged on the same work.
    """
    old = spec.sizes
    if spec.speculative is not None and isinstance(spec.speculative.schedule, ScheduleSource):
        spec = replace(spec, speculative=today.speculative)
    sizes = Sizes(
        policy=Policy.MEASURED,
        max_tokens=old.max_tokens,
        max_reqs=old.max_reqs,
        traffic=TRAFFIC_FILE,
        profile=PROFILE_FILE,
        objective=None if values["objective"] == "mean" else values["objective"],
    )
    stated = {name: values[name] for name in ("max_graphs", "memory", "seconds") if values[name] is not None}
    roles = {role.value: replace(spec.roles.of(role), sizes=None) for role in Role}
    return replace(spec, sizes=sizes, roles=Roles(**roles), budget=replace(spec.budget, **stated))


def _bounds(budget: Budget) -> TuningBounds | None:
    """Return the bounds of a budget; None for one without any."""
    if budget.max_graphs is None and budget.memory is None and budget.seconds is None:
        return None
    memory = None if budget.memory is None else budget.memory / MIB
    return TuningBounds(graphs=budget.max_graphs, memory_mib=memory, seconds=budget.seconds)


def _within(spec: Spec, count: int, kept: TuningBounds | None) -> Spec:
    """Return the spec with a budget of so many graphs, and of the memory and time that are kept to."""
    budget = replace(spec.budget, max_graphs=count)
    if kept is not None:
        memory = None if kept.memory_mib is None else math.ceil(kept.memory_mib * MIB)
        budget = replace(budget, memory=memory, seconds=kept.seconds or None)
    return replace(spec, budget=budget)


def _assumed(tuning: Tuning, costs: Costs, today: Emulation, accepted: float | None) -> Iterator[str]:
    """Yield what the figures rest on, where no source says it."""
    if tuning.pricings is not None:
        graphs = {(graph.role, graph.entry) for pricing in tuning.pricings for graph in pricing.deployment.graphs}
        families = sorted({entry_family(*graph) for graph in graphs}, key=lambda family: family_name(*family))
        yield from costs.assumptions(families)
    if costs.profile.spread is None:
        yield f"the profile does not state its spread; it is taken to be {SPREAD:.0%}"
    if tuning.today is not None and tuning.today.unknown:
        yield f"{tuning.today.unknown:,} steps count as eager today: the observation has no answer for their batches"
    if not costs.profile.step(1, 0.0):
        yield "the profile has no time of a step apart from its passes; shares of a step are shares of its passes"
    if today.lora is not None:
        yield "neither traffic nor profile says what adapters are active; steps count as those without any"
    if today.speculative is not None and accepted is None:
        yield "the traffic has no acceptance of drafts; a step counts as one token of each request"


def _launch(subject: TuneSubject, tuning: Tuning, output: Path | None) -> LaunchLine | None:
    """Return the command that starts the engine under the plan; None without an engine's words, or without a change."""
    if tuning.verdict is not TuneVerdict.CHANGE or tuning.plan is None or subject.engine is None or not subject.words:
        return None
    return launch_line(subject.engine, tuning.plan, subject.words, str((output or Path()) / PLAN_FILE))


def _commands(line: LaunchLine | None, output: Path | None) -> tuple[str, ...]:
    if line is None or line.command is None:
        return ()
    return (line.command,)


def _write(
    folder: Path, form: str, tuning: Tuning, spec: Spec, measurements: Measurements, line: LaunchLine | None
) -> None:
    """Write what reproduces the plan, and the command that uses it."""
    if tuning.verdict is not TuneVerdict.CHANGE or tuning.plan is None or tuning.max_graphs is None:
        click.echo(f"nothing is written to {folder}: no change is proposed", err=form == "json")
        return
    assert measurements.traffic is not None, "it was read"
    texts = {
        SPEC_FILE: codec.dumps(_within(spec, tuning.max_graphs, tuning.kept)),
        TRAFFIC_FILE: codec.dumps(measurements.traffic),
        PROFILE_FILE: codec.dumps(measurements.profile),
        PLAN_FILE: codec.dumps(tuning.plan),
    }
    if line is not None and line.command is not None:
        texts[LAUNCH_FILE] = f"{line.command}\n"
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        codec.write(folder / name, text)
    click.echo(f"written to {folder}: {', '.join(texts)}", err=form == "json")
