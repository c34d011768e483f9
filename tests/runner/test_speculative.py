"""Greedy verification against a reference that goes row by row and token by token."""

import copy
import random

import attrs
import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from capture_planner_runner.serving.inputs import sampled_rows
from capture_planner_runner.serving.speculative import advance, settle, store_tokens
from capture_planner_runner.serving.states import AdmittedRequest, PageFormat, RequestStates, ScheduledBatch
from capture_planner_runner.serving.workload import Request

VOCABULARY = 3
"""Few tokens, so that drafts are often right."""
PLACES = 7


def scheduled_of(rows, states, most_drafts, prompts=0):
    """A batch of ``(place, tokens, drafts)`` of these states, of which so many are prompts."""
    request = Request(name="r", arrival=0.0, prompt=(1,), max_new_tokens=1)
    places, counts, drafts = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return ScheduledBatch(
        live=tuple(AdmittedRequest(request, place, [], 0.0) for place, _, _ in rows),
        state_indices=places,
        base=states.computed[places],
        counts=counts,
        drafts=drafts,
        prompts=prompts,
        draft_tokens=most_drafts,
    )


@st.composite
def situations(draw):
    """RequestStates with any tokens, and a batch of decodes and of prompts that end in it or do not."""
    chosen = random.Random(draw(st.integers(0, 1 << 32)))
    longest, k = draw(st.sampled_from((2, 5, 12))), draw(st.integers(0, 4))
    places = RequestStates(PLACES, longest, k, PageFormat(page_size=4, num_pages=9))
    places.tokens[:] = [[chosen.randrange(VOCABULARY) for _ in row] for row in places.tokens]
    rows, prompts = [], 0
    for place in chosen.sample(range(PLACES), draw(st.integers(1, PLACES))):
        length = chosen.randint(1, longest - 1)
        places.length[place] = length
        if chosen.random() < 0.6:
            places.computed[place], drafts = length - 1, chosen.randint(0, min(k, longest - length))
            rows.append((place, 1 + drafts, drafts))
        else:
            prompts += 1
            places.computed[place] = chosen.randrange(length)
            rows.append((place, chosen.randint(1, length - int(places.computed[place])), 0))
    return scheduled_of(rows, places, k, prompts), places, chosen


def starts_of(scheduled):
    """Where each row begins, and the end."""
    return np.concatenate(([0], np.cumsum(scheduled.counts))).astype(np.int32)


def copied(places):
    """All that is known of the places, as plain lists."""
    return places.tokens.tolist(), places.length.tolist(), places.computed.tolist()


@given(situations())
def test_read_are_the_last_settled_token_and_the_drafts_of_each_row_at_its_end(situation):
    """A row that ends inside its prompt is not read."""
    scheduled, places, _ = situation
    starts, wanted = starts_of(scheduled), []
    for index, (place, count, drafts) in enumerate(
        zip(scheduled.state_indices, scheduled.counts, scheduled.drafts, strict=True)
    ):
        if places.computed[place] + count - drafts == places.length[place]:
            positions = range(places.computed[place], places.computed[place] + count)
            read = [at - positions[0] for at in positions if at >= places.length[place] - 1]
            wanted += [starts[index] + offset for offset in read]
    rows = sampled_rows(scheduled, starts, places)
    assert rows.tolist() == wanted
    assert rows.dtype == np.int64


@given(situations(), st.booleans())
def test_settling_is_what_each_row_alone_would_be(situation, synthetic):
    """Drafts are kept while the target says them, or as many as are given; then its own token stands."""
    scheduled, places, chosen = situation
    given_counts = np.array([chosen.randint(0, 5) for _ in scheduled.drafts], dtype=np.int32) if synthetic else None
    sampled = np.array(
        [chosen.randrange(VOCABULARY) for _ in sampled_rows(scheduled, starts_of(scheduled), places)], dtype=np.int64
    )
    tokens, length, computed = copied(places)
    said, kept, accepted, gained = iter(sampled.tolist()), [], [], []
    for row, (place, count, drafts) in enumerate(
        zip(scheduled.state_indices.tolist(), scheduled.counts.tolist(), scheduled.drafts.tolist(), strict=True)
    ):
        if computed[place] + count - drafts < length[place]:
            computed[place] += count
            kept.append(count)
            accepted.append(0)
            gained.append(0)
            continue
        says, hits = [next(said) for _ in range(1 + drafts)], 0
        while hits < drafts and (
            tokens[place][length[place] + hits] == says[hits] if given_counts is None else hits < given_counts[row]
        ):
            hits += 1
        tokens[place][length[place] + hits] = says[hits]
        computed[place] += count - drafts + hits
        length[place] += hits + 1
        kept.append(count - drafts + hits)
        accepted.append(hits)
        gained.append(hits + 1)
    settled = settle(scheduled, places, sampled, given_counts)
    assert next(said, None) is None
    assert settled.kept.tolist() == kept
    assert settled.accepted.tolist() == accepted
    assert settled.gained.tolist() == gained
    assert copied(places) == (tokens, length, computed)
    event(f"some drafts were kept, and some were not: {0 < sum(accepted) < scheduled.drafts.sum()}")


@given(situations())
def test_advancing_and_then_storing_tokens_is_settling(situation):
    """Lengths before the tokens are known, and then the tokens: what settling all at once does."""
    scheduled, places, chosen = situation
    scheduled = attrs.evolve(
        scheduled, counts=scheduled.counts - scheduled.drafts, drafts=np.zeros_like(scheduled.drafts)
    )
    other, starts = copy.deepcopy(places), starts_of(scheduled)
    said = np.array([chosen.randrange(VOCABULARY) for _ in range(scheduled.num_tokens)])
    expected = settle(scheduled, other, said[sampled_rows(scheduled, starts, other)])
    advanced = advance(scheduled, places, starts)
    assert places.length.tolist() == other.length.tolist()
    for row, (place, at, gained) in enumerate(zip(scheduled.state_indices, advanced.at, advanced.gained, strict=True)):
        if gained:
            # What stands there meanwhile names the row that will say it.
            assert said[-1 - places.tokens[place, at]] == other.tokens[place, at]
            assert -1 - places.tokens[place, at] == starts[row + 1] - 1
    store_tokens(scheduled, advanced, places, starts, said)
    assert copied(places) == copied(other)
    for name in ("kept", "accepted", "gained", "at"):
        assert getattr(advanced, name).tolist() == getattr(expected, name).tolist()


def greedy(prompt, length, seed):
    """What a model says, one token at a time: of a sequence alone, and of all of it."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(say(tokens, seed))
    return tokens


def say(tokens, seed):
    """The next token."""
    return hash((seed, *tokens)) % VOCABULARY


@given(
    st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(0, 1 << 32),
    st.sampled_from((0.0, 0.5, 1.0)),
)
def test_whatever_is_drafted_the_output_is_the_targets_own(prompts, seed, chance):
    """It is a prefix of greedy decoding after each step, longer by the drafts accepted and one.

    Cache rows past ``computed`` are not counted: each step begins where the last settled token is.
    """
    chosen, longest = random.Random(seed), 24
    places = RequestStates(len(prompts), longest, 4, PageFormat(page_size=4, num_pages=9))
    for place, prompt in enumerate(prompts):
        places.tokens[place, : len(prompt)] = prompt
        places.length[place], places.computed[place] = len(prompt), len(prompt) - 1
    outputs = [greedy(prompt, longest + 5, seed) for prompt in prompts]
    while (places.length < longest).all():
        rows = []
        for place, output in enumerate(outputs):
            at = int(places.length[place])
            drafts = chosen.randint(0, min(4, longest - at))
            for index in range(at, at + drafts):
                right = chosen.random() < chance
                places.tokens[place, index] = output[index] if right else chosen.randrange(VOCABULARY)
            rows.append((place, 1 + drafts, drafts))
        scheduled = scheduled_of(rows, places, 4)
        sampled = []
        for place, _, drafts in rows:
            at = int(places.length[place])
            sequence = places.tokens[place].tolist()
            sampled += [say(sequence[: at + index], seed) for index in range(drafts + 1)]
        before = places.length.copy()
        settled = settle(scheduled, places, np.array(sampled, dtype=np.int64))
        assert (settled.gained == settled.accepted + 1).all()
        assert places.length.tolist() == (before + settled.gained).tolist()
        assert places.computed.tolist() == (places.length - 1).tolist()
        for place, output in enumerate(outputs):
            length = int(places.length[place])
            assert places.tokens[place, :length].tolist() == output[:length]
            if chance == 1.0:
                assert settled.accepted[place] == scheduled.drafts[place]
