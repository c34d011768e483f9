"""Drafters that answer: always right, never right, or right by chance, and nothing else changed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import RunError
from capture_planner.records.model import DraftModel, Method, Speculative
from capture_planner_runner.models.drafters import Eagle3, OracleDrafter, choose_drafter, load_drafter

PLACES, LENGTH, VOCAB, HIDDEN = 3, 12, 50, 24
KINDS = ("copy", "miss", "chance")
PLAN = Speculative(method=Method.EAGLE3, num_tokens=2, model=DraftModel(vocab_size=11))
ROWS = st.lists(st.tuples(st.integers(0, PLACES - 1), st.integers(0, LENGTH - 1)), min_size=1, max_size=9)
TABLES = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=LENGTH, max_size=LENGTH), min_size=PLACES, max_size=PLACES
)


@pytest.fixture(scope="module")
def drafter(target):
    """A random EAGLE-3 head."""
    return load_drafter(None, PLAN, target)


def answering(drafter, kind, tables=(), *, length=LENGTH, **options):
    """Return a drafter that was told these answers."""
    told = OracleDrafter(drafter, kind, num_states=PLACES, length=length, vocab_size=VOCAB, **options)
    for place, tokens in enumerate(tables):
        told.set_answer(place, tuple(tokens))
    return told


def propose(drafter, rows):
    """Return proposals for (place, position) pairs."""
    places, positions = torch.tensor(rows).T
    return drafter.propose(torch.zeros(len(rows), HIDDEN, dtype=torch.float64), places, positions).tolist()


@given(TABLES, ROWS, st.floats(0, 1), st.integers(0, 2**40))
def test_proposals_are_the_answers_or_others(drafter, tables, rows, chance, seed):
    """Copy proposes all, miss none, and chance those or their likes; all are in the vocabulary."""
    answers = [tables[place][position] for place, position in rows]
    assert propose(answering(drafter, "copy", tables), rows) == answers
    missed = propose(answering(drafter, "miss", tables), rows)
    assert not any(map(int.__eq__, missed, answers))
    mixed = propose(answering(drafter, "chance", tables, chance=chance, seed=seed), rows)
    assert all(token in pair for token, *pair in zip(mixed, answers, missed, strict=True))
    assert all(0 <= token < VOCAB for token in missed)


@given(st.integers(0, 2**31), st.floats(0, 1))
def test_chance_follows_position_and_seed_alone(drafter, seed, chance):
    """The same positions are right in all places and all drafters of a seed; 0 is never, 1 always."""
    told = answering(drafter, "chance", [[place] * LENGTH for place in range(PLACES)], chance=chance, seed=seed)
    again = answering(drafter, "chance", [[9] * LENGTH] * PLACES, chance=chance, seed=seed)
    hits = [
        [token == place for token in propose(told, [(place, position) for position in range(LENGTH)])]
        for place in range(PLACES)
    ]
    hits.append([token == 9 for token in propose(again, [(0, position) for position in range(LENGTH)])])
    assert all(row == hits[0] for row in hits)
    if chance in (0, 1):
        assert all(hit == (chance == 1) for hit in hits[0])


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_chance_is_met_over_many_positions(drafter, chance, seed):
    """Within 5 standard deviations, and within stretches as over all."""
    count = 4096
    told = answering(drafter, "chance", [[5] * count], length=count, chance=chance, seed=seed)
    hits = torch.tensor([token == 5 for token in propose(told, [(0, position) for position in range(count)])])
    for stretch in hits.view(4, -1):
        spread = (chance * (1 - chance) / len(stretch)) ** 0.5
        assert abs(stretch.double().mean().item() - chance) < 5 * spread
    both = (hits[1:] & hits[:-1]).double().mean().item()
    assert abs(both - chance**2) < 0.05


def test_positions_past_the_table_are_its_last(drafter):
    """And those before it its first; padded rows have a place of their own."""
    told = answering(drafter, "copy", [range(LENGTH), range(20, 20 + LENGTH), range(LENGTH)])
    rows = [(0, LENGTH), (1, 10**6), (1, -3), (PLACES, 5)]
    assert propose(told, rows) == [LENGTH - 1, 20 + LENGTH - 1, 20, 0]


@given(st.lists(st.integers(0, VOCAB - 1), max_size=LENGTH), st.integers(0, PLACES - 1))
def test_a_place_forgets_what_was_there(drafter, tokens, place):
    """The next request at a place has its own answers, in the same storage; the others keep theirs."""
    told = answering(drafter, "copy", [[7] * LENGTH] * PLACES)
    storage = told.table.data_ptr()
    told.set_answer(place, tuple(tokens))
    assert told.table.data_ptr() == storage
    rest = [0] * (LENGTH - len(tokens))
    for other in range(PLACES):
        expected = tokens + rest if other == place else [7] * LENGTH
        assert propose(told, [(other, position) for position in range(LENGTH)]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_all_the_work_of_the_real_drafter_is_done(kind, drafter, attention, no_host_reads):
    """Its hidden states, its logits, its weights, its shape; and nothing is read on the host."""
    told = answering(drafter, kind, [range(LENGTH)])
    aux = torch.randn(4, 3 * HIDDEN, dtype=torch.float64)
    tokens, attend, seen = torch.arange(4), attention(), []
    hook = drafter.lm_head.register_forward_hook(lambda *call: seen.append(call[-1].shape))
    with no_host_reads():
        hidden = told.combine(aux)
        out = told.forward(input_ids=tokens, positions=tokens, hidden=hidden, attend=attend)
        told.propose(out, tokens.clamp(max=PLACES), tokens)
    hook.remove()
    assert seen == [(4, 11)]
    assert torch.equal(hidden, drafter.combine(aux))
    again = drafter.forward(input_ids=tokens, positions=tokens, hidden=hidden, attend=attend)
    assert torch.equal(out, again)
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "aux_layers"):
        assert getattr(told, name) == getattr(drafter, name)
    *own, (name, module, attribute) = told.weights()
    assert own == list(drafter.weights())
    assert (name, getattr(module, attribute)) == ("table", told.table)
    assert told.name.startswith(f"{kind} over Eagle3 of the plan's numbers")


def test_answers_that_do_not_fit_are_refused(drafter):
    """A place that is not there, that of padded rows, more tokens than places for them, no chance."""
    told = answering(drafter, "copy")
    for place, tokens in ((-1, ()), (PLACES, (1,)), (0, (1,) * (LENGTH + 1))):
        with pytest.raises(RunError, match="the table has states 0 to 2, of 12 tokens"):
            told.set_answer(place, tokens)
    with pytest.raises(RunError, match="expected at least 2 tokens"):
        OracleDrafter(drafter, "miss", num_states=1, length=1, vocab_size=1)
    with pytest.raises(RunError, match="a chance from 0 to 1"):
        answering(drafter, "chance", chance=1.5)


def test_a_drafter_is_chosen_by_name_or_folder(target, tmp_path):
    """The kinds that answer wrap a random head; a folder is loaded."""
    options = {"num_states": PLACES, "length": LENGTH}
    for kind in KINDS:
        chosen = choose_drafter(kind, PLAN, target, **options, chance=0.25, seed=3)
        assert isinstance(chosen, OracleDrafter)
        assert chosen.table.shape == (PLACES + 1, LENGTH)
        assert chosen.name.startswith(kind)
        assert "random weights (seed 3)" in chosen.name
    assert "0.25" in chosen.name
    random = choose_drafter("random", PLAN, target, **options, seed=3)
    assert isinstance(random, Eagle3)
    with pytest.raises(RunError, match=str(tmp_path)):
        choose_drafter(tmp_path, PLAN, target, **options)
