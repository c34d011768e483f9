"""The values of a step against a reference that goes through the batch token by token."""

import random

import attrs
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.records.backend import COMMON_FIELDS
from capture_planner_runner.execution.fields import FieldBuffer
from capture_planner_runner.execution.inputs import DERIVED
from capture_planner_runner.execution.updates import TokenFields, Updates
from capture_planner_runner.serving.inputs import draft_decode_inputs, draft_prefill_inputs, target_inputs, token_rows
from capture_planner_runner.serving.states import AdmittedRequest, PageFormat, RequestStates, ScheduledBatch
from capture_planner_runner.serving.workload import Request

DTYPES = {
    "input_ids": "int32",
    "positions": "int64",
    "slot_mapping": "int64",
    "query_start_loc": "int32",
    "seq_lens": "int32",
    "block_table": "int32",
    "last_token_indices": "int32",
    "idx_mapping": "int32",
    "cu_num_draft_tokens": "int32",
    "state_indices": "int32",
    "sampled_rows": "int64",
    "sampled_counts": "int32",
}
"""What the runner's fields are declared as."""
OF_THE_TARGET = {"cu_num_draft_tokens", "state_indices", "sampled_rows", "sampled_counts"}


@attrs.frozen(kw_only=True)
class Situation:
    """A batch, what is known of all places, and the numbers that they were made with."""

    scheduled: ScheduledBatch
    places: RequestStates
    pages: PageFormat
    max_model_len: int

    def rows(self):
        """Yield place, first position, tokens and drafts of each row."""
        s = self.scheduled
        for place, count, drafts in zip(s.state_indices, s.counts, s.drafts, strict=True):
            yield int(place), int(self.places.computed[place]), int(count), int(drafts)

    def tokens(self):
        """Yield place and position of each token of the batch."""
        for place, first, count, _ in self.rows():
            yield from ((place, first + index) for index in range(count))

    def slot(self, place, position):
        """Where a position's keys and values are."""
        page = int(self.places.table[place][position // self.pages.page_size])
        return page * self.pages.page_size + position % self.pages.page_size


@st.composite
def situations(draw, decodes=False):
    """Any batch that a scheduler could make, up to the model's last position; or decodes alone."""
    chosen = random.Random(draw(st.integers(0, 1 << 32)))
    max_model_len = draw(st.sampled_from((2, 7, 30)))
    pages = PageFormat(page_size=draw(st.integers(1, 8)), num_pages=1000)
    k, count = draw(st.integers(0, 4)), draw(st.integers(1, 6))
    places = RequestStates(8, max_model_len, k, pages)
    free = chosen.sample(range(1, pages.num_pages), 8 * pages.pages(max_model_len))
    places.table[:] = np.array(free).reshape(places.table.shape)
    places.tokens[:] = np.array([chosen.randrange(1000) for _ in places.tokens.flat]).reshape(places.tokens.shape)
    same = draw(st.booleans())
    rows, live = [], []
    for place in chosen.sample(range(8), count):
        length = chosen.randint(1, max_model_len - 1)
        places.length[place], past = length, decodes or chosen.random() < 0.5
        places.prompt[place] = chosen.randint(1, length) if past else length
        places.computed[place] = length - 1 if past else chosen.randrange(length)
        most = min(k, max_model_len - length) if past else length - int(places.computed[place])
        if past:
            drafts = most if same else chosen.randint(0, most)
            rows.append((place, 1 + drafts, drafts))
        else:
            rows.append((place, 1 if same else chosen.randint(1, most), 0))
        request = Request(name=f"r{place}", arrival=0.0, prompt=(1,) * length, max_new_tokens=1)
        live.append(AdmittedRequest(request, place, [], 0.0))
    scheduled = ScheduledBatch(
        live=tuple(live),
        state_indices=np.array([row[0] for row in rows], dtype=np.int64),
        base=np.array([places.computed[row[0]] for row in rows], dtype=np.int64),
        counts=np.array([row[1] for row in rows], dtype=np.int64),
        drafts=np.array([row[2] for row in rows], dtype=np.int64),
        prompts=sum(int(places.computed[row[0]] < places.prompt[row[0]]) for row in rows),
        draft_tokens=k,
    )
    return Situation(scheduled=scheduled, places=places, pages=pages, max_model_len=max_model_len)


def used_pages(situation, place, length):
    """The pages that the first tokens of a place lie in."""
    return situation.places.table[place][: -(-length // situation.pages.page_size)].tolist()


@given(situations() | situations(decodes=True))
def test_the_targets_values_are_those_of_each_token(batch):
    """Ids, positions, slots and offsets, token by token and row by row."""
    made = target_inputs(batch.scheduled, batch.places, batch.pages).declared
    rows = list(batch.rows())
    tokens = list(batch.tokens())
    assert made["input_ids"].tolist() == [int(batch.places.tokens[token]) for token in tokens]
    assert made["positions"].tolist() == [position for _, position in tokens]
    assert made["slot_mapping"].tolist() == [batch.slot(*token) for token in tokens]
    assert made["idx_mapping"].tolist() == [place for place, *_ in rows]
    assert made["seq_lens"].tolist() == [first + count for _, first, count, _ in rows]
    starts, drafts, seen, verified = [0], [], 0, 0
    for _, _, count, proposed in rows:
        seen, verified = seen + count, verified + proposed
        starts.append(seen)
        drafts.append(verified)
    assert made["query_start_loc"].tolist() == starts
    assert made["last_token_indices"].tolist() == [start - 1 for start in starts[1:]]
    assert made["cu_num_draft_tokens"].tolist() == drafts
    for row, (place, first, count, _) in zip(made["block_table"].tolist(), rows, strict=True):
        used = used_pages(batch, place, first + count)
        assert row[: len(used)] == used
        assert set(row) <= set(batch.places.table[place].tolist())
    assert {name: str(array.dtype) for name, array in made.items()} == DTYPES


@given(situations() | situations(decodes=True))
def test_token_rows_say_whose_each_token_is(batch):
    """Uniform batches take a shorter way, to the same answer."""
    starts, places, positions = token_rows(batch.scheduled)
    assert list(zip(places.tolist(), positions.tolist(), strict=True)) == list(batch.tokens())
    assert np.diff(starts).tolist() == batch.scheduled.counts.tolist()
    assert starts.dtype == np.int32


@given(situations() | situations(decodes=True), st.integers(0, 1 << 32))
def test_the_draft_prefill_reads_the_next_token_and_the_last_settled_row(batch, seed):
    """The target's batch with each token shifted by one, read where verification stopped."""
    target = target_inputs(batch.scheduled, batch.places, batch.pages)
    chosen = random.Random(seed)
    kept = [count - chosen.randint(0, drafts) for _, _, count, drafts in batch.rows()]
    made = draft_prefill_inputs(target, batch.scheduled, np.array(kept), batch.places).declared
    shifted = [int(batch.places.tokens[place, position + 1]) for place, position in batch.tokens()]
    assert made["input_ids"].tolist() == shifted
    starts = target.query_start_loc.tolist()[:-1]
    assert made["last_token_indices"].tolist() == [start + count - 1 for start, count in zip(starts, kept, strict=True)]
    for name in set(made) - {"input_ids", "last_token_indices"}:
        assert made[name] is getattr(target, name)
    assert {name: str(array.dtype) for name, array in made.items()} == DTYPES


def draft_decode(batch):
    """A draft decode after verification: what is computed may have reached the model's end."""
    for place, first, count, _ in batch.rows():
        batch.places.computed[place] = min(first + count, batch.max_model_len)
    computed = batch.places.computed[batch.scheduled.state_indices]
    return draft_decode_inputs(batch.scheduled, computed, batch.places, batch.pages)


def wanted_draft_decode(batch, moved):
    """Position, length and slot of each row after so many moves: past the end, the last and no slot."""
    last = batch.max_model_len - 1
    for place in batch.scheduled.state_indices.tolist():
        position = int(batch.places.computed[place]) + moved
        if position > last:
            yield last, last + 1, 0
        else:
            yield position, position + 1, batch.slot(place, position)


@given(situations())
def test_the_draft_decodes_values_are_held_at_the_models_end(batch):
    """One token a row, after what is computed; past the end it writes the null slot."""
    made = draft_decode(batch).declared
    wanted = list(wanted_draft_decode(batch, 0))
    rows = range(len(wanted))
    assert made["positions"].tolist() == [position for position, _, _ in wanted]
    assert made["seq_lens"].tolist() == [length for _, length, _ in wanted]
    assert made["slot_mapping"].tolist() == [slot for _, _, slot in wanted]
    assert made["query_start_loc"].tolist() == [*rows, len(wanted)]
    assert made["last_token_indices"].tolist() == list(rows)
    assert made["idx_mapping"].tolist() == batch.scheduled.state_indices.tolist()
    assert len(made["input_ids"]) == len(wanted)
    assert {name: str(array.dtype) for name, array in made.items()} == {
        name: dtype for name, dtype in DTYPES.items() if name not in OF_THE_TARGET
    }


def device_fields(made, padding):
    """The device's fields of a draft decode, with padded rows after the real ones."""
    found = {}
    for field in COMMON_FIELDS:
        if field.name in made:
            real = torch.from_numpy(made[field.name].copy())
            fill = torch.full((padding, *real.shape[1:]), field.value or 0, dtype=real.dtype)
            found[field.name] = FieldBuffer(field.name, field, torch.cat([real, fill]))
    return found


class BufferedFields(dict):
    """Fields by name, that go through their buffers as the runner's do."""

    def __getitem__(self, name):
        return super().__getitem__(name).tensor

    def __iter__(self):
        return iter(self.values())


@given(situations(), st.integers(0, 3))
def test_host_and_graph_move_a_draft_decode_on_alike(batch, padding):
    """Both are the reference at every step of a chain of k - 1, and padded rows stay padding."""
    inputs = draft_decode(batch)
    held = BufferedFields(device_fields(inputs.declared, padding))
    rows, dtypes = inputs.num_reqs, {name: str(array.dtype) for name, array in inputs.declared.items()}
    token_fields = TokenFields.of(held, batch.pages.page_size, batch.max_model_len)
    updates = Updates()
    for moved in range(1, batch.scheduled.draft_tokens):
        before, inputs = inputs, inputs.next_draft(batch.max_model_len)
        assert inputs is not before
        made = inputs.declared
        updates.advance(token_fields, rows + padding)
        positions, lengths, slots = zip(*wanted_draft_decode(batch, moved), strict=True)
        assert tuple(made["positions"].tolist()) == positions
        assert tuple(made["seq_lens"].tolist()) == lengths
        assert tuple(made["slot_mapping"].tolist()) == slots
        assert {name: str(made[name].dtype) for name in made} == dtypes
        assert tuple(held["positions"].tolist()) == positions + (0,) * padding
        assert tuple(held["seq_lens"].tolist()) == lengths + (0,) * padding
        assert tuple(held["slot_mapping"].tolist()) == slots + (0,) * padding


@given(situations() | situations(decodes=True))
def test_derived_fields_follow_from_the_common_ones(batch):
    """FlashInfer's page lists, its names for offsets and lengths, and text's three rope sections."""
    inputs = target_inputs(batch.scheduled, batch.places, batch.pages)
    common = dict(inputs.declared)
    lengths = [first + count for _, first, count, _ in batch.rows()]
    lists = [used_pages(batch, place, length) for (place, *_), length in zip(batch.rows(), lengths, strict=True)]
    page_size = batch.pages.page_size
    wanted = {
        "qo_indptr": common["query_start_loc"].tolist(),
        "kv_lens": lengths,
        "paged_kv_indptr": [sum(map(len, lists[:index])) for index in range(len(lists) + 1)],
        "paged_kv_indices": [page for used in lists for page in used],
        "paged_kv_last_page_len": [
            length - page_size * (len(used) - 1) for length, used in zip(lengths, lists, strict=True)
        ],
        "mrope_positions": [position for position in common["positions"].tolist() for _ in range(3)],
    }
    assert set(wanted) == set(DERIVED)
    for name, values in wanted.items():
        assert inputs.array(name).tolist() == values
        assert str(inputs.array(name).dtype) == ("int64" if name == "mrope_positions" else "int32"), name
    assert all(inputs.declared[name] is common[name] for name in common)


@given(situations() | situations(decodes=True), st.sets(st.sampled_from(sorted(DERIVED))))
def test_derived_fields_are_made_when_they_are_read(batch, names):
    """Each once; a field of a backend's own is not known."""
    inputs = target_inputs(batch.scheduled, batch.places, batch.pages)
    before = set(inputs.declared)
    arrays = {name: inputs.declared[name] for name in names}
    assert set(inputs.declared) - before == names
    assert all(inputs.declared[name] is array for name, array in arrays.items())
    assert inputs.array("tiles_of_a_backend") is None


@given(situations(decodes=True))
def test_next_decode_is_the_step_that_follows_without_ids_and_slots(batch):
    """Positions and lengths grow by one; the step before is left as it was."""
    inputs = target_inputs(batch.scheduled, batch.places, batch.pages)
    positions = inputs.positions.copy()
    after = inputs.next_decode()
    assert inputs.positions.tolist() == positions.tolist()
    assert after.positions.tolist() == (positions + 1).tolist()
    assert after.array("kv_lens").tolist() == (inputs.seq_lens + 1).tolist()
    assert after.array("input_ids") is after.array("slot_mapping") is None
    assert after.block_table is inputs.block_table
    assert {name: getattr(after, name).dtype for name in ("positions", "seq_lens")} == {
        "positions": inputs.positions.dtype,
        "seq_lens": inputs.seq_lens.dtype,
    }
