"""Law 11, graphs apart: graphs of one pool do not touch each other, and outputs last until their readers are done.

A replay changes no persistent tensor but those that its own role writes; the pool between two replays is nobody's.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.modes import Role
from capture_planner_runner.capture.variants import without_speculation
from capture_planner_runner.execution.fields import tensor_of
from support.worlds import Watcher, bits, persistent, requests_of, serve, spec_of, world_of, worlds

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = settings(max_examples=max(settings.default.max_examples // 5, 3))
SEEDS = st.integers(0, 1 << 16)


def served_plainly(world, requests):
    """The output of plain greedy decoding, and the answers that it gives."""
    with world.runner(without_speculation(world.plan, world.registry)) as runner:
        output = serve(runner, requests)
    return output, {request.name: request.prompt + output[request.name] for request in requests}


def foreign(moment):
    """The persistent tensors that a forward may not write: other roles' fields, outputs, workspaces and caches."""
    role = moment.role
    read = f"{role.role.value}.target."
    own = {tensor_of(held).data_ptr() for held in role.persistent() if not held[0].startswith(read)}
    return {name: tensor for name, tensor in persistent(moment.runner).items() if tensor.data_ptr() not in own}


def kept(moment):
    """Their bits, by name."""
    return {name: bits(tensor) for name, tensor in foreign(moment).items()}


@FEW
@given(worlds(), SEEDS)
def test_replay_changes_nothing_of_another_role(world, seed):
    """Nor does the pool hold what anything reads later: with poison in it after each forward, tokens are the same."""
    requests = requests_of(world, seed)
    output, answers = served_plainly(world, requests)

    def after(moment, before):
        assert kept(moment) == before, moment.entry
        for role in moment.runner.roles.values():
            if role.graphs.pool is not None:
                role.graphs.pool.poison()
        assert kept(moment) == before, "a persistent tensor lies in a pool"

    watcher = Watcher()
    with world.runner(observer=watcher) as runner:
        runner.capture()
        with watcher.watching(runner, kept, after):
            assert serve(runner, requests, answers) == output


def test_target_keeps_what_the_drafter_reads():
    """The hidden states and tokens of a step are foreign to every draft forward, and there are such forwards."""
    world = world_of(spec_of(k=3))
    requests = requests_of(world, 1)
    names = {}
    watcher = Watcher()
    with world.runner(observer=watcher) as runner:
        runner.capture()
        _, answers = served_plainly(world, requests)
        with watcher.watching(runner, lambda moment: names.setdefault(moment.role.role, set(foreign(moment)))):
            serve(runner, requests, answers)
    for role in (Role.DRAFT_PREFILL, Role.DRAFT_DECODE):
        assert {"target.hidden", "target.tokens", "target.keys[0]", "target.input_ids"} <= names[role]
    assert {"draft_prefill.hidden", "draft_prefill.draft_state.token", "draft_decode.keys[0]"} <= names[Role.TARGET]
