"""TensorRT-LLM: its rules of sizes, shapes and look-up, against plain restatements and laws."""

from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner.engines.emulation import Manager
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner_tensorrt_llm import rules
from capture_planner_tensorrt_llm.manager import TargetGraphs, agreed
from capture_planner_tensorrt_llm.settings import ALGORITHMS, Drafting
from engines.generators.tensorrt_llm_answers import batch_of

KINDS = tuple(ALGORITHMS)


def graphs_of(sizes, *, padding=True, most=10_000, drafting=None, schedule=None):
    """Graphs of these sizes, in the engine's order."""
    lens = (0,) if drafting is None else drafting.draft_lens
    longest = 0 if drafting is None else drafting.max_draft_len
    return TargetGraphs(
        sizes=tuple(sizes),
        shapes=rules.captured_shapes(sizes, lens, schedule, longest),
        padding=padding,
        max_batch_size=most,
        drafting=drafting,
        schedule=schedule,
    )


def test_graphs_meet_the_manager_protocol():
    """The contract that every engine's roles meet; without a size there is no mode."""
    manager: Manager = graphs_of((1, 2))
    assert (manager.role, manager.mode) == (Role.TARGET, GraphMode.FULL_DECODE_ONLY)
    assert graphs_of(()).mode is GraphMode.NONE


def test_padding_stays_within_max_batch_size():
    """More dummies than max_batch_size has places for are not added, where a list was cut without padding."""
    graphs = graphs_of((4, 8), most=6)
    assert graphs.dispatch(batch_of((5, 1, True))).reason is Reason.UNCOVERED
    assert graphs.dispatch(batch_of((3, 1, True))).entry.num_reqs == 4


@st.composite
def drafting(draw):
    """Speculation of any kind, or none."""
    kind = draw(st.none() | st.sampled_from(KINDS))
    if kind is None:
        return None
    drafts = draw(st.integers(1, 5))
    schedule = None
    if ALGORITHMS[kind].dynamic and draw(st.booleans()):
        thresholds = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=3)))
        lengths = sorted((draw(st.integers(0, drafts)) for _ in thresholds[1:]), reverse=draw(st.booleans()))
        schedule = dict(zip(thresholds, [drafts, *lengths], strict=True))
    most = draw(st.none() | st.integers(1, 40)) if not ALGORITHMS[kind].dynamic else None
    return Drafting(
        decoding_type=kind, max_draft_len=drafts, total_draft_tokens=drafts, schedule=schedule, max_concurrency=most
    )


@given(drafting(), st.integers(1, 64))
def test_query_length_and_draft_length_are_inverse(spec, width):
    """PARD runs 2K tokens, the others K + 1, and a request without drafts one."""
    assume(spec is not None)
    doubled = spec.decoding_type == "PARD"
    lengths = [k for k in range(64) if (2 * k if doubled and k else k + 1) == width]
    assert spec.draft_len_of(width) == (lengths[0] if lengths else None)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8).map(sorted), st.integers(0, 60), st.booleans())
def test_size_limit_leaves_dispatch_of_smaller_batches(sizes, most, padding):
    """Batches of up to ``most`` requests are held as before, by nothing larger, and no other batch is."""
    admitted = rules.admitted_sizes(sizes, most, padding)
    assert list(admitted) == sorted(admitted)
    assert all(size <= most for size in admitted)
    assert {size for size in sizes if size <= most} <= set(admitted) <= {*sizes, most}
    assert rules.admitted_sizes(admitted, most, padding) == admitted
    for num_reqs in range(1, most + 1):
        before, after = (
            any(size >= num_reqs if padding else size == num_reqs for size in some) for some in (sizes, admitted)
        )
        assert before == after


@given(drafting(), st.sets(st.integers(1, 50), min_size=1, max_size=8).map(sorted))
def test_graph_shapes_follow_the_schedule(spec, sizes):
    """With a schedule a size has one length, and the largest the longest besides; else all lengths."""
    schedule = None if spec is None else spec.schedule
    shapes = graphs_of(sizes, drafting=spec, schedule=schedule).shapes
    assert list(shapes) == sorted(set(shapes), reverse=True)
    if schedule is None:
        lens = (0,) if spec is None else spec.draft_lens
        assert set(shapes) == {(size, draft_len) for size in sizes for draft_len in lens}
    else:
        for size in sizes:
            reached = [threshold for threshold in schedule if threshold >= size]
            scheduled = schedule[min(reached)] if reached else 0
            own = {draft_len for found, draft_len in shapes if found == size}
            extra = {spec.max_draft_len} if size == max(sizes) else set()
            assert own == {scheduled} | extra


@given(
    drafting(),
    st.sets(st.integers(1, 50), min_size=1, max_size=8).map(sorted),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(0, 6),
    st.booleans(),
)
def test_dispatch_equals_brute_force(spec, sizes, num_reqs, most, draft_len, padding):
    """Padded: the least size with this length, not beyond the engine. Then the graph of just that shape."""
    schedule = None if spec is None else spec.schedule
    # In other schedules the engine's binary search decides; the recorded answers have those.
    assume(schedule is None or list(schedule.values()) == sorted(schedule.values(), reverse=True))
    if spec is None:
        draft_len = 0
    graphs = graphs_of(sizes, padding=padding, most=most, drafting=spec, schedule=schedule)
    width = 1 if spec is None else spec.width(draft_len)
    size = num_reqs
    if padding:
        lengths = {s: draft_len if schedule is None else rules.scheduled_draft_len(schedule, s) for s in sizes}
        fitting = [s for s in sizes if s >= num_reqs and lengths[s] == draft_len]
        if fitting and fitting[0] <= most:
            size = fitting[0]
    answer = graphs.dispatch(batch_of((num_reqs, width, True)))
    if (size, draft_len) in graphs.shapes:
        assert (answer.entry.num_reqs, answer.entry.query_len) == (size, width)
        assert answer.padded_tokens == (size - num_reqs) * width
        assert answer.entry.rejection(batch_of((num_reqs, width, True))) is None
    else:
        assert answer.entry is None
        assert answer.reason is (Reason.SIZES if num_reqs > max(sizes) else Reason.UNCOVERED)


@given(
    st.sets(st.integers(1, 30), min_size=1, max_size=6).map(sorted),
    st.lists(st.tuples(st.integers(1, 34), st.booleans()), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 34),
)
def test_ranks_equal_brute_force(sizes, ranks, padding, most):
    """All or none has a graph; with one, all have the same, and it is the one for the largest."""
    graphs = graphs_of(sizes, padding=padding, most=most)
    batches = [batch_of((num_reqs, 1, past)) for num_reqs, past in ranks]
    answers = agreed(graphs, batches)
    entries = {answer.entry for answer in answers}
    assert len(entries) == 1
    (entry,) = entries
    largest = max(num_reqs for num_reqs, _ in ranks)
    alike = len({num_reqs for num_reqs, _ in ranks}) == 1
    next_size = min((size for size in sizes if size >= largest), default=None)
    if not all(past for _, past in ranks) or next_size is None:
        wanted = None
    elif padding and next_size <= most:
        wanted = next_size
    else:
        wanted = next_size if alike and next_size == largest else None
    assert (None if entry is None else entry.num_reqs) == wanted
    for batch, answer in zip(batches, answers, strict=True):
        if entry is None and graphs.dispatch(batch).entry is not None:
            assert answer.reason in (Reason.RANK, Reason.SIZES, Reason.UNCOVERED)


@given(drafting(), st.integers(1, 60), st.integers(1, 400))
def test_speculative_has_the_engines_query_lengths(spec, most, tokens):
    """By batch size: the schedule's, or with and without drafts around a concurrency."""
    assume(spec is not None)
    speculative = spec.speculative(most, tokens)
    for num_reqs in range(1, most + 1):
        draft_len = spec.max_draft_len
        if spec.schedule is not None:
            draft_len = rules.scheduled_draft_len(spec.schedule, num_reqs)
        elif spec.max_concurrency is not None:
            together = min(num_reqs, tokens // spec.width(spec.max_draft_len))
            if num_reqs <= tokens and together > spec.max_concurrency:
                draft_len = 0
            elif num_reqs > tokens // spec.width(spec.max_draft_len):
                continue  # more than can draft together: such a batch is not scheduled
        assert 1 + speculative.draft_tokens(num_reqs) == spec.width(draft_len)
