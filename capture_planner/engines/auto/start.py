"""A start of ``launch --auto``: the clock, the machine and the process around what ``decisions`` decides.

It never keeps an engine from starting: an error of ours is one line, and the engine runs by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import attrs

from capture_planner.engines import engines
from capture_planner.engines.auto.decisions import (
    StartDecision,
    TuneProposal,
    conclude,
    decide,
    failed,
    put_aside,
    refused,
    short,
    start_record,
)
from capture_planner.engines.auto.folder import CAPTURED, JournalFolder
from capture_planner.engines.child import EngineEnd, run_marked
from capture_planner.engines.command_line import fitting_flags, started
from capture_planner.engines.engine import Engine
from capture_planner.engines.launch import OBSERVE, PLAN, PROFILE, STARTED
from capture_planner.errors import CapturePlannerError, FlagError
from capture_planner.records.journal import DeploymentKey, Event, JournalRecord
from capture_planner.records.plan import Plan

_WITHOUT_GRAPHS = (
    *("--host", "--port", "--uds", "--api-key", "--hf-token", "--served-model-name", "--root-path", "--chat-template"),
    *("--uvicorn-log-level", "--disable-log-requests", "--enable-log-requests", "--disable-log-stats"),
    *("--allowed-origins", "--ssl-keyfile", "--ssl-certfile", "--otlp-traces-endpoint"),
)
"""Flags that change no graph: a command line that differs in them alone is the same deployment."""


@attrs.frozen(kw_only=True)
class EngineStart:
    """An engine that is about to run."""

    decision: StartDecision | None
    """None: an error of ours; the engine runs by itself, and nothing is written."""
    words: tuple[str, ...]
    variables: Mapping[str, str] = attrs.Factory(dict)


@attrs.define(kw_only=True)
class AutoLaunch:
    """One call of ``launch --auto``."""

    folder: JournalFolder
    variables: Mapping[str, str]
    """Those in front of the command."""
    words: tuple[str, ...]
    """Program and arguments."""
    writes: bool
    """Whether the folder is ours to write; else it is only read."""
    tune: Callable[[int], TuneProposal | None]
    """Tunes on the observation of a run, and keeps the plan in the folder; None: not in time."""
    say: Callable[[str], None]
    announce: Callable[[StartDecision, Plan | None, Path | None], None]
    """Shows what runs: the decision, its plan, and the folder that is observed into."""

    def prepare(self) -> EngineStart:
        """Return what to run; whatever goes wrong here, the engine by itself."""
        return self._guarded(self._decided)

    def run(self, prepared: EngineStart) -> int:
        """Run the engine, write down how it ended, and return its exit code.

        Where it ended before its capture under a plan, that is put aside, and the engine runs once more by itself.
        Raises ``EngineError`` where the program cannot be started.
        """
        ended, decision = self._ended(prepared), prepared.decision
        # An engine that a signal ended, or that captured, says nothing against its plan; nor does exit code 0.
        if decision is None or decision.plan is None or ended.captured or ended.interrupted or not ended.code:
            return ended.code
        record, again = failed(decision, ended.code, _now())
        self._append([record])
        self.say(f"{short(decision.plan)} is put aside: {record.reason}")
        return self._ended(self._guarded(lambda: self._started(again, None, self.words, []))).code

    def _guarded(self, prepare: Callable[[], EngineStart]) -> EngineStart:
        try:
            return prepare()
        except Exception as error:
            self.say(f"an error of capture-planner, {_named(error)}; the engine runs by itself")
            return EngineStart(decision=None, words=self.words, variables=self.variables)

    def _decided(self) -> EngineStart:
        engine, count = self._engine
        # Without a plugin there is nothing to observe by.
        if engine is not None and engine.launch is None:
            self.say(f"{engine.name} has no plugin that observes or runs plans; it runs by itself")
            return EngineStart(decision=None, words=self.words, variables=self.variables)
        contents = self.folder.read(live=not self.writes)
        for problem in contents.problems:
            self.say(problem)
        decision = decide(contents.journal, contents.seen, self._deployment(), _now())
        # A plan that cannot be kept could not be named by its observation.
        if decision.tune_on is not None and self.writes:
            decision = conclude(decision, self._proposal(decision.tune_on))
        else:
            decision = attrs.evolve(decision, tune_on=None)
        records, plan, words = list(decision.findings), None, self.words
        try:
            if decision.plan is not None:
                plan = self.folder.load_plan(decision.plan)
                words = words if engine is None else self._with_flags(engine, plan, count)
        except FlagError as error:
            reason = f"launch refuses the plan: {error.problems[0]}"
            records.append(put_aside(decision, reason, _now()))
            decision, plan = refused(decision, reason), None
        return self._started(decision, plan, words, records)

    def _started(
        self, decision: StartDecision, plan: Plan | None, words: tuple[str, ...], records: Sequence[JournalRecord]
    ) -> EngineStart:
        """Write and show a start, and return it with the variables of the plugin inside the engine."""
        self._append([*records, start_record(decision, self._deployment(), _now(), plan)])
        run = self.folder.run(decision.run)
        self.announce(decision, plan, run if self.writes else None)
        variables = dict(self.variables)
        if decision.plan is not None:
            variables[PLAN] = str(self.folder.plan_file(decision.plan))
        if self.writes:
            variables |= {OBSERVE: str(run), PROFILE: "1", STARTED: str(run / CAPTURED)}
        return EngineStart(decision=decision, words=words, variables=variables)

    def _proposal(self, run: int) -> TuneProposal | None:
        """Return what tuning found; where it failed, that."""
        try:
            return self.tune(run)
        except Exception as error:
            return TuneProposal(reason=f"tuning failed: {_named(error)}")

    def _with_flags(self, engine: Engine, plan: Plan, count: int) -> tuple[str, ...]:
        """Return the command with the flags that the plan needs, without those that contradict it."""
        flags, notes = fitting_flags(engine, plan, self.words[count:])
        for note in notes:
            self.say(note)
        assert engine.launch is not None
        return (*self.words[:count], *flags, *engine.launch(plan, flags).arguments)

    def _append(self, records: Sequence[JournalRecord]) -> None:
        """Write records into the journal; where that fails, the folder is only read from here on."""
        if not self.writes:
            return
        try:
            self.folder.append(records)
            self.folder.run(records[-1].run).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.writes = False
            self.say(f"{self.folder.path}: nothing more is written: {error.strerror or error}")

    def _ended(self, prepared: EngineStart) -> EngineEnd:
        """Run an engine to its end, and write down how it ended."""
        # A plan or a folder of another launch around this one is none of this engine's.
        own = {name: value for name, value in os.environ.items() if name not in (PLAN, OBSERVE, PROFILE, STARTED)}
        ended, decision = run_marked(prepared.words, {**own, **prepared.variables}), prepared.decision
        if decision is None or not self.writes:
            return ended
        # A plugin that is older than the mark has observed all the same.
        captured = ended.captured or any(self.folder.run(decision.run).glob("*.y*ml"))
        end = JournalRecord(
            time=_now(),
            run=decision.run,
            decision=Event.END,
            plan=decision.plan,
            graphs=decision.graphs,
            captured=captured,
            exit_code=ended.code & 255,
            interrupted=ended.interrupted,
        )
        self._append([end])
        return attrs.evolve(ended, captured=captured)

    @property
    def _engine(self) -> tuple[Engine | None, int]:
        """The engine that the command starts, None for a script, and how many words its program has."""
        return started(self.words, [item.value for item in engines().values()]) or (None, 0)

    def _deployment(self) -> DeploymentKey:
        """Return what is known of the deployment before it starts."""
        own = [f"{name}={value}" for name, value in sorted(self.variables.items())]
        read = [each for each in own if each.startswith(("VLLM_", "SGLANG_"))]
        # Secrets decide no graph, and a journal is shared.
        mattering = [each for each in read if not any(word in each.partition("=")[0] for word in ("KEY", "TOKEN"))]
        return DeploymentKey(
            command=(*mattering, *_with_graphs(self.words)),
            engine_version=_installed(self._engine[0]),
            devices=_devices(),
        )


def _with_graphs(words: Sequence[str]) -> Iterator[str]:
    """Yield the words without flags that change no graph, and their values."""
    inside = False
    for word in words:
        if word.startswith("-"):
            inside = word.partition("=")[0].replace("_", "-") in _WITHOUT_GRAPHS
        if not inside:
            yield word


def _installed(engine: Engine | None) -> str | None:
    """Return the version of an engine's distribution in this environment; of a script, of the only one installed."""
    candidates = [engine] if engine is not None else [item.value for item in engines().values()]
    versions = set()
    for each in candidates:
        try:
            versions.add(metadata.version(each.name).partition("+")[0])
        except metadata.PackageNotFoundError:
            continue
    return versions.pop() if len(versions) == 1 else None


def _devices() -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs that the driver lists, each once."""
    names = set()
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        try:
            lines = file.read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        names |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return tuple(sorted(names))


def _named(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, CapturePlannerError) else f"{type(error).__name__}: {first}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
