"""Costs of a deployment's graphs and steps: by one rule for today's engine and for a plan.

Each step is dispatched as the deployment dispatches, and takes the time of the graph that it gets, or of an eager pass.
The difference of two sides may be wrong, by the profile and by the traffic; a verdict says whether a gain is more than
that noise. A promise states what the steps of both sides are expected to take, by role and shape.
"""

from __future__ import annotations

import enum
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import attrs

from capture_planner.engines.emulation import Emulation
from capture_planner.measuring.fits import predict_graphs
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.steps import PassCost, Prices, StepCost, Steps, passes_of, weights_of
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.batch_space import DecodeFamily, kind_of
from capture_planner.records.profile import Profile
from capture_planner.records.promise import MAX_PROMISED, ExpectedSteps, Promise, PromisedSteps
from capture_planner.records.text import counted


@attrs.frozen(kw_only=True)
class SideFigures:
    """One side of a comparison: its graphs, and the steps that it was judged on."""

    graphs: int
    memory_mib: float
    seconds: float
    """Start-up time that capturing takes."""
    mean_step_ms: float
    token_ms: float
    """Milliseconds that a request waits for one token: the step's time over the tokens that a request gets of it."""
    eager_share: Mapping[Role, float]
    """Share of the steps in which a role runs that it runs eager."""
    regret: float
    """Extra time of steps over a graph of every size, as a share."""
    worst_regret: float
    """The same of the batch for which it is worst."""
    objective: float
    """Value of the objective: milliseconds, or of the worst regret the ratio."""
    gap_ms: float
    """Mean time between two outputs of a request, in milliseconds: of the steps, weighted by their requests."""
    gap_p99_ms: float
    """The same within which 99 % of them end: prompts in a batch decide it."""
    gap_p99_eager: bool
    """Whether the target runs that step without a graph."""
    prompt_step_ms: float | None
    """Mean time of a step with prompts, which a first token waits for; None: no step has any."""
    evenly: float = 1.0
    """Ratio of the time of steps to that with a graph of every size, if each doubling of requests counts the same."""
    unknown: int = 0
    """Steps that an observation has no answer for; they count as eager."""

    @property
    def rank(self) -> tuple[float, float]:
        """Order of tables: by the objective, and of equal ones by the mean step."""
        return self.objective, self.mean_step_ms

    @property
    def figures(self) -> tuple[float, float, float]:
        """Figures by which tables of different numbers of graphs are compared."""
        return *self.rank, self.evenly


class Pricing:
    """The time of a deployment's steps."""

    def __init__(self, deployment: Emulation, costs: Costs) -> None:
        self.deployment, self.costs = deployment, costs
        self._prices = Prices(costs, deployment, deployment.modes)
        self._known: dict[Batch, StepCost] = {}

    def step(self, batch: Batch) -> StepCost:
        """Return what a step of the target's ``batch`` takes.

        Raises ``PlanningError`` for a role of which the profile has no times.
        """
        if batch not in self._known:
            self._known[batch] = self._prices.cost(self._answer, batch, self._passes(batch))
        return self._known[batch]

    def on(self, batch: Batch, entry: Entry) -> float:
        """Return the milliseconds of one pass of a batch on a graph."""
        return self._prices.of(batch, entry, 1)

    def is_unknown(self, batch: Batch) -> bool:
        """Return whether an observation has no answer for a pass of a step; the pass counts as eager."""
        eager = (each.batch for each in self.step(batch).passes if each.entry is None)
        return any(self.deployment.dispatch(each).reason is Reason.UNKNOWN for each in eager)

    def _answer(self, batch: Batch) -> Entry | None:
        return self.deployment.dispatch(batch).entry

    def _passes(self, batch: Batch) -> Iterator[tuple[Batch, int]]:
        """Yield the passes of the roles that the engine runs: some draft without a model, or inside the target."""
        return (each for each in passes_of(batch, self.deployment) if each[0].role in self.deployment.modes)


def judged(
    pricing: Pricing, steps: Mapping[Batch, int], *, objective: str = "mean", accepted: float = 0.0
) -> SideFigures:
    """Return what a deployment's graphs cost, and what steps take.

    :param objective: as in ``Sizes.objective``: token, mean, regret, or a percentile as p99.
    :param accepted: drafts that a request gets accepted in a step, on average.
    """
    graphs = [(graph.role, graph.entry) for graph in pricing.deployment.graphs]
    capture = predict_graphs(pricing.costs.profile, graphs)
    spent = every = waited = worst = prompted = 0.0
    requests = unknown = prompts = 0
    eager: Counter[Role] = Counter()
    run: Counter[Role] = Counter()
    doublings: dict[int, list[float]] = {}
    for batch, count in steps.items():
        step = pricing.step(batch)
        doubling = doublings.setdefault((batch.num_reqs - 1).bit_length(), [0.0, 0.0, 0.0])
        for index, figure in enumerate((step.milliseconds, step.every_size, 1)):
            doubling[index] += figure * count
        spent += step.milliseconds * count
        every += step.every_size * count
        worst = max(worst, step.milliseconds / step.every_size - 1)
        waited += step.milliseconds * batch.num_reqs * count
        requests += batch.num_reqs * count
        unknown += pricing.is_unknown(batch) * count
        if not batch.past_prompt:
            # A first token waits for a step with prompts, so those have a mean of their own.
            prompted += step.milliseconds * count
            prompts += count
        for role, entry in step.answers.items():
            run[role] += count
            eager[role] += count * (entry is None)
    # Weighted by requests: a gap between two outputs is felt by every request of the step.
    slow = _at(pricing, weights_of(steps, "token"), 99)
    total = sum(steps.values())
    mean, gap = spent / total, waited / requests
    ratios = [own / best for own, best, number in doublings.values() if number >= LEAST_SHARE * total]
    values = {"mean": mean, "token": gap, "regret": 1 + worst}
    return SideFigures(
        graphs=len(graphs),
        memory_mib=capture.memory_mib,
        seconds=capture.seconds,
        mean_step_ms=mean,
        token_ms=gap / (1 + accepted),
        eager_share={role: eager[role] / max(run[role], 1) for role in pricing.deployment.modes},
        regret=spent / every - 1,
        worst_regret=worst,
        objective=values[objective] if objective in values else _at(pricing, steps, float(objective[1:])).milliseconds,
        gap_ms=gap,
        gap_p99_ms=slow.milliseconds,
        gap_p99_eager=slow.answers.get(Role.TARGET) is None,
        prompt_step_ms=prompted / prompts if prompts else None,
        evenly=sum(ratios) / len(ratios),
        unknown=unknown,
    )


LEAST_SHARE = 0.01
"""Share of the steps that a doubling of requests has at least to count."""


def _at(pricing: Pricing, weights: Mapping[Batch, int], percent: float) -> StepCost:
    """Return the step within whose time so many of the steps end, each with its weight."""
    return pricing.step(Steps(weights).percentile(percent, lambda batch: pricing.step(batch).milliseconds))


SPREAD = 0.02
"""Spread of measured times where a profile does not state its own: ``profile`` repeats until it is below that."""

RESAMPLES = 200
"""Number of times that the traffic is resampled."""

_LOWEST, _HIGHEST = 0.025, 0.975
_NORMAL = 1.96
"""Standard errors on each side of a mean that hold 95 % of all cases."""

_SUMMED = ("mean", "token")
"""Objectives that are sums over steps; every other is one step's."""


@attrs.frozen(kw_only=True)
class Evidence:
    """Reasons to trust figures less, apart from the profile's own spread."""

    lines: int | None = None
    """Number of lines, or samples, that the judged steps were read from; None: each step is one."""
    blocks: tuple[Mapping[Batch, int], ...] = attrs.field(default=(), repr=False)
    """The judged steps in blocks of time, in order; empty: they have no order, and count as independent."""
    foreign: float = 0.0
    """Error of times measured with another model or on another device, as a share."""
    is_estimate: bool = False
    """Whether the costs are not those of this deployment, so that nothing is promised."""
    has_prompts: bool = True
    """Whether any step has prompts; without one nothing is known of mixed batches."""

    @property
    def keeps_mixed(self) -> bool:
        """Whether mixed batches keep their graphs; decodes keep piecewise ones by the costs of another deployment."""
        return self.is_estimate or not self.has_prompts


@attrs.frozen(kw_only=True)
class Noise:
    """Error of the difference between two sides, in milliseconds of the objective."""

    measuring: float
    """From the profile, over the classes of graphs on which the two sides differ; 95 %."""
    sampling: float
    """From the traffic: how far the gain is above the lower end of its interval under resampling."""
    low: float | None = None
    """The ends of the 95 % interval of the gain under resampling, as shares; None: the objective is one step's."""
    high: float | None = None
    blocks: int = 0
    """Number of blocks of time that were drawn from; 0: single steps, as if they were independent."""

    @property
    def total(self) -> float:
        """Both: they have nothing to do with each other."""
        return math.hypot(self.measuring, self.sampling)


def noise_between(
    today: Pricing,
    proposed: Pricing,
    steps: Mapping[Batch, int],
    spread: float,
    objective: str = "mean",
    evidence: Evidence | None = None,
) -> Noise:
    """Return the noise in the difference between two sides that are judged on the same steps.

    Where both run a batch on the same graphs, an error of the profile is in both, and cancels out. Of an objective that
    is one step's, such as a percentile, that step may be off by the whole spread.
    """
    evidence = evidence or Evidence()
    if objective not in _SUMMED:
        # The objective is the time of one step, whose error does not average out over many.
        off = math.hypot(spread, evidence.foreign)
        return Noise(measuring=off * judged(today, steps, objective=objective).objective, sampling=0.0)
    measuring = _measuring(today, proposed, steps, spread, objective, evidence.foreign)
    blocks = [_Gain.over(today, proposed, block, objective) for block in evidence.blocks if block]
    # Steps that are near in time are alike, so blocks are drawn where there are any: single steps would look surer.
    gains = sorted(_resampled(blocks) if len(blocks) > 1 else _redrawn(today, proposed, steps, objective))
    gain = _Gain.over(today, proposed, steps, objective)
    low, high = (gains[round(share * (len(gains) - 1))] for share in (_LOWEST, _HIGHEST))
    before = gain.before / gain.weight
    return Noise(
        measuring=measuring,
        sampling=max(gain.share - low, 0.0) * before,
        low=low,
        high=high,
        blocks=len(blocks) if len(blocks) > 1 else 0,
    )


@attrs.frozen
class _Gain:
    """Weighted milliseconds of some steps today, and how many of them the other side saves."""

    before: float
    saved: float
    weight: float

    @classmethod
    def over(cls, today: Pricing, proposed: Pricing, steps: Mapping[Batch, int], objective: str) -> _Gain:
        before = saved = total = 0.0
        for batch, weight in weights_of(steps, objective).items():
            own = today.step(batch).milliseconds
            before += own * weight
            saved += (own - proposed.step(batch).milliseconds) * weight
            total += weight
        return cls(before, saved, total)

    @property
    def share(self) -> float:
        return self.saved / self.before if self.before else 0.0


def _resampled(blocks: Sequence[_Gain]) -> Iterator[float]:
    """Yield the gain over blocks that are drawn with replacement."""
    draw = random.Random(0)  # of a fixed seed: the same data has the same verdict
    for _ in range(RESAMPLES):
        drawn = draw.choices(blocks, k=len(blocks))
        before = sum(each.before for each in drawn)
        yield sum(each.saved for each in drawn) / before if before else 0.0


def _redrawn(today: Pricing, proposed: Pricing, steps: Mapping[Batch, int], objective: str) -> Iterator[float]:
    """Yield the gain over as many steps, each drawn by itself: counts vary as those of independent events do."""
    draw = random.Random(0)
    gains = [(count, _Gain.over(today, proposed, {batch: 1}, objective)) for batch, count in steps.items()]
    for _ in range(RESAMPLES):
        drawn = [(max(draw.gauss(count, math.sqrt(count)), 0.0), each) for count, each in gains]  # as Poisson's
        before = sum(times * each.before for times, each in drawn)
        yield sum(times * each.saved for times, each in drawn) / before if before else 0.0


CostClass = tuple[object, ...]


def _measuring(
    today: Pricing, proposed: Pricing, steps: Mapping[Batch, int], spread: float, objective: str, foreign: float
) -> float:
    """Return the milliseconds by which the profile may mistake the difference, at 95 %.

    Each class of graphs was measured by itself, so errors of classes are independent, and count as far as the sides
    spend different times on a class. The times of another deployment may be off all in the same direction.
    """
    spent: Counter[CostClass] = Counter()
    ran: Counter[tuple[GraphMode, int | None]] = Counter()
    different = total = 0.0
    for batch, weight in weights_of(steps, objective).items():
        total += weight
        before, after = today.step(batch), proposed.step(batch)
        # An error of a class is in both sides, and cancels out.
        if [_class_of(each) for each in before.passes] == [_class_of(each) for each in after.passes]:
            continue
        different += max(before.milliseconds, after.milliseconds) * weight
        for sign, step in ((1, before), (-1, after)):
            for each in step.passes:
                spent[_class_of(each)] += sign * each.milliseconds * weight  # type: ignore[assignment]
                # Overheads of a mode are measured per step, by how the target runs.
                if each.batch.role is Role.TARGET:
                    ran[_mode_of(each)] += sign * weight
    errors = {each.key: each.error for each in today.costs.profile.overheads}
    passes = [spread * milliseconds for milliseconds in spent.values()]
    apart = [_NORMAL * errors.get(mode, 0.0) * weight for mode, weight in ran.items()]
    return math.hypot(*passes, *apart, foreign * different) / total


def _class_of(each: PassCost) -> CostClass:
    """Return what of a pass decides its time: its graph and that one's size; eager passes of a role are one class."""
    entry = each.entry
    if entry is None:
        # Eager times of a role are one curve, whatever the size: its error moves all of them together.
        return each.batch.role, GraphMode.NONE
    return each.batch.role, entry.mode, entry.query_len, entry.draft_steps, entry.num_tokens


def _mode_of(each: PassCost) -> tuple[GraphMode, int | None]:
    """Return how the target's pass ran, as ``Overhead`` has it."""
    if each.entry is None:
        return GraphMode.NONE, each.batch.uniform_query_len
    return each.entry.mode, each.entry.query_len


LEAST_STEPS = 1000
"""Fewer steps to judge on promise nothing; nor do fewer than ``LEAST_LINES`` lines that say how many they were."""

LEAST_LINES = 200
"""Fewer lines of a log promise nothing, however many steps each of them stands for."""

MEMORY_ERROR, SECONDS_ERROR = 0.20, 0.25
"""Errors of predicted memory and capture time, as shares: smaller savings are none.

The tuned plans of six runs on an H200 missed their predictions by 20 % and 22 %, root mean square, and by 30 % and 42 %
at most.
"""

SUBJECTS = {
    "mean": "mean step",
    "token": "mean time between two outputs of a request",
    "regret": "worst step, against a graph of its own size,",
}
"""Subject of each objective in sentences; a percentile goes by its name."""

REST = "memory and start-up stay about the same"


class TuneVerdict(enum.StrEnum):
    """What to do."""

    CHANGE = "change"
    KEEP = "keep"
    OVER_BUDGET = "over_budget"
    """Neither today's graphs nor any table that may be proposed are within the budget."""
    TOO_LITTLE_DATA = "too_little_data"


def verdict_on(
    today: SideFigures, proposed: SideFigures, noise: Noise, objective: str = "mean"
) -> tuple[TuneVerdict, str]:
    """Return the verdict, and why, in a sentence.

    A change is faster by more than the noise; or it saves memory or start-up, takes no more of the other, and is slower
    by no figure: of single steps within ``SPREAD``.
    """
    gain = today.objective - proposed.objective
    share, error = gain / today.objective, noise.total / today.objective
    savings = _savings(today, proposed)
    parts = (noise.measuring / today.objective, noise.sampling / today.objective)
    bound = f"noise of {error:.1%} (profile {parts[0]:.1%}, traffic {parts[1]:.1%})"
    subject = f"the {subject_of(objective)}"
    slower = proposed.mean_step_ms / today.mean_step_ms - 1
    # First what speaks against a change: no saving makes up for slower steps.
    if is_slower(today, proposed):
        if gain < 0:
            return TuneVerdict.KEEP, f"{subject} would be {-share:.2%} longer"
        return TuneVerdict.KEEP, f"the mean step would be {slower:.2%} longer"
    if gain > noise.total:
        return TuneVerdict.CHANGE, f"{subject} is {share:.1%} shorter, more than the {bound}"
    if savings:
        saves, dearer = f"the plan saves {', '.join(savings)}", _dearer(today, proposed)
        same = f"{subject} is the same within the {bound}"
        if dearer:
            return TuneVerdict.KEEP, f"{saves}, but takes {', '.join(dearer)}, and {same}"
        return TuneVerdict.CHANGE, f"{saves}, and {same}"
    # A smaller share is written as 0.0%.
    if share >= 0.0005:
        return (TuneVerdict.KEEP, f"the gain of {share:.1%} is within the {bound}; {REST}")
    return TuneVerdict.KEEP, f"no table of sizes is faster; {REST}"


def is_slower(today: SideFigures, proposed: SideFigures) -> bool:
    """Return whether the objective, or the mean step, takes longer than today."""
    same = 1 + 1e-9  # sums of the same times in another order differ in their last digits
    return proposed.objective > today.objective * same or proposed.mean_step_ms > today.mean_step_ms * same


def subject_of(objective: str) -> str:
    """Return what an objective is about, in words."""
    return SUBJECTS.get(objective, f"{objective} step")


def _savings(today: SideFigures, proposed: SideFigures) -> list[str]:
    """Return the savings that are larger than the error of their prediction, in words."""
    words: list[str] = []
    # The search for the fewest graphs ends at an eighth of them: within that, another search finds another number.
    if 0 < today.graphs - proposed.graphs <= max(1, today.graphs // 8):
        return words
    if today.memory_mib - proposed.memory_mib > MEMORY_ERROR * today.memory_mib:
        words.append(f"{today.memory_mib - proposed.memory_mib:,.0f} MiB")
    if today.seconds - proposed.seconds > SECONDS_ERROR * today.seconds:
        words.append(f"{today.seconds - proposed.seconds:.1f} s of start-up")
    if words and today.graphs > proposed.graphs:
        # Fewer graphs alone are no reason to change: they are named where they save something.
        words.insert(0, counted(today.graphs - proposed.graphs, "graph"))
    return words


def _dearer(today: SideFigures, proposed: SideFigures) -> list[str]:
    """Return what of the proposed side is worse than today, apart from the objective and the mean step, in words."""
    words: list[str] = []
    # Below the digit that a report has nothing is more.
    if (mib := proposed.memory_mib - today.memory_mib) > 1:
        words.append(f"{mib:,.0f} MiB more")
    if (seconds := proposed.seconds - today.seconds) > 0.1:
        words.append(f"{seconds:.1f} s more of start-up")
    for name, before, after in (
        ("between two outputs", today.gap_ms, proposed.gap_ms),
        ("between two outputs at p99", today.gap_p99_ms, proposed.gap_p99_ms),
        ("for a step with prompts", today.prompt_step_ms or 0.0, proposed.prompt_step_ms or 0.0),
    ):
        if after > before * (1 + SPREAD):
            words.append(f"{after / before - 1:.1%} more time {name}")
    return words


def promise_of(before: Pricing, after: Pricing, steps: Mapping[Batch, int]) -> Promise:
    """Return what a plan promises, by costs that were measured on the engine itself.

    :param before: the time of today's steps.
    :param after: that of the plan's.
    :param steps: how often each batch of the target ran, in the traffic that both sides are judged on; not empty.
    """
    return Promise(
        costs=before.costs.profile.source,
        steps=sum(steps.values()),
        before=_expected(before, steps),
        after=_expected(after, steps),
    )


@attrs.define
class _Tally:
    """The steps of one row so far."""

    first: int
    last: int
    steps: int = 0
    milliseconds: float = 0.0

    def add(self, extent: int, milliseconds: float, steps: int) -> None:
        self.first, self.last = min(self.first, extent), max(self.last, extent)
        self.steps += steps
        self.milliseconds += milliseconds * steps


_Row = tuple[Role, int | None, GraphMode, int, Entry | None]
"""Role, query length (None: mixed), mode, the octave of an eager batch's extent, and the graph."""


def _expected(pricing: Pricing, steps: Mapping[Batch, int]) -> ExpectedSteps:
    families = {role: pricing.deployment.families(role) for role in pricing.deployment.modes}
    rows: dict[_Row, _Tally] = {}
    total: Counter[Role] = Counter()
    spent, overheads = 0.0, Counter[tuple[GraphMode, int | None]]()
    for batch, count in steps.items():
        step = pricing.step(batch)
        spent += step.milliseconds * count
        for each in step.passes:
            role = each.batch.role
            key, extent = _key(each, families[role])
            # Shares are of the steps in which the role runs.
            total[role] += count
            if not role.is_drafter:
                overheads[_mode_of(each)] += count
            # The target's rows have whole steps, as that is what an observation can measure; a drafter's have passes.
            taken = each.milliseconds if role.is_drafter else step.milliseconds
            rows.setdefault(key, _Tally(extent, extent)).add(extent, taken, count)
    mean, number = spent / sum(steps.values()), sum(steps.values())
    shares = {key: count / number for key, count in overheads.items()}
    return ExpectedSteps(
        mean_step_ms=_rounded(mean),
        error_ms=_rounded(_error(pricing.costs.profile, mean, shares)),
        rows=tuple(
            _merged(
                PromisedSteps(
                    role=role,
                    query_len=query_len,
                    first=row.first,
                    last=row.last,
                    mode=mode,
                    milliseconds=_rounded(row.milliseconds / row.steps),
                    share=min(1.0, _rounded(row.steps / total[role])),
                )
                for (role, query_len, mode, *_), row in sorted(rows.items(), key=_place)
            )
        ),
    )


def _key(cost: PassCost, families: tuple[DecodeFamily, ...]) -> tuple[_Row, int]:
    """Return the row of a pass, and its extent: requests of a decode, tokens of a mixed batch."""
    batch = cost.batch
    kind = kind_of(batch, families)
    extent = batch.extent(kind)
    query_len = batch.decode_query_len if kind is Kind.DECODE else None
    if cost.entry is None:
        # Eager times grow with the size: one row for all of them would mean nothing.
        return (batch.role, query_len, GraphMode.NONE, extent.bit_length(), None), extent
    return (batch.role, query_len, cost.entry.mode, 0, cost.entry), extent


def _place(item: tuple[_Row, _Tally]) -> tuple[object, ...]:
    (role, query_len, mode, *_), row = item
    return list(Role).index(role), query_len or 0, row.first, row.last, mode.value


def _merged(rows: Iterable[PromisedSteps]) -> list[PromisedSteps]:
    """Return no more rows than a promise may have.

    Neighbours of one kind and mode become one, the rarest first. Where no two are alike, the rarest row is left out.
    """
    left = list(rows)
    while len(left) > MAX_PROMISED:
        near = [
            (a.share + b.share, at)
            for at, (a, b) in enumerate(pairwise(left))
            if (a.role, a.query_len, a.mode) == (b.role, b.query_len, b.mode)
        ]
        # Drafts of many lengths: each kind and mode has one row, and the rarest are not promised.
        if not near:
            left.remove(min(left, key=lambda row: row.share))
            continue
        share, at = min(near)
        a, b = left[at : at + 2]
        weight = a.share / share if share else 0.5  # shares may be rounded to 0
        left[at : at + 2] = [
            replace(
                a,
                first=min(a.first, b.first),
                last=max(a.last, b.last),
                milliseconds=_rounded(a.milliseconds * weight + b.milliseconds * (1 - weight)),
                share=min(1.0, _rounded(share)),
            )
        ]
    return left


def _error(profile: Profile, mean: float, shares: Mapping[tuple[GraphMode, int | None], float]) -> float:
    """Return the standard error of a mean step: from the spread of the passes' times, and that of the overheads.

    :param shares: the share of the steps whose target runs in each mode, by mode and query length.
    """
    spread = SPREAD if profile.spread is None else profile.spread
    overheads = (each.error * shares.get(each.key, 0.0) for each in profile.overheads)
    return math.hypot(spread * mean, *overheads)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
