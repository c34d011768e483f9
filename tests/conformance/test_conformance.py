"""The suite finds what is wrong, says where, and does the same again; a healthy backend passes."""

import sys

import attrs
import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Role
from capture_planner_conformance import (
    Attack,
    Case,
    Check,
    Scene,
    SearchProfile,
    Shape,
    SuiteOptions,
    Verdict,
    attack_case,
    audit,
    audits,
    conform,
    dumps,
    loads,
    replay,
    suite,
    under_test,
    usable_shapes,
    verdicts,
)
from capture_planner_conformance.scene import Arrive, Depart, Move, RunBatch
from capture_planner_reference import Reference
from support.faulty import DoubledOutput, ImpureSupport, NoGraphs, OwnerReader, TailReader, UnreadFields
from support.files import module_at

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = SearchProfile(name="short", examples=15, steps=15)


RAN = {f"{role.value} FULL" for role in Role} | {"target PIECEWISE", "target NONE", "draft_prefill PIECEWISE"}
"""Forwards that a search has, by role and mode."""
STEPS = {"arrive", "depart", "move", "reload", "forward", "serve"}


@pytest.mark.parametrize("examples", [6, pytest.param(15, marks=pytest.mark.thorough)])
def test_a_healthy_backend_passes(examples):
    """The reference backend: every kind of step, every role, graphs and eager steps, and no finding.

    Few scenes may need several seeds to have them all.
    """
    profile, seen, wanted = attrs.evolve(SHORT, examples=examples), set(), RAN | STEPS
    for seed in range(1, 6):
        outcome = conform(under_test("reference"), SuiteOptions(profile=profile, seed=seed, audits=False))
        assert outcome.failures == ()
        seen |= {*outcome.log.steps, *outcome.log.forwards}
        if wanted <= seen:
            break
    assert wanted <= seen


def test_the_same_seed_does_the_same():
    """Twice the same scenes, steps and forwards; another seed does others."""
    profile = attrs.evolve(SHORT, examples=2, steps=5)
    logs = [
        conform(under_test("reference"), SuiteOptions(profile=profile, seed=seed, audits=False)).log
        for seed in (3, 3, 4)
    ]
    assert (logs[0].steps, logs[0].forwards) == (logs[1].steps, logs[1].forwards)
    assert (logs[0].steps, logs[0].forwards) != (logs[2].steps, logs[2].forwards)


def test_a_seed_draws_the_same_whatever_was_imported(tmp_path, monkeypatch):
    """By itself, Hypothesis also draws numbers that it reads in local modules, which differ between processes."""

    def drawn():
        found = []

        @hypothesis.seed(3)
        @suite.search_settings(50, shrink=False)
        @hypothesis.given(st.lists(st.integers(0, 5000), min_size=5))
        def draw(numbers):
            found.append(numbers)

        with suite.without_local_constants():
            draw()
        return found

    def failing():
        providers.CONSTANTS_CACHE["integer", "any"] = ((), ())
        raise KeyError

    before = drawn()
    with pytest.raises(KeyError), suite.without_local_constants():
        failing()
    assert not providers.CONSTANTS_CACHE.cache  # a search that fails leaves none that lacks local ones
    (tmp_path / "numbers.py").write_text(f"NUMBERS = {list(range(1000, 1400))}", "utf-8")
    monkeypatch.setitem(sys.modules, "local_numbers", module_at(tmp_path / "numbers.py"))
    assert drawn() == before


@pytest.mark.parametrize(("backend", "field", "axis"), [(TailReader, "skips", "request")])
def test_a_finding_names_the_field_and_is_small_and_comes_again(backend, field, axis):
    """What reads past its rows is told so by name; the smallest case has no step too many."""
    put = under_test(backend())
    outcome = conform(put, SuiteOptions(profile=SHORT, seed=0))
    (finding,) = outcome.failures
    assert finding.check in (Check.ROWS, Check.BOUNDED, Check.RAN)
    assert finding.field.endswith(field)
    assert finding.axis == axis
    assert finding.entry is not None
    case = loads(finding.case)
    assert len(case.steps) <= 3
    assert replay(put, finding.case).failure.check is finding.check
    assert replay(under_test("reference"), finding.case).failure is None


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_kernel_that_is_wrong_without_a_graph_is_not_called_a_wrong_graph(seed):
    """Whichever of the two ran first: the law that is named is that of eager steps, whatever the mode."""
    put = under_test(DoubledOutput())
    (finding,) = conform(put, SuiteOptions(profile=SHORT, seed=seed, shrink=False, blame=False)).failures
    assert finding.check is Check.EAGER
    case = loads(finding.case)
    for mode in GraphMode:
        changed = attrs.evolve(case, scene=attrs.evolve(case.scene, mode=mode))
        assert replay(put, dumps(changed)).failure.check is Check.EAGER


def test_a_contract_that_is_kept_is_in_order():
    """A backend that gathers by a field of its own over padded rows relies on its fill, and may."""
    assert conform(
        under_test(OwnerReader()), SuiteOptions(profile=attrs.evolve(SHORT, examples=3), audits=False)
    ).passed


def test_declarations_that_change_are_found():
    """Asked twice, a backend must say the same."""
    outcome = conform(under_test(ImpureSupport()), SuiteOptions(profile=SHORT))
    assert {finding.check for finding in outcome.failures} <= {Check.DECLARED}
    assert outcome.failures


def test_a_backend_that_runs_nowhere_is_refused_with_its_reason():
    """There is nothing to say about it: an error, and no pass."""
    with pytest.raises(RunError, match="there is no kernel for this machine"):
        conform(under_test(NoGraphs()))


def test_what_is_no_case_is_refused():
    """A case that was cut off, or is something else."""
    for text in ("", "{}", '{"scene":{},"steps":[]}', '{"scene":{"shape":1},"steps":[]}'):
        with pytest.raises(RunError, match="not a case"):
            replay(under_test("reference"), text)


SMALL = Scene(shape=Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=4, longest=24))
COMES = Arrive(prompt=3, computed=3)


def test_a_case_of_which_nothing_runs_is_no_pass():
    """A request that is not there, a batch that is too long, or no forward at all."""
    for steps in ([RunBatch(rows=((5, 1, 0),))], [COMES, RunBatch(rows=((0, 99, 0),))], [COMES]):
        with pytest.raises(RunError, match="nothing of this case runs"):
            replay(under_test("reference"), dumps(Case(scene=SMALL, steps=tuple(steps))))


def test_steps_that_do_not_apply_are_said():
    """They are counted from 1, and are not among the steps that were done."""
    steps = (Depart(request=1), COMES, RunBatch(rows=((0, 1, 0),)), Move(request=7))
    done = replay(under_test("reference"), dumps(Case(scene=SMALL, steps=steps)))
    assert (done.failure, done.skipped) == (None, (1, 4))
    assert done.log.steps == {"arrive": 1, "forward": 1}
    assert sum(done.log.forwards.values()) == 2


# Audits.


@pytest.fixture(scope="module")
def audited():
    """Every attack on a backend with a field that nothing reads."""
    put = under_test(UnreadFields())
    return put, audit(put, usable_shapes(put)[0], fields={"skips", "slot_mapping"})


@pytest.mark.thorough
def test_what_nothing_reads_is_over_declared(audited):
    """The backend's own field alone; the runner's are its own affair."""
    _, found = audited
    over = {field for (_, field), verdict in verdicts(found).items() if verdict is Verdict.OVER_DECLARED}
    assert {field.rpartition(".")[2] for field in over} == {"skips"}
    assert all(each.attack in Attack for each in found)


@pytest.mark.thorough
def test_what_matters_says_where_and_comes_again(audited):
    """Slots that are not padded are written to somebody's page, and the smallest batch shows it."""
    put, found = audited
    assert verdicts(found)[Role.TARGET, "slot_mapping"] is Verdict.NEEDED
    for each in found:
        if each.field == "slot_mapping" and each.matters:
            assert each.axis == "token"
            assert each.batch.startswith("1 request")
            seen = attack_case(put, loads(each.case), each.role, each.field, each.attack)
            assert seen is not None
            assert seen.message == each.message


def test_an_attack_on_what_is_not_there_is_refused():
    """It is no evidence about a field: neither a name that nobody has, nor a role without graphs."""
    case = Case(scene=SMALL, steps=(COMES, RunBatch(rows=((0, 1, 0),))))
    put = under_test("reference")
    with pytest.raises(RunError, match="target has no field 'nosuch' to attack; it has input_ids"):
        attack_case(put, case, Role.TARGET, "nosuch", Attack.STALE_TAIL)
    with pytest.raises(RunError, match="no role draft_decode"):
        attack_case(put, case, Role.DRAFT_DECODE, "seq_lens", Attack.STALE_TAIL)


def test_a_field_that_a_backend_reads_is_needed(monkeypatch):
    """An index over padded rows, declared with its fill: some attack on it matters, in each role in the first case."""
    cases = audits._cases
    monkeypatch.setattr(audits, "_cases", lambda *given: [next(cases(*given))])
    put = under_test(OwnerReader())
    found = audit(put, usable_shapes(put)[0], fields={"owners"})
    own = {field: v for (role, field), v in verdicts(found).items() if field.endswith("owners")}
    assert set(own.values()) == {Verdict.NEEDED}


@pytest.mark.thorough
def test_a_healthy_backend_is_the_baseline():
    """The cases of the audits pass where nothing is attack_case."""
    put = under_test(Reference())
    for each in audit(put, usable_shapes(put)[0], fields={"query_start_loc", "idx_mapping"}):
        if each.matters:
            assert replay(put, each.case).failure is None


# Nothing tried.


def test_a_search_without_a_forward_does_not_pass():
    """A scene that is set up, and no step after that: there is nothing to say."""
    profile = SearchProfile(name="none", examples=2, steps=1)
    with pytest.raises(RunError, match=r"no forward ran in 2 scenes of up to 1 step, .* more scenes or steps"):
        conform(under_test("reference"), SuiteOptions(profile=profile))
