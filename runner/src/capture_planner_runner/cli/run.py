"""``run``: execute a plan on this machine, and report."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import click

from capture_planner.analysis.diff import diff
from capture_planner.cli import options
from capture_planner.cli.common import (
    FINDINGS,
    Output,
    OutputFile,
    make_folder,
    plan_of,
    progress_bars,
    read_document,
    show_lines,
    show_notes,
)
from capture_planner.cli.ending import INTERRUPTED, Say, exit_code_of, exit_interrupted, say_error
from capture_planner.cli.options import FILE, SIZE, FiniteRange, ParsedText, dashed, flag, option, stated
from capture_planner.codec import dumps
from capture_planner.errors import CapturePlannerError, RankError, RunError
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_runner._extras import refuse_missing
from capture_planner_runner.cli.options import RANGE, acceptance, compiling, proposals

if TYPE_CHECKING:
    from capture_planner_runner.launch.launch import MakeReport, Outcome
    from capture_planner_runner.ledger.session import RunReport
    from capture_planner_runner.ranks.peers import Peers
    from capture_planner_runner.ranks.processes import RankProcess
    from capture_planner_runner.ranks.watch import RankVerdict
    from capture_planner_runner.serving.workload import Decode, Request


LAST_WORDS = 2.0
"""Seconds for a partial report of a process whose main thread hangs."""


class PartialReport:
    """The report of what has run so far, shown once: by the main thread, or in place of it where it hangs."""

    def __init__(self, show: Callable[[RunReport], None]) -> None:
        self._show, self._lock = show, threading.Lock()
        self._make: MakeReport | None = None

    def offer(self, make: MakeReport) -> None:
        """Set the function that makes the report."""
        self._make = make

    def show(self, fault: str) -> bool:
        """Show the report, if there is one, and it was not shown; return whether it is shown now."""
        with self._lock:
            # Taken before it is called, so that only one of two threads shows the report.
            make, self._make = self._make, None
            report = None if make is None else make(fault)
            if report is not None:
                self._show(report)
            return report is not None

    def withdraw(self) -> None:
        """Show nothing from here on, because the complete report is shown."""
        with self._lock:
            self._make = None


@attrs.frozen(kw_only=True)
class RankCommand:
    """The command of one rank, from its launch to its exit code."""

    me: RankProcess
    plan: Callable[[], Plan]
    execute: Callable[[Plan, Peers, Callable[[MakeReport], None]], Outcome]
    """Runs the plan with the other ranks; its third argument takes what makes a report of what has run."""
    show: Callable[[Outcome], object]
    """Shows what was run; on the first rank the report of all."""
    show_partial: Callable[[RunReport], None]
    as_json: bool
    slow: float | None

    def __call__(self, say: Say) -> int:
        """Return the exit code. Each line of an error is passed to ``say`` once."""
        said: set[str] = set()

        def say_once(line: str) -> None:
            if line not in said:
                said.add(line)
                say(line)

        partial_report = PartialReport(self.show_partial if self.me.rank == 0 else lambda report: None)
        work = partial(self._run, partial_report, say_once)
        return exit_code_of(work, as_json=self.as_json and self.me.rank == 0, say=say_once)

    def _run(self, partial_report: PartialReport, say: Say) -> object:
        from capture_planner_runner.launch.request import refuse_other_size
        from capture_planner_runner.ranks.connection import connected
        from capture_planner_runner.ranks.group import RankGroup
        from capture_planner_runner.ranks.watch import WaitLimits, sentence

        def end(verdict: RankVerdict, is_raised: bool) -> NoReturn:
            """End around a main thread that hangs in a collective: first the error, then what has run."""
            if not verdict.interrupted:
                say(verdict.says)
            fault = "" if verdict.interrupted else verdict.says
            # In a thread with a time limit: making the report reads the device, which may hang too.
            last_words = threading.Thread(target=partial_report.show, args=(fault,), daemon=True)
            last_words.start()
            last_words.join(LAST_WORDS)
            # os._exit below does not flush buffers.
            sys.stdout.flush()
            os._exit(INTERRUPTED if verdict.interrupted else 1)

        limits = WaitLimits(slow=self.slow, start=self.slow or WaitLimits().start)
        outcome = None
        try:
            with connected(self.me, limits, end) as connection:
                # Read by each rank under the watch, so that an error of one ends all.
                plan = self.plan()
                refuse_other_size(plan, self.me.size)
                device = _device(plan, self.me)
                parallel = plan.parallel
                peers = RankGroup(connection, tensor_size=parallel.tensor, data_size=parallel.data, device=device)
                outcome = self.execute(plan, peers, partial_report.offer)
                if outcome.report.interrupted:
                    # On the way out the other ranks are told; the report is complete, and is shown below.
                    raise KeyboardInterrupt
                peers.close()
        except Exception as error:
            fault = str(error) if isinstance(error, RankError) else f"rank {self.me.rank} ended: {sentence(error)}"
            # First what has run, then the error: a reader of the terminal sees the cause last.
            is_shown = partial_report.show(fault)
            # An unexpected error is shown as a traceback, after the report.
            if not is_shown or not isinstance(error, CapturePlannerError):
                raise
            say(str(error))
            return 1
        except KeyboardInterrupt:
            if outcome is None:
                partial_report.show("")
                # Only the first rank says on the terminal that the run was interrupted.
                if self.me.rank:
                    return INTERRUPTED
                raise
        partial_report.withdraw()
        return self.show(outcome)


def launched() -> RankProcess | None:
    """Return the launcher's values for this process; None without a launcher."""
    from capture_planner_runner.ranks.processes import RankProcess

    return RankProcess.of(os.environ)


def _device(plan: Plan, me: RankProcess) -> Any:
    """Return the device of this rank, which is the current one from here on."""
    import torch

    from capture_planner_runner import host

    device = host.device_of(plan.environment)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if me.local_rank >= count:
        raise RunError(
            f"rank {me.rank} is number {me.local_rank} on its host, which has {count} CUDA devices; each rank needs "
            "one of its own"
        )
    torch.cuda.set_device(me.local_rank)
    return host.device_of(plan.environment)


def run_here(plan: Plan, size: int, command: Callable[[RankProcess], RankCommand]) -> int:
    """Run all ranks of a plan on this host, and return the exit code of the first that failed, or 0."""
    # Imported before the fork, so that the ranks share it.
    importlib.import_module("capture_planner_runner.models.huggingface")
    from capture_planner_runner.launch.request import refuse_other_size
    from capture_planner_runner.ranks.processes import run_ranks

    # Before the fork: ranks that are missing would be waited for.
    refuse_other_size(plan, size)
    return run_ranks(size, lambda me, say: command(me)(say), say_error)


def run_as_rank(command: RankCommand) -> NoReturn:
    """Run one rank of several that were launched; its error is noted for torchrun, too, which shows it at its end."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    def say(line: str) -> None:
        say_error(line)
        get_error_handler().record_exception(RankError(line))

    code = command(say)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the groups of torch would wait for ranks that are gone.
    os._exit(code)


MAX_CHANGES = 8
"""Graphs that are named where many changed."""

CHECKS = {"tokens": "verify", "tensors": "compare", "indices": "debug", "padding": "poison", "none": "trust"}
"""The field of ``RunRequest`` or of its ``Options`` that each value of ``--check`` sets."""


def _checks(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    *checks, none = CHECKS
    if unknown := [name for name in names if name not in CHECKS]:
        raise ValueError(f"{unknown[0]!r} is no check; give some of {', '.join(checks)}, or {none}.")
    if none in names and len(names) > 1:
        raise ValueError(f"{text!r}: {none} removes even the guards, and the others add checks; give one or the other.")
    return names


@click.command()
@click.argument("plan_file", metavar="PLAN|SPEC")
@options.model
@option(
    "--drafter",
    default="random",
    metavar="copy|miss|chance|random|FOLDER",
    help="Source of draft tokens: always right, always wrong, right with probability --chance, a drafter with "
    "random weights, or a folder with an EAGLE or EAGLE-3 head, MTP modules or a draft model. The first three copy a "
    "rehearsal, which holds in float32 and float64; in bfloat16 give --acceptance.",
)
@option("--chance", type=FiniteRange(0, 1), default=0.5, help="Probability that --drafter chance is right.")
@acceptance
@proposals
@click.option(
    "--adapters",
    multiple=True,
    metavar="N|FOLDER",
    help="LoRA adapters, assigned to requests round-robin: N with random weights, or a folder that peft saved.",
)
@click.option("--requests", type=click.IntRange(0), help="Number of requests. Default: 16, or all in the file.")
@click.option("--trace", type=FILE, help="CSV of arrival times, prompt and output lengths.")
@click.option("--prompts", type=FILE, help="Text file with one prompt per line, or .jsonl; needs --tokenizer.")
@click.option("--tokenizer", type=FILE, help="Folder of the tokenizer.")
@click.option("--rate", type=FiniteRange(0, min_open=True), help="Request rate (req/s). Default: all at once.")
@option("--prompt-tokens", type=RANGE, default="1:64", help="Prompt length of generated requests.")
@option(
    "--output-tokens",
    type=RANGE,
    default="16:32",
    help="Output length of generated requests; for --prompts, HIGH is the limit.",
)
@option(
    "--temperature",
    type=FiniteRange(0),
    default=0.0,
    help="Temperature at which tokens and drafts are sampled, each request by --seed and its name; 0: greedy.",
)
@option("--top-p", type=FiniteRange(0, 1, min_open=True), default=1.0, help="Probability of the tokens sampled from.")
@option("--speed", type=FiniteRange(0, min_open=True), default=1.0, help="Speed-up factor for --trace.")
@option(
    "--step-time", type=FiniteRange(0, min_open=True), default=0.01, help="Seconds of simulated arrival time per step."
)
@flag("--clip", "Truncate requests that exceed the model length.")
@options.seed
@options.page_size(16)
@options.threads
@options.pages("every request at full length, as far as memory allows: on a GPU by --memory-utilization, else 1 GiB")
@click.option(
    "--memory-utilization",
    type=FiniteRange(0, 1, min_open=True),
    help="Share of a GPU's memory that weights, buffers, graphs and KV cache may take together. Default: 0.9.",
)
@option(
    "--warm-up/--no-warm-up",
    default=None,
    help="Run steps of the workload's shapes before the clock starts. Default: on a GPU.",
)
@click.option("--graph-memory", type=SIZE, help="Memory limit of each graph pool. Default: the plan's budget.")
@click.option(
    "--dump-graphs",
    type=FILE,
    metavar="FOLDER",
    help="Write what each graph holds: Graphviz of CUDA graphs, text of recorded ones.",
)
@click.option(
    "--timeline",
    cls=OutputFile,
    help="Write captures, steps and forwards of all ranks as Chrome trace events, which ui.perfetto.dev opens.",
)
@flag("--strict", "Stop if a graph does not fit, instead of dropping it.")
@compiling
@flag("--eager", "Run eager: capture no graphs.")
@click.option(
    "--check",
    type=ParsedText("CHECK,...", _checks),
    default=(),
    help="Comma-separated checks. tokens: tokens and hidden states against the model in higher precision; exit code 2 "
    "if one is off; sampled tokens against an eager run with the same seeds. tensors: each step eager as well; stop "
    "with exit code 2 at the first tensor that differs. indices: the bounds of every index field at every step. "
    "padding: buffers filled with NaN before each forward. none: replay without guards. Default: guards only.",
)
@options.admit("Run")
@click.option("--fingerprints", cls=OutputFile, help="Write the plan with fingerprints of its captured graphs.")
@click.option(
    "--ranks",
    type=click.IntRange(2, 64),
    help="Number of ranks to start on this host: the plan's parallel.tensor x parallel.data.",
)
@click.option(
    "--rank-timeout",
    type=FiniteRange(0, min_open=True),
    metavar="SECONDS",
    help="Longest wait for a rank that answers but is behind the others. Default: 10 at the start, then no limit.",
)
@option(
    "--all-reduce",
    type=click.Choice(["auto", "nccl", "symmetric"]),
    default="auto",
    help="Algorithm that sums over the GPUs of one model. auto: symmetric memory for small sizes if they have it, else "
    "NCCL.",
)
@options.progress
@options.environment
@options.reports()
def run(plan_file: str, environment: str | None, to: Output, **values: Any) -> None:
    """Execute a plan: reserve memory, capture graphs, serve requests, and report.

    Without a GPU, graphs are recorded operator by operator and replayed on the same storage. Requests are
    generated, or read from a trace or a file of prompts. Ctrl-C and SIGTERM end with a complete report of what ran.

    A plan for several ranks runs in as many processes: with --ranks on one host, or under torchrun.
    """
    _refuse_contradictions(values)
    for name, (where, applies) in _APPLIES.items():
        if stated(name) and not applies(values):
            raise click.UsageError(f"{dashed(name)} goes with {where}.")
    make_folder("--dump-graphs", values["dump_graphs"])
    refuse_missing()
    me = launched()
    if values["ranks"] is not None and me is not None:
        raise click.UsageError("--ranks starts the ranks itself, and a launcher has started this process; omit one.")
    if values["ranks"] is None and me is None:
        _show(_launch(_plan(plan_file, environment), values=values), values, to)
        return

    def command(me: RankProcess, plan: Callable[[], Plan]) -> RankCommand:
        return RankCommand(
            me=me,
            plan=plan,
            execute=partial(_launch, values=values),
            show=partial(_show, values=values, to=to, rank=me.rank),
            show_partial=partial(_emit, to=Output(to.form)),
            as_json=to.is_json,
            slow=values["rank_timeout"],
        )

    if me is not None:
        run_as_rank(command(me, partial(_plan, plan_file, environment)))
    plan = _plan(plan_file, environment)
    code = run_here(plan, values["ranks"], partial(command, plan=lambda: plan))
    if code == INTERRUPTED:
        exit_interrupted()
    click.get_current_context().exit(code)


def _show(outcome: Outcome, values: dict[str, Any], to: Output, *, rank: int = 0) -> None:
    """Show what was run; on other ranks than the first, only what is wrong on this one."""
    report = outcome.report
    if rank == 0:
        _emit(report, to, outcome.differing)
        file = values["fingerprints"]
        found, locked = report.fingerprints, report.plan.fingerprints
        # A graph that waits for its first use has the fingerprint of an earlier run.
        merged = found if found is None or locked is None else locked.updated(found)
        now = replace(report.plan, fingerprints=merged)
        if locked is not None:
            changes = [change.message for change in diff(report.plan, now) if change.subject == "fingerprint"]
            made = f"the fingerprints in the plan are of {locked.device} and torch {locked.torch}"
            show_notes([made, *changes[:MAX_CHANGES]] if changes else [])
            if len(changes) > MAX_CHANGES:
                show_notes([f"{counted(len(changes) - MAX_CHANGES, 'other graph')} changed"])
        if file is not None and found is None:
            show_notes([f"{file} is not written: {report.host.get('no fingerprints', 'no graph was captured')}"])
        elif file is not None:
            to.write(file, lambda: dumps(now))
        if values["timeline"] is not None:
            from capture_planner_runner.report.timeline import timeline

            to.write(values["timeline"], lambda: json.dumps(timeline(outcome.events)))
    _end(outcome, as_json=to.is_json, rank=rank)


def _emit(report: RunReport, to: Output, differing: tuple[str, ...] | None = None) -> None:
    from capture_planner.report.plain import plain
    from capture_planner_runner.report.run import run_report

    to.show(lambda: plain(report) | {"differing": differing}, lambda: run_report(report))


def _end(outcome: Outcome, *, as_json: bool, rank: int = 0) -> None:
    """Print the results of comparisons, and exit with the code that fits; of a later rank only those that are wrong."""
    context, report = click.get_current_context(), outcome.report
    whose = f"rank {rank}: " if report.plan.parallel.data > 1 or rank else ""
    checks = [check for check in (report.comparison, report.verification) if check is not None]
    is_wrong = not all(check.passed for check in checks)
    for check in checks:
        if rank == 0 or not check.passed:
            # With JSON, standard output has the report alone.
            show_lines(f"{whose}{check.verdict}", err=as_json or rank > 0)
    if outcome.not_dumped:
        say_error(f"{whose}{outcome.not_dumped}")
    if report.interrupted:
        exit_interrupted()
    if is_wrong:
        context.exit(FINDINGS)
    if outcome.not_dumped:
        context.exit(1)


def _plan(file: str, environment: str | None) -> Plan:
    """Read a plan, or plan a spec for the processor, which every machine has."""
    return plan_of(read_document(file), environment, default="cpu")


def _launch(
    plan: Plan,
    peers: Peers | None = None,
    offer: Callable[[MakeReport], None] = lambda make: None,
    *,
    values: dict[str, Any],
) -> Outcome:
    """Execute a plan, with the other ranks where there are any."""
    import torch

    from capture_planner_runner.launch.launch import launch
    from capture_planner_runner.launch.request import RunRequest
    from capture_planner_runner.options import Options
    from capture_planner_runner.ranks.peers import ALONE

    torch.set_num_threads(values["threads"])
    (source, decode), drafter, peers = _workload(values), values["drafter"], peers or ALONE
    dumped = values["dump_graphs"]
    if dumped is not None and peers.place.size > 1:
        # By rank: the graphs of all ranks have the same names.
        dumped = Path(dumped) / f"rank-{peers.place.rank}"
    checked = {field: name in values["check"] for name, field in CHECKS.items()}
    asked = RunRequest(
        **_given(RunRequest, values)
        | {
            "drafter": drafter if drafter in _DRAFTERS else Path(drafter),
            "adapters": _adapters(values["adapters"]),
            "verify": checked.pop("verify"),
            "dump_graphs": dumped and Path(dumped),
            "timeline": values["timeline"] is not None,
            "step_seconds": values["step_time"],
            "slower": _slower(values),
            "options": Options(**_given(Options, values) | checked),
        }
    )
    bars = progress_bars(values["progress"])
    return launch(plan, registry.load_backends(), source, asked, bars, decode=decode, peers=peers, offer=offer)


def _given(kind: type[attrs.AttrsInstance], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of options that are fields of the same name; the others keep its defaults."""
    return {field.name: values[field.name] for field in attrs.fields(kind) if values.get(field.name) is not None}


def _workload(values: dict[str, Any]) -> tuple[Callable[[int], Sequence[Request]], Decode | None]:
    """Return what makes the requests for a vocabulary, and what turns tokens into text."""
    from capture_planner_runner.serving.workload import from_prompts, from_trace, generated

    seed, limit = values["seed"], values["requests"]
    if values["prompts"] is not None:
        requests, decode = from_prompts(
            values["prompts"], values["tokenizer"], max_new_tokens=values["output_tokens"][1]
        )
        return lambda vocab_size: requests[:limit], decode
    lengths = {name: values[name] for name in ("rate", "prompt_tokens", "output_tokens")}
    read: Callable[..., Sequence[Request]] = partial(generated, 16 if limit is None else limit, **lengths)
    if values["trace"] is not None:
        read = partial(from_trace, values["trace"], limit=limit, speed=values["speed"])
    return lambda vocab_size: read(seed=seed, vocab_size=vocab_size), None


def _slower(values: dict[str, Any]) -> str:
    """Return what makes requests arrive more slowly; empty where they always come at once."""
    if values["trace"] is not None:
        return "lower --speed"
    if values["prompts"] is not None:
        return ""
    return "give --rate" if values["rate"] is None else "lower --rate"


def _adapters(given: Sequence[str]) -> int | tuple[Path, ...]:
    """Return a number of adapters, or their folders."""
    if len(given) == 1 and given[0].isdecimal():
        return int(given[0])
    return tuple(map(Path, given))


_MOST_ADAPTERS = 1024
_DRAFTERS = ("copy", "miss", "chance", "random")


def _refuse_contradictions(values: dict[str, Any]) -> None:
    if values["trace"] is not None and values["prompts"] is not None:
        raise click.UsageError("Give one of --trace and --prompts.")
    if (values["prompts"] is None) != (values["tokenizer"] is None):
        raise click.UsageError("--prompts and --tokenizer go together.")
    for name in ("tensors", "none"):
        if name in values["check"] and values["eager"]:
            raise click.UsageError(f"--check {name} goes with graphs, so without --eager.")
    if values["drafter"] not in _DRAFTERS and not Path(values["drafter"]).exists():
        raise click.UsageError(
            f"--drafter {values['drafter']}: no such folder; give a folder or one of {', '.join(_DRAFTERS)}."
        )
    if not isinstance(adapters := _adapters(values["adapters"]), int):
        for folder in adapters:
            if not folder.is_dir():
                raise click.UsageError(f"--adapters {folder}: no such folder; give folders, or one number.")
    elif not 1 <= adapters <= _MOST_ADAPTERS:
        raise click.UsageError(f"--adapters {adapters}: expected 1 to {_MOST_ADAPTERS}.")


_CAPTURES = ("captures, so without --eager", lambda values: not values["eager"])
_GENERATED = ("generated requests", lambda values: values["trace"] is None and values["prompts"] is None)
_APPLIES: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    "chance": ("--drafter chance", lambda values: values["drafter"] == "chance"),
    "top_p": ("--temperature above 0", lambda values: values["temperature"] > 0),
    "speed": ("--trace", lambda values: values["trace"] is not None),
    "output_tokens": ("generated requests or --prompts", lambda values: values["trace"] is None),
    "strict": _CAPTURES,
    "fingerprints": _CAPTURES,
    "graph_memory": _CAPTURES,
    "dump_graphs": _CAPTURES,
    "rate": _GENERATED,
    "prompt_tokens": _GENERATED,
    "rank_timeout": ("several ranks: --ranks or torchrun", lambda values: values["ranks"] or launched() is not None),
}
