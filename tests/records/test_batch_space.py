"""Admissible batches, against plain counting."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import (
    Domain,
    batches,
    decode_families,
    is_admissible,
    lora_cases,
    mixed_tokens,
    request_step,
    served_cases,
    token_step,
)
from capture_planner.records.spec import Limits, Lora, Parallel
from capture_planner.testing import specs
from support.reference import extra_rows, is_chain

DOMAINS = st.sets(st.integers(1, 30), min_size=1).map(
    lambda counts: (sorted(counts), Domain(tuple((n, n) for n in sorted(counts)), 1))
)


@given(DOMAINS, st.integers(0, 35))
def test_domain_neighbours(drawn, count):
    """Membership, the next count above, the last one up to, and clipping."""
    counts, domain = drawn
    assert (count in domain) == (count in counts)
    assert domain.after(count) == min((n for n in counts if n > count), default=None)
    assert domain.upto_count(count) == max((n for n in counts if n <= count), default=None)
    assert [a for a, _ in domain.clipped(count).intervals] == [n for n in counts if n <= count]
    assert domain.tight(count) == domain.upto_count(count)
    assert domain.ceiling == counts[-1]


@given(st.integers(1, 99), st.integers(1, 9), st.integers(0, 120))
def test_domain_sizes_are_multiples_of_the_step(last, step, limit):
    """Rounded up, never down; tight is the largest useful multiple within a limit."""
    domain = Domain.upto(last, step)
    useful = {-(-n // step) * step for n in range(1, last + 1)}
    assert domain.ceiling == max(useful)
    assert domain.tight(limit) == max((n for n in useful if n <= limit), default=None)


@given(DOMAINS, st.lists(st.integers(1, 35)))
def test_domain_needed_sizes_each_serve_a_count(drawn, sizes):
    """A size stays exactly where some count has it as the nearest."""
    counts, domain = drawn
    nearest = {min((s for s in sizes if s >= n), default=None) for n in counts} - {None}
    assert domain.needed(sizes) == tuple(sorted(nearest))


def test_domain_without_counts_is_false():
    """And a domain up to zero is empty."""
    assert not Domain.upto(0)
    assert Domain.upto(1)


@given(specs(max_reqs=64))
def test_decode_families_follow_the_schedule(spec):
    """Each request count has one family: 1 + k tokens, and those of the first draft pass, as far as both passes fit."""
    slots = extra_rows(spec.speculative)
    chain = is_chain(spec.speculative)
    for role in Role:
        families = decode_families(role, spec)
        for n in range(1, spec.limits.max_num_reqs + 1):
            k = spec.speculative.draft_tokens(n) if spec.speculative else 0
            query_len = {Role.TARGET: 1 + k, Role.DRAFT_PREFILL: 1 + k + slots, Role.DRAFT_DECODE: 1}[role]
            width = 1 if role is Role.DRAFT_DECODE else 1 + k + slots
            runs = n * width <= spec.limits.max_num_tokens and (role is not Role.DRAFT_DECODE or (chain and k >= 2))
            found = [(f.query_len, f.draft_steps) for f in families if n in f.requests]
            steps = k - 1 if role is Role.DRAFT_DECODE else None
            assert found == ([(query_len, steps)] if runs else [])
            if runs:
                batch = Batch(role=role, num_reqs=n, num_tokens=n * query_len, query_len=query_len)
                assert is_admissible(batch, spec, families)


@given(st.integers(1, 32), st.integers(1, 16), st.booleans())
def test_request_step_aligns_tokens(query_len, tensor, sequence):
    """The least number of requests whose tokens are a multiple of the ranks."""
    parallel = Parallel(tensor=tensor, sequence=sequence)
    step, ranks = request_step(query_len, parallel), tensor if sequence else 1
    assert token_step(parallel) == ranks
    assert step == min(n for n in range(1, 17) if n * query_len % ranks == 0)


@given(st.builds(Lora, max_active=st.integers(1, 20), specialize=st.booleans()), st.integers(1, 30))
def test_served_lora_cases_are_those_a_batch_can_need(lora, num_reqs):
    """Each count of adapters up to the requests is rounded up to one of them, and each is used."""
    cases = lora.cases()
    used = {min(c for c in cases if c >= n) for n in range(min(num_reqs, cases[-1]) + 1)}
    assert set(served_cases(cases, num_reqs)) == used


@given(specs())
def test_drafters_take_no_adapters_and_draft_decodes_are_never_mixed(spec):
    """As in vLLM 0.33."""
    assert lora_cases(Role.DRAFT_PREFILL, spec) == lora_cases(Role.DRAFT_DECODE, spec) == (0,)
    assert not mixed_tokens(Role.DRAFT_DECODE, spec)
    slots, most = extra_rows(spec.speculative), spec.limits.max_num_tokens
    assert mixed_tokens(Role.TARGET, spec).intervals == ((1, most - slots),)
    assert mixed_tokens(Role.DRAFT_PREFILL, spec).intervals == ((1, most),)
    assert lora_cases(Role.TARGET, spec) == (spec.lora.cases() if spec.lora else (0,))


@given(specs(), st.integers(-2, 600), st.integers(-2, 5000), st.integers(-1, 40))
def test_limits_decide_what_is_admissible(spec, num_reqs, num_tokens, loras):
    """Requests, tokens and adapters within their limits; a token at least, an adapter at most a request."""
    batch = Batch(role=Role.TARGET, num_reqs=num_reqs, num_tokens=num_tokens, active_loras=loras)
    limits, most = spec.limits, min(spec.lora.max_active + 1, num_reqs) if spec.lora else 0
    largest = limits.max_num_tokens - extra_rows(spec.speculative)
    within = 0 < num_reqs <= limits.max_num_reqs and num_reqs <= num_tokens <= largest
    families = decode_families(Role.TARGET, spec)
    assert is_admissible(batch, spec, families) == (within and 0 <= loras <= most)


def test_batches_have_no_more_loras_than_requests():
    """Where more adapters can be active than requests can run, as with max_loras 5 and max_num_seqs 4."""
    limits = Limits(max_num_reqs=4, max_num_tokens=8)
    deployment = SimpleNamespace(limits=limits, speculative=None, lora=Lora(max_active=5), parallel=Parallel())
    families = decode_families(Role.TARGET, deployment)
    listed = [batch for batch, _ in batches(Role.TARGET, deployment)]
    assert all(is_admissible(batch, deployment, families) for batch in listed)
    assert max(batch.active_loras for batch in listed) == 4
