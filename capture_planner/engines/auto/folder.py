"""The folder of ``launch --auto``: its journal, the plans that it keeps, and what was observed.

- ``journal.jsonl``: a ``JournalRecord`` a line;
- ``plans/DIGEST.yaml``: each plan that ran, by the digest that observations name;
- ``runs/NUMBER/``: what the workers of one run observed, and ``captured`` once an engine has captured its graphs;
- ``lock``: held while an engine runs, so that a second start only reads.

What cannot be read is skipped, with a sentence. Nothing here raises for what a folder has in it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

from capture_planner import codec
from capture_planner.engines.auto.decisions import SeenFolder, SeenRun, facts_of, plan_file
from capture_planner.errors import CapturePlannerError, InvalidValue
from capture_planner.measuring.promises import check_promise
from capture_planner.measuring.workers import read_workers
from capture_planner.modes import Role
from capture_planner.records._base import digest
from capture_planner.records.journal import STARTS, Event, JournalRecord
from capture_planner.records.plan import Plan

JOURNAL, PLANS, RUNS, LOCK, CAPTURED = "journal.jsonl", "plans", "runs", "lock", "captured"

MAX_BYTES = 8 << 20
"""Bytes of a journal that are read, from its end."""

LATEST_RUNS = 4
"""Runs whose observations are read; what follows from older ones is in the journal."""


@attrs.frozen(kw_only=True)
class Contents:
    """Contents of a folder."""

    journal: tuple[JournalRecord, ...] = ()
    seen: SeenFolder = attrs.Factory(SeenFolder)
    problems: tuple[str, ...] = ()
    """Skipped parts, in a sentence each."""


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

    def read(self, *, live: bool = False) -> Contents:
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
        seen = SeenFolder(runs=runs, plans=frozenset(plans), live=going)
        return Contents(journal=journal, seen=seen, problems=tuple(problems))

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
            os.fsync(file.fileno())

    def _records(self, problems: list[str]) -> Iterator[JournalRecord]:
        try:
            with self.journal.open("rb") as file:
                start = max(0, file.seek(0, os.SEEK_END) - MAX_BYTES)
                file.seek(start)
                lines = file.read().split(b"\n")[1 if start else 0 :]
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
    for folder in (observed.parent, *observed.parents):
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
        os.close(handle)
