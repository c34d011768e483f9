"""Profile: what each size of graph costs on one machine, in time, memory and capture."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from capture_planner.errors import Problem
from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.records._base import Amount, Count, Name, Positive, duplicates, field, record
from capture_planner.records.environment import Device, Version, by_name
from capture_planner.records.model import Model, Speculative
from capture_planner.records.observation import Moment
from capture_planner.records.spec import SCHEMA_VERSION, Parallel, QueryLength, SchemaVersion


@record
class CostCurve:
    """Milliseconds of a forward pass by its padded tokens, for one role, mode and kind of batch.

    Below the largest size, time is a step function of the size: measured sizes are chosen where it steps. Sizes
    between two that were measured are interpolated (``planning.costs``).
    """

    role: Role = field("the role")
    mode: GraphMode = field("FULL or PIECEWISE graphs; NONE: eager")
    query_len: QueryLength | None = field("tokens of each request of a decode; None: mixed batches", default=None)
    draft_steps: Count | None = field("draft decodes in one pass; None: one", default=None)
    tokens: tuple[Count, ...] = field("measured sizes, in tokens, ascending")
    milliseconds: tuple[Positive, ...] = field("median time of a pass at each size")

    def _problems(self) -> Iterator[Problem]:
        if self.mode not in (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL):
            yield Problem(path=("mode",), message=f"a pass runs PIECEWISE, FULL or NONE, not {self.mode.value}")
        yield from _uneven(self)

    @property
    def key(self) -> tuple[Role, GraphMode, int | None, int | None]:
        """Role, mode, query length and draft steps: one curve of a profile has them."""
        return self.role, self.mode, self.query_len, self.draft_steps


@record
class ExpertCost:
    """Milliseconds that the experts of a mixture take in a pass, by the tokens of the batch.

    They skip padding (vLLM 0.33, ``VLLM_MOE_SKIP_PADDING``), so that no size changes them: no graph's curve has them.
    """

    role: Role = field("the role")
    tokens: tuple[Count, ...] = field("measured tokens of a batch, ascending")
    milliseconds: tuple[Amount, ...] = field("time of the experts at each")

    def _problems(self) -> Iterator[Problem]:
        yield from _uneven(self)

    def __call__(self, tokens: int) -> float:
        """Return the milliseconds of ``tokens``: from 0 on interpolated, and beyond the last in proportion."""
        index = bisect_left(self.tokens, tokens)
        if index == len(self.tokens):
            return self.milliseconds[-1] * tokens / self.tokens[-1]
        left, before = (self.tokens[index - 1], self.milliseconds[index - 1]) if index else (0, 0.0)
        slope = (self.milliseconds[index] - before) / (self.tokens[index] - left)
        return before + slope * (tokens - left)


@record
class GraphCost:
    """What graphs of a family cost: memory of the allocator and of the driver, and time to capture.

    Graphs of a pool share their intermediates: of all graphs of one mode in it, the largest takes
    ``largest_mib + mib_per_token * tokens`` MiB, and each adds ``mib`` in the pool and ``driver_mib`` outside of it
    (``measuring.fits``).
    """

    role: Role = field("the role")
    mode: GraphMode = field("FULL or PIECEWISE")
    query_len: QueryLength | None = field("tokens of each request of a decode; None: mixed batches", default=None)
    draft_steps: Count | None = field("draft decodes in one graph; None: one", default=None)
    mib: Amount = field("memory that each graph adds to the allocator's pool, in MiB")
    driver_mib: Amount = field("memory of a graph outside of the allocator, in MiB", default=0.0)
    mib_per_token: Amount = field("memory of the pool for each token of the largest graph, in MiB", default=0.0)
    seconds: Amount = field("time to capture a graph, apart from its tokens")
    seconds_per_token: Amount = field("time to capture a graph for each of its tokens", default=0.0)
    largest_mib: Amount = field("memory of the pool for the largest graph, apart from its tokens, in MiB", default=0.0)
    mib_error: Amount = field("error of the memory of a graph that was not fitted, in MiB", default=0.0)
    seconds_error: Amount = field("error of the time of a graph that was not fitted, in seconds", default=0.0)

    @property
    def key(self) -> tuple[Role, GraphMode, int | None, int | None]:
        """Role, mode, query length and draft steps: one cost of a profile has them."""
        return self.role, self.mode, self.query_len, self.draft_steps


@record
class Overhead:
    """What a step takes until the next one besides its passes: the host's work, by how the target's pass ran.

    While the host launches and prepares, the device waits, unless it takes longer: steps of Qwen3-8B without a graph
    took 46 ms with 1,000 tokens and 69 with 4,000, and their kernels 21 and 70 (vLLM 0.33, H200).
    """

    mode: GraphMode = field("graphs of the target's pass: FULL or PIECEWISE; NONE: eager")
    query_len: QueryLength | None = field("tokens of each request of a decode; None: mixed batches", default=None)
    milliseconds: Amount = field("mean overhead of a step, without its passes, the floor and the time per request")
    floor: Amount = field("least time of all passes of a step, which is the host's", default=0.0)
    error: Amount = field("standard error of that time, in milliseconds", default=0.0)
    steps: Count = field("number of measured steps")

    @property
    def key(self) -> tuple[GraphMode, int | None]:
        """Mode and query length: one overhead of a profile has them."""
        return self.mode, self.query_len


@record
class Profile:
    """What sizes cost on one machine, as measured there."""

    version: SchemaVersion = field("version of this file's schema", default=SCHEMA_VERSION)
    source: Name = field("program that ran the passes, with its version: capture-planner 0.1.0, vllm 0.33.0")
    command: str = field("the command that measured", default="")
    date: Moment = field("time of the measurement, in UTC")
    device: Device = field("the device")
    driver: str | None = field("version of the device driver", default=None)
    torch: str | None = field("version of torch", default=None)
    packages: Mapping[Name, Version] = field(
        "versions of what ran the passes, by name", factory=dict, converter=by_name, hash=False
    )
    model: Model = field("the model that was measured")
    speculative: Speculative | None = field("its speculative decoding; None: off", default=None)
    parallel: Parallel = field("placement of the model on devices", factory=Parallel)
    context: Count | None = field("tokens in the KV cache of each request in the measured passes", default=None)
    curves: tuple[CostCurve, ...] = field("times by size")
    experts: tuple[ExpertCost, ...] = field("times of the experts of a mixture, by role", default=())
    graphs: tuple[GraphCost, ...] = field("costs of a graph, by family", default=())
    pool: Pool = field("whose graphs share the memory of their intermediates", default=Pool.SHARED)
    base_mib: Amount = field("memory that capturing takes once in each pool, whatever it captures, in MiB", default=0.0)
    base_seconds: Amount = field("time that capturing takes once, whatever it captures", default=0.0)
    step_milliseconds: Amount = field(
        "time of a step apart from its passes: scheduling, sampling, copies; 0 if unknown", default=0.0
    )
    step_milliseconds_per_request: Amount = field("such time for each request of the step", default=0.0)
    overheads: tuple[Overhead, ...] = field(
        "time of a step besides its passes, by how the target's pass ran, in place of step_milliseconds", default=()
    )
    spread: Amount | None = field("largest relative spread of a measured size over its repeats", default=None)
    notes: tuple[str, ...] = field("sentences about figures that could not be measured", default=())

    def _problems(self) -> Iterator[Problem]:
        for items, listed in (("curves", self.curves), ("graphs", self.graphs)):
            yield from duplicates([family_name(*each.key) for each in listed], "{} is listed twice", items, "role")
        yield from duplicates([each.key for each in self.overheads], "{} is listed twice", "overheads", "mode")
        yield from duplicates([each.role.value for each in self.experts], "{} is listed twice", "experts", "role")

    def expert_milliseconds(self, role: Role, tokens: int) -> float:
        """Return what the experts of a mixture take in a pass of so many tokens; 0.0 where the profile has none."""
        return next((each(tokens) for each in self.experts if each.role is role), 0.0)

    def overhead(self, mode: GraphMode, query_len: int | None) -> float:
        """Return the milliseconds of a step besides its passes, apart from those for each request.

        What was not measured counts as the most that was measured of the same mode, else of the next faster mode. Where
        neither was measured, it counts as the least of all.

        :param mode: how the target's pass runs: FULL, PIECEWISE, or NONE for eager.
        :param query_len: tokens of each request of a decode; None: mixed batches.
        """
        found = self._alike(mode, query_len)
        return max((each.milliseconds for each in found), default=self.base_overhead)

    def floor(self, mode: GraphMode, query_len: int | None) -> float:
        """Return the least milliseconds of the passes of a step; the same rule as ``overhead``."""
        return max((each.floor for each in self._alike(mode, query_len)), default=0.0)

    def _alike(self, mode: GraphMode, query_len: int | None) -> list[Overhead]:
        own = [each for each in self.overheads if each.key == (mode, query_len)]
        order = (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL)
        # The host does at least as much in a slower mode: the next faster one is a lower bound.
        modes = ([each for each in self.overheads if each.mode is slower] for slower in order[order.index(mode) :])
        return own or next(filter(None, modes), [])

    @property
    def base_overhead(self) -> float:
        """The milliseconds that any step takes besides its passes: the least overhead."""
        return min((each.milliseconds for each in self.overheads), default=self.step_milliseconds)

    def step(self, num_reqs: int, passes: float) -> float:
        """Return the milliseconds from the start of a step of ``num_reqs`` requests to the start of the next.

        :param passes: milliseconds of all its passes, with what the mode of the target's adds to the base overhead, and
            with the floor (``Costs``).
        """
        return passes + self.base_overhead + self.step_milliseconds_per_request * num_reqs


def _uneven(times: CostCurve | ExpertCost) -> Iterator[Problem]:
    """Yield what is wrong with times by size."""
    # Costs are looked up by bisection.
    if not times.tokens or list(times.tokens) != sorted(set(times.tokens)):
        yield Problem(path=("tokens",), message="expected sizes in ascending order, each once")
    if len(times.tokens) != len(times.milliseconds):
        message = f"{len(times.milliseconds)} times for {len(times.tokens)} sizes"
        yield Problem(path=("milliseconds",), message=message, remedy="give one time for each size")


def family_name(role: Role, mode: GraphMode, query_len: int | None, draft_steps: int | None) -> str:
    """Return a family of graphs, or of eager passes, in words."""
    kind = "mixed batches" if query_len is None else f"decodes of query length {query_len}"
    chain = f", chains of {draft_steps}" if draft_steps else ""
    return f"{role.value} {mode.value} ({kind}{chain})"
