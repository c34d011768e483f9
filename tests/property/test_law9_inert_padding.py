"""Law 9: padding is inert.

What real rows compute does not depend on the contents of padded rows; padded rows write only null
slots; large, small, large replays equal eager.
"""

import numpy as np
import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.records.spec import Policy, Sizes
from capture_planner_runner.capture.variants import without_graphs, without_speculation
from capture_planner_runner.options import Options
from support.worlds import LONGEST, VOCABULARY, Watcher, bits, caches_of, requests_of, serve, spec_of, world_of, worlds

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = settings(max_examples=max(settings.default.max_examples // 5, 3))
SEEDS = st.integers(0, 1 << 16)
SAFE = {"input_ids": VOCABULARY, "positions": LONGEST}
"""Fields that a padded row may hold any value of, and how many there are."""


STATE = ("token", "hidden", "proposed")
"""What draft steps hand on, a row a place."""
CANARY = 7e77


class Garbage:
    """What nobody may read, different for each seed: put in place before a forward."""

    def __init__(self, seed):
        self._random = np.random.default_rng(seed)
        self._floats = [float("nan"), 1e300, -1e300][seed % 3]
        self._integers = [-(1 << 31), (1 << 31) - 1][seed % 2]
        self._is_poison = seed % 2 == 0

    def __call__(self, moment):
        """Spoil everything but what the batch owns."""
        self._fields(moment)
        for cache in caches_of(moment.runner).values():
            cache[: moment.runner.pages.page_size] = self._floats
        self._outputs(moment)
        if self._is_poison and moment.role.graphs.pool is not None:
            moment.role.graphs.pool.poison()

    def _fields(self, moment):
        pages, table = moment.runner.pages, moment.role.fields["block_table"]
        for buffer in moment.role.fields:
            along = moment.padded_tokens if buffer.field.axis.value == "token" else moment.padded_reqs + 1
            buffer.tensor[buffer.field.offset + buffer.field.scale * along :] = self._integers
            if buffer.field.name in SAFE:
                padded = buffer.tensor[moment.num_tokens : moment.padded_tokens]
                padded.copy_(self._integers_like(padded, SAFE[buffer.field.name]))
            # The next step must know that these are not the fill.
            buffer.spoil()
        padded = table[moment.num_reqs : moment.padded_reqs]
        padded.copy_(self._integers_like(padded, pages.num_pages))
        for row, length in zip(table, moment.role.fields["seq_lens"][: moment.num_reqs], strict=False):
            # A draft decode moves on into the pages that follow.
            unused = row[pages.pages(int(length) + 6) :]
            unused.copy_(self._integers_like(unused, pages.num_pages))
        if "last_token_indices" in moment.role.fields:
            padded = moment.role.fields["last_token_indices"][moment.num_reqs : moment.padded_reqs]
            padded.copy_(self._integers_like(padded, moment.padded_tokens))

    def _outputs(self, moment):
        body, state = moment.runner.target, moment.runner.draft_state
        first = moment.num_tokens
        if moment.role.role is Role.TARGET:
            first = 0
            if body.embeddings is not None:
                body.embeddings[moment.num_tokens :] = self._floats
        if moment.role.role is not Role.DRAFT_DECODE:
            for tensor in (body.hidden, body.aux):
                if tensor is not None:
                    tensor[first:] = self._floats
            body.tokens[first:] = self._integers
        if moment.role.role is Role.DRAFT_PREFILL:
            moment.role.body.hidden.fill_(self._floats)
            for tensor in (state.token, state.proposed, state.column):
                tensor.fill_(self._integers)
            state.hidden.fill_(self._floats)
        if moment.role.role is Role.DRAFT_DECODE:
            others = self._others(moment)
            state.token[others] = self._integers
            state.proposed[others] = self._integers
            state.hidden[others] = self._floats

    @staticmethod
    def _others(moment):
        others = torch.ones(len(moment.runner.draft_state.token), dtype=torch.bool)
        others[moment.places] = False
        return others

    def _integers_like(self, tensor, below):
        return torch.from_numpy(self._random.integers(0, below, tuple(tensor.shape))).to(tensor.dtype)


def answers_of(world, requests):
    """Prompt and plain greedy output of each request: what must come out, whatever is drafted."""
    with world.runner(without_speculation(world.plan, world.registry)) as runner:
        said = serve(runner, requests)
    return {request.name: request.prompt + said[request.name] for request in requests}


def output(answers, requests):
    """The outputs alone."""
    return {request.name: answers[request.name][len(request.prompt) :] for request in requests}


@FEW
@given(worlds(), SEEDS)
def test_real_rows_do_not_depend_on_padding(world, seed):
    """Clean, and with two kinds of garbage before each forward: bit for bit the same, and the same as plain.

    Garbage is in the padded rows, in fields and outputs past them, in the null page, in what the pool
    holds, and in the draft state of those who are not in the batch.
    """
    requests = requests_of(world, seed)
    answers = answers_of(world, requests)
    seen = []
    watcher = Watcher()
    with world.runner(observer=watcher) as runner:
        runner.capture()
        for garbage in (lambda _: None, Garbage(seed), Garbage(seed + 1)):
            with watcher.watching(runner, garbage) as rows:
                assert serve(runner, requests, answers) == output(answers, requests)
            seen.append(rows)
        for role in {forward.role for forward in runner.session.forwards if forward.padded_tokens}:
            event(f"padded {role.value}")
    clean = seen[0]
    for rows in seen[1:]:
        assert rows.keys() == clean.keys()
        for key, forwards in rows.items():
            for now, then in zip(forwards, clean[key], strict=True):
                for name in then:
                    assert bits(now[name]) == bits(then[name]), (key, name)


def family_of(moment):
    """Whose caches a forward writes: the target's, or those that the draft roles share."""
    return "draft" if moment.role.role.is_drafter else "target"


@FEW
@given(worlds(), SEEDS, st.booleans())
def test_only_slots_and_rows_of_the_batch_are_written(world, seed, is_spoiled):
    """All slots of the batch are; every other slot and row of the draft state keeps its bits.

    A target forward writes no slot of the drafter and a draft no slot of the target; what padded rows
    write goes to the null page, and to the last row of the draft state.
    """
    requests = requests_of(world, seed)
    answers = answers_of(world, requests)
    garbage = Garbage(seed)

    def before(moment):
        if is_spoiled:
            garbage(moment)
        slots, state = moment.slots(), moment.runner.draft_state
        for name, cache in caches_of(moment.runner).items():
            if name.startswith(family_of(moment)):
                cache[list(slots)] = CANARY
        caches = {name: cache.clone() for name, cache in caches_of(moment.runner).items()}
        held = {} if state is None else {name: getattr(state, name).clone() for name in STATE}
        return slots, caches, held

    def after(moment, kept):
        slots, caches, held = kept
        for name, cache in caches_of(moment.runner).items():
            same = (cache.view(torch.int64) == caches[name].view(torch.int64)).all(dim=1)
            written = set((~same).nonzero().flatten().tolist())
            own = slots if name.startswith(family_of(moment)) else set()
            assert written - set(range(moment.runner.pages.page_size)) == own, (name, moment.entry)
        for name, tensor in held.items():
            mine = [] if moment.role.role is Role.TARGET else [*moment.places.tolist(), len(tensor) - 1]
            others = [row for row in range(len(tensor)) if row not in mine]
            now = getattr(moment.runner.draft_state, name)
            assert bits(now[others]) == bits(tensor[others]), (name, moment.entry)

    watcher = Watcher()
    with world.runner(observer=watcher) as runner:
        runner.capture()
        with watcher.watching(runner, before, after):
            assert serve(runner, requests, answers) == output(answers, requests)


@FEW
@given(worlds(), SEEDS)
def test_large_small_large_replays_equal_eager(world, seed):
    """Batches shrink and grow again; every forward equals the eager one."""
    requests = requests_of(world, seed)
    answers = answers_of(world, requests)
    found = {}
    for kind, plan in (("graph", world.plan), ("eager", without_graphs(world.plan))):
        watcher = Watcher()
        with world.runner(plan, observer=watcher) as runner:
            runner.capture()
            with watcher.watching(runner) as rows:
                assert serve(runner, requests, answers) == output(answers, requests)
            sizes = [step.num_reqs for step in runner.session.steps]
            found[kind] = (rows, sizes)
    (graph, sizes), (eager, eager_sizes) = found["graph"], found["eager"]
    assert sizes == eager_sizes
    assume(any(max(sizes[:i]) > size < max(sizes[i:]) for i, size in enumerate(sizes[1:], 1)))
    assert graph.keys() == eager.keys()
    for key, forwards in graph.items():
        # A fused chain is one forward: what it ends with is what the last eager draft decode ends with.
        one, other = forwards[-1], eager[key][-1]
        for name in one.keys() & other.keys():
            torch.testing.assert_close(
                one[name], other[name], rtol=1e-9, atol=1e-9, msg=lambda text, at=(key, name): f"{at}: {text}"
            )


@FEW
@given(worlds(), SEEDS)
def test_poison_changes_no_token(world, seed):
    """With poison in all buffers before every forward, and every index checked: plain greedy output."""
    requests = requests_of(world, seed)
    answers = answers_of(world, requests)
    for plan in (world.plan, without_graphs(world.plan)):
        with world.runner(plan, options=Options(poison=True, debug=True)) as runner:
            runner.capture()
            assert serve(runner, requests, answers) == output(answers, requests)


@pytest.mark.parametrize("backend", ["reference", "probe"])
def test_every_kind_of_graph_is_padded_above(backend):
    """The worlds and the requests of these tests pad tokens and requests of every role, in both modes."""
    sizes = Sizes(policy=Policy.EXPLICIT, num_tokens=(5, 24), num_reqs=(3, 5))
    mode = GraphMode.FULL_AND_PIECEWISE
    world = world_of(spec_of(k=3, num_reqs=5, num_tokens=24, mode=mode, backend=backend, sizes=sizes))
    requests = requests_of(world, 1)
    with world.runner() as runner:
        runner.capture()
        serve(runner, requests, answers_of(world, requests))
        padded = {(f.role, f.mode) for f in runner.session.forwards if f.padded_tokens and f.entry is not None}
    assert padded == {
        (Role.TARGET, GraphMode.FULL),
        (Role.TARGET, GraphMode.PIECEWISE),
        (Role.DRAFT_PREFILL, GraphMode.FULL),
        (Role.DRAFT_PREFILL, GraphMode.PIECEWISE),
        (Role.DRAFT_DECODE, GraphMode.FULL),
    }
