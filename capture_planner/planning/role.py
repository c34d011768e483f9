"""One role while it is planned: its ladders, and the decisions that led to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from capture_planner.modes import Chain, GraphMode, Reason, Refresh, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.resolve import Group, ResolvedMode
from capture_planner.planning.sizing import Context, Ladder, decode_sizes, mixed_sizes
from capture_planner.planning.sizing.policies import Choice
from capture_planner.records.batch import Entry, Kind
from capture_planner.records.batch_space import (
    DecodeFamily,
    Domain,
    decode_families,
    decode_tiers,
    extra_slots,
    lora_cases,
    mixed_tokens,
    token_step,
)
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.plan import Decision
from capture_planner.records.spec import Policy, Sizes, Spec
from capture_planner.records.text import counted, format_bytes


@attrs.define
class RoleInProgress:
    """One role while it is planned; ``planner`` turns it into a RolePlan."""

    spec: Spec
    environment: Environment
    role: Role
    groups: tuple[Group, ...]
    requested: GraphMode
    resolved: ResolvedMode
    families: tuple[DecodeFamily, ...] = ()
    ladders: tuple[Ladder, ...] = ()
    lazy: tuple[Entry, ...] = ()
    """Graphs that are captured on first use."""
    decisions: list[Decision] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.decisions = list(self.resolved.decisions)
        self.families = decode_families(self.role, self.spec)

    def decide(self, rule: str, before: object, after: object, message: str, backend: str | None = None) -> None:
        self.decisions.append(
            Decision(rule=rule, before=str(before), after=str(after), role=self.role, backend=backend, message=message)
        )

    @property
    def mode(self) -> GraphMode:
        return self.resolved.mode

    @property
    def cap(self) -> int | None:
        """Most requests that every backend of the role can capture."""
        return min((g.support.max_num_reqs for g in self.groups if g.support.max_num_reqs), default=None)

    @property
    def mixed_ladder(self) -> Ladder | None:
        """The ladder of mixed batches, if the mode has one."""
        return next((ladder for ladder in self.ladders if ladder.kind is Kind.MIXED), None)

    def choose_ladders(self, measurements: Measurements | None = None) -> None:
        """Choose sizes for each kind of batch that the mode has graphs for; the policy default by a profile's times."""
        self._note_limits()
        sizes = self.spec.roles.of(self.role).sizes or self.spec.sizes
        context = Context(
            limits=self.spec.limits,
            speculative=self.spec.speculative,
            parallel=self.spec.parallel,
            environment=self.environment,
        )

        def timed(mode: GraphMode, query_len: int | None, steps: int | None) -> Context:
            # With a traffic, measurements are for a measured choice; without, the policy default goes by the times.
            if measurements is None or measurements.traffic is not None:
                return context
            curve = Costs(measurements.profile).known((self.role, mode, query_len, steps))
            if curve is None:
                return context
            source = measurements.source or f"by a profile of {measurements.profile.source}"
            return attrs.evolve(context, time=lambda size: curve(size * (query_len or 1)), source=source)

        ladders = []
        if self.mode.is_separate:
            for family in self._captured_families():
                # A profile has times of uniform decodes only.
                decodes = context if family.varies else timed(GraphMode.FULL, family.query_len, family.draft_steps)
                ladders.append(self._decode_ladder(family, sizes, decodes))
        if self.mode.mixed_mode is not GraphMode.NONE and self.role is not Role.DRAFT_DECODE:
            ladders.append(self._mixed_ladder(sizes, timed(self.mode.mixed_mode, None, None)))
        self.ladders = tuple(ladders)

    def _note_limits(self) -> None:
        spec, limits, step = self.spec, self.spec.limits, token_step(self.spec.parallel)
        speculative = spec.speculative
        # One schedule holds for all roles, so it is noted once, of the target.
        if speculative is not None and self.role is Role.TARGET:
            clamped = sorted({k for *_, k in speculative.ranges if k > speculative.num_tokens})
            if clamped:
                most, k = max(clamped), speculative.num_tokens
                message = f"the schedule has up to {most} draft tokens, but num_tokens is {k}"
                self.decide("schedule-clamped", most, k, message)
        if self.role is Role.DRAFT_DECODE and not self.families:
            message = "the draft prefill makes the only draft token, so no draft decode follows"
            self.decide("draft-decode-never-runs", self.mode.value, GraphMode.NONE.value, message)
            self.resolved = attrs.evolve(self.resolved, mode=GraphMode.NONE)
        # Draft decodes follow those of the target, whose limit is noted already.
        for _, last, k in () if self.role is Role.DRAFT_DECODE else decode_tiers(spec):
            # The drafter's additional rows count too (vLLM 0.33: ``max_num_new_slots_for_drafting``).
            width = 1 + k + extra_slots(spec)
            fits = limits.max_num_tokens // width
            if fits < last:
                room = f"{counted(fits, 'request')} of {counted(width, 'token')}"
                message = f"max_num_tokens {limits.max_num_tokens} holds {room}: decodes of {last} are never scheduled"
                self.decide("tokens-limit-requests", last, fits, message)
        if step > 1:
            message = f"sequence parallelism splits tokens over the ranks, so padded tokens are multiples of {step}"
            self.decide("sequence-parallel-alignment", 1, step, message)
        if spec.lora is not None and self.role is Role.TARGET:
            most, cases = spec.lora.max_active, ", ".join(map(str, spec.lora.cases()))
            message = (
                f"graphs go by the distinct adapters of a batch, not by those that are loaded: at most {most}, and one "
                "more for requests without an adapter next to them; drafters run without adapters"
            )
            self.decide("lora-cases", f"max_active {most}", cases, message)
        if spec.parallel.data > 1 and self.role is Role.TARGET:
            message = (
                f"all {spec.parallel.data} data-parallel ranks, idle ones included, run the shape of the largest "
                "batch; if one rank runs eager, all do"
            )
            self.decide("data-parallel-largest", 1, spec.parallel.data, message)

    def _captured_families(self) -> tuple[DecodeFamily, ...]:
        """Return the decodes to capture: draft chains by their length, or single draft steps."""
        if self.role is not Role.DRAFT_DECODE or not self.families:
            return self.families
        longest = max(family.draft_steps or 0 for family in self.families)
        single = self.spec.speculative is not None and self.spec.speculative.chain is Chain.SINGLE
        # With single steps the backends' answers would change nothing.
        by_host = [
            group.registered.name
            for group in (() if single else self.groups)
            if group.registered.refresh(self.role, group.attention, self.environment) is Refresh.HOST
        ]
        if single or by_host or longest == 1:
            if longest > 1 and single:
                message = "speculative.chain requests single steps, so a single-step graph is replayed"
            elif by_host:
                message = f"{by_host[0]} needs a host step between draft steps, so a single-step graph is replayed"
            else:
                message = "only one draft decode follows the draft prefill"
            self.decide("draft-chain", _chains(self.families), "single steps", message, by_host[0] if by_host else None)
            intervals = sorted(interval for f in self.families for interval in f.requests.intervals)
            domain = Domain(tuple(intervals), self.families[0].requests.step)
            return (DecodeFamily(query_len=1, draft_steps=None, requests=domain),)
        message = (
            "every draft backend refreshes its metadata inside the graph, so one graph holds all draft decodes of a "
            f"step: {_chains(self.families)}"
        )
        self.decide("draft-chain", "single steps", _chains(self.families), message)
        return tuple(
            attrs.evolve(family, draft_steps=None) if family.draft_steps == 1 else family for family in self.families
        )

    def _decode_ladder(self, family: DecodeFamily, sizes: Sizes, context: Context) -> Ladder:
        # Sizes are multiples of the sequence-parallel step, so a cap between two of them is lowered.
        step, cap = family.requests.step, self.cap
        capped = family.requests if cap is None else family.requests.clipped(cap // step * step)
        choice = decode_sizes(sizes, capped, family.query_len, context, varies=family.varies).within(cap)
        return self._ladder(
            choice,
            sizes,
            family.requests,
            kind=Kind.DECODE,
            mode=GraphMode.FULL,
            query_len=family.query_len,
            varies=family.varies,
            draft_steps=family.draft_steps,
            max_num_reqs=self.spec.limits.max_num_reqs,
            # A policy that ends below the cap is the reason itself.
            cut=Reason.BACKEND_CAP if capped != family.requests and choice.domain == capped else None,
        )

    def _mixed_ladder(self, sizes: Sizes, context: Context) -> Ladder:
        domain = mixed_tokens(self.role, self.spec)
        anchors: tuple[int, ...] = ()
        # Decodes then run on these graphs, so their largest numbers of tokens are sizes.
        if not self.mode.is_separate:
            anchors = tuple(sorted({f.requests.ceiling * f.query_len for f in self.families}))
        choice = mixed_sizes(sizes, domain, anchors, context)
        full = self.mode.mixed_mode is GraphMode.FULL
        most = self.spec.limits.max_num_reqs
        return self._ladder(
            choice,
            sizes,
            domain,
            kind=Kind.MIXED,
            mode=self.mode.mixed_mode,
            # Anchors bind measured sizes, which are chosen later, and recomputed ones as far as these have them.
            anchors=anchors
            if sizes.policy is Policy.MEASURED
            else tuple(anchor for anchor in anchors if choice.adaptive and anchor in choice.sizes),
            # PIECEWISE graphs run attention outside, so the backend's cap on requests does not bind them.
            max_num_reqs=min(most, self.cap or most) if full else most,
        )

    def _ladder(self, choice: Choice, sizes: Sizes, domain: Domain, **fields: Any) -> Ladder:
        """Return the ladder of a choice, and note the choice; ``fields`` are the ladder's other ones."""
        ladder = Ladder(
            role=self.role,
            domain=choice.domain,
            sizes=choice.sizes,
            adaptive=choice.adaptive,
            cases=lora_cases(self.role, self.spec),
            **fields,
        )
        if sizes.policy is Policy.MEASURED:  # its sizes are chosen later, for all roles at once
            return ladder
        policy = sizes.policy.value.replace("_", "-")
        last = domain.intervals[-1][1]
        self.decide(f"sizes-{policy}", f"1..{last}", counted(len(choice.sizes), "size"), f"{ladder}: {choice.message}")
        return ladder

    def wait_for_use(self, entries: Iterable[Entry], why: str) -> None:
        """Leave graphs to their first use."""
        self.lazy, capture, total = tuple(entries), self.spec.capture, sum(each.num_graphs for each in self.ladders)
        if not total:
            return
        assert capture.memory is not None and capture.seconds_per_minute is not None, "lazy capture has a budget"
        budget = f"{format_bytes(capture.memory)} and {capture.seconds_per_minute:g} s a minute"
        message = f"{why}; {counted(len(self.lazy), 'graph')} wait for their first use, within {budget}"
        self.decide("capture-lazy", counted(total, "graph"), f"{total - len(self.lazy)} at start", message)

    def settle_mode(self) -> None:
        """Resolve to NONE where no ladder has a size left, so that nothing is captured (vLLM's ``needs_capture``)."""
        if self.mode is not GraphMode.NONE and not any(ladder.sizes for ladder in self.ladders):
            message = "no size is left for any kind of batch, so there is nothing to capture and everything runs eager"
            self.decide("nothing-to-capture", self.mode.value, GraphMode.NONE.value, message)
            self.resolved = attrs.evolve(self.resolved, mode=GraphMode.NONE)

    def refit(self, fitted: Sequence[Ladder], rule: str, why: str = "", backend: str | None = None) -> None:
        """Replace the ladders, with a decision for each that changed.

        :param fitted: one for each of ``self.ladders``, in their order.
        :param why: what bounds them; empty: another decision says it for all roles.
        """
        for before, after in zip(self.ladders, fitted, strict=True):
            if before == after:
                continue
            if after.sizes:
                padding = f"worst padding {float(before.worst - 1):.1%} becomes {float(after.worst - 1):.1%}"
            else:
                padding = "no size is left"
            was, left = counted(before.num_graphs, "graph"), counted(after.num_graphs, "graph")
            self.decide(rule, was, left, f"{before}: {why and why + '; '}{padding}", backend)
        self.ladders = tuple(fitted)


def _chains(families: Sequence[DecodeFamily]) -> str:
    """Write the lengths of draft chains: ``chains of 2 and 4``."""
    lengths = sorted({family.draft_steps or 1 for family in families})
    *first, last = map(str, lengths)
    return f"chain{'s' if first else ''} of {', '.join(first)}{' and ' if first else ''}{last}"
