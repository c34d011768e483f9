"""The updates of a forward: torch against the host's arithmetic, and each kernel against torch."""

import copy
import random
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import capture_planner_runner
from capture_planner.errors import RunError
from capture_planner.plugins.backend import LayerCache
from capture_planner.records.backend import COMMON_FIELDS, Axis, Fill, MetadataField
from capture_planner_runner.execution import padding
from capture_planner_runner.execution.fields import Extents, FieldBuffer
from capture_planner_runner.execution.updates import (
    DraftState,
    StepAhead,
    TokenFields,
    Updates,
    VerificationInputs,
    VerificationOutcome,
)
from capture_planner_runner.serving.inputs import draft_decode_inputs, draft_prefill_inputs, target_inputs
from capture_planner_runner.serving.speculative import settle
from support.files import module_at

CPU = torch.device("cpu")
TORCH = Updates()


steps = module_at(Path(__file__).with_name("test_step.py"), "step_laws")
KV_LENS = MetadataField(name="kv_lens", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0)


@pytest.fixture(scope="module")
def fused():
    """The kernels, interpreted: Triton looks at the variable where a kernel is defined, not later."""
    pytest.importorskip("triton", reason="the fused updates need triton, which is not installed")
    folder = Path(capture_planner_runner.__file__).parent / "execution"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return module_at(folder / "fused_updates.py", "interpreted_fused_updates").FusedUpdates()


def test_no_kernel_is_compiled_for_numbers_that_change(fused):
    """Triton compiles a kernel again for 1, and for multiples of 16, of each number that it is not told about."""
    values = type(fused).correct.__globals__.values()
    kernels = [each for each in values if type(each).__name__ == "InterpretedFunction"]
    changing = [({"rows", "most"} & set(kernel.arg_names), kernel.kwargs["do_not_specialize"]) for kernel in kernels]
    assert sum(bool(numbers) for numbers, _ in changing) == 6
    assert all(numbers <= set(told or ()) for numbers, told in changing)


class BufferedFields(dict):
    """Fields by name, that go through their buffers as the runner's do."""

    def __getitem__(self, name):
        return super().__getitem__(name).tensor

    def __iter__(self):
        return iter(self.values())


def fields_of(batch, made, padded):
    """Buffers with room for ``padded`` more rows, filled and padded for a step's values."""
    pages = batch.pages.pages(batch.max_model_len)
    tokens = sum(count for _, _, count, _ in batch.rows())
    room = Extents(tokens=tokens + padded, reqs=made.num_reqs + padded, pages=pages)
    held = BufferedFields()
    for field in (*COMMON_FIELDS, KV_LENS):
        columns = room.columns(field)
        shape = (room.rows(field),) if columns is None else (room.rows(field), columns)
        held[field.name] = FieldBuffer(field.name, field, torch.zeros(shape, dtype=getattr(torch, field.dtype)))
        held.get(field.name).spoil()
    values = made.declared | {"kv_lens": made.seq_lens}
    padding.apply(padding.table(held, values, made.num_tokens))
    return held


def moving_of(batch, held):
    """The same as what goes on by a token."""
    return TokenFields.of(held, batch.pages.page_size, batch.max_model_len)


def same(one, other):
    """Say whether two roles' fields hold the same."""
    return all(torch.equal(a.tensor, b.tensor) for a, b in zip(one, other, strict=True))


@st.composite
def verifications(draw):
    """A batch with its target inputs, and what the target says: often what was drafted. Or acceptance is synthetic."""
    batch = draw(steps.situations() | steps.situations(decodes=True))
    made = target_inputs(batch.scheduled, batch.places, batch.pages)
    ids = np.append(made.input_ids[1:], 0)
    flips = np.array(draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
    if draw(st.booleans()):
        accepted = draw(st.lists(st.integers(0, 5), min_size=made.num_reqs, max_size=made.num_reqs))
        made = attrs.evolve(made, accepted_counts=np.array(accepted, dtype=np.int32))
    return batch, made, np.where(flips, ids + 1, ids).astype(np.int64)


def prepare(updates, batch, made, answers, padded, *, decodes):
    """Fill all roles as if every draft were kept, and let the device put in what was."""
    outcome = VerificationOutcome.make(len(batch.places.length), 4, CPU)
    target = fields_of(batch, made, padded)
    counts = batch.scheduled.counts
    longest = np.minimum(batch.places.computed[batch.scheduled.state_indices] + counts, batch.max_model_len)
    prefill = fields_of(batch, draft_prefill_inputs(made, batch.scheduled, counts, batch.places), padded)
    decode = fields_of(batch, draft_decode_inputs(batch.scheduled, longest, batch.places, batch.pages), padded)
    rows = batch.scheduled.num_reqs
    updates.prepare_drafts(
        VerificationInputs(
            fields=moving_of(batch, target),
            starts=target["query_start_loc"][: rows + 1],
            counts=torch.from_numpy(made.sampled_counts),
            answers=torch.from_numpy(answers),
            most=1 + int(batch.scheduled.drafts.max()),
            accepted=None if made.accepted_counts is None else torch.from_numpy(made.accepted_counts)[:, None],
        ),
        moving_of(batch, prefill),
        prefill["last_token_indices"],
        moving_of(batch, decode) if decodes else None,
        outcome,
    )
    return prefill, decode, outcome


@given(verifications(), st.integers(0, 2))
def test_drafts_prepared_on_the_device_are_those_of_the_host(case, padded):
    """VerificationInputs and shifted there as ``settle`` and the draft values do it here; padding is left as it was."""
    batch, made, answers = case
    prefill, decode, outcome = prepare(TORCH, batch, made, answers, padded, decodes=True)
    scheduled, places = batch.scheduled, batch.places
    settled = settle(scheduled, places, answers[made.sampled_rows], made.accepted_counts)
    wanted = draft_prefill_inputs(made, scheduled, settled.kept, places)
    expected = fields_of(batch, wanted, padded)
    rows, starts = scheduled.num_reqs, made.query_start_loc
    for start, kept in zip(starts, settled.kept, strict=False):
        # Rows past what was kept hold rejected drafts, which nobody reads.
        kept_rows = slice(start, start + kept)
        assert prefill["input_ids"][kept_rows].tolist() == expected["input_ids"][kept_rows].tolist()
    assert prefill["input_ids"][scheduled.num_tokens :].eq(0).all()
    assert prefill["last_token_indices"].tolist() == expected["last_token_indices"].tolist()
    computed = places.computed[scheduled.state_indices]
    expected = fields_of(batch, draft_decode_inputs(scheduled, computed, places, batch.pages), padded)
    for name in ("positions", "seq_lens", "kv_lens", "slot_mapping", "idx_mapping", "input_ids"):
        assert decode[name][:rows].tolist() == expected[name][:rows].tolist(), name
        assert decode[name][rows : rows + padded].tolist() == expected[name][rows : rows + padded].tolist()
    for row, place in enumerate(scheduled.state_indices):
        assert outcome.rejected[place] == scheduled.drafts[row] - settled.accepted[row]
        assert settled.gained[row] == 0 or outcome.token[place] == places.tokens[place, places.length[place] - 1]


@settings(max_examples=max(settings.default.max_examples // 4, 3))
@given(verifications(), st.integers(0, 2), st.booleans())
def test_the_kernel_prepares_drafts_as_torch_does(fused, case, padded, decodes):
    """Every field of both roles, real and padded."""
    batch, made, answers = case
    *ours, our_outcome = prepare(fused, batch, made, answers, padded, decodes=decodes)
    *theirs, their_outcome = prepare(TORCH, batch, made, answers, padded, decodes=decodes)
    assert all(same(one, other) for one, other in zip(ours, theirs, strict=True))
    assert torch.equal(our_outcome.token, their_outcome.token)
    assert torch.equal(our_outcome.rejected, their_outcome.rejected)


@st.composite
def steps_ahead(draw):
    """A batch as it is when the host has read the step before, the states that it has seen before that, and what that
    step left on the device: of each decode that it was in, the newest token, the drafts, and how many were rejected.
    """
    batch = draw(steps.situations() | steps.situations(decodes=True))
    chosen, scheduled, after = random.Random(draw(st.integers(0, 1 << 32))), batch.scheduled, batch.places
    before, proposed = copy.deepcopy(after), scheduled.drafts.copy()
    outcome = VerificationOutcome.make(len(after.length), 4, CPU)
    state = DraftState.make(len(after.length), 4, 2, torch.float32, CPU)
    outcome.rejected += 1  # nothing reads it for a request that is not corrected
    for row, (place, computed, count, drafts) in enumerate(batch.rows()):
        room = batch.max_model_len - computed - count
        if computed < max(after.prompt[place], 1) or chosen.random() < 0.3:
            continue
        proposed[row], rejected = chosen.randint(0, drafts), chosen.randint(0, min(4, room))
        kept = chosen.randint(1, min(5 - rejected, computed)) if rejected < 5 else 1
        before.computed[place], before.length[place] = computed - kept, computed - kept + 1
        before.ahead[place] = kept + rejected
        length = int(after.length[place])
        after.tokens[place, length + proposed[row] : length + drafts] = 0
        outcome.token[place], outcome.rejected[place] = int(after.tokens[place, length - 1]), rejected
        state.proposed[place, :drafts] = torch.from_numpy(after.tokens[place, length : length + drafts])
    batch = attrs.evolve(batch, scheduled=attrs.evolve(scheduled, proposed=proposed))
    return batch, before, outcome, state


def corrected(updates, case, padded, accepted):
    """The fields of target and draft prefill, filled by what the host knew, and corrected."""
    batch, before, outcome, state = case
    rows = batch.scheduled.state_indices
    scheduled = attrs.evolve(batch.scheduled, base=before.computed_at_most(rows), unread=before.is_unread(rows))
    made = target_inputs(scheduled, before, batch.pages)
    roles = [made, draft_prefill_inputs(made, scheduled, scheduled.counts, before)]
    held = [fields_of(batch, inputs, padded) for inputs in roles]
    target, prefill = (moving_of(batch, fields) for fields in held)
    counts = torch.from_numpy(accepted) if accepted is not None else None
    starts = held[0]["query_start_loc"][: made.num_reqs + 1]
    most = 1 + int(batch.scheduled.drafts.max())
    updates.correct(
        StepAhead(target=target, prefill=prefill, starts=starts, most=most, accepted=counts), state, outcome
    )
    return held, counts


@given(steps_ahead(), st.integers(0, 2), st.booleans())
def test_a_corrected_step_is_the_one_that_the_host_makes_when_it_has_read_the_last(case, padded, synthetic):
    """Every field of target and draft prefill, padding included; of synthetic acceptance the number for that place."""
    batch, before, outcome, _ = case
    rows = batch.scheduled.state_indices
    accepted = np.arange(len(rows) * 5, dtype=np.int32).reshape(-1, 5) if synthetic else None
    (target, prefill), counts = corrected(TORCH, case, padded, None if accepted is None else accepted.copy())
    made = target_inputs(batch.scheduled, batch.places, batch.pages)
    assert same(target, fields_of(batch, made, padded))
    expected = draft_prefill_inputs(made, batch.scheduled, batch.scheduled.counts, batch.places)
    expected = fields_of(batch, expected, padded)
    for name in ("positions", "slot_mapping", "seq_lens", "kv_lens", "query_start_loc"):
        assert torch.equal(prefill[name], expected[name]), name
    if synthetic:
        places = np.where(before.is_unread(rows), outcome.rejected.numpy()[rows], 0)
        assert counts[:, 0].tolist() == accepted[np.arange(len(rows)), places].tolist()
    event(f"some drafts were rejected: {bool((before.ahead[rows] > 0).any())}")


@settings(max_examples=max(settings.default.max_examples // 4, 3))
@given(steps_ahead(), st.integers(0, 2), st.booleans())
def test_the_kernel_corrects_as_torch_does(fused, case, padded, synthetic):
    """All fields of both roles, and what synthetic acceptance accepts."""
    rows = case[0].scheduled.num_reqs
    accepted = np.arange(rows * 5, dtype=np.int32).reshape(-1, 5) if synthetic else None
    found = [corrected(each, case, padded, None if accepted is None else accepted.copy()) for each in (fused, TORCH)]
    (ours, our_counts), (theirs, their_counts) = found
    assert all(same(one, other) for one, other in zip(ours, theirs, strict=True))
    assert not synthetic or torch.equal(our_counts[:, 0], their_counts[:, 0])


@settings(max_examples=max(settings.default.max_examples // 4, 3))
@given(steps.situations(), st.integers(0, 2), st.integers(1, 3), st.booleans())
def test_the_kernel_moves_on_as_torch_does(fused, batch, padded, moves, takes):
    """Positions, lengths and slots up to the model's end, and the tokens that come next."""
    computed = batch.places.computed[batch.scheduled.state_indices]
    made = draft_decode_inputs(batch.scheduled, computed, batch.places, batch.pages)
    rows = len(computed) + padded
    tokens = torch.arange(5, 5 + rows) if takes else None
    found = []
    for updates in (fused, TORCH):
        held = fields_of(batch, made, padded)
        for _ in range(moves):
            updates.advance(moving_of(batch, held), rows, tokens)
        found.append(held)
    assert same(*found)
    if takes:
        assert found[0]["input_ids"][: len(computed)].tolist() == tokens[: len(computed)].tolist()


@settings(max_examples=max(settings.default.max_examples // 4, 3))
@given(
    st.lists(st.integers(-1, 6), min_size=1, max_size=300, unique_by=lambda place: place if place >= 0 else id),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 3),
)
def test_the_kernels_keep_drafts_as_torch_does(fused, mapping, width, again, columns):
    """One proposal after another, the columns held at the last; padded rows share a row of their own.

    Tokens may be a column of a table, as a parallel pass has them.
    """
    found = []
    idx_mapping = torch.tensor(mapping, dtype=torch.int32)
    for updates in (fused, TORCH):
        state = DraftState.make(7, width, 2, torch.float32, CPU)
        for number in range(width + again):
            table = torch.arange(len(mapping) * columns).view(-1, columns) * 10 + number
            updates.keep(state, idx_mapping, table[:, 0], first=number == 0)
        places, ids = updates.entered(state, idx_mapping)
        real = torch.tensor(mapping) >= 0
        assert ids[~real].eq(0).all()
        assert places[~real].eq(state.padding).all()
        found.append((state.token[:-1], state.proposed[:-1], state.column, places, ids))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@settings(max_examples=max(settings.default.max_examples // 4, 3))
@given(st.lists(st.integers(-9, 50), min_size=1, max_size=300))
def test_pending_tokens_are_taken_from_the_answers(fused, ids):
    """A negative id is the answer of a row; the others are themselves."""
    answers = torch.arange(100, 109)
    expected = [100 + -1 - token if token < 0 else token for token in ids]
    for updates in (fused, TORCH):
        assert updates.taken(torch.tensor(ids, dtype=torch.int32), answers).tolist() == expected


def test_lengths_of_another_type_are_refused():
    """The kernels write 32 bits."""
    wide = MetadataField(name="kv_lens", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0, dtype="int64")
    held = BufferedFields(kv_lens=FieldBuffer("own.kv_lens", wide, torch.zeros(3, dtype=torch.int64)))
    with pytest.raises(RunError, match=r"own\.kv_lens is declared int64"):
        TokenFields.of(held, 16, 64)


@settings(max_examples=max(settings.default.max_examples // 4, 3))
@given(
    st.integers(0, 5),
    st.integers(1, 3),
    st.sampled_from([1, 3, 8]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2),
    st.data(),
)
def test_keys_and_values_go_to_their_slots(fused, tokens, heads, dim, transposed, packed, apart, data):
    """Wherever they lie: heads side by side, or one product of keys and values cut in two; the cache, too, and its
    pages may lie apart.
    """
    slots = data.draw(st.lists(st.integers(0, 11), min_size=tokens, max_size=tokens, unique=True))
    both = torch.randn(tokens, 2 * heads * dim)
    keys, values = (part.unflatten(-1, (heads, dim)) for part in both.chunk(2, dim=-1))
    if transposed:
        keys = keys.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    found = []
    for updates in (fused, TORCH):
        held = torch.zeros(3, 4 + apart, heads, dim), torch.ones(3, 4 + apart, heads, dim)
        if packed:
            held = torch.cat(held, dim=-1).split(dim, dim=-1)
        keys_there, values_there = (each[:, :4] for each in held)
        cache = LayerCache(keys=keys_there, values=values_there)
        updates.store(cache, torch.tensor(slots, dtype=torch.int64), keys, values)
        found.append((cache.keys, cache.values))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    for number, slot in enumerate(slots):
        assert torch.equal(found[0][0].flatten(0, 1)[slot], keys[number])
