"""Journal: what ``launch --auto`` decided at each start of an engine, and how each run ended.

A journal is a file of JSON lines, one record each, the oldest first. Lines are only ever added.
"""

from __future__ import annotations

import enum
from typing import Annotated

from capture_planner.records._base import Amount, Count, Interval, field, record
from capture_planner.records.observation import Moment
from capture_planner.records.plan import Digest
from capture_planner.records.spec import SCHEMA_VERSION, SchemaVersion

ExitCode = Annotated[int, Interval(0, 255)]


class Event(enum.Enum):
    """What a record of a journal is about."""

    OBSERVE = "observe"
    """A start: the engine runs by itself."""
    APPLY = "apply"
    """A start under a plan that has not run before."""
    KEEP = "keep"
    """A start under a plan that ran before."""
    CHECK = "check"
    """A promise was checked, by the observation of a run."""
    PUT_ASIDE = "put_aside"
    """A plan is not used again."""
    END = "end"
    """An engine ended."""


STARTS = frozenset((Event.OBSERVE, Event.APPLY, Event.KEEP))

NOT_STARTED = frozenset((126, 127))
"""Exit codes that say that a program was not started, as a shell has them."""


class PromiseVerdict(enum.Enum):
    """What became of a promise."""

    KEPT = "kept"
    BROKEN = "broken"
    TOO_LITTLE_DATA = "too_little_data"


@record
class DeploymentKey:
    """What is known of a deployment before its engine starts. Equal ones can run the same plans."""

    command: tuple[str, ...] = field("words of the command line, without those that no graph depends on", default=())
    engine_version: str | None = field("installed version of the engine; None: not known here", default=None)
    devices: tuple[str, ...] = field("names of the GPUs of this machine; none: not known here", default=())


@record
class JournalRecord:
    """One line of a journal."""

    version: SchemaVersion = field("version of this file's schema", default=SCHEMA_VERSION)
    time: Moment = field("time of writing, in UTC")
    run: Count = field("number of the run that it is about; its observations are in runs/NUMBER")
    decision: Event = field("subject of the record")
    reason: str = field("why, in a sentence", default="")
    plan: Digest | None = field("digest of the plan; None: the engine by itself", default=None)
    graphs: Digest | None = field("digest of the graphs of the plan, whatever it promised", default=None)
    file: str | None = field("the plan's file, in the journal's folder", default=None)
    deployment: DeploymentKey | None = field("of a start: the deployment", default=None)
    tuned_on: Count | None = field("of a start: the run whose observation sizes were chosen by", default=None)
    before_ms: Amount | None = field("of a start: mean step without the plan, by its promise", default=None)
    after_ms: Amount | None = field("of a start: mean step under the plan, as promised", default=None)
    verdict: PromiseVerdict | None = field("outcome of the plan's promise", default=None)
    captured: bool = field("of an end: the engine had captured its graphs", default=False)
    exit_code: ExitCode | None = field("of an end: the engine's exit code", default=None)
    interrupted: bool = field("of an end: a signal from outside ended it", default=False)

    @property
    def is_error(self) -> bool:
        """Of an end: whether the engine started, and ended with an error by itself."""
        return self.exit_code not in (None, 0, *NOT_STARTED) and not self.interrupted
