"""What a launch refuses: plans, models, caches, requests and options, before anything is reserved to run."""

import json

import attrs
import pytest

from capture_planner.errors import BackendError, CapturePlannerError, RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.planner import plan
from capture_planner.records._base import replace
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import DataType, DraftModel, Method, Speculative
from capture_planner.records.spec import Parallel
from capture_planner_runner.launch.launch import launch
from capture_planner_runner.launch.request import RunRequest
from support.launches import (
    CONFIG,
    HERE,
    MODEL,
    SPEC,
    CountingReference,
    ProgressRecord,
    one_request,
    registry_of,
    requests_of,
    started,
)

pytestmark = pytest.mark.usefixtures("one_thread")
H100 = Environment(
    name="h100",
    device=Device(kind=DeviceKind.CUDA, name="H100", capability="9.0", memory=80 << 30, multiprocessors=132),
)


def changed_model(**changes):
    """The spec with another model."""
    return replace(SPEC, model=replace(MODEL, **changes))


REFUSED_PLANS = {
    "cuda": ({"environment": H100}, "the plan is for H100"),
    "cuda, forced": (
        {"environment": H100, "any_environment": True},
        "the plan is for H100, and this machine has no CUDA device",
    ),
    "versions": (
        {"environment": attrs.evolve(HERE, packages={"torch": "1.0", "no-such-package": "3"})},
        "no-such-package 3 was planned for and is not installed; torch 1.0 was planned for and",
    ),
    "data": (
        {"spec": replace(SPEC, parallel=Parallel(data=2))},
        "the plan is for 2 ranks (parallel.tensor 1 x parallel.data 2), and this is one",
    ),
    "tensor": ({"spec": replace(SPEC, parallel=Parallel(tensor=2))}, "use --ranks 2, or torchrun --nproc-per-node 2"),
    "decode context": (
        {"spec": replace(SPEC, parallel=Parallel(decode_context=2))},
        "parallel.decode_context is 2: 1 tensor-parallel rank with 2 KV heads hold each of them 1 time; plan it with 1",
    ),
    "fp8": ({"spec": changed_model(dtype=DataType.FP8)}, "in fp8; the runner computes in"),
    "nvfp4 cache": ({"spec": changed_model(kv_dtype=DataType.NVFP4)}, "in nvfp4; the runner computes in"),
}
REFUSED = {
    "no requests": ({"workload": lambda vocab_size: ()}, "there are no requests to serve"),
    "no prompt": ({"workload": one_request(prompt=())}, "r: the prompt is empty"),
    "too long": (
        {"workload": one_request(max_new_tokens=44)},
        "5 prompt tokens and 44 output tokens are more than max_model_len, 48",
    ),
    "foreign token": ({"workload": one_request(prompt=(20,))}, "token 20 is not in the model's vocabulary"),
    "more drafts than mtp modules": (
        {
            "spec": replace(
                SPEC, speculative=Speculative(method=Method.MTP, num_tokens=3, model=DraftModel(num_layers=2))
            )
        },
        "3 drafts of 2 modules, one token each",
    ),
}


def check_refused(given, says):
    """With what is wrong in the message, and before anything is begun; return the backend."""
    backend, shown = CountingReference(), ProgressRecord()
    with pytest.raises(RunError) as caught:
        started(backend=backend, shown=shown, **given)
    assert says in str(caught.value)
    assert not shown.totals
    return backend


@pytest.mark.parametrize("case", REFUSED_PLANS)
def test_a_plan_that_cannot_be_executed_is_refused_before_anything_is_reserved(case):
    """No backend has been asked for anything."""
    assert check_refused(*REFUSED_PLANS[case]).reserved == 0


def check_only_tried(backend):
    """Every group was reserved on trial, and released; nothing was reserved to run."""
    assert backend.reserved == backend.trials > 0
    assert backend.held == 0


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_executed_is_refused_before_anything_is_reserved_to_run(case):
    """What depends on the model too."""
    check_only_tried(check_refused(*REFUSED[case]))


@pytest.mark.parametrize("content", [None, {"eagle": True}])
def test_a_drafter_that_is_not_there_is_refused_before_anything_is_reserved_to_run(tmp_path, content):
    """A folder that does not exist, and one that holds something else."""
    folder = tmp_path / "head"
    if content is not None:
        folder.mkdir()
        (folder / "notes.json").write_text(json.dumps(content))
    backend = CountingReference()
    with pytest.raises(CapturePlannerError) as caught:
        started(backend=backend, drafter=folder)
    assert str(folder) in str(caught.value)
    check_only_tried(backend)


def with_error():
    """A plan whose lint finds an error: a batch that no entry and no waiver covers."""
    registry = registry_of(CountingReference())
    made = plan(SPEC, HERE, registry)
    target = made.role(Role.TARGET)
    kept = tuple(e for e in target.entries if e.mode is GraphMode.FULL)
    return replace(made, roles=(replace(target, entries=kept), *made.roles[1:]))


def test_a_plan_with_errors_is_refused_unless_it_is_wanted():
    """``any_plan`` runs what the plan has; what it does not cover runs eager."""
    backend, made = CountingReference(), with_error()
    with pytest.raises(RunError, match=r"the plan has errors: .*CP\d{3}"):
        launch(made, registry_of(backend), requests_of, RunRequest(page_size=4), ProgressRecord())
    assert backend.reserved == 0
    outcome = launch(
        made, registry_of(backend), requests_of, RunRequest(page_size=4, any_plan=True, verify=True), ProgressRecord()
    )
    assert outcome.differing == ()


def test_other_versions_run_where_it_is_wanted():
    """``any_environment`` is for versions; the report has what is really here."""
    environment = attrs.evolve(HERE, packages={"torch": "1.0"})
    outcome = started(environment=environment, any_environment=True)
    assert len(outcome.report.served) == 7
    assert outcome.report.host["torch"] != "1.0"


@pytest.mark.parametrize(
    ("name", "planned", "real"),
    [
        ("num_layers", 3, 1),
        ("num_heads", 2, 4),
        ("num_kv_heads", 4, 2),
        ("head_dim", 16, 8),
        ("hidden_size", 32, 16),
        ("vocab_size", 21, 20),
        ("sinks", True, False),
        ("mrope", True, False),
        ("max_model_len", 64, 48),
    ],
)
def test_another_model_than_the_plans_is_refused_number_by_number(tmp_path, name, planned, real):
    """Each is named, with what the plan says and what the model has."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    backend = CountingReference()
    with pytest.raises(RunError) as caught:
        started(changed_model(**{name: planned}), backend=backend, model=config)
    says = str(caught.value)
    assert f"model.{name}: the plan says {planned}" in says
    assert str(real) in says.partition(f"model.{name}")[2]
    assert says.count("the plan says") == 1
    check_only_tried(backend)


def test_a_cache_too_small_for_a_request_is_refused_before_capture():
    """5 + 5 tokens and 2 drafts are 3 pages of 4; with 2 they could never be free."""
    shown, backend = ProgressRecord(), CountingReference()
    with pytest.raises(RunError, match="the request r needs 3 pages of 4 tokens, and the KV cache has 2"):
        started(workload=one_request(), backend=backend, pages=2, shown=shown)
    assert backend.held == 0
    assert not [task for task, _ in shown.done if task == "capture"]


def test_a_cache_that_no_memory_holds_is_refused():
    """In a sentence that names the option, not in the allocator's words."""
    with pytest.raises(RunError, match=r"there is no memory for keys and values of 1099511627777 pages"):
        started(pages=1 << 40)


def test_a_backend_without_an_executor_is_named():
    """What ``reserve`` returned lacks every call."""

    class Empty(CountingReference):
        def reserve(self, reservation):
            return object()

    with pytest.raises(BackendError, match=r"from reserve .*which has no prepare, attend, layout, release"):
        started(backend=Empty())
