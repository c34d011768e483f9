"""A start of ``launch --auto``: the clock, the machine and the process around what ``decisions`` decides.

It never keeps an engine from starting: an error of ours is one line, and the engine runs by itself. Its folder has

- ``journal.jsonl``: a ``JournalRecord`` a line;
- ``plans/DIGEST.yaml``: each plan that ran, by the digest that observations name;
- ``runs/NUMBER/``: what the workers of one run observed, and ``captured`` once an engine has captured its graphs;
- ``lock``: held while an engine runs, so that a second start only reads.

What cannot be read in it is skipped, with a sentence.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import attrs

from capture_planner import codec
from capture_planner.engines import engines
from capture_planner.engines.command_line import started
from capture_planner.engines.engine import Engine, spelled, without_flags
from capture_planner.engines.launch import OBSERVE, PLAN, PROFILE, STARTED
from capture_planner.errors import CapturePlannerError, EngineError, FlagError, InvalidValue
from capture_planner.measuring.workers import read_workers
from capture_planner.modes import Role
from capture_planner.records._base import digest
from capture_planner.records.plan import Plan
from capture_planner_tuner.auto.decisions import (
    AutoHistory,
    SeenRun,
    StartDecision,
    TuneProposal,
    conclude,
    decide,
    facts_of,
    failed,
    plan_file,
    put_aside,
    refused,
    short,
    start_record,
)
from capture_planner_tuner.child import EngineEnd, run_marked
from capture_planner_tuner.journal import NOT_STARTED, STARTS, DeploymentKey, Event, JournalRecord
from capture_planner_tuner.launch_line import fitting_flags
from capture_planner_tuner.promises import check_promise

JOURNAL, PLANS, RUNS, LOCK, CAPTURED = "journal.jsonl", "plans", "runs", "lock", "captured"

MAX_BYTES = 8 << 20
"""Bytes of a journal that are read, from its end."""

LATEST_RUNS = 4
"""Runs whose observations are read; what follows from older ones is in the journal."""


@attrs.frozen
class JournalFolder:
    """A folder of ``launch --auto``."""

    path: Path

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.path / JOURNAL

    def run(self, number: int) -> Path:
        """Return the folder of a run."""
        return self.path / RUNS / str(number)

    def plan_file(self, plan: str) -> Path:
        """Return the file of a plan, by its digest."""
        return self.path / plan_file(plan)

    def read(self, *, live: bool = False) -> AutoHistory:
        """Return what the folder has, as far as it can be read.

        :param live: whether another launch may be running an engine on this folder.
        """
        problems: list[str] = []
        journal = tuple(self._records(problems))
        plans = dict(self._plans(journal, problems))
        numbers = {each.run for each in journal if each.decision in STARTS} | set(self._numbers())
        latest = sorted(numbers)[-LATEST_RUNS:]
        runs = tuple(self._seen(number, plans, problems) for number in latest)
        ended = {each.run for each in journal if each.decision is Event.END}
        # Another launch holds the lock: its run has no end yet.
        going = max(numbers - ended, default=None) if live else None
        return AutoHistory(journal=journal, runs=runs, plans=frozenset(plans), live=going, problems=tuple(problems))

    def load_plan(self, plan: str) -> Plan:
        """Return a plan of the folder; raises ``CapturePlannerError`` where its file is not that plan."""
        found = codec.load_plan(self.plan_file(plan))
        # Observations name plans by digest, so a file that was edited would be blamed for another's steps.
        if digest(found) != plan:
            raise CapturePlannerError(f"{self.plan_file(plan)}: was changed: its digest is {digest(found)}")
        return found

    def keep(self, plan: Plan) -> None:
        """Write a plan into the folder; raises ``CapturePlannerError`` where that is not possible."""
        file = self.plan_file(digest(plan))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CapturePlannerError(f"{file.parent}: cannot be made: {error.strerror or error}") from error
        codec.write(file, codec.dumps(plan))

    def append(self, records: Sequence[JournalRecord]) -> None:
        """Add records to the journal; raises ``OSError``.

        They are written at once and in one piece. After a line that was cut off, as by a full disk, they begin on a
        new one.
        """
        if not records:
            return
        text = "".join(line_of(each) for each in records).encode()
        with self.journal.open("a+b") as file:
            # A disk that was full may have cut the last line off.
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                text = b"\n" + text
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # the next start relies on it, also after the host went down

    def _records(self, problems: list[str]) -> Iterator[JournalRecord]:
        try:
            with self.journal.open("rb") as file:
                start = max(0, file.seek(0, os.SEEK_END) - MAX_BYTES)
                file.seek(start)
                lines = file.read().split(b"\n")[1 if start else 0 :]  # the first one may be cut off
        except FileNotFoundError:
            return
        except OSError as error:
            problems.append(f"{self.journal}: cannot be read: {error.strerror or error}")
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield record_of(line.decode())
                except (ValueError, RecursionError, InvalidValue) as error:
                    reason = error.problems[0] if isinstance(error, InvalidValue) else "not a line of JSON"
                    problems.append(f"{self.journal}:{number}: skipped: {reason}")

    def _plans(self, journal: Sequence[JournalRecord], problems: list[str]) -> Iterator[tuple[str, Plan]]:
        for plan in dict.fromkeys(each.plan for each in journal if each.plan is not None):
            try:
                yield plan, self.load_plan(plan)
            except CapturePlannerError as error:
                problems.append(f"{plan_file(plan)}: skipped: {error}")

    def _numbers(self) -> Iterator[int]:
        try:
            names = [each.name for each in (self.path / RUNS).iterdir()]
        except OSError:
            return
        yield from (int(name) for name in names if re.fullmatch(r"[1-9][0-9]{0,5}", name))

    def _seen(self, number: int, plans: dict[str, Plan], problems: list[str]) -> SeenRun:
        folder = self.run(number)
        marked = (folder / CAPTURED).exists()
        # The mark is made at once, an observation only after some seconds.
        if not any(folder.glob("*.y*ml")):
            return SeenRun(number=number, captured=marked)
        try:
            observation = read_workers(folder)
        except (CapturePlannerError, OSError) as error:
            problems.append(f"{RUNS}/{number}: skipped: {str(error).splitlines()[0]}")
            # Whatever the error: only an engine that has captured its graphs writes observations.
            return SeenRun(number=number, captured=True)
        plan = plans.get(observation.plan) if observation.plan is not None else None
        promise = None if plan is None else plan.promise
        checked = None if promise is None else check_promise(promise, observation)
        return SeenRun(
            number=number,
            captured=True,
            facts=facts_of(observation),
            engine_version=observation.engine_version,
            plan=observation.plan,
            steps=sum(role.steps for role in observation.roles if role.role is Role.TARGET),
            verdict=None if checked is None else checked.verdict,
            reason="" if checked is None else checked.reason,
        )


def line_of(record: JournalRecord) -> str:
    """Return a record as its line in a journal, its end included."""
    return json.dumps(codec.to_data(record), ensure_ascii=True) + "\n"


def record_of(line: str) -> JournalRecord:
    """Return the record of a line; raises ``ValueError`` for what is no JSON, ``InvalidValue`` for another record."""
    return codec.structure(json.loads(line), JournalRecord)


def kept_plan(observed: Path, plan: str) -> Path | None:
    """Return the file of the plan that something was observed under, where ``launch --auto`` keeps it.

    :param observed: an observation in the folder of a run, or that folder.
    :param plan: the digest of the plan.
    """
    for folder in (observed, *observed.parents):
        file = folder / plan_file(plan)
        if (folder / JOURNAL).exists() and file.exists():
            return file
    return None


@contextmanager
def held(path: Path, say: Callable[[str], None]) -> Iterator[bool]:
    """Hold a folder while an engine runs; yield whether it is ours to write, and say why where it is not.

    :param path: the folder; it is made where it does not exist.
    """
    import fcntl  # which only POSIX has

    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        say(f"{path} cannot be written ({error.strerror or error}): it is only read, and nothing is observed")
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            taken = isinstance(error, BlockingIOError)
            why = "another launch runs on it" if taken else f"cannot be locked ({error.strerror or error})"
            say(f"{path}: {why}: it is only read, and nothing is observed")
            yield False
            return
        yield True
    finally:
        os.close(handle)  # which unlocks it


_WITHOUT_GRAPHS: Mapping[str, float] = {
    **dict.fromkeys(("--disable-log-requests", "--enable-log-requests", "--disable-log-stats"), 0),
    **dict.fromkeys(("--host", "--port", "--uds", "--api-key", "--hf-token", "--root-path", "--chat-template"), 1),
    **dict.fromkeys(("--uvicorn-log-level", "--allowed-origins", "--ssl-keyfile", "--ssl-certfile"), 1),
    **{"--otlp-traces-endpoint": 1, "--served-model-name": math.inf},
}
"""Flags that change no graph, with the most values behind each: a command line that differs in them alone is the same
deployment."""


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
        # An engine that a signal ended, that captured, or that was not started, says nothing against its plan.
        says_nothing = ended.captured or ended.interrupted or ended.code in (0, *NOT_STARTED)
        if decision is None or decision.plan is None or says_nothing:
            return ended.code
        record, again = failed(decision, ended.code, _now())
        self._append([record])
        self.say(f"{short(decision.plan)} is put aside: {record.reason}")
        return self._ended(self._guarded(lambda: self._started(again, None, self.words, []))).code

    def _guarded(self, prepare: Callable[[], EngineStart]) -> EngineStart:
        try:
            return prepare()
        # An error of ours must not keep a server from starting.
        except Exception as error:
            self.say(f"an error of capture-planner, {_named(error)}; the engine runs by itself")
            return EngineStart(decision=None, words=self.words, variables=self.variables)

    def _decided(self) -> EngineStart:
        engine, count = self._engine
        # Without a plugin there is nothing to observe by.
        if engine is not None and engine.launch is None:
            self.say(f"{engine.name} has no plugin that observes or runs plans; it runs by itself")
            return EngineStart(decision=None, words=self.words, variables=self.variables)
        history = self.folder.read(live=not self.writes)
        for problem in history.problems:
            self.say(problem)
        decision = decide(history, self._deployment(), _now())
        # A plan that cannot be kept could not be named by its observation.
        if decision.tune_on is not None and self.writes:
            decision = conclude(decision, self._proposal(decision.tune_on))
        else:
            decision = attrs.evolve(decision, tune_on=None)
        records, plan, words = list(decision.findings), None, self.words
        try:
            if decision.plan is not None:
                plan = self.folder.load_plan(decision.plan)
                if engine is not None:
                    words, given_way = self._with_flags(engine, plan, count)
                    decision = attrs.evolve(decision, reason="; ".join([decision.reason, *given_way]))
        except FlagError as error:
            reason = f"launch refuses the plan: {error.problems[0]}"
            records.append(put_aside(decision, reason, _now()))
            decision, plan = refused(decision, reason), None
        return self._started(decision, plan, words, records)

    def _started(
        self, decision: StartDecision, plan: Plan | None, words: tuple[str, ...], records: Sequence[JournalRecord]
    ) -> EngineStart:
        """Write and show a start, and return it with the variables of the plugin inside the engine."""
        # First, since a folder that turns out not to be writable is not observed into either.
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

    def _with_flags(self, engine: Engine, plan: Plan, count: int) -> tuple[tuple[str, ...], list[str]]:
        """Return the command with the flags that the plan needs, and which of its own give way to it, in sentences."""
        flags, contrary = fitting_flags(engine, plan, self.words[count:])
        assert engine.launch is not None
        words = (*self.words[:count], *flags, *engine.launch(plan, flags).arguments)
        return words, [f"{name} gives way to the plan: {why}" for name, why in contrary.items()]

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
        try:
            ended = run_marked(prepared.words, {**own, **prepared.variables})
        except EngineError as error:
            # Without an end, the plan would look as if it had kept the engine from starting.
            self._noted(prepared.decision, EngineEnd(error.exit_code, captured=False, interrupted=False))
            raise
        return self._noted(prepared.decision, ended)

    def _noted(self, decision: StartDecision | None, ended: EngineEnd) -> EngineEnd:
        """Write down how an engine ended; return it with what its folder says."""
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
    """Return the words without flags that change no graph, and their values."""
    return without_flags(words, lambda flag: _WITHOUT_GRAPHS.get(spelled(flag)))


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
