"""Mutants that are the same program, each with the reason: they are not counted, and a result lists them apart.

A rule has a piece of the line as it is, and a pattern that the changed line has and the line itself has not. A rule
is for what cannot differ: what a test could notice, however unlikely, is a survivor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SORTS_FIRST = "no member sorts below it"
_SORTS_LAST = "no member sorts above it"
_BY_NAME = "how the record is constructed: its fields are given by name"
_SAME_LENGTHS = "a check that never fails: both have the same length"
_BISECTED = "bisect returns no more than the length"
_DEVICE = "runs on a GPU only, where tests/gpu compares its bytes; these tests have none"
_ON_DEVICE = "runs on a GPU only: these tests have none"
_OTHER_END = "the other end of a range: no step lies between the two, or the list ends at the top"
_DEPLOYMENT = "a deployment to check with: its neighbours are as good"
_ROUNDS = "how often the rest is recomputed: the sizes are the best either way"
_STOPS = "after how many sets a search stops, and says so"


def _ordered(name: str, *, first: bool) -> Iterable[tuple[str, str, str]]:
    reason = _SORTS_FIRST if first else _SORTS_LAST
    same, other = ("<=", ">") if first else (">=", "<")
    yield f" is {name}", rf" {same} {re.escape(name)}\b", reason
    yield f" is not {name}", rf" {other} {re.escape(name)}\b", reason


Rules = tuple[tuple[str, str, str], ...]

ANYWHERE: Rules = (
    ("kw_only=True", "kw_only=False", _BY_NAME),
    ("strict=True", "strict=False", _SAME_LENGTHS),
    *_ordered("Role.DRAFT_DECODE", first=True),
    *_ordered("Role.TARGET", first=False),
    *_ordered("GraphMode.NONE", first=True),
    *_ordered("GraphMode.FULL", first=False),
    *_ordered("GraphSupport.NEVER", first=True),
    *_ordered("GraphSupport.ALWAYS", first=False),
)
"""Of any module."""

RULES: dict[str, Rules] = {
    "modes": (("if self is GraphMode.PIECEWISE:", r"<= GraphMode", "only NONE is less, and NONE is what it returns"),),
    "planning/sizing/policies": (
        ("SGLANG_PREFILL_TOKENS = 2048", r"= +2049", _OTHER_END),
        ("round(time(size) * 1_000_000)", r"\* +(999999|1000001)", "a unit of time: ratios are compared"),
    ),
    "planning/sizing/budget": (
        ("pair[0].kind is kind", r"pair\[ ?-?1\]\.kind", "a ladder is of the same kind before and after"),
        ("-(ladder.query_len or 0)", r"or +-?1\)", "mixed ladders have no query length: only roles tell them apart"),
    ),
    "planning/sizing/minimax": (
        ("_ROUNDS = 4", r"_ROUNDS = +[35]", _ROUNDS),
        ("rounds -= 1", r"rounds -= +[02]", _ROUNDS),
        ("domain.after(0)", r"after\( ?-1\)", "no count is below one"),
        ("if anchor < len(anchors):", r"anchor (!=|is not) len", _BISECTED),
        ("if nearest == len(candidates):", r"nearest (>=|is) len", _BISECTED),
        ("grid = domain.ceiling**2", r"ceiling\*\* ?3", "a finer grid"),
    ),
    "planning/sizing/ladder": (
        ("upto_count(size) or 0", r"or ?-?1\)", "a size that serves no count is in no ladder"),
        ("if ratio <= self.worst", r"ratio < self", "within its own worst ratio, a ladder is at most shortened"),
        ("if len(sizes) >= len(self.sizes)", r"\) (==|is) len", "a looser ratio never takes more sizes"),
    ),
    "planning/sizing/engine_lists": (
        ("if query_len > 1 and", r"query_len (!= 1|>= 1|> +0)", "for one token the general rule gives the same sizes"),
        ("*range(10, 33, 2)", r"\b34,", _OTHER_END),
        ("*range(40, 65, 4)", r"\b66,", _OTHER_END),
        ("*range(72, 257, 8)", r"\b258,", _OTHER_END),
        ("*range(16, 257, 8)", r"\b258,", _OTHER_END),
        ("*range(272, 512, 16)", r"\b51[13],", _OTHER_END),
        ("*range(4, 33, 4)", r"\b34,", _OTHER_END),
        ("*range(48, 257, 16)", r"\b258,", _OTHER_END),
        ("*range(288, 513, 32)", r"\b514,", _OTHER_END),
        ("*range(576, 1025, 64)", r"\b1026,", _OTHER_END),
        ("*range(1280, 4097, 256)", r"\b4098,", _OTHER_END),
        ("*range(8, 129, 8)", r"\b130,", _OTHER_END),
        ("top + 1, ", r"top (\*|//|\*\*|<<|\|) 1,|top \+ +[02],", _OTHER_END),
        ("(top - 1).bit_length()", r"top (\+|\*|//|\*\*|<<|\||\^) 1\)|top - +0\)", _OTHER_END),
        ("if size <= top}", r"size < top", "the top itself is added"),
    ),
    "planning/sizing/program": (
        ("attrs.field(factory=list, init=False)", r"init=True", _BY_NAME),
        ("while len(self._tops) < number:", r"\) <= number", "one more row is computed, and not read"),
    ),
    "planning/measured/allocation": (
        ("_Allocation(0, 0, ()", r"_Allocation\((\s*-?1, 0|0,\s*-?1),", "a constant in all sums that are compared"),
        ("left: tuple[int, ...] = attrs.field(order=False)", r"order=True", "orders states that are equal in all else"),
        ("left - need for left, need", r"left (<<|\+|\|) need", "a choice that leaves too little is none"),
        (
            "Fraction(1, longest**2 + 1)",
            r"longest\*\*2 (\*|//|\*\*|\||<<|\^|-) 1|longest\*\*2 \+ +[02]|longest\*\* ?3",
            "a grain as fine as two ratios can be near, or finer: the walk ends at the same ratio",
        ),
    ),
    "planning/resolve": ((" is _FULL", r">= _FULL", _SORTS_LAST), (" is not _FULL", r" < _FULL", _SORTS_LAST)),
    "planning/planner": (
        ("100 * groups + 10 * decisions", r"100 \*\* groups", "more plans are written: the same answer"),
        ("100 * groups + 10 * decisions", r"groups // 10", "an estimate, to be far from what a file may have"),
    ),
    "planning/measured/teams": (
        ("if each.role is ladder.role)", r"each\.role <= ladder", "roles come in order, and the first sorts last"),
    ),
    "planning/measured/search": (
        ("bound.limit < 0 for bound", r"limit <= 0", "to waive what takes of no bound saves nothing"),
        ("MOST_LISTED = 1 << 16", r"MOST_LISTED = .*", _STOPS),
        ("MOST_SETS = 1024", r"MOST_SETS = +102[35]", _STOPS),
        ("if tried == MOST_SETS or", r"(tried|number) >= MOST", "both grow by one"),
        (
            "if best is not None and (least > best[0][0]",
            r"\(least == best\[0\]\[0\] or|> best\[0\]\[ ?0\]\)\)",
            "it ends a search in which nothing better is left",
        ),
        ("range(len(cheap) + 1)", r"\) \^ 1|\) \| 1|\) \+ +2", "the set of all is tried anyway, or twice"),
    ),
    "planning/costs": (
        ("abs((steps or 1)", r"\(steps or +[02]\)", "curves without a chain differ in other parts of the key"),
        ("query_len or 0,", r"query_len and 0,", "nothing is left to order where all others are equal"),
    ),
    "planning/measured/choice": (("if any(len(team) > 1 and", r"\) != 1", "no team is empty"),),
    "planning/measured/steps": (
        ("return items[-1][0]", r"\[\+1\]", "reached only where a sum of floats is short of all steps"),
    ),
    "dispatch/dispatcher": (
        ("entry.num_tokens // query_len)", r"num_tokens / query_len", "as many requests as the whole number below"),
        (
            "entry.num_reqs >= entry.num_tokens else",
            r"num_reqs (>|==) entry",
            "the bound binds no batch: the same answers",
        ),
        ("if level < len(self._levels)", r"level (!=|is not) len", _BISECTED),
        ("_CACHE_SIZE = 1 << 16", r"_CACHE_SIZE = .*", "how many answers are kept"),
        ("self._cached = 1", r"_cached = +[02]", "how many answers are kept"),
    ),
    "execution/fields": (
        ('.device.type == "cpu"', r'type <= "cpu"', "no device sorts below cpu"),
        ("@attrs.define(eq=False)", r"eq=True", "buffers are never compared"),
    ),
    "execution/fused": (
        ("rows * (_COLUMNS * 8 + _ALIGNMENT)", r"_COLUMNS << 8", "more room than is written"),
        ("tl.arange(0, block)", r"first (\||\^) tl", "the first place is a multiple of the block"),
        ("if pinned", r"if not pinned", _DEVICE),
        ("count = min(1 << (count - 1).bit_length(), len(self._device))", r".", _DEVICE),
        ("key = turn, count, 1 << (blocks - 1).bit_length()", r".", _DEVICE),
        ("if key not in self._graphs:", r".", _DEVICE),
        ("self._launch(key[2], self.max_writes)", r".", _DEVICE),
        ("self._launch(1, rows)", r".", _DEVICE),
        ("with nothing_collected(), torch.cuda.stream(stream):", r".", _DEVICE),
    ),
    "conformance/audits": (
        ("with subject.stage(subject, cases[0].scene)", r"cases\[ ?-?1\]", "scenes differ in mode, not in fields"),
        ("_cases(shapes[0], seed)", r"shapes\[ ?-?1\]", "a shape to audit with: another is as good"),
    ),
    "conformance/memory": (
        ("@attrs.frozen(eq=False)", r"eq=True", "snapshots are never compared"),
        ("LARGEST = 1 << 20", r"LARGEST = .*", "between an output and a workspace, which differ by more"),
        ("if turn == 2:", r"turn >= 2", "a remainder of three"),
        ("elif depth > 1:", r"depth != 1", "it is never less"),
    ),
    "conformance/scene_batch": (("found = RequestStates(", r".", "how long the arrays are: no less than is written"),),
    "conformance/shapes": (
        ("Arrive(prompt=2, computed=2)", r".", _DEPLOYMENT),
        ("size_tokens=(16,), size_reqs=(3,))", r".", _DEPLOYMENT),
    ),
    "conformance/tampering": (
        ("below = {None: bounds.positions", r".", _ON_DEVICE),
        ("if below is None and indexes is not None:", r".", _ON_DEVICE),
        ("draw = np.random.default_rng(len(tail))", r".", _ON_DEVICE),
        ("elif buffer.field.axis is not Axis.REQUEST_PLUS_ONE:", r".", _ON_DEVICE),
    ),
    "conformance/watch": (
        ("self._breaks = 0", r"_breaks = +-?1$", "each session sets it"),
        ("self.largest = (0, 0)", r"\( ?-1, 0\)|\(0, +-?1\)", "a batch has at least one request"),
        ("self.longest, self.pages = 0, 0", r"-1", "a forward has a request"),
    ),
}
"""Of a module."""


def equivalent(module: str, before: str, after: str) -> str | None:
    """Return why a mutant is the same program, or None."""
    for code, pattern, reason in (*ANYWHERE, *RULES.get(module, ())):
        if code in before and re.search(pattern, after) and (pattern == "." or not re.search(pattern, before)):
            return reason
    return None
