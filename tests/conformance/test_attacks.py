"""Audits, causes and LoRA: what the suite tries on a backend, each part by itself."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.records.backend import LORA_FIELDS, Axis, Bound, Fill
from capture_planner.records.batch import Batch, Entry
from capture_planner_conformance import (
    Attack,
    AuditResult,
    Case,
    Check,
    Failure,
    Log,
    Scene,
    Shape,
    Stage,
    Verdict,
    dumps,
    minimize,
    under_test,
    verdicts,
)
from capture_planner_conformance import tampering as tampers
from capture_planner_conformance.failure import Violation
from capture_planner_conformance.scene import Arrive, RunBatch
from capture_planner_runner.execution.fields import Extents
from capture_planner_runner.execution.padding import Write
from capture_planner_runner.models.adapters import random_adapters
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.serving.workload import Request
from support.runner_conformance import adapter_rows

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=4, longest=24)
SUBJECT = under_test("reference")
audits = import_module("capture_planner_conformance.audits")
"""The module: the package has the function under the same name."""


@pytest.fixture(scope="module")
def stage():
    """A stage of the reference backend with a drafter."""
    with Stage(SUBJECT, Scene(shape=SHAPE, size_tokens=(8,), size_reqs=(2,), drafts=2)) as each:
        yield each


# Audits.


@pytest.mark.parametrize("longest", [12, 24])
def test_cases_of_an_audit_end_with_a_small_batch_after_a_large_one(longest):
    """The smallest first; all requests are past their prompts, with lengths of their own, and fit their batches."""
    shape = attrs.evolve(SHAPE, longest=longest)
    cases = list(audits._cases(shape, 5))
    assert [case.scene.mode for case in cases] == [GraphMode.FULL_AND_PIECEWISE] * 4 + [GraphMode.FULL] * 2
    for case in cases:
        scene = case.scene
        assert (scene.shape, scene.seed, scene.drafts, scene.fused) == (shape, 5, 2, False)
        assert scene.size_tokens == (scene.num_tokens,)
        assert scene.size_reqs == (scene.num_reqs,) == (4,)
        *before, large, small = case.steps
        assert len(before) == len(large.rows) == 4
        assert [step.computed for step in before] == [max(2, longest // 2 - 2 * index) for index in range(4)]
        assert all(step.computed >= step.prompt == 2 for step in before)
        assert large.rows == tuple((index, 3, 0) for index in range(4))
        assert sum(count for _, count, _ in large.rows) <= scene.num_tokens
        assert len(small.rows) < len(large.rows)
    rows = [[count for _, count, _ in case.steps[-1].rows] for case in cases[:4]]
    assert rows == [[3], [3, 3], [3, 3, 3], [1, 2]]
    assert [row[0] for row in cases[3].steps[-1].rows] == [2, 1]


def test_attack_is_tried_on_all_cases_at_once_and_then_on_the_one_that_it_shows_in(monkeypatch):
    """That one alone is the result, if it fails too; where all at once show nothing, the next scene is tried."""
    cases = list(audits._cases(SHAPE, 0))
    record = AuditResult(role=Role.TARGET, field="f", attack=Attack.SHRUNK)
    tried, shows, ran = [], set(), 0

    def attacked(subject, case, each):
        assert each is record
        tried.append(case)
        found = attrs.evolve(record, matters=True, case=dumps(case)), ran
        return found if dumps(case) in shows else None

    monkeypatch.setattr(audits, "_attacked", attacked)
    assert audits._tried(SUBJECT, cases, record) is record
    together = list(tried)
    assert len(together) == 2
    for case, own in zip(together, (cases[:4], cases[4:]), strict=True):
        assert case.scene == own[0].scene
        assert case.steps == (*own[0].steps[:-2], *(step for each in own for step in each.steps[-2:]))
    for index, own in enumerate((cases[:4], cases[4:])):
        before = len(own[0].steps) - 2
        for ran in (0, *range(before, before + 2 * len(own))):
            alone = own[max(ran - before, 0) // 2]
            shows = {dumps(together[index]), dumps(alone)}
            assert audits._tried(SUBJECT, cases, record).case == dumps(alone)
            shows = {dumps(together[index])}
            assert audits._tried(SUBJECT, cases, record).case == dumps(together[index])


def test_attack_matters_where_its_case_fails(monkeypatch):
    """The result says what changed, for which batch and entry; an error of the attack itself is raised."""
    case = Case(scene=Scene(shape=SHAPE))
    entry = Entry(mode=GraphMode.FULL, num_tokens=4, num_reqs=4, query_len=1)
    wrong = Failure(check=Check.ROWS, message="off", batch="1 request", entry=entry, axis="token")
    failures, errors = [wrong, None, wrong], [None, None, RunError("no such field")]

    def play(subject, each, *, spared, tampering):
        assert each is case
        assert spared == ("positions", "outputs")
        tampering.error = errors.pop(0)
        return SimpleNamespace(failure=failures.pop(0), log=Log())

    monkeypatch.setattr(audits, "play", play)
    attack = (SUBJECT, case, Role.TARGET, "positions", Attack.SHRUNK)
    assert audits.attack_case(*attack) == AuditResult(
        role=Role.TARGET,
        field="positions",
        attack=Attack.SHRUNK,
        axis="token",
        matters=True,
        message=f"{Check.ROWS.value}: off",
        batch="1 request",
        entry=entry,
        case=dumps(case),
    )
    assert audits.attack_case(*attack) is None
    with pytest.raises(RunError, match="no such field"):
        audits.attack_case(*attack)


def test_verdict_on_a_field_is_that_of_all_attacks():
    """One that matters makes it needed; else it is unread, or declared in vain."""
    found = [
        AuditResult(role=Role.TARGET, field=field, declared_by=owner, attack=attack, matters=matters)
        for field, owner, wrong in (("a", "runner", ()), ("b", "mine", ()), ("c", "mine", (Attack.SHRUNK,)))
        for attack in Attack
        for matters in [attack in wrong]
    ]
    assert verdicts(found) == verdicts(found[::-1])
    assert {field: verdict for (_, field), verdict in verdicts(found).items()} == {
        "a": Verdict.UNREAD,
        "b": Verdict.OVER_DECLARED,
        "c": Verdict.NEEDED,
    }


def test_every_attack_is_tried_on_every_field(stage, monkeypatch):
    """Of every role, or on those that are asked for; with who declared it."""
    asked, names = [], []
    monkeypatch.setattr(audits, "_tried", lambda subject, cases, record: asked.append(record) or record)
    found = audits.audit(SUBJECT, (SHAPE,), progress=lambda name, total: names.append((name, total)))
    assert list(found) == asked
    wanted = [
        (role.role, key, attack)
        for role in stage.runner.roles.values()
        for key in tampers.attackable(role)
        for attack in Attack
    ]
    assert {(each.role, each.field, each.attack) for each in found} == set(wanted)
    assert len(found) == len(wanted)
    assert names == [(f"{each.role.value} {each.field}: {each.attack.value}", len(found)) for each in found]
    for each in found:
        assert each.group == ("" if "." not in each.field else each.field.split(".")[0])
        assert each.declared_by == ("reference" if "." in each.field else "runner") or each.declared_by == "reference"
    few = audits.audit(SUBJECT, (SHAPE,), fields={"positions"})
    assert {each.field for each in few} == {"positions"}


# Tampering.


def test_attack_changes_one_promise_of_one_field(stage):
    """Another axis, another fill, no fill: of the field that is named, in its role."""
    target = stage.runner.roles[Role.TARGET]
    for key, buffer in tampers.attackable(target).items():
        field = buffer.field
        assert field.axis is not Axis.SCALAR
        assert not buffer.is_frozen
        for attack in Attack:
            tampers.Tampering(Role.TARGET, key, attack)._redeclare(stage.runner)
            changed = buffer.field
            if attack is Attack.OTHER_FILL:
                assert changed.fill is Fill.CONSTANT
                fill = tampers._another(stage.runner, attrs.evolve(buffer, field=field))
                slots = field.indexes is Bound.SLOTS
                assert fill == (4 if slots else 0 if (field.value or 0) == 1 else 1)
                assert changed.value == fill
            elif attack is Attack.OTHER_AXIS:
                assert changed.axis is (Axis.REQUEST if field.axis is Axis.TOKEN else Axis.TOKEN)
            else:
                assert changed == field
            buffer.redeclare(field)
    with pytest.raises(RunError, match="the case has no role draft_nothing; it has target"):
        tampers.Tampering("draft_nothing", "positions", Attack.SHRUNK).begin(stage.runner)
    attack = tampers.Tampering(Role.TARGET, "nosuch", Attack.SHRUNK)
    with pytest.raises(RunError, match="target has no field 'nosuch' to attack"):
        attack.begin(stage.runner)
    assert isinstance(attack.error, RunError)


@pytest.mark.parametrize("attack", Attack)
def test_stale_tail_is_a_write_that_ends_with_its_real_values(stage, attack):
    """Of that field and role; a field without real values is not written."""
    roles = stage.runner.roles
    role, other = roles[Role.TARGET], roles[Role.DRAFT_PREFILL]
    buffers = {buffer.key: buffer for buffer in role.fields}
    table, vector, last = (buffers[name] for name in ("block_table", "positions", "seq_lens"))
    writes = [
        Write(table, np.ones((2, 3), np.int32), 4, 6, 0),
        Write(vector, np.ones(5, np.int64), 8, 1, 0),
        Write(last, None, 4, 1, 0),
    ]
    for index, (key, extent) in enumerate((("block_table", (2, 3)), ("positions", (5, 1)), ("seq_lens", (0, 1)))):
        tampering = tampers.Tampering(Role.TARGET, key, attack)
        assert tampering.writes(other, writes) == writes
        found = tampering.writes(role, list(writes))
        for place, (new, old) in enumerate(zip(found, writes, strict=True)):
            if place == index and attack is Attack.STALE_TAIL:
                assert (new.rows, new.columns) == extent
                assert new.buffer is old.buffer
            else:
                assert new is old


def test_shrunk_field_is_overwritten_behind_its_real_extent(stage):
    """As far as the forward reads, and not before; the next step fills all of it."""
    role = stage.runner.roles[Role.TARGET]
    step = SimpleNamespace(real=Extents(tokens=3, reqs=1, pages=2), extents=Extents(tokens=6, reqs=2, pages=2))
    for buffer in tampers.attackable(role).values():
        before = buffer.tensor.clone()
        tampers._cut(buffer, role, step)
        first, end = step.real.rows(buffer.field), step.extents.rows(buffer.field)
        assert torch.equal(buffer.tensor[:first], before[:first])
        assert torch.equal(buffer.tensor[end:], before[end:])
        assert bool((buffer.tensor[first:end] != before[first:end]).all())
        assert (buffer.dirty_rows, buffer.dirty_columns) == (buffer.rows, buffer.columns)


@pytest.mark.parametrize("attack", Attack)
@pytest.mark.parametrize("own", Role)
def test_field_is_cut_before_the_forwards_of_its_role(stage, monkeypatch, attack, own):
    """By the attack that shrinks it alone."""
    cut = []
    monkeypatch.setattr(tampers, "_cut", lambda buffer, role, step: cut.append((buffer.key, role.role)))
    monkeypatch.setattr(tampers.ForwardObserver, "forward", lambda self, role, step: "around")
    for role in stage.runner.roles.values():
        assert tampers.Tampering(own, "positions", attack).forward(role, None) == "around"
    assert cut == ([("positions", own)] if attack is Attack.SHRUNK else [])


# Causes.


def test_only_padding_at_fault_is_noted_as_such():
    """A case with batches and sizes that runs in graphs of exactly its sizes, and passes there."""
    steps = (Arrive(prompt=3, computed=3), Arrive(prompt=3, computed=3), RunBatch(rows=((0, 1, 0), (1, 1, 0))))
    scene = Scene(shape=SHAPE, size_tokens=(16,), size_reqs=(3,))
    assert minimize._passes_exact(SUBJECT, Case(scene=scene, steps=steps))
    assert not minimize._passes_exact(SUBJECT, Case(scene=scene, steps=steps[:2]))
    assert not minimize._passes_exact(SUBJECT, Case(scene=attrs.evolve(scene, size_tokens=()), steps=steps))
    skipped = (*steps, RunBatch(rows=((7, 1, 0),)))
    assert not minimize._passes_exact(SUBJECT, Case(scene=scene, steps=skipped))
    eager = attrs.evolve(scene, mode=GraphMode.NONE)
    assert not minimize._passes_exact(SUBJECT, Case(scene=eager, steps=steps))


def test_a_field_that_a_failure_names_stays(monkeypatch):
    """Of a failure without one it is the first field whose garbage it needs; one that comes and goes has no causes."""
    case = dumps(Case(scene=Scene(shape=SHAPE), steps=()))
    first = Failure(check=Check.TOKENS, message="a token", case=case)

    def play(subject, each, *, spared=()):
        return SimpleNamespace(failure=None if "positions" in spared else first)

    monkeypatch.setattr(minimize, "play_case", play)
    found = minimize.with_causes(SUBJECT, first)
    assert found.causes == ("positions",)
    assert (found.field, found.axis) == ("positions", "token")
    named = minimize.with_causes(SUBJECT, attrs.evolve(first, field="mine", axis="request"))
    assert (named.field, named.axis) == ("mine", "request")
    for same in (attrs.evolve(first, case=""), attrs.evolve(first, failed=(1, 2))):
        assert minimize.with_causes(SUBJECT, same) is same


# LoRA.


def test_requests_have_the_tokens_of_their_adapter():
    """Each token is the greedy choice of the model with the adapter; a request gets max_new_tokens."""
    target = load_target(None, adapter_rows.MODEL, device=SUBJECT.device, dtype=torch.float64, seed=1)
    adapters = random_adapters(target.linears(), 2, seed=2)
    seen = set()
    for adapter in range(3):
        request = Request(name="one", arrival=0.0, prompt=(3, 5), max_new_tokens=3, adapter=adapter)
        tokens = []
        for _ in range(3):
            one = attrs.evolve(request, max_new_tokens=len(tokens) + 1)
            for token in range(adapter_rows.MODEL.vocab_size):
                try:
                    adapter_rows._check_tokens(target, adapters, one, (*tokens, token))
                except Violation:
                    continue
                tokens.append(token)
                break
        assert len(tokens) == 3
        seen.add(tuple(tokens))
        for number in range(3):
            wrong = (*tokens[:number], (tokens[number] + 1) % 61, *tokens[number + 1 :])
            with pytest.raises(Violation) as raised:
                adapter_rows._check_tokens(target, adapters, request, wrong)
            assert raised.value.failure.message == (
                f"token {number + 1} of one is not the greedy choice of the model with adapter {adapter}"
            )
        with pytest.raises(Violation):
            adapter_rows._check_tokens(target, adapters, request, tuple(tokens[:2]))
    assert len(seen) > 1


def test_plans_of_the_check_of_adapters_leave_padding():
    """With and without drafts, specialised by the number of adapters or not."""
    plans = list(adapter_rows._plans())
    assert [(plan.speculative is not None, plan.lora.specialize) for plan in plans] == [
        (False, True),
        (True, True),
        (False, False),
        (True, False),
    ]
    for plan in plans:
        entries = plan.role(Role.TARGET).entries
        cases = {entry.active_loras for entry in entries}
        assert len(cases) > 2 if plan.lora.specialize else len(cases) <= 2
        assert {entry.num_reqs for entry in entries if entry.query_len} == {2, 4}
        assert {entry.num_tokens for entry in entries if not entry.query_len} == {8, 24}
        assert plan.speculative is None or plan.speculative.num_tokens == 2


def test_padding_of_what_lora_reads_is_no_adapter(stage, monkeypatch):
    """Each field behind its real values; all of it where a step has none, and of the target alone."""
    watch = adapter_rows._Padding()
    monkeypatch.setattr(adapter_rows.ForwardObserver, "forward", lambda self, role, step: "ran")
    fill = {field.name: field.value or 0 for field in LORA_FIELDS}
    batch = Batch(role=Role.TARGET, num_reqs=1, num_tokens=2)
    for name in fill:
        for real in (0, 2, None):
            values = {each: torch.full((4,), fill[each]) for each in fill}
            arrays = dict.fromkeys(fill, np.zeros(4))
            arrays[name] = None if real is None else np.zeros(real)
            step = SimpleNamespace(inputs=SimpleNamespace(array=arrays.get), batch=batch, entry=None)
            role = SimpleNamespace(role=Role.TARGET, fields=values)
            assert watch.forward(role, step) == "ran"
            for place in range(4):
                values[name][place] += 7
                if place >= (real or 0):
                    with pytest.raises(Violation) as raised:
                        watch.forward(role, step)
                    assert raised.value.failure.check is Check.FILLED
                    assert f"the padding of {name} must be" in raised.value.failure.message
                    drafter = SimpleNamespace(role=Role.DRAFT_PREFILL, fields=values)
                    assert watch.forward(drafter, step) == "ran"
                else:
                    assert watch.forward(role, step) == "ran"
                values[name][place] -= 7
