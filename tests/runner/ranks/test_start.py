"""What differs between ranks is named with the ranks that have it, before anything is loaded."""

from __future__ import annotations

import socket
from contextlib import closing
from threading import Event
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import RankError, RunError
from capture_planner_runner.ranks import watch
from capture_planner_runner.ranks.outcomes import differences, refuse_differences
from capture_planner_runner.ranks.peers import Place
from capture_planner_runner.ranks.processes import RankProcess

FACTS = st.lists(
    st.fixed_dictionaries({}, optional={name: st.sampled_from("12") for name in ("plan", "torch", "seed")}),
    min_size=2,
    max_size=9,
)


@given(FACTS)
def test_each_fact_that_differs_is_named_once(facts):
    """And none that is the same on all ranks; every rank is named for each."""
    found = differences(facts, [f"host{rank // 4}" for rank in range(len(facts))])
    differing = [name for name in ("plan", "torch", "seed") if len({each.get(name) for each in facts}) > 1]
    assert sorted(line.partition(":")[0] for line in found) == sorted(differing)


def test_ranks_are_named_in_runs_with_their_machines():
    """Of ranks that have the same value, the first and the last."""
    facts = [{"torch": "2.11"}] * 4 + [{"torch": "2.13"}] + [{"torch": "2.11"}]
    (line,) = differences(facts, ["a"] * 4 + ["b"] * 2)
    assert line == "torch: 2.11 on ranks 0 to 3, 5 (a, b), 2.13 on rank 4 (b)"


def start(*facts):
    """Return by rank what each raises at the start, or None: ranks with these facts, on one machine."""
    values = [{"": "host", **each} for each in facts]
    raised = []
    for rank, each in enumerate(facts):
        place = Place(rank, tensor_size=len(facts), data_size=1, host="host")
        peers = SimpleNamespace(place=place, exchange=lambda topic, value: values)
        try:
            raised.append(refuse_differences(peers, "what they run", each))
        except RankError as error:
            raised.append((str(error), error.ranks))
    return raised


def test_a_rank_with_another_plan_is_named_on_every_rank():
    """All stop, also those that are alike."""
    (raised,) = set(start({"plan": "b"}, {"plan": "b"}, {"plan": "a"}))
    assert raised == (
        "the ranks do not run the same: plan: b on ranks 0 to 1 (host), a on rank 2 (host); start all of them alike",
        (2,),
    )


def test_ranks_that_are_alike_start():
    """Nothing is raised, on any of them."""
    assert start({"plan": "a"}, {"plan": "a"}) == [None] * 2


def test_a_fact_that_a_rank_lacks_differs():
    """A GPU on one machine alone, for example."""
    assert differences([{"cuda": "13.0"}, {}], ["a", "b"]) == ("cuda: 13.0 on rank 0 (a), nothing on rank 1 (b)",)


@pytest.mark.parametrize("wrong", ["99999999", "65536", "-1", "1.5", "x", "9" * 5000, "\u00b2"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_a_variable_that_no_launcher_sets_is_named(name, wrong):
    """Before torch takes it for a port."""
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with pytest.raises(RunError, match=f"{name} is .*; expected a whole number of at most 65,535"):
        RankProcess.of(launcher | {name: wrong})


@pytest.mark.parametrize(("listens", "raised"), [(False, OSError), (True, RuntimeError)])
def test_an_address_without_a_store_is_an_error_in_time(listens, raised, capfd, monkeypatch):
    """Nothing else is printed. For another kind of server torch waits without end, whatever its limit is."""
    monkeypatch.setattr(watch, "TCPStore", lambda *address, **limits: Event().wait())
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        with pytest.raises(raised):
            watch.open_store("127.0.0.1", server.getsockname()[1], hosts=False, seconds=0.3)
    assert capfd.readouterr().err == ""
