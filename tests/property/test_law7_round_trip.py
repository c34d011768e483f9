"""Law 7, round trip: writing and reading is the identity; order and process change nothing."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import attrs
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.errors import InvalidDocument, PlanningError
from capture_planner.plugins import registry
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner.records._base import digest
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Spec
from capture_planner.testing import arbitrary_plans, backends, deployments, environments, plans, specs
from support.strategies import documents, observations, profiles, traffics

ANY_RECORD = (
    specs(measured=None, scheduled=True)
    | environments()
    | plans(max_reqs=512)
    | arbitrary_plans()
    | observations()
    | profiles()
    | traffics()
)


@given(ANY_RECORD)
def test_yaml_round_trip(record):
    """Law 7: record -> YAML -> record is the identity, with an equal digest and equal bytes."""
    text = codec.dumps(record)
    again = codec.loads(text, type(record))
    assert again == record
    assert digest(again) == digest(record)
    assert codec.dumps(again) == text


@given(ANY_RECORD)
def test_json_round_trip(record):
    """Law 7: JSON is read by the same reader, to the same record."""
    text = codec.dumps_json(codec.to_data(record))
    assert codec.loads(text, type(record)) == record


@given(specs(), specs())
def test_digests_are_equal_exactly_where_records_are(one, other):
    """Law 7: a digest is the record, as far as equality goes."""
    assert (digest(one) == digest(other)) == (one == other)


def _plan_of(deployment):
    try:
        return deployment.plan()
    except PlanningError as error:
        return error.problems


@given(deployments())
def test_planning_is_deterministic(deployment):
    """Law 7: the same spec, environment and backends give the same plan, twice."""
    assert _plan_of(deployment) == _plan_of(deployment)


@given(deployments())
def test_a_written_spec_gives_the_same_plan(deployment):
    """Law 7: nothing that planning needs is lost in a file."""
    again = attrs.evolve(
        deployment,
        spec=codec.loads(codec.dumps(deployment.spec), Spec),
        environment=codec.loads(codec.dumps(deployment.environment), Environment),
    )
    assert _plan_of(again) == _plan_of(deployment)


@given(deployments(), st.data())
def test_the_order_of_registration_changes_nothing(deployment, data):
    """Law 7: plugins in any order give an equal registry and an equal plan."""

    def plugin(item):
        @hookimpl
        def capture_planner_backends():
            return [item.backend]

        return SimpleNamespace(__name__=item.distribution, capture_planner_backends=capture_planner_backends)

    plugins = [plugin(item) for item in deployment.registry.values()]
    made = [
        registry.load_backends(*data.draw(st.permutations(plugins)), installed=False),
        registry.load_backends(*plugins, installed=False),
    ]
    assert list(made[0]) == list(made[1])
    assert dict(made[0]) == dict(made[1])
    one, other = (_plan_of(attrs.evolve(deployment, registry=r)) for r in made)
    assert one == other


@given(deployments(max_reqs=64), backends("stranger"))
def test_unused_backend_changes_nothing(deployment, stranger):
    """Law 7: a backend is chosen by name, whatever else is installed."""
    item = registry.RegisteredBackend(backend=stranger, distribution="stranger", version="1")
    larger = registry.Registry([item, *deployment.registry.values()])
    more = attrs.evolve(deployment, registry=larger)
    assert _plan_of(more) == _plan_of(deployment)


@given(documents())
def test_a_damaged_file_is_refused_with_its_place_or_read(document):
    """Law 7: any text is a record that round-trips, or an ``InvalidDocument``; never a traceback."""
    problems, read = (), None
    try:
        read = codec.loads(document.text, document.kind, "f.yaml")
    except InvalidDocument as error:
        problems = error.problems
    if read is None:
        assert document.mutated
        assert problems
        assert all(p.file == "f.yaml" and p.message and (p.line or 1) >= 1 for p in problems)
    else:
        assert codec.loads(codec.dumps(read), document.kind) == read


_PRINT = """
import json, sys
from capture_planner import codec
from capture_planner.records._base import digest
from capture_planner.records.plan import Plan
plans = [codec.loads(text, Plan) for text in json.load(sys.stdin)]
json.dump([(digest(plan), codec.dumps(plan)) for plan in plans], sys.stdout)
"""


def _in_a_process(seed, texts):
    done = subprocess.run(
        [sys.executable, "-c", _PRINT],
        input=json.dumps(texts),
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONUTF8": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [tuple(found) for found in json.loads(done.stdout)]


def test_digests_are_the_same_in_every_process():
    """Law 7: neither digests nor files depend on the seed of a process's hashes."""
    expected = []

    @settings(max_examples=5)
    @given(plans())
    def write(plan):
        assume(plan.num_graphs)
        expected.append((digest(plan), codec.dumps(plan)))

    write()
    texts = [text for _, text in expected]
    assert _in_a_process("1", texts) == _in_a_process("2", texts) == expected
