"""The strategies draw what they say: every field takes part, and what they give is valid."""

from collections import defaultdict

import attrs
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from capture_planner.plugins.backend import Backend
from capture_planner.records.batch import Batch
from capture_planner.records.environment import Environment
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Spec
from capture_planner.records.traffic import Traffic
from capture_planner.testing import arbitrary_plans, backends, batches, deployments, environments, plans, specs
from support.strategies import documents, observations, profiles, traffics

# There is one schema version so far, and a newer one cannot be read.
ONE_VALUE = {("version",), ("environment", "version")}


def leaves(value, path=()):
    """Every leaf field of a record by its path; positions in tuples do not count."""
    if attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            if field.init:
                yield from leaves(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, tuple):
        yield path, len(value)
        for position, item in enumerate(value):
            yield from leaves(item, path if attrs.has(type(item)) else (*path, position % 3))
    else:
        yield path, repr(value)


def declared(kind, path=()):
    """Every leaf path that a record type can have, from its annotations."""
    hints = attrs.resolve_types(kind)
    for field in attrs.fields(hints):
        if field.init:
            inner = _records(field.type)
            yield (*path, field.name)
            for record in inner:
                yield from declared(record, (*path, field.name))


def _records(annotation):
    if attrs.has(annotation):
        return [annotation]
    return [found for arg in getattr(annotation, "__args__", ()) for found in _records(arg)]


# A new seed sees more than more examples of the last one.
FEW = settings(max_examples=10, database=None, phases=[Phase.generate])


def _unseen(strategy, kind, rounds=300, without=()):
    """The fields that have fewer than two values, in round after round until there are none."""
    seen, fields = defaultdict(set), set(declared(kind)) - ONE_VALUE - set(without)
    for number in range(rounds):

        @seed(number)
        @FEW
        @given(strategy)
        def collect(value):
            for path, leaf in leaves(value):
                for length in range(1, len(path) + 1):
                    seen[path[:length]].add(leaf)

        collect()
        if missing := sorted(path for path in fields if len(seen[path]) < 2):
            continue
        break
    return missing


def test_every_field_of_a_spec_takes_part():
    """Over some hundred specs each field, however deep, has at least two values."""
    # These are chosen for all roles at once, so that no role has its own.
    names = ("max_slowdown", "objective", "profile", "traffic")
    shared = [path for path in declared(Spec) if path[0] == "roles" and path[-1] in names]
    assert not _unseen(specs(measured=None), Spec, without=shared)


def test_every_field_of_an_environment_takes_part():
    """The same for environments."""
    assert not _unseen(environments(), Environment)


def test_every_field_of_a_plan_takes_part():
    """The same for plans that are made by hand."""
    assert not _unseen(arbitrary_plans(), Plan)


def test_every_field_of_an_observation_takes_part():
    """The same for observations, whose graphs say beside their entry up to which length decodes vary."""
    beside = [("roles", graphs, "entry", "max_query_len") for graphs in ("graphs", "trials")]
    assert not _unseen(observations(), Observation, without=beside)


def test_every_field_of_traffic_takes_part():
    """The same for traffic."""
    assert not _unseen(traffics(), Traffic)


def test_every_field_of_a_profile_takes_part():
    """The same for profiles."""
    assert not _unseen(profiles(), Profile)


@given(backends())
def test_a_fake_backend_is_a_backend(backend):
    """What the strategy gives meets the contract's protocol."""
    assert isinstance(backend, Backend)


@given(deployments())
def test_a_deployment_has_the_backends_that_it_names(deployment):
    """Each name in the spec is in the registry."""
    spec = deployment.spec
    named = {spec.backend}
    for role in (spec.roles.target, spec.roles.draft_prefill, spec.roles.draft_decode):
        named |= {role.backend, *(group.backend for group in role.groups)} - {None}
    assert named <= set(deployment.registry)


@given(plans(), st.data())
def test_batches_belong_to_a_role_of_the_plan(plan, data):
    """Batches ask about a role that the plan has."""
    batch = data.draw(batches(plan))
    assert isinstance(batch, Batch)
    assert plan.role(batch.role).role is batch.role


def test_documents_are_damaged_and_whole():
    """Both kinds of text are drawn, of each kind of record."""
    seen = set()

    kinds = (Spec, Environment, Plan, Observation, Traffic, Profile)
    every = {(kind, damaged) for kind in kinds for damaged in (True, False)}
    for number in range(120):

        @seed(number)
        @FEW
        @given(documents())
        def collect(document):
            seen.add((document.kind, document.mutated))

        collect()
        if seen == every:
            break
    assert seen == every
