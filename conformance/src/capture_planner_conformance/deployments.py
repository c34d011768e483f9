"""Draw scenes: small deployments of any kind, and now and then a large one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from capture_planner.modes import GraphMode
from capture_planner_conformance.scene import CaptureAttack, DraftScheme, Scene, Shape

MOST_REQS, MOST_DRAFTS = 5, 5
"""Of most scenes."""

LARGE_REQS, LARGE_DRAFTS = 17, 3
"""The fewest requests of a large scene, one more than a tile of 16, and its most drafts."""

LARGEST_REQS = 20
"""The most requests of a large scene, unless the caller says otherwise."""

DRAFTERS = (
    DraftScheme.EAGLE,
    DraftScheme.EAGLE3,
    DraftScheme.DRAFT_MODEL,
    DraftScheme.PARALLEL,
    DraftScheme.LAYERS,
    DraftScheme.EAGLE3,
    DraftScheme.MODULES,
    DraftScheme.PARALLEL_MODEL,
)
"""Drafters to draw from: chains on the target's rows, which most engines run, more often."""

MODES = (
    GraphMode.FULL_AND_PIECEWISE,
    GraphMode.FULL,
    GraphMode.FULL_DECODE_ONLY,
    GraphMode.FULL_AND_PIECEWISE,
    GraphMode.FULL,
    GraphMode.PIECEWISE,
    GraphMode.FULL_AND_PIECEWISE,
)
"""Modes to draw from: those that pad requests more often, since they show most."""


@st.composite
def scenes(
    draw: DrawFn,
    shapes: Sequence[Shape],
    drafts: Sequence[int] = tuple(range(MOST_DRAFTS + 1)),
    largest: int = LARGEST_REQS,
    features: Collection[str] | None = None,
    drafters: Sequence[DraftScheme] = DRAFTERS,
    kind: type[Scene] = Scene,
    sizes: Sequence[int] = (),
) -> Scene:
    """Return any small deployment: mode, limits, sizes that leave much padding, drafter and schedule.

    One of six is large, with up to ``largest`` requests. ``features`` are names of the features of its ``kind`` that
    it may have, by default all. Of ``drafters`` the first is drawn most often. With ``sizes`` most large scenes have
    one request more than one of them, or as many, and all capture a full graph for decodes of all requests.
    """
    drawn = {
        name: draw(st.sampled_from(feature.values))
        for name, feature in kind.features.items()
        if features is None or name in features
    }
    # Entries beyond the limits would be larger than the backend's cap.
    if drawn.get("capped"):
        drawn["beyond"] = 0
    # Padding on both axes needs several requests, and a chain several drafts: these are drawn more often.
    is_large = largest > MOST_REQS and draw(st.sampled_from((False, False, False, True, False, False)))
    # A kernel that is wrong beyond a size is seen only by a full graph of all requests: nothing may take that away.
    shows_size = is_large and bool(sizes)
    if shows_size and "capped" in drawn:
        drawn["capped"] = 0
    if is_large:
        most = st.integers(min(LARGE_REQS, largest), largest)
        beyond = [st.sampled_from([size + more for size in sizes for more in (1, 1, 0)])] * 3 if sizes else []
        num_reqs = draw(st.one_of(*beyond, most))
        drafts = [k for k in drafts if k <= LARGE_DRAFTS] or list(drafts)
    else:
        num_reqs = draw(st.sampled_from([*range(2, min(MOST_REQS, largest) + 1), 1]))
    several, none = [k for k in drafts if k > 1] or list(drafts), [k for k in drafts if k == 0] or list(drafts)
    k = draw(st.one_of(*map(st.sampled_from, (several, several, drafts, none))))
    if not k and "lazy" in drawn:
        # Graphs fill their own fields then, which a capture between two steps overwrites.
        drawn["lazy"] = draw(st.booleans())
    # Without drafts it keeps its default: no two scenes differ in what has no effect.
    drafter = draw(st.sampled_from(drafters)) if k else DraftScheme.EAGLE
    # Token limits with and without room for a decode of all requests.
    width = Scene(shape=shapes[0], drafts=k, drafter=drafter).decode_width
    decodes = num_reqs * width
    tight, roomy = st.integers(max(num_reqs, width), 24 + num_reqs), st.integers(decodes, decodes + 8)
    num_tokens = draw(roomy if is_large else st.one_of(tight, roomy))
    # The default policy plans a graph for each number of requests, most of which a lazy plan captures on first use.
    explicit = draw(st.integers(0, 3)) > 0 if not drawn.get("lazy") else draw(st.booleans())
    # By the default policy a large scene would have a graph for each number of requests.
    explicit |= is_large
    # Sizes of mixed batches close to sizes of decodes, so that the nearest graph is not always the best.
    widths = sorted({1 + k, width})
    close = [(r + 1) * each + off for each in widths for r in range(num_reqs) for off in (-1, 0, 1)]
    near = st.sampled_from([size for size in close if 1 <= size <= num_tokens])
    some = st.sets(st.one_of(st.integers(1, num_tokens), near), min_size=1, max_size=3)
    few = st.sets(st.integers(1, num_reqs), min_size=1, max_size=2)

    def closed(found: set[int]) -> set[int]:
        # Two counts are left as they are: then some decodes have more requests than the largest graph for them. In a
        # large scene the graph of all requests is what it is drawn for: kernels change at its size.
        return found if len(found) > 1 and not is_large else found | {num_reqs}

    scheduled = k > 1 and num_reqs > 1 and not shows_size and draw(st.integers(0, 2)) > 0
    shape = draw(st.sampled_from(shapes))
    page = shape.page_size
    return kind(
        shape=shape,
        # Windows that end inside a page, at its end, and after it.
        window=draw(st.sampled_from((0, max(page - 1, 1), page, page + 2, 2 * page))) if shape.windowed else 0,
        mode=draw(
            st.sampled_from([mode for mode in MODES if mode is not GraphMode.PIECEWISE] if shows_size else MODES)
        ),
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        layers=draw(st.integers(1, 2)),
        size_tokens=tuple(sorted(draw(some) | {num_tokens})) if explicit else (),
        size_reqs=tuple(sorted(draw(st.one_of(st.just({num_reqs}), few.map(closed))))) if explicit else (),
        drafts=k,
        schedule=draw(schedules(k, num_reqs)) if scheduled else (),
        drafter=drafter,
        agreeing=k > 0 and draw(st.booleans()),
        varying=k > 0 and draw(st.booleans()),
        fused=draw(st.booleans()),
        per_role=draw(st.booleans()),
        ahead=draw(st.booleans()),
        capture=CaptureAttack() if shows_size else draw(capture_attacks()),
        full_cache=not is_large and draw(st.integers(0, 4)) == 4,
        seed=draw(st.integers(0, 7)),
        **drawn,
    )


@st.composite
def capture_attacks(draw: DrawFn) -> CaptureAttack:
    """Return how a session goes: in any order; now and then broken off once, or with memory for a graph a role."""
    trouble = draw(st.integers(0, 11))
    return CaptureAttack(
        order=draw(st.one_of(st.just(0), st.integers(1, 9))),
        alone=draw(st.integers(1, 12)) if trouble > 8 else 0,
        breaks=draw(st.integers(1, 12)) if trouble in (7, 8) else 0,
        stays_eager=trouble == 8,
    )


@st.composite
def schedules(draw: DrawFn, k: int, num_reqs: int) -> tuple[tuple[int, int, int], ...]:
    """Return tiers of requests, each with a number of drafts of its own, K among them."""
    starts = sorted(draw(st.sets(st.integers(2, num_reqs), min_size=1, max_size=2)) | {1})
    fewer = draw(st.permutations(range(k)))[: len(starts) - 1]
    drafts = draw(st.permutations([k, *fewer]))
    ends = [start - 1 for start in starts[1:]]
    return tuple(zip(starts, [*ends, num_reqs], drafts, strict=True))
