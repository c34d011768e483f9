"""Mutants of plans, classes A to C: what is captured is not what batches need."""

from __future__ import annotations

import attrs

from capture_planner.analysis.lint.core import BugClass
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry, Kind
from capture_planner.records.plan import Plan, RolePlan, Waiver
from capture_planner.records.spec import Policy
from gallery.planned import PlanMutant, deployed, on_role, planted, with_sizes

# A, coverage -----------------------------------------------------------------------------------

_VERIFIED = deployed(reqs=6, tokens=512, drafts=6)
"""Six requests of seven tokens: the largest decode has 42."""


def _list_ends_at_40() -> Plan:
    """The engine's own list, asked for a maximum of 42: its step of 8 ends at 40."""
    return with_sizes(_VERIFIED, policy=Policy.VLLM, max_tokens=42).plan()


_OFF_STRIDE = deployed(reqs=12, tokens=512, mode=GraphMode.FULL_DECODE_ONLY)
"""Twelve requests: no step of the engine's list."""


def _ceiling_left_out() -> Plan:
    """Sizes go to the last step below the maximum, 8, and nothing says that 9 to 12 run eager."""
    return on_role(
        _OFF_STRIDE.plan(),
        Role.TARGET,
        lambda role: replace(role, entries=tuple(entry for entry in role.entries if entry.num_tokens <= 8)),
    )


_CROWDED = deployed(reqs=4096, tokens=8192)


def _captured_to_32() -> Plan:
    return with_sizes(_CROWDED, policy=Policy.SGLANG, max_reqs=32).plan()


# B, shape algebra ------------------------------------------------------------------------------

_ODD = deployed(reqs=33, tokens=512)


def _edited_to_34() -> Plan:
    """The largest decode was rounded up by hand."""

    def rounded(entry: Entry) -> Entry:
        return replace(entry, num_reqs=34, num_tokens=34) if entry.num_reqs == entry.num_tokens == 33 else entry

    return on_role(_ODD.plan(), Role.TARGET, lambda role: replace(role, entries=tuple(map(rounded, role.entries))))


_TRIPLES = deployed(reqs=8, tokens=512, drafts=2)


def _requests_from_rounded_tokens() -> Plan:
    """Sizes are tokens, and requests are what they hold of them, rounded up: the last one is short."""

    def rounded(role: RolePlan) -> RolePlan:
        mixed = [entry for entry in role.entries if entry.query_len is None]
        uniform = (
            Entry(mode=GraphMode.FULL, num_tokens=size, num_reqs=-(-size // 3), query_len=3)
            for size in (1, 2, 4, 8, 16, 24)
        )
        return replace(role, entries=(*mixed, *uniform))

    return on_role(_TRIPLES.plan(), Role.TARGET, rounded)


_FEWER_WHEN_FULL = ((1, 8, 7), (9, 32, 1))
_TIERS = deployed(reqs=32, tokens=1024, drafts=7, schedule=_FEWER_WHEN_FULL)


def _target_formula_for_the_drafter() -> Plan:
    """Each tier shortens the query by as much as it drafts less: 1 + (1 - 7) where the query has one token."""

    def tiers(role: RolePlan) -> RolePlan:
        lengths = [1 + (k - 7) for *_, k in _FEWER_WHEN_FULL]
        return replace(
            role,
            entries=tuple(
                attrs.evolve(entry, query_len=length, num_tokens=(entry.num_reqs or 0) * length)
                for entry in role.entries
                for length in lengths
            ),
        )

    return on_role(_TIERS.plan(), Role.DRAFT_DECODE, tiers)


# C, dispatch -----------------------------------------------------------------------------------

_SCHEDULED = deployed(reqs=64, tokens=1024, drafts=2, schedule=((1, 16, 2), (17, 64, 1)))


def _every_tier_at_every_size() -> Plan:
    """Each query length of the schedule is captured at each size, whatever the schedule sends there."""

    def all_tiers(role: RolePlan) -> RolePlan:
        uniform = [entry for entry in role.entries if entry.query_len is not None]
        more = {
            attrs.evolve(entry, query_len=length, num_tokens=(entry.num_reqs or 0) * length)
            for entry in uniform
            for length in {other.query_len for other in uniform if other.query_len}
        }
        return replace(role, entries=tuple({*role.entries, *more}))

    return on_role(_SCHEDULED.plan(), Role.TARGET, all_tiers)


_DOUBLING = tuple(1 << i for i in range(12))
_PREFILLS = deployed(reqs=64, tokens=8192, mode=GraphMode.PIECEWISE)


def _prefill_sizes(*tokens: int) -> Plan:
    return with_sizes(_PREFILLS, policy=Policy.EXPLICIT, num_tokens=tokens).plan()


def _cheap_padding_refused() -> Plan:
    """What a graph would pad to more than twice its tokens runs eager, and be it 5 tokens of 16."""
    refused = Waiver(
        kind=Kind.MIXED, first=5, last=7, reason=Reason.SIZES, message="a graph would pad to more than twice"
    )
    return on_role(
        _prefill_sizes(1, 2, 4, 16, 32, 64, 128, 256, 512),
        Role.TARGET,
        lambda role: replace(role, waivers=(refused, *role.waivers)),
    )


# All -------------------------------------------------------------------------------------------

PLANTED: tuple[PlanMutant, ...] = (
    planted(
        "list-ends-below-the-ceiling",
        BugClass.A,
        "vllm#54933",
        says="a largest size of 42 (6 requests of 7 tokens) becomes 40, the last step of the list",
        healthy=_VERIFIED,
        plan=_list_ends_at_40,
    ),
    planted(
        "ceiling-left-out",
        BugClass.A,
        "vllm-ascend#16049",
        says="at most 12 requests, sizes to 8: larger decodes run eager, and nothing says so",
        healthy=_OFF_STRIDE,
        plan=_ceiling_left_out,
    ),
    planted(
        "captured-to-32",
        BugClass.A,
        "sglang#33483",
        says="graphs for up to 32 requests where 4096 run",
        healthy=_CROWDED,
        plan=_captured_to_32,
    ),
    planted(
        "decode-sizes-off-the-multiple",
        BugClass.B,
        "vllm#28207",
        says="with K = 2, decode graphs have 1, 2, 4, 8 tokens: no multiples of 3, the last request is short",
        healthy=_TRIPLES,
        plan=_requests_from_rounded_tokens,
    ),
    planted(
        "edited-beyond-the-limits",
        BugClass.B,
        "vllm#50065",
        says="the largest decode is rounded up by hand to 34 requests, and the limits admit 33",
        healthy=_ODD,
        plan=_edited_to_34,
    ),
    planted(
        "draft-query-below-one",
        BugClass.B,
        "vllm#48494",
        "vllm#48329",
        says="the target's query length of a tier is applied to draft decodes: 1 + (1 - 7) = -5 tokens",
        healthy=_TIERS,
        plan=_target_formula_for_the_drafter,
    ),
    planted(
        "every-tier-at-every-size",
        BugClass.C,
        "vllm#56136",
        "vllm#53407",
        says="every query length of a schedule is captured at every size",
        healthy=_SCHEDULED,
        plan=_every_tier_at_every_size,
    ),
    planted(
        "prefill-sizes-far-apart",
        BugClass.C,
        "sglang#31487",
        says="3208 tokens of prompts are padded to 8192",
        healthy=lambda: _prefill_sizes(*_DOUBLING, 3200, 4096, 6144, 8192),
        plan=lambda: _prefill_sizes(*_DOUBLING, 3200, 8192),
    ),
    planted(
        "cheap-padding-refused",
        BugClass.C,
        "sglang#40253",
        says="a fixed cap of twice the tokens leaves 5 tokens eager although a graph of 16 exists",
        healthy=lambda: _prefill_sizes(1, 2, 4, 16, 32, 64, 128, 256, 512),
        plan=_cheap_padding_refused,
    ),
)
