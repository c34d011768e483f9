"""Arrivals: from a trace of requests to the steps that a deployment's scheduler makes of it, in a closed loop.

Each step takes what a function says of its batch, so a slower table of graphs meets larger batches. Each decode makes
one token and the drafts that are accepted on average. Memory for the KV cache does not end, and no prefix is shared.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from heapq import heappop, heappush
from typing import Generic, TypeVar

import attrs

from capture_planner.analysis.trace import TraceRow
from capture_planner.modes import Role
from capture_planner.planning.measured.steps import percentile
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import DecodeFamily, draft_prefill_of
from capture_planner.records.model import Speculative
from capture_planner.records.spec import Limits

STEP_MS = 20.0
"""Milliseconds of a step where nothing says what its batch takes: each request gets fifty tokens per second."""

StepTime = Callable[[Batch], float]
"""Milliseconds of a step, the drafter's passes included, by the target's batch."""

_EPSILON = 1e-6
"""Tokens by which sums of shares may be off."""


@attrs.frozen
class Pace:
    """Durations of steps."""

    step_time: StepTime
    words: str
    """Sentence: ``every step takes 20 ms``."""

    @classmethod
    def constant(cls, milliseconds: float = STEP_MS) -> Pace:
        """Return that of steps that all take equally long."""
        return cls(lambda batch: milliseconds, f"every step takes {milliseconds:g} ms")


@attrs.frozen
class ServingLatency:
    """Waiting times of requests, in milliseconds."""

    first_token_p50: float
    """Time from the arrival to the first token, queueing included."""
    first_token_p99: float
    inter_token_p50: float
    """Time from one output of a request to the next: a step, with all the tokens that it accepted."""
    inter_token_p99: float


@attrs.frozen(kw_only=True)
class Simulation:
    """The steps that a scheduler makes of a trace."""

    blocks: tuple[Counter[Batch], ...]
    """Steps of each batch of the target, in stretches of equally many steps, in the order of time."""
    seconds: float
    """Seconds from the first request to the last token."""
    first_token: Counter[float] = attrs.field(repr=False)
    """Requests by what they wait for their first token, in milliseconds."""
    inter_token: Counter[float] = attrs.field(repr=False)
    """Outputs after the first by what their request waits for them, in milliseconds."""

    @property
    def counts(self) -> Counter[Batch]:
        """How often each batch of the target runs."""
        return sum(self.blocks, Counter[Batch]())


def latency_of(simulations: Iterable[Simulation]) -> ServingLatency | None:
    """Return what the requests of all simulations wait; None where no request gets a second token."""
    first, later = Counter[float](), Counter[float]()
    for each in simulations:
        first.update(each.first_token)
        later.update(each.inter_token)
    # A percentile needs one value: a trace of single tokens has no second ones.
    if not first or not later:
        return None
    return ServingLatency(*(percentile(sorted(waits.items()), share) for waits in (first, later) for share in (50, 99)))


def simulate(
    arrivals: Iterable[TraceRow],
    limits: Limits,
    speculative: Speculative | None,
    step_time: StepTime,
    *,
    acceptance: Sequence[float] = (),
    window: tuple[float, float] = (0.0, math.inf),
) -> Simulation:
    """Return the steps of continuous batching, from the first request to the last token.

    Requests that decode come first, then prompts in order of arrival, cut where the tokens of a batch end. Where the
    decodes alone need more tokens than a batch has, they share them.

    :param acceptance: share of steps in which the draft of each position and all before it are accepted; positions
        that it does not have accept none.
    :param window: seconds from the start; steps that begin, and requests that arrive, outside are simulated, but not
        counted.
    """
    waiting = deque(sorted(arrivals, key=lambda request: request.arrival))
    # The same batches return step after step, so each is priced once.
    return _Scheduler(waiting, limits, speculative, cache(step_time), acceptance, window).run()


@attrs.define(eq=False)
class _PromptInProgress:
    """A request that runs and has tokens of its prompt left."""

    arrival: float
    left: int
    output: int


@attrs.define(eq=False, slots=False)
class _Scheduler:
    """Runs a trace, from one change of the batch to the next.

    All requests that decode get the same share of tokens in a step. So it is enough to know how many tokens each has
    got since the start (``_progress``), and at which number each request ends (``_ends``).
    """

    _waiting: deque[TraceRow]
    _limits: Limits
    _speculative: Speculative | None
    _step_time: StepTime
    _acceptance: Sequence[float]
    _window: tuple[float, float]
    _prompts: deque[_PromptInProgress] = attrs.field(init=False, factory=deque)
    _ends: list[float] = attrs.field(init=False, factory=list)
    _progress: float = attrs.field(init=False, default=0.0)
    _blocks: OrderedBlocks[Batch] = attrs.field(init=False, factory=lambda: OrderedBlocks[Batch]())
    _first_token: Counter[float] = attrs.field(init=False, factory=Counter)
    _inter_token: Counter[float] = attrs.field(init=False, factory=Counter)

    def __attrs_post_init__(self) -> None:
        self._start = self._clock = self._waiting[0].arrival if self._waiting else 0.0
        self._slots = 0 if self._speculative is None else self._speculative.extra_slots
        self._tokens, self._decode = cache(lambda drafts: 1 + sum(self._acceptance[:drafts])), cache(self._decode_of)

    def run(self) -> Simulation:
        """Run until the last token, or until the window ends."""
        while (self._waiting or self._prompts or self._ends) and self._clock < self._window[1]:
            self._admit()
            if not self._step_with_prompts():
                self._steps_of_decodes()
        return Simulation(
            blocks=self._blocks.blocks,
            seconds=max(min(self._clock, self._window[1]) - max(self._start, self._window[0]), 0.0),
            first_token=self._first_token,
            inter_token=self._inter_token,
        )

    def _admit(self) -> None:
        if not self._prompts and not self._ends:
            # An idle engine takes no steps, so nothing else moves the clock on.
            self._clock = max(self._clock, self._waiting[0].arrival)
        while self._waiting and self._waiting[0].arrival <= self._clock and self._running < self._limits.max_num_reqs:
            request = self._waiting.popleft()
            self._prompts.append(_PromptInProgress(request.arrival, request.prompt, request.output))

    @property
    def _running(self) -> int:
        return len(self._prompts) + len(self._ends)

    def _step_with_prompts(self) -> bool:
        """Run a step with prompts in it; False where no prompt waits, or decodes take up the tokens."""
        decoding, drafts = len(self._ends), self._drafts(self._running)
        # The first draft pass has ``_slots`` more rows for each request, and max_num_tokens holds for it too.
        left = self._limits.max_num_tokens - decoding * (1 + drafts + self._slots)
        if not self._prompts or left <= self._slots:
            return False
        tokens, requests, read = decoding * (1 + drafts), decoding, []
        while self._prompts and left > self._slots:
            prompt = self._prompts[0]
            chunk = min(left - self._slots, prompt.left)
            prompt.left -= chunk
            left -= chunk + self._slots
            tokens, requests = tokens + chunk, requests + 1
            if not prompt.left:
                read.append(self._prompts.popleft())
        self._run(Batch.mixed(Role.TARGET, requests, tokens), self._tokens(drafts), decoding)
        for prompt in read:
            # A request counts by its arrival, in whichever step its prompt ends.
            if self._window[0] <= prompt.arrival < self._window[1]:
                self._first_token[(self._clock - prompt.arrival) * 1000] += 1
            if prompt.output > 1:  # The first token comes with the end of the prompt.
                heappush(self._ends, self._progress + prompt.output - 1)
        return True

    def _steps_of_decodes(self) -> None:
        """Run decodes until a request ends or another comes."""
        batch, share = self._decode(len(self._ends))
        tokens = self._tokens(batch.num_tokens // batch.num_reqs - 1) * share
        seconds = self._seconds(batch)
        # Nothing changes until the first request ends, so all steps up to then are alike.
        steps = max(math.ceil((self._ends[0] - self._progress - _EPSILON) / tokens), 1)
        # Neither an end of the window nor a request that is admitted may fall inside of equal steps.
        changes = [each for each in self._window if each > self._clock]
        if self._waiting and self._running < self._limits.max_num_reqs:
            changes.append(self._waiting[0].arrival)
        for moment in changes:
            if moment < math.inf:
                steps = min(steps, math.ceil((moment - self._clock) / seconds))
        self._run(batch, tokens, len(self._ends) * share, steps)

    def _run(self, batch: Batch, tokens: float, outputs: float, steps: int = 1) -> None:
        """Run equal steps, in each of which a request that decodes gets ``tokens``, and so many requests get some."""
        seconds = self._seconds(batch)
        if self._window[0] <= self._clock < self._window[1]:
            # A block of time may end inside of the steps.
            left = steps
            while left:
                some = min(left, self._blocks.room)
                self._blocks.add({batch: some}, some)
                left -= some
            if self._ends:
                # Where requests take turns, each waits for several steps.
                wait = seconds * 1000 * len(self._ends) / outputs
                self._inter_token[wait] += round(outputs) * steps
        self._clock += seconds * steps
        self._progress += tokens * steps
        while self._ends and self._ends[0] <= self._progress + _EPSILON:
            heappop(self._ends)

    def _seconds(self, batch: Batch) -> float:
        # Steps of no time would never reach the next arrival.
        return max(self._step_time(batch), 1e-3) / 1000

    def _drafts(self, num_reqs: int) -> int:
        return 0 if self._speculative is None else self._speculative.draft_tokens(num_reqs)

    def _decode_of(self, num_reqs: int) -> tuple[Batch, float]:
        """Return the batch of so many requests that decode, and the share of them that fit into it."""
        count, most = num_reqs, self._limits.max_num_tokens
        # Fewer requests may draft more tokens each, so the largest batch that fits is found by trying.
        while count > 1 and count * (1 + self._drafts(count) + self._slots) > most:
            count -= 1
        # One request by itself may draft more tokens than a batch has.
        each = min(1 + self._drafts(count), most - self._slots)
        return Batch.decode(Role.TARGET, count, each), count / num_reqs


def for_role(met: Counter[Batch], role: Role, families: Iterable[DecodeFamily], *, slots: int = 0) -> Counter[Batch]:
    """Return what a role runs where the target runs these batches; ``families`` are the role's decodes.

    Draft prefill runs the target's, with ``slots`` more rows for each request; draft decodes follow it, as often as one
    pass follows another.
    """
    found: Counter[Batch] = Counter()
    for batch, count in met.items():
        if role is Role.DRAFT_DECODE:  # they follow mixed batches too: only the number of requests decides
            for family in families:
                if batch.num_reqs in family.requests:
                    found[Batch.decode(role, batch.num_reqs, family.query_len)] += count * (family.draft_steps or 1)
        else:
            found[draft_prefill_of(batch, slots) if role.is_drafter else attrs.evolve(batch, role=role)] += count
    return found


MOST_BLOCKS = 50
"""Most blocks; where there would be more, each two neighbours become one, so that at least half as many are left."""

K = TypeVar("K")


class OrderedBlocks(Generic[K]):
    """Counts that are added in the order of time, as blocks of the same length but the last."""

    def __init__(self, length: int = 1) -> None:
        """Begin with blocks of ``length``, in units of the caller's: steps, or bytes."""
        self._blocks: list[Counter[K]] = [Counter()]
        self._length, self._filled = length, 0

    @property
    def room(self) -> int:
        """How much of the current block is left, in the same units; at least 1."""
        return self._length - self._filled

    def add(self, counts: Mapping[K, int], length: int) -> None:
        """Add counts to the current block, which is full where ``length`` is at least ``room``."""
        if length <= 0:
            return
        self._blocks[-1].update(counts)
        self._filled += length
        if self._filled >= self._length:
            if len(self._blocks) >= MOST_BLOCKS:
                # Half as many blocks of twice the length bound the memory, however long the source is.
                firsts, seconds = self._blocks[::2], self._blocks[1::2]
                for first, second in zip(firsts, seconds, strict=True):
                    first.update(second)
                self._blocks, self._length = firsts, 2 * self._length
            self._blocks.append(Counter())
            self._filled = 0

    @property
    def blocks(self) -> tuple[Counter[K], ...]:
        """The blocks; a last one of less than half the length is part of the one before it."""
        whole, last = self._blocks[:-1], self._blocks[-1]
        # A short block would be noisier than the others.
        if whole and 2 * self._filled < self._length:
            whole, last = whole[:-1], whole[-1] + last
        return tuple(block for block in (*whole, last) if block)

    @property
    def entries(self) -> int:
        """How many counts are held, over all blocks."""
        return sum(map(len, self._blocks))

    def rename(self, name: Callable[[K], K]) -> None:
        """Count what now has the same name as one."""
        for index, block in enumerate(self._blocks):
            renamed: Counter[K] = Counter()
            for key, count in block.items():
                renamed[name(key)] += count
            self._blocks[index] = renamed
