"""Observation: what an engine really captured, dispatched and took, as one process saw it.

Written while the engine serves (``capture_planner.measuring.recorder``), and read wherever a plan is. Its four
tables, of graphs, answers, batches and costs, are compact in files: rows of columns (``codec.rows``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import attrs

from capture_planner.errors import Problem
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import Amount, Count, Name, NonNegative, Pattern, Tally, duplicates, field, record
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.model import Speculative
from capture_planner.records.plan import Decision, Digest
from capture_planner.records.spec import SCHEMA_VERSION, Limits, Lora, Parallel, QueryLength, SchemaVersion
from capture_planner.records.traffic import accepted_problems

MAX_BATCHES = 512
"""Most batch shapes of one role in an observation; steps of others are only counted."""

MAX_VECTORS = 32
"""Most vectors of data-parallel ranks of one role in an observation; steps of others are only counted."""

_UTC = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|\+00:00)"
Moment = Annotated[str, Pattern(_UTC, "a time in UTC such as 2026-11-22T13:00:00Z")]


@attrs.frozen(kw_only=True)
class ObservedGraph:
    """One graph that the engine captured."""

    entry: Entry
    max_query_len: int | None = None
    """Most tokens of each request, where it serves any mix of decodes: vLLM's varlen graphs."""
    prompts_only: bool = False
    """True where decodes never run on it: SGLang's graphs of prefills."""
    seconds: float | None = None
    """Seconds of its capture."""
    mib: float | None = None
    """MiB that its capture took."""
    milliseconds: float | None = None
    """Milliseconds of a replay right after capture, the least or the median of a few; None: not profiled."""
    half_milliseconds: float | None = None
    """The same with half of its tokens, where the experts of a mixture skip padding; None: they do not, or unknown."""
    replays: int = 0
    """Number of steps on it."""


@attrs.frozen(kw_only=True)
class DispatchRun:
    """The answer of the engine's own dispatcher to a range of batches, asked after capture.

    With a ``query_len`` it is about batches in which every request has that many tokens, ``first`` to ``last``
    requests. Without one, about batches whose requests differ, ``first`` to ``last`` tokens, and ``min_reqs`` to
    ``max_reqs`` requests.
    """

    query_len: int | None = None
    past_prompt: bool = True
    """True where every request is past its prompt."""
    min_reqs: int = 1
    max_reqs: int | None = None
    """Most requests; None: any number."""
    min_loras: int = 0
    max_loras: int = 0
    first: int
    last: int
    graph: int | None = None
    """Index into the role's graphs; None: eager."""
    reason: Reason | None = None
    """Reason for no graph; None with one."""

    @property
    def kind(self) -> Kind:
        """DECODE, counted in requests, or MIXED, counted in tokens."""
        return Kind.MIXED if self.query_len is None else Kind.DECODE


@attrs.frozen(kw_only=True)
class BatchCount:
    """How often one batch shape ran, and on which graph; the counts of the batch are as in ``Batch``."""

    num_reqs: int
    num_tokens: int
    query_len: int | None = None
    past_prompt: bool = True
    active_loras: int = 0
    steps: int
    """Number of steps of this shape."""
    graph: int | None = None
    """Index into the role's graphs; None: eager."""
    reason: Reason | None = None
    """Reason for no graph; None with one."""
    milliseconds: float | None = None
    """Median of the sampled steps, in milliseconds."""
    samples: int = 0
    """Number of steps that were timed."""
    interval: float | None = None
    """Mean milliseconds by which such a step puts off the next, the host's work included: of the target's batches,
    where the engine's observer measures it. Stalls are left out. In files without ``intervals`` it is a median."""
    intervals: int = 0
    """Number of steps in the mean."""
    interval_error: float | None = None
    """Standard error of that mean, in milliseconds; None: of fewer than two steps."""

    def batch(self, role: Role) -> Batch:
        """Return the batch that was counted."""
        return Batch(
            role=role,
            num_reqs=self.num_reqs,
            num_tokens=self.num_tokens,
            query_len=self.query_len,
            past_prompt=self.past_prompt,
            active_loras=self.active_loras,
        )


def _most_frequent_first(counts: tuple[BatchCount, ...]) -> tuple[BatchCount, ...]:
    def place(count: BatchCount) -> tuple[object, ...]:
        known = (count.num_tokens, count.past_prompt, count.active_loras, count.samples, count.intervals)
        others = (count.query_len, count.graph, count.milliseconds, count.interval, count.interval_error)
        numbers = (-1 if number is None else number for number in others)  # None does not compare with numbers
        return (-count.steps, count.num_reqs, *known, *numbers, count.reason or "")

    return tuple(sorted(counts, key=place))


@record
class ObservedVector:
    """What data-parallel ranks brought to a step, and how often; each list is by rank.

    A rank without work has 0 requests, or the dummy batch that its engine submits for it: vLLM's vector does not tell
    that from a decode of one request.
    """

    num_reqs: tuple[Tally, ...] = field("requests of each rank, without padding")
    num_tokens: tuple[Tally, ...] = field("tokens of each rank, without padding")
    query_len: tuple[Tally | None, ...] = field("tokens of every request of a rank; null where they differ")
    past_prompt: tuple[bool, ...] = field("every request of a rank is past its prompt")
    modes: tuple[GraphMode, ...] = field("the kind of graph that each rank would replay by itself; NONE: eager")
    steps: Tally = field("number of times that it occurred while the observed rank had work")
    graph: Tally | None = field("index of the graph that the observed rank ran; omitted where eager", default=None)
    reason: Reason | None = field("reason for no graph", default=None)

    def _problems(self) -> Iterator[Problem]:
        for name in ("num_tokens", "query_len", "past_prompt", "modes"):
            if (length := len(getattr(self, name))) != self.num_ranks:
                yield Problem(path=(name,), message=f"{length} ranks, and num_reqs has {self.num_ranks}")

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.num_reqs)

    def batch(self, role: Role, rank: int) -> Batch | None:
        """Return what a rank brought, adapters unknown; None: it was idle."""
        if not self.num_reqs[rank]:
            return None
        return Batch(
            role=role,
            num_reqs=self.num_reqs[rank],
            num_tokens=self.num_tokens[rank],
            query_len=self.query_len[rank],
            past_prompt=self.past_prompt[rank],
        )


def _most_frequent_vectors(vectors: tuple[ObservedVector, ...]) -> tuple[ObservedVector, ...]:
    # The text decides last: query lengths may be None, which does not compare with numbers.
    return tuple(sorted(vectors, key=lambda each: (-each.steps, each.num_reqs, each.num_tokens, str(each))))


@record
class EagerCost:
    """The time of one eager step, measured right after capture."""

    num_reqs: Count = field("requests in the batch")
    num_tokens: Count = field("tokens in the batch")
    query_len: NonNegative | None = field("tokens of each request, if all have the same number", default=None)
    milliseconds: Amount = field("median time of a step")


@record
class DraftPass:
    """Draft decodes that the engine runs at some batch sizes."""

    query_len: QueryLength = field("tokens of each request in a pass")
    draft_steps: Count | None = field("passes in one graph, if a graph has all of a step", default=None)
    first: Count = field("fewest requests")
    last: Count = field("most requests")


@record
class ObservedRole:
    """What was observed of one role."""

    role: Role = field("the role")
    mode: GraphMode = field("the mode that the engine resolved")
    graphs: tuple[ObservedGraph, ...] = field("graphs, in capture order", default=())
    trials: tuple[ObservedGraph, ...] = field(
        "graphs that the engine captured, timed and dropped before it served: each in a pool of its own", default=()
    )
    answers: tuple[DispatchRun, ...] = field(
        "answers of the engine's dispatcher to every batch that it was asked about after capture", default=()
    )
    batches: tuple[BatchCount, ...] = field(
        "batch shapes that ran, the most frequent first", default=(), converter=_most_frequent_first
    )
    rounded_batches: Tally = field("steps of rare shapes that are listed as larger ones", default=0)
    other_batches: Tally = field("steps of batch shapes that are not listed", default=0)
    stalls: Tally = field(
        "steps left out of mean intervals: they took ten times as long as steps of their kind", default=0
    )
    eager: tuple[EagerCost, ...] = field("times of eager steps, where the engine was profiled", default=())
    vectors: tuple[ObservedVector, ...] = field(
        "batches of the data-parallel ranks by step, the most frequent first",
        default=(),
        converter=_most_frequent_vectors,
    )
    other_vectors: Tally = field("steps of vectors that are not listed", default=0)

    def _problems(self) -> Iterator[Problem]:
        """Yield each answer and each batch that names no graph of the role, or not exactly one of graph and reason."""
        for key, items in (("answers", self.answers), ("batches", self.batches), ("vectors", self.vectors)):
            for item in items:
                if item.graph is not None and not 0 <= item.graph < len(self.graphs):
                    message = f"graph {item.graph}, and the role has {len(self.graphs)}"
                    yield Problem(path=(key,), message=message, remedy="graphs count from 0, in capture order")
                # A graph and a reason contradict each other; without both, nothing says why the batch ran eager.
                elif (item.graph is None) is (item.reason is None):
                    yield Problem(path=(key,), message="needs either a graph or a reason for none")

    @property
    def steps(self) -> int:
        """How many steps ran, of all shapes."""
        return sum(count.steps for count in self.batches) + self.other_batches

    @property
    def eager_steps(self) -> int:
        """How many steps ran without a graph."""
        return self.steps - sum(graph.replays for graph in self.graphs)


@record
class Observation:
    """What one process of an engine captured, dispatched and took."""

    version: SchemaVersion = field("version of this file's schema", default=SCHEMA_VERSION)
    engine: Name = field("the engine's name")
    engine_version: str = field("the engine's version")
    device: str | None = field("the device's own name", default=None)
    driver: str | None = field("version of the device driver", default=None)
    torch: str | None = field("version of torch", default=None)
    rank: NonNegative = field("the rank of the process", default=0)
    world_size: Count = field("number of ranks", default=1)
    replica: NonNegative = field(
        "number of the engine among those that serve side by side and share nothing", default=0
    )
    started: Moment = field("start of counting, in UTC")
    seconds: Amount = field("time that the counts cover", default=0.0)
    plan: Digest | None = field("digest of the plan that was applied; None: the engine by itself", default=None)
    model: str = field("the served model's name")
    limits: Limits = field("the scheduler's limits")
    whole_prompts: bool = field(
        "one prompt by itself may be longer than max_num_tokens (SGLang without chunks)", default=False
    )
    speculative: Speculative | None = field("speculative decoding; None: off", default=None)
    drafts: tuple[DraftPass, ...] | None = field(
        "passes of draft decodes, where they are not one token of each request, k - 1 times", default=None
    )
    lora: Lora | None = field("LoRA adapters; None: off", default=None)
    parallel: Parallel = field("placement of the model on devices", factory=Parallel)
    sizes: tuple[Count, ...] = field("the engine's list of capture sizes, in its own unit", default=())
    settings: tuple[tuple[str, str], ...] = field("resolved facts that matter for graphs: [name, value]", default=())
    decisions: tuple[Decision, ...] = field("changes by the engine's rules, in order", default=())
    kv_blocks: Tally | None = field("KV-cache blocks that were left", default=None)
    kv_token_bytes: Amount | None = field("bytes of the KV cache that a token takes on one device", default=None)
    capture_seconds: Amount | None = field("time of the whole capture", default=None)
    graph_mib: Amount | None = field("memory of all graphs, in MiB", default=None)
    roles: tuple[ObservedRole, ...] = field("the roles, target first")
    drafted: tuple[Tally, ...] = field("drafts proposed, by position", default=())
    accepted: tuple[Tally, ...] = field("drafts accepted, by position", default=())
    idle_steps: Tally = field("steps in which the rank had no work and ran a dummy batch along", default=0)
    notes: tuple[str, ...] = field("further facts, in sentences", default=())

    def _problems(self) -> Iterator[Problem]:
        yield from duplicates([role.role for role in self.roles], "the role {} is listed twice", "roles", "role")
        yield from accepted_problems(self.drafted, self.accepted)

    def kv_tokens(self, mib: float) -> int | None:
        """Return how many tokens of the KV cache so many MiB of one device would hold; None where that is not known."""
        return int(mib * (1 << 20) / self.kv_token_bytes) if self.kv_token_bytes else None

    @property
    def num_graphs(self) -> int:
        """How many graphs were captured, over all roles."""
        return sum(len(role.graphs) for role in self.roles)
