"""Why ranks ran what they ran: a sentence for each rank names the others that are the cause, and no more."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.analysis.data_parallel import explain_share
from capture_planner.cli.ranks import ranks
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.observation import ObservedVector
from support.observing import observation_of

PLAN = codec.load_plan(Path(__file__).parents[2] / "plans" / "locked" / "tiny-mtp-cpu.cpu.yaml")
GRAPHS = (
    None,
    Entry(mode=GraphMode.FULL, num_tokens=32, num_reqs=8, query_len=4),
    Entry(mode=GraphMode.PIECEWISE, num_tokens=64),
)
SHARES = st.tuples(st.integers(0, 8), st.sampled_from([None, 4]), st.sampled_from(GraphMode))


def vector_of(shares, **changes):
    """A vector of requests, query lengths and the graphs that ranks would run by themselves."""
    reqs, lengths, modes = zip(*shares, strict=True)
    tokens = tuple(count * 4 + (length is None and count > 0) for count, length in zip(reqs, lengths, strict=True))
    past = (True,) * len(reqs)
    outcome = {"steps": 3, "graph": 0} | changes
    return ObservedVector(num_reqs=reqs, num_tokens=tokens, query_len=lengths, past_prompt=past, modes=modes, **outcome)


def named(sentence):
    """The ranks that a sentence names."""
    return {
        int(rank)
        for ranks_named in re.findall(r"ranks? ([\d, ]+)", sentence)
        for rank in re.findall(r"\d+", ranks_named)
    }


@given(st.lists(SHARES, min_size=2, max_size=5), st.sampled_from(GRAPHS))
def test_ranks_that_are_the_cause_are_named(shares, entry):
    """Eager: those without a graph. Else: one with the most tokens, and those without decodes of this rank's length."""
    vector = vector_of(shares)
    lacking = {rank for rank, (_, _, mode) in enumerate(shares) if mode is GraphMode.NONE}
    for rank, (reqs, length, _) in enumerate(shares):
        sentence = explain_share(Role.TARGET, vector, rank, entry)
        assert sentence.startswith("idle; ") == (reqs == 0)
        if entry is None:
            assert named(sentence) == lacking - {rank}
            assert ("this rank has no graph" in sentence) == (rank in lacking)
            continue
        most = max(vector.num_tokens)
        mixed = {
            other
            for other, (others, theirs, _) in enumerate(shares)
            if others and other != rank and theirs != length and length is not None and reqs and entry.query_len is None
        }
        larger = {vector.num_tokens.index(most)} if vector.num_tokens[rank] < most else set()
        assert named(sentence) == mixed | larger
        assert ("its own batch" in sentence) == (not mixed and not larger)


@pytest.fixture
def observed(tmp_path):
    """An observation with a replayed vector and an eager one, and its file."""
    seen = observation_of(PLAN)
    vectors = (
        vector_of([(2, 4, GraphMode.FULL), (7, 4, GraphMode.FULL)], graph=len(seen.roles[0].graphs) - 8, steps=9),
        vector_of([(2, 4, GraphMode.FULL), (1, None, GraphMode.NONE)], graph=None, reason=Reason.RANK),
    )
    target = replace(seen.roles[0], vectors=vectors, other_vectors=5)
    path = tmp_path / "seen.yaml"
    path.write_text(codec.dumps(replace(seen, roles=(target, *seen.roles[1:]), idle_steps=4)))
    return str(path)


def test_observed_vectors_are_shown_by_rank(observed):
    """As tables, and as JSON with the same sentences."""
    ran = CliRunner().invoke(ranks, [observed])
    assert ran.exit_code == 0
    shown = CliRunner().invoke(ranks, [observed, "--format", "json"])
    data = json.loads(shown.stdout)
    says = [[each["message"] for each in vector["ranks"]] for vector in data["vectors"]]
    assert says == [
        ["rank 1 has 28 tokens", "the graph of its own batch"],
        ["all ran eager: rank 1 has no graph for 1 request, 5 tokens, mixed", "all ran eager: this rank has no graph"],
    ]
    assert (data["other_steps"], data["idle_steps"]) == (5, 4)
    for text in (
        "target, 9 steps -> FULL 32 tokens, 8 requests of 4",
        "rank 1 has 28 tokens",
        "and 5 steps of vectors",
    ):
        assert text in ran.stdout
    assert "4 steps without work" in ran.stdout
    drafts = CliRunner().invoke(ranks, [observed, "--role", "draft_decode"])
    assert "no vector of several ranks" in drafts.stdout


def test_vectors_of_a_file_are_refused_with_an_observation(observed):
    """It has its own."""
    assert "omit --vectors, --recorded and --ranks" in CliRunner().invoke(ranks, [observed, "--ranks", "4"]).stderr
