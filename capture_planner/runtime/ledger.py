"""The ledger: what was captured, what each step took, what each request saw. Plain data, no torch."""

from __future__ import annotations

import attrs

from capture_planner.entry import Entry
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.plan import Plan, Waiver


@attrs.frozen(kw_only=True)
class Captured:
    """One graph that was captured, or could not be."""

    role: Role
    entry: Entry
    seconds: float
    """Warm-up and capture."""
    memory: int
    """Bytes by which the graph grew its pool: what it costs beside those captured before it."""
    alone: int
    """Bytes that it would take in a pool of its own."""
    waiver: Waiver | None = None
    """Set where there is no graph: the batches it would have served, and why they lost it."""


@attrs.frozen(kw_only=True)
class Forward:
    """One forward of one role: which batch, which graph, how much padding, how long."""

    step: int
    role: Role
    num_reqs: int
    num_tokens: int
    query_len: int | None
    """Set for a uniform decode: each request has that many tokens and is past its prompt."""
    entry: Entry | None
    reason: Reason | None
    """Why it ran eager; None where an entry served it."""
    padded_tokens: int = 0
    padded_reqs: int = 0
    repeats: int = 1
    """Forwards of this kind in the step: draft decodes run k - 1 times, or once as a fused chain."""
    host_seconds: float = 0.0
    """Values, dispatch, fill, padding, backend preparation and guards; of all repeats together."""
    seconds: float = 0.0
    """All of it, of all repeats together."""

    @property
    def mode(self) -> GraphMode:
        """FULL, PIECEWISE, or NONE for an eager step."""
        return GraphMode.NONE if self.entry is None else self.entry.mode


@attrs.frozen(kw_only=True)
class Step:
    """One step of the scheduler: a target forward and what the drafter ran after it."""

    index: int
    num_reqs: int
    num_tokens: int
    prompts: int
    """Requests still in their prompt."""
    drafted: int
    """Draft tokens that the target verified."""
    accepted: int
    seconds: float
    waiting: int
    """Requests that wait for a place."""


@attrs.frozen(kw_only=True)
class Served:
    """One request. Times are in seconds of wall clock from when it entered the queue."""

    name: str
    prompt_tokens: int
    output_tokens: int
    first_token: float | None
    """Time to the first token; None where there was none."""
    finished: float | None
    """Time to the last token; None where it was cut off."""
    tokens: tuple[int, ...] = ()
    """What was generated."""
    text: str | None = None
    """The same as text, where a tokenizer was given."""


@attrs.frozen(kw_only=True)
class RunReport:
    """All that happened when a plan was executed."""

    plan: Plan
    """The plan that was given."""
    model: str
    """What ran: an architecture, and where its weights came from."""
    backends: dict[str, str]
    """Name and version of each backend that executed."""
    host: dict[str, str]
    """Machine and versions: device, torch, python."""
    captured: tuple[Captured, ...]
    forwards: tuple[Forward, ...]
    steps: tuple[Step, ...]
    served: tuple[Served, ...]
    buffers: int
    """Bytes of persistent buffers: fields, outputs, workspaces."""
    kv_cache: int
    """Bytes of the KV cache."""
    capture_seconds: float
    serve_seconds: float
    interrupted: bool = False
    """Whether it was stopped before all requests were served."""
