"""Launches: verification, reports that add up, interruptions, and what backends are given."""

from collections import Counter
from itertools import pairwise

import attrs
import numpy as np
import pytest

from capture_planner.modes import GraphMode, Reason, Refresh, Role
from capture_planner.planning.planner import plan
from capture_planner.records._base import replace
from capture_planner.records.backend import COMMON_FIELDS, Axis, Fill, MetadataField, PaddingContract, Where
from capture_planner.records.model import DraftModel, Method, Speculative
from capture_planner.report.plain import plain as json_of_report
from capture_planner.report.terminal import tables
from capture_planner_runner.execution.sampling import Sampler
from capture_planner_runner.launch.launch import launch
from capture_planner_runner.launch.request import RunRequest
from capture_planner_runner.options import Options
from capture_planner_runner.report.run import run_report
from capture_planner_runner.serving.workload import Request
from support.launches import (
    HERE,
    MODEL,
    SCHEDULE,
    SPEC,
    CountingReference,
    ProgressRecord,
    one_request,
    registry_of,
    requests_of,
    served,
    started,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_clip_cuts_what_is_too_long():
    """Instead of refusing it; the request then is as long as the model."""
    outcome = started(workload=one_request(prompt=(1,) * 30, max_new_tokens=40), clip=True)
    (done,) = outcome.report.served
    assert done.prompt_tokens + done.output_tokens == MODEL.max_model_len


def test_a_cache_of_just_enough_pages_serves_everything():
    """One request at a time, the others wait; none is refused."""
    outcome = started(pages=7, verify=True)
    assert outcome.differing == ()
    assert len(outcome.report.served) == 7
    assert max(step.waiting for step in outcome.report.steps) > 0


# Verification ------------------------------------------------------------------------------------


class WrongReference(CountingReference):
    """A backend that is wrong in one graph of the target."""

    def __init__(self, mode, size):
        super().__init__()
        self._mode, self._size = mode, size

    def change(self, executor, reservation):
        """Turn the sign of what attention says, in the entry of one size."""
        attend = executor.attend

        def attended(layer, query, out, scoring, metadata):
            attend(layer, query, out, scoring, metadata)
            entry = metadata.entry
            if entry and reservation.role is Role.TARGET and (entry.mode, entry.num_tokens) == self._wrong:
                out.mul_(-9)

        executor.attend = attended

    @property
    def _wrong(self):
        return self._mode, self._size


@pytest.mark.parametrize(("mode", "size"), [(GraphMode.FULL, 3), (GraphMode.PIECEWISE, 4)])
def test_verification_finds_the_requests_that_one_wrong_graph_served(mode, size):
    """The plain rehearsal has no graph; without graphs nothing differs."""
    backend = WrongReference(mode, size)
    outcome = started(backend=backend, verify=True)
    used = [f.entry for f in outcome.report.forwards if f.role is Role.TARGET and f.entry is not None]
    assert (mode, size) in {(entry.mode, entry.num_tokens) for entry in used}
    names = {done.name for done in outcome.report.served}
    assert outcome.differing
    assert set(outcome.differing) < names
    assert started(backend=backend, verify=True, eager=True).differing == ()


@pytest.mark.parametrize("drafter", ["copy", "miss", "chance", "random"])
def test_what_is_drafted_changes_no_token(drafter):
    """With k that changes as the batch does."""
    outcome = served(drafter, verify=True)
    assert outcome.differing == ()
    assert {done.name for done in outcome.report.served} == {r.name for r in requests_of(20)}


def test_sampled_tokens_are_compared_with_an_eager_run(monkeypatch):
    """The report says how they were sampled; where the eager run draws other numbers, each request differs."""
    options = Options(temperature=0.8, top_p=0.9, seed=3)
    outcome = started(verify=True, options=options)
    report = outcome.report
    assert (outcome.differing, report.host["sampling"]) == ((), "temperature 0.8, top-p 0.9, a seed per request")
    tokens = sum(len(done.tokens) for done in report.served)
    assert report.verification.measured[0] == (
        f"tokens: {tokens} of {tokens} as sampled by an eager run with the same seeds"
    )
    draws, samplers = Sampler.draws, []

    def others(sampler, *given):
        if sampler not in samplers:
            samplers.append(sampler)
        return draws(attrs.evolve(sampler, seed=samplers.index(sampler)), *given)

    monkeypatch.setattr(Sampler, "draws", others)
    wrong = started(verify=True, options=options)
    assert wrong.differing
    assert all("and sampled eagerly" in fault for fault in wrong.report.verification.faults)


def test_nothing_is_compared_where_nobody_asked():
    """None says so: it is not the same as no difference."""
    assert served("copy").differing is None


# Reports -----------------------------------------------------------------------------------------


def check_report(report):
    """What holds of any report, interrupted or not: forwards, steps and requests belong together."""
    entries = [(role.role, entry) for role in report.plan.roles for entry in role.entries]
    entries.sort(key=lambda item: item[1].capture_order)
    captured = [(done.role, done.entry) for done in report.captured]
    assert captured == entries[: len(captured)]
    assert [step.index for step in report.steps] == list(range(len(report.steps)))
    speculative = report.plan.speculative
    for step in report.steps:
        forwards = [f for f in report.forwards if f.step == step.index]
        roles = Counter(f.role for f in forwards)
        k = 0 if speculative is None else speculative.draft_tokens(step.num_reqs)
        assert roles[Role.TARGET] == 1
        assert roles[Role.DRAFT_PREFILL] <= (speculative is not None)
        assert roles[Role.DRAFT_DECODE] == (roles[Role.DRAFT_PREFILL] and k > 1)
        assert 0 <= step.accepted <= step.drafted <= step.num_tokens - step.num_reqs
        for f in forwards:
            assert f.num_reqs == step.num_reqs
            assert f.num_tokens == (step.num_reqs if f.role is Role.DRAFT_DECODE else step.num_tokens)
            if f.role is Role.DRAFT_DECODE:
                chained = f.entry is not None and f.entry.draft_steps is not None
                assert (f.entry.draft_steps if chained else f.repeats) == k - 1
            assert (f.entry is None) == (f.reason is not None)
            padded = (f.entry.num_tokens - f.num_tokens) if f.entry else 0
            assert f.padded_tokens == padded >= 0
            assert 0 <= f.host_seconds <= f.seconds
    assert {f.step for f in report.forwards} <= set(range(len(report.steps) + report.interrupted))
    names = [done.name for done in report.served]
    assert len(set(names)) == len(names)
    for done in report.served:
        assert done.output_tokens == len(done.tokens)
        if done.finished is not None:
            assert 0 <= done.first_token <= done.finished
    assert json_of_report(report)["interrupted"] is report.interrupted
    assert tables(run_report(report))


@pytest.mark.parametrize("choices", [{}, {"eager": True}])
def test_a_report_is_complete(choices):
    """Every entry of the plan, every step with its forwards, every request with all its tokens."""
    outcome = served("chance", **choices)
    report = outcome.report
    check_report(report)
    assert not report.interrupted
    planned = [] if choices else [(r.role, entry) for r in report.plan.roles for entry in r.entries]
    assert {(c.role, c.entry) for c in report.captured} == set(planned)
    assert all(done.waiver is None and done.memory >= 0 and done.alone > 0 for done in report.captured)
    wanted = {r.name: (len(r.prompt), r.max_new_tokens) for r in requests_of(20)}
    assert {d.name: (d.prompt_tokens, d.output_tokens) for d in report.served} == wanted
    assert all(done.finished is not None and done.text is None for done in report.served)
    assert report.buffers > 0
    assert report.kv_cache > 0
    assert report.serve_seconds > 0
    assert report.backends == {"reference": "1.2"}
    assert report.host["seed"] == "0"
    assert "chance" in report.model
    assert "Llama" in report.model
    # Nobody needs a draft after the last step.
    assert {f.role for f in report.forwards if f.step == report.steps[-1].index} == {Role.TARGET}
    reasons = {f.reason for f in report.forwards if f.entry is None}
    assert reasons == ({Reason.MODE} if choices else set())


def test_text_is_given_where_a_tokenizer_is():
    """``decode`` is asked about the output of each request."""
    registry = registry_of(CountingReference())
    outcome = launch(
        plan(SPEC, HERE, registry), registry, requests_of, RunRequest(page_size=4), ProgressRecord(), decode=repr
    )
    assert all(done.text == repr(done.tokens) for done in outcome.report.served)


def rates(drafter):
    """Drafts verified and accepted in all, where k falls and rises."""
    steps = served(drafter, ((1, 1, 4), (2, 2, 1), (3, 3, 3))).report.steps
    return sum(step.drafted for step in steps), sum(step.accepted for step in steps)


def outcome_of_rounds(drafter, k, chance=0.5):
    """Outputs of one token and some rounds of 1 + k: a right drafter wastes no draft at their ends."""
    speculative = Speculative(method=Method.EAGLE, num_tokens=k)

    def workload(vocab_size):
        requests = requests_of(vocab_size)
        return [attrs.evolve(r, max_new_tokens=1 + (1 + k) * (i % 4 + 1)) for i, r in enumerate(requests)]

    spec = replace(SPEC, speculative=speculative)
    return started(spec, workload=workload, drafter=drafter, chance=chance, eager=True)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    ("drafter", "chance", "share"), [("copy", 0.5, 1), ("chance", 1.0, 1), ("miss", 0.5, 0), ("chance", 0.0, 0)]
)
def test_drafts_are_accepted_always_or_never(drafter, chance, share, k):
    """``copy`` is right to the last token, ``miss`` never is, and the chances 1 and 0 are the same."""
    steps = outcome_of_rounds(drafter, k, chance).report.steps
    assert sum(step.drafted for step in steps) > 15
    assert all(step.accepted == step.drafted * share for step in steps)


def test_with_a_schedule_a_right_drafter_loses_nothing():
    """Not even past the end of an answer; a chance is between."""
    drafted, accepted = rates("copy")
    assert drafted == accepted > 0
    assert rates("miss")[1] == 0 < rates("miss")[0]
    some, right = rates("chance")
    assert 0 < right < some


def test_only_what_a_drafter_proposed_counts_as_drafted():
    """Where k rises as a request leaves, rows are filled up with what nobody proposed."""
    schedule = ((1, 1, 4), (2, 2, 1))
    requests = [
        Request(name=name, arrival=0.0, prompt=(1, 2), max_new_tokens=new) for name, new in (("a", 5), ("b", 30))
    ]
    spec = replace(SPEC, speculative=Speculative(method=Method.EAGLE, num_tokens=4, schedule=schedule))
    steps = started(spec, workload=lambda _: requests, drafter="miss").report.steps
    for before, step in pairwise(steps):
        k = min(spec.speculative.draft_tokens(s.num_reqs) for s in (before, step))
        assert step.drafted == k * step.num_reqs
    assert {step.num_tokens - step.num_reqs - step.drafted for step in steps[1:]} == {0, 3}


def test_pages_are_enough_for_the_longest_request_where_memory_is_short(monkeypatch):
    """8 + 8 tokens and 2 drafts in pages of 4: five, and the null page."""
    monkeypatch.setattr("capture_planner_runner.launch.cache_memory.HOST_MEMORY", 0)
    report = started(workload=one_request(prompt=(1,) * 8, max_new_tokens=8), verify=True).report
    page = 2 * 4 * MODEL.num_kv_heads * MODEL.head_dim * 8
    assert report.kv_cache == 6 * page * (MODEL.num_layers + 1)
    assert report.served[0].output_tokens == 8


def plain(report):
    """A report without its times."""
    return (
        [attrs.evolve(c, seconds=0.0, ended=0.0) for c in report.captured],
        [attrs.evolve(f, seconds=0.0, preparation=0, host_seconds=0.0, ended=0.0) for f in report.forwards],
        [attrs.evolve(s, seconds=0.0, ended=0.0) for s in report.steps],
        [attrs.evolve(d, first_token=None, finished=None) for d in report.served],
    )


def test_the_same_seed_gives_the_same_batches_and_tokens():
    """Arrivals are on a clock of steps, so how quick the machine is does not matter."""
    spec = replace(SPEC, speculative=Speculative(method=Method.EAGLE, num_tokens=4, schedule=SCHEDULE))
    first, again, other = (started(spec, drafter="chance", seed=seed).report for seed in (0, 0, 1))
    assert plain(first) == plain(again)
    assert [d.tokens for d in first.served] != [d.tokens for d in other.served]


# Interruptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "after", "drafter"),
    [
        ("plain greedy", 1, "copy"),
        ("plain greedy", 7, "copy"),
        ("capture", 1, "random"),
        ("capture", 9, "copy"),
        ("serve", 1, "copy"),
        ("serve", 4, "random"),
        ("verify", 2, "random"),
    ],
)
def test_an_interruption_ends_in_a_report_of_what_there_is(task, after, drafter):
    """Whenever Ctrl-C comes: what was captured and served until then, and everything is released."""
    shown, backend = ProgressRecord(task, after), CountingReference()
    report = (outcome := started(backend=backend, shown=shown, drafter=drafter, verify=True)).report
    check_report(report)
    assert report.interrupted
    assert backend.held == 0
    assert len(report.captured) == sum(what == "capture" for what, _ in shown.done)
    finished = [done.name for done in report.served if done.finished is not None]
    assert finished[: after if task == "serve" else None] == [name for what, name in shown.done if what == "serve"]
    # Every request is there, and one that never had its turn is cut off too.
    assert {done.name for done in report.served} == {request.name for request in requests_of(64)}
    if task == "plain greedy":
        assert not report.captured + report.forwards
    assert outcome.differing == (() if task == "serve" else None)
    assert (report.verification is not None) is (task == "serve")
    if task in ("plain greedy", "capture"):
        assert not any(done.tokens for done in report.served)
    elif task == "serve":
        assert len(report.captured) == report.plan.num_graphs
        assert report.serve_seconds > 0
        assert after > 1 or any(done.finished is None for done in report.served)


def test_a_request_that_had_its_last_token_is_not_cut_off_by_an_interruption():
    """Two requests end in one step, and Ctrl-C comes when the first is reported."""
    requests = [Request(name=name, arrival=0.0, prompt=(1, 2), max_new_tokens=4) for name in "ab"]
    spec = replace(SPEC, speculative=None)
    report = started(spec, workload=lambda _: requests, shown=ProgressRecord("serve", 1)).report
    assert [len(done.tokens) for done in report.served] == [4, 4]
    assert all(done.finished is not None for done in report.served)


# What backends see -------------------------------------------------------------------------------


class ReadsPages(CountingReference):
    """A backend that plans on the host from page lists, as FlashInfer does, and looks at each of them."""

    FIELDS = (
        MetadataField(name="paged_kv_indptr", axis=Axis.REQUEST_PLUS_ONE, fill=Fill.REPEAT_LAST, where=Where.BOTH),
        MetadataField(name="paged_kv_indices", axis=Axis.PAGE, fill=Fill.CONSTANT, value=0, where=Where.BOTH),
        MetadataField(name="paged_kv_last_page_len", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0, where=Where.BOTH),
        MetadataField(name="kv_lens", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0, where=Where.BOTH),
        next(field for field in COMMON_FIELDS if field.name == "seq_lens"),
    )

    def __init__(self):
        super().__init__()
        self.wrong, self.seen = [], Counter()

    def padding(self, role, model, environment):
        """The page lists."""
        return PaddingContract(fields=self.FIELDS)

    def refresh(self, role, model, environment):
        """On the host, before each step of a chain."""
        return Refresh.HOST

    def change(self, executor, reservation):
        """Compare the page lists with the lengths at every preparation."""

        def prepared(metadata):
            prepare(metadata)
            self.seen[reservation.role] += 1
            where = ("host", metadata.host), ("device", metadata.fields)
            for name, fields in where:
                lengths = np.asarray(fields["seq_lens"])
                pages = -(-lengths // reservation.page_size)
                total = int(pages.sum())
                table = np.asarray(metadata.fields["block_table"])
                used = [page for row, count in zip(table, pages, strict=True) for page in row[:count]]
                wanted = {
                    "kv_lens": lengths,
                    "paged_kv_indptr": np.concatenate(([0], pages.cumsum())),
                    "paged_kv_last_page_len": np.where(lengths, (lengths - 1) % reservation.page_size + 1, 0),
                }
                for field, values in wanted.items():
                    if not np.array_equal(np.asarray(fields[field]), values):
                        self.wrong.append((reservation.role.value, name, field))
                if np.asarray(fields["paged_kv_indices"])[:total].tolist() != used:
                    self.wrong.append((reservation.role.value, name, "paged_kv_indices"))

        prepare, executor.prepare = executor.prepare, prepared


def test_page_lists_fit_the_lengths_at_every_preparation():
    """In the later steps of a draft chain too, whose lengths have moved on."""
    backend = ReadsPages()
    speculative = Speculative(method=Method.EAGLE, num_tokens=4)
    outcome = started(replace(SPEC, speculative=speculative), backend=backend, verify=True)
    assert outcome.differing == ()
    assert backend.seen[Role.DRAFT_DECODE] > len(outcome.report.steps)
    assert sorted(set(backend.wrong)) == []


def test_the_drafters_own_shape_is_cached():
    """Two layers of other heads than the target's."""
    model = DraftModel(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4)
    spec = replace(SPEC, speculative=Speculative(method=Method.EAGLE, num_tokens=2, model=model))
    outcome = started(spec, verify=True, pages=20)
    assert outcome.differing == ()
    rows = MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim + 2 * 1 * 4
    assert outcome.report.kv_cache == 2 * rows * 21 * 4 * 8


def test_a_rehearsal_that_does_not_hold_is_reported():
    """What the target says from a wrong graph is not what it said eager: the drafter then copies what is wrong."""
    wrong = started(backend=WrongReference(GraphMode.FULL, 3), drafter="copy").report
    assert 0 < wrong.mismatched_requests <= 7
    assert any("use --acceptance" in line for line in json_of_report(wrong)["verdict"])
    right = served("copy").report
    assert right.mismatched_requests == 0
    assert right.tally.accepted_tokens == right.tally.drafted_tokens


def test_a_launch_warms_up_where_it_is_told_to():
    """Steps that are compared or verified are not warmed up; on a processor nothing is."""
    assert served("copy").report.warm_up is None
    warm = started(warm_up=True).report
    assert warm.warm_up.ran == warm.warm_up.shapes > 0
    assert [step.index for step in warm.steps] == list(range(len(warm.steps)))
    verified = started(warm_up=True, verify=True)
    assert (verified.report.warm_up.ran, verified.differing) == (0, ())
    assert verified.report.warm_up.reason
