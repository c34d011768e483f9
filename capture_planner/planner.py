"""plan(spec, environment, registry) -> Plan: one pass from what is wanted to what was decided.

Role by role the backends are asked, the mode is resolved and ladders are chosen; the budget then
fits all ladders at once; what they became is written as entries, waivers and workspaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs

from capture_planner._record import digest
from capture_planner.admissible import (
    DecodeFamily,
    Domain,
    decode_families,
    lora_cases,
    mixed_tokens,
    token_step,
)
from capture_planner.contract import COMMON_FIELDS, SPECULATIVE_FIELDS, Attention, MetadataField, PaddingContract, Support, Workspace
from capture_planner.entry import Entry
from capture_planner.environment import Environment
from capture_planner.errors import BackendError, CapturePlannerError
from capture_planner.modes import GraphMode, Reason, Refresh, Role
from capture_planner.plan import Decision, GroupPlan, Kind, Plan, RolePlan, Waiver
from capture_planner.registry import Registered, Registry
from capture_planner.resolve import GroupSupport, Resolved, resolve, resolve_draft_decode, resolve_draft_prefill
from capture_planner.sizing import Context, Ladder, decode_sizes, fit, mixed_sizes, total
from capture_planner.sizing.policies import Choice
from capture_planner.spec import GroupSpec, Sizes, Spec

Answer = TypeVar("Answer")


def plan(spec: Spec, environment: Environment, registry: Registry) -> Plan:
    """Return the plan of ``spec`` on ``environment``: deterministic, without torch or a device.

    Raises ``PlanningError`` where a mode is out of reach, and ``BackendError`` where a backend is
    unknown or breaks its contract.
    """
    roles: list[_Role] = []
    for role in spec.active_roles:
        groups = tuple(_groups(spec, role, environment, registry))
        requested, resolved = _resolve(spec, role, groups, roles[0].resolved.mode if roles else None)
        roles.append(_Role(spec, environment, role, groups, requested, resolved))
    for working in roles:
        working.choose_ladders()
        working.fit_backend()
    _fit_budget(spec, roles)
    return Plan(
        spec=digest(spec),
        environment=environment,
        model=spec.model,
        limits=spec.limits,
        speculative=spec.speculative,
        lora=spec.lora,
        parallel=spec.parallel,
        piecewise=spec.piecewise,
        budget=spec.budget,
        pool=spec.pool,
        roles=tuple(working.written() for working in roles),
    )


@attrs.frozen(kw_only=True)
class _Group:
    """An attention group while it is planned."""

    spec: GroupSpec
    registered: Registered
    attention: Attention
    support: Support

    def ask(self, call: str, kind: type[Answer], *args: object) -> Answer:
        """Call a method of the backend; what it raises or returns wrongly carries its name."""
        method: Callable[..., object] = getattr(self.registered.backend, call)
        return _checked(self.registered, f"{call} of group {self.spec.name}", kind, method, *args)


def _checked(
    registered: Registered, what: str, kind: type[Answer], method: Callable[..., object], *args: object
) -> Answer:
    origin = f"the backend {registered.backend.name!r} ({registered.distribution} {registered.version}), in {what}"
    try:
        answer = method(*args)
    except CapturePlannerError:
        raise
    except Exception as error:
        raise BackendError(f"{origin}, raised {type(error).__name__}: {error}; tell its authors") from error
    if not isinstance(answer, kind):
        raise BackendError(f"{origin}, returned {answer!r}, not a {kind.__name__}; tell its authors")
    return answer


def _groups(spec: Spec, role: Role, environment: Environment, registry: Registry) -> list[_Group]:
    """Ask the backend of each attention group of a role how far it goes."""
    wanted = spec.roles.of(role)
    backend = wanted.backend or spec.backend
    draft = spec.speculative.model if spec.speculative and role.is_drafter else None
    layers = draft.num_layers if draft else spec.model.num_layers
    found = []
    for group in wanted.groups or (GroupSpec(name="all", layers=layers),):
        registered = registry[group.backend or backend]
        attention = _attention(spec, role, group)
        support = _checked(
            registered,
            f"support of group {group.name}",
            Support,
            registered.backend.support,
            role,
            attention,
            environment,
        )
        found.append(_Group(spec=group, registered=registered, attention=attention, support=support))
    return found


def _attention(spec: Spec, role: Role, group: GroupSpec) -> Attention:
    """Say what a group asks of its backend, in one rank's heads."""
    model, tensor = spec.model, spec.parallel.tensor
    draft = spec.speculative.model if spec.speculative and role.is_drafter else None
    num_heads = (draft and draft.num_heads) or model.num_heads
    num_kv_heads = (draft and draft.num_kv_heads) or model.num_kv_heads
    return Attention(
        num_layers=group.layers,
        num_heads=max(num_heads // tensor, 1),
        num_kv_heads=max(num_kv_heads // tensor, 1),
        head_dim=(draft and draft.head_dim) or model.head_dim,
        max_model_len=model.max_model_len,
        max_query_len=_max_query_len(spec, role),
        window=group.window,
        causal=model.causal,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype or model.dtype,
        latent=draft.latent if draft else model.latent,
        sinks=draft.sinks if draft else model.sinks,
        decode_context=spec.parallel.decode_context,
    )


def _max_query_len(spec: Spec, role: Role) -> int:
    """Return the longest uniform query of a role: 1 + the largest k that is scheduled, or 1."""
    if spec.speculative is None or role is Role.DRAFT_DECODE:
        return 1
    return 1 + max(k for _, _, k in spec.speculative.tiers(spec.limits.max_num_reqs))


def _resolve(
    spec: Spec, role: Role, groups: Sequence[_Group], target: GraphMode | None
) -> tuple[GraphMode, Resolved]:
    """Return the mode that a role starts from, and the one that it ends with."""
    supports = [
        GroupSupport(group=g.spec.name, backend=g.registered.backend.name, support=g.support) for g in groups
    ]
    wanted, query_len = spec.roles.of(role).mode, _max_query_len(spec, role)
    if target is None:
        requested = wanted or spec.mode
        return requested, resolve(role, requested, supports, max_query_len=query_len, piecewise=spec.piecewise)
    if role is Role.DRAFT_PREFILL:
        return target, resolve_draft_prefill(
            target, wanted, supports, max_query_len=query_len, piecewise=spec.piecewise
        )
    return target, resolve_draft_decode(target, wanted, supports)


@attrs.define
class _Role:
    """One role on its way to a RolePlan."""

    spec: Spec
    environment: Environment
    role: Role
    groups: tuple[_Group, ...]
    requested: GraphMode
    resolved: Resolved
    families: tuple[DecodeFamily, ...] = ()
    ladders: tuple[Ladder, ...] = ()
    decisions: list[Decision] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.decisions = list(self.resolved.decisions)
        self.families = decode_families(self.role, self.spec)

    def decide(self, rule: str, before: object, after: object, says: str, backend: str | None = None) -> None:
        self.decisions.append(
            Decision(rule=rule, before=str(before), after=str(after), role=self.role, backend=backend, says=says)
        )

    @property
    def mode(self) -> GraphMode:
        return self.resolved.mode

    @property
    def cap(self) -> int | None:
        """Most requests that every backend of the role can capture."""
        return min((g.support.max_num_reqs for g in self.groups if g.support.max_num_reqs), default=None)

    def choose_ladders(self) -> None:
        """Choose sizes for each kind of batch that the mode has graphs for."""
        self._note_limits()
        sizes = self.spec.roles.of(self.role).sizes or self.spec.sizes
        context = Context(
            limits=self.spec.limits,
            speculative=self.spec.speculative,
            parallel=self.spec.parallel,
            environment=self.environment,
        )
        ladders = []
        if self.mode.is_separate:
            ladders += [self._decode_ladder(family, sizes, context) for family in self._captured_families()]
        if self.mode.mixed_mode is not GraphMode.NONE and self.role is not Role.DRAFT_DECODE:
            ladders.append(self._mixed_ladder(sizes, context))
        self.ladders = tuple(ladders)

    def _note_limits(self) -> None:
        """Record what the deployment fixes before any size is chosen."""
        spec, limits, step = self.spec, self.spec.limits, token_step(self.spec.parallel)
        speculative = spec.speculative
        if speculative is not None and self.role is Role.TARGET:
            clamped = sorted({k for *_, k in speculative.schedule if k > speculative.num_tokens})
            if clamped:
                self.decide(
                    "schedule-clamped",
                    max(clamped),
                    speculative.num_tokens,
                    f"the schedule asks for up to {max(clamped)} draft tokens, num_tokens allows "
                    f"{speculative.num_tokens}",
                )
        if self.role is Role.DRAFT_DECODE and not self.families:
            self.decide(
                "draft-decode-never-runs",
                self.mode.value,
                "no graphs",
                "with one draft token the draft prefill is the whole draft: no draft decode follows",
            )
        for query_len in sorted({family.query_len for family in self.families}):
            fits = limits.max_num_tokens // query_len
            if fits < limits.max_num_reqs:
                self.decide(
                    "tokens-limit-requests",
                    limits.max_num_reqs,
                    fits,
                    f"{fits} requests of {query_len} tokens fill max_num_tokens {limits.max_num_tokens}, so no "
                    f"decode of {limits.max_num_reqs} can be scheduled",
                )
        if step > 1:
            self.decide(
                "sequence-parallel-alignment",
                1,
                step,
                f"padded tokens are multiples of {step}, because sequence parallelism splits them over the ranks",
            )
        if spec.parallel.data > 1 and self.role is Role.TARGET:
            self.decide(
                "data-parallel-largest",
                1,
                spec.parallel.data,
                f"{spec.parallel.data} data-parallel ranks run the largest rank's batch, idle ranks included; "
                "one eager rank makes all of them eager",
            )

    def _captured_families(self) -> tuple[DecodeFamily, ...]:
        """Return the decodes to capture: a draft chain by its length, or single steps for all."""
        if self.role is not Role.DRAFT_DECODE or not self.families:
            return self.families
        by_host = [
            group.registered.backend.name
            for group in self.groups
            if group.ask("refresh", Refresh, self.role, group.attention, self.environment) is Refresh.HOST
        ]
        longest = max(family.draft_steps or 0 for family in self.families)
        if by_host or longest == 1:
            says = (
                f"{by_host[0]} needs a host step between draft steps, so one single-step graph is replayed"
                if by_host
                else "a single draft decode follows the draft prefill"
            )
            self.decide("draft-chain", longest, 1, says, by_host[0] if by_host else None)
            intervals = sorted(interval for f in self.families for interval in f.requests.intervals)
            domain = Domain(tuple(intervals), self.families[0].requests.step)
            return (DecodeFamily(query_len=1, draft_steps=None, requests=domain),)
        self.decide(
            "draft-chain",
            1,
            longest,
            "every draft backend refreshes its metadata inside the graph, so all the draft decodes of a step "
            "are one graph, for each length that is scheduled",
        )
        return tuple(
            attrs.evolve(family, draft_steps=None) if family.draft_steps == 1 else family
            for family in self.families
        )

    def _decode_ladder(self, family: DecodeFamily, sizes: Sizes, context: Context) -> Ladder:
        step, cap = family.requests.step, self.cap
        capped = family.requests if cap is None else family.requests.clipped(cap // step * step)
        choice = decode_sizes(sizes, capped, family.query_len, context)
        ladder = Ladder(
            role=self.role,
            kind=Kind.DECODE,
            mode=GraphMode.FULL,
            query_len=family.query_len,
            draft_steps=family.draft_steps,
            domain=choice.domain,
            sizes=choice.sizes,
            adaptive=choice.adaptive,
            cases=lora_cases(self.role, self.spec),
            max_num_reqs=self.spec.limits.max_num_reqs,
            cut=Reason.BACKEND_CAP if capped != family.requests and choice.domain == capped else None,
        )
        self._note_choice(ladder, choice, sizes, family.requests)
        return ladder

    def _mixed_ladder(self, sizes: Sizes, context: Context) -> Ladder:
        domain = mixed_tokens(self.role, self.spec)
        anchors: tuple[int, ...] = ()
        if not self.mode.is_separate:
            anchors = tuple(family.requests.ceiling * family.query_len for family in self.families)
        choice = mixed_sizes(sizes, domain, anchors, context)
        full = self.mode.mixed_mode is GraphMode.FULL
        most = self.spec.limits.max_num_reqs
        ladder = Ladder(
            role=self.role,
            kind=Kind.MIXED,
            mode=self.mode.mixed_mode,
            domain=choice.domain,
            sizes=choice.sizes,
            adaptive=choice.adaptive,
            anchors=tuple(anchor for anchor in anchors if choice.adaptive and anchor in choice.sizes),
            cases=lora_cases(self.role, self.spec),
            max_num_reqs=min(most, self.cap or most) if full else most,
        )
        self._note_choice(ladder, choice, sizes, domain)
        return ladder

    def _note_choice(self, ladder: Ladder, choice: Choice, sizes: Sizes, domain: Domain) -> None:
        policy = sizes.policy.value.replace("_", "-")
        last = domain.intervals[-1][1]
        self.decide(f"sizes-{policy}", f"1..{last}", f"{len(choice.sizes)} sizes", f"{ladder}: {choice.says}")

    def fit_backend(self) -> None:
        """Hold no more full graphs than the backends can."""
        capped = [group for group in self.groups if group.support.max_graphs is not None]
        if not capped:
            return
        group = min(capped, key=lambda g: g.support.max_graphs or 0)
        allowed = group.support.max_graphs or 0
        full = [ladder for ladder in self.ladders if ladder.mode is GraphMode.FULL]
        if total(full) <= allowed:
            return
        name = group.registered.backend.name
        why = f"{name} holds at most {allowed} full graphs"
        fitted = iter(fit(full, allowed, Reason.BACKEND_CAP))
        self.refit(
            [next(fitted) if ladder.mode is GraphMode.FULL else ladder for ladder in self.ladders],
            "backend-max-graphs",
            why,
            name,
        )

    def refit(self, fitted: Sequence[Ladder], rule: str, why: str, backend: str | None = None) -> None:
        """Replace the ladders, and say of each what it lost."""
        for before, after in zip(self.ladders, fitted, strict=True):
            if before == after:
                continue
            if after.sizes:
                padding = f"worst padding {float(before.worst - 1):.1%} becomes {float(after.worst - 1):.1%}"
            else:
                padding = "nothing is left of it"
            self.decide(
                rule,
                f"{before.num_graphs} graphs",
                f"{after.num_graphs} graphs",
                f"{before}: {why}; {padding}",
                backend,
            )
        self.ladders = tuple(fitted)

    def written(self) -> RolePlan:
        """Return what was decided."""
        entries = tuple(entry for ladder in self.ladders for entry in _entries(ladder))
        inputs: tuple[MetadataField, ...] = COMMON_FIELDS
        if self.role is Role.TARGET and self.spec.speculative is not None:
            inputs += SPECULATIVE_FIELDS
        return RolePlan(
            role=self.role,
            requested=self.requested,
            mode=self.mode,
            groups=tuple(self._group(group, entries) for group in self.groups),
            decisions=tuple(self.decisions),
            entries=entries,
            waivers=tuple(self._waivers()),
            inputs=inputs,
        )

    def _group(self, group: _Group, entries: tuple[Entry, ...]) -> GroupPlan:
        asked = (self.role, group.attention, self.environment)
        return GroupPlan(
            name=group.spec.name,
            layers=group.spec.layers,
            backend=group.registered.backend.name,
            distribution=group.registered.distribution,
            version=group.registered.version,
            support=group.support,
            padding=group.ask("padding", PaddingContract, *asked),
            workspace=group.ask("workspace", Workspace, *asked, entries, self.spec.limits),
        )

    def _waivers(self) -> list[Waiver]:
        """Waive every admissible batch that no entry serves. Sizes only ever end too early."""
        waivers = []
        mixed = next((ladder for ladder in self.ladders if ladder.kind is Kind.MIXED and ladder.sizes), None)
        most_loras = lora_cases(self.role, self.spec)[-1]
        for family in self.families:
            reach = self._decode_reach(family, mixed)
            first = family.requests.after(reach)
            if first is not None:
                reason = self._reason(self.mode.decode_mode, self._ladder_of(family) or self._ladder_of(None))
                last = family.requests.intervals[-1][1]
                waivers.append(
                    Waiver(
                        kind=Kind.DECODE,
                        query_len=family.query_len,
                        first=first,
                        last=last,
                        max_loras=most_loras,
                        reason=reason,
                        says=f"decodes of {first} to {last} requests run eager: {_WHY[reason]}",
                    )
                )
        if self.role is Role.DRAFT_DECODE:
            return waivers
        limits, ladder = self.spec.limits, self._ladder_of(None)
        spans = [(1 + (mixed.sizes[-1] if mixed else 0), self._reason(self.mode.mixed_mode, ladder))]
        if mixed is not None and mixed.max_num_reqs < limits.max_num_reqs:
            spans.insert(0, (mixed.max_num_reqs + 1, Reason.BACKEND_CAP))
        ends = [first - 1 for first, _ in spans[1:]] + [limits.max_num_tokens]
        for (first, reason), last in zip(spans, ends, strict=True):
            if first <= last:
                waivers.append(
                    Waiver(
                        kind=Kind.MIXED,
                        first=first,
                        last=last,
                        max_loras=most_loras,
                        reason=reason,
                        says=f"mixed batches of {first} to {last} tokens run eager: {_WHY[reason]}",
                    )
                )
        return waivers

    def _ladder_of(self, family: DecodeFamily | None) -> Ladder | None:
        """Return the ladder that is meant for a family of decodes, or for mixed batches."""
        for ladder in self.ladders:
            if family is None:
                if ladder.kind is Kind.MIXED:
                    return ladder
            elif ladder.query_len == family.query_len and ladder.draft_steps in (None, family.draft_steps):
                return ladder
        return None

    def _decode_reach(self, family: DecodeFamily, mixed: Ladder | None) -> int:
        """Return the most requests of a decode that some entry serves."""
        reach = [
            ladder.sizes[-1]
            for ladder in self.ladders
            if ladder.sizes
            and ladder.query_len == family.query_len
            and ladder.draft_steps in (None, family.draft_steps)
        ]
        if mixed is not None:
            tokens = mixed.sizes[-1] // family.query_len
            reach.append(min(tokens, mixed.max_num_reqs) if mixed.mode is GraphMode.FULL else tokens)
        return max(reach, default=0)

    def _reason(self, half: GraphMode, ladder: Ladder | None) -> Reason:
        if half is GraphMode.NONE or ladder is None:
            return Reason.MODE
        if ladder.kind is Kind.MIXED and ladder.max_num_reqs < self.spec.limits.max_num_reqs and not ladder.cut:
            return Reason.SIZES if half is GraphMode.PIECEWISE else Reason.BACKEND_CAP
        return ladder.cut or Reason.SIZES


_WHY = {
    Reason.MODE: "the resolved mode has no graph for them",
    Reason.SIZES: "the size policy ends below them",
    Reason.BACKEND_CAP: "the backend cannot capture that many",
    Reason.BUDGET: "their graphs were dropped to meet the budget",
}


def _entries(ladder: Ladder) -> list[Entry]:
    entries = []
    for size in ladder.sizes:
        num_reqs: int | None = ladder.num_reqs(size)
        num_tokens = size if ladder.query_len is None else size * ladder.query_len
        if ladder.mode is GraphMode.PIECEWISE:
            num_reqs = None
        entries += [
            Entry(
                mode=ladder.mode,
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                query_len=ladder.query_len,
                active_loras=case,
                draft_steps=ladder.draft_steps,
            )
            for case in ladder.served(size)
        ]
    return entries


def _fit_budget(spec: Spec, roles: Sequence[_Role]) -> None:
    """Fit the graphs of all roles into the budget, and give each role its part back."""
    bound = spec.budget.allowed_graphs()
    ladders = [ladder for working in roles for ladder in working.ladders]
    if bound is None or total(ladders) <= bound[0]:
        return
    allowed, rule = bound
    fitted = iter(fit(ladders, allowed, Reason.BUDGET))
    why = f"{rule} leaves {allowed} of {total(ladders)} graphs"
    for working in roles:
        working.refit([next(fitted) for _ in working.ladders], "budget", why)
