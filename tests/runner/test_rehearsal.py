"""The rehearsal of drafters that know the answers: it is over before the run takes its memory."""

import gc
import weakref

import pytest

from capture_planner.planning.planner import plan
from capture_planner_runner.launch.launch import launch
from capture_planner_runner.launch.request import RunRequest
from support.launches import HERE, SPEC, CountingReference, ProgressRecord, registry_of, requests_of, started

pytestmark = pytest.mark.usefixtures("one_thread")


class CacheCounting(CountingReference):
    """It counts the bytes of the KV cache that are there at once."""

    def __init__(self):
        super().__init__()
        self.there, self.most = {}, 0

    def reserve(self, reservation):
        """Take note of the caches, which roles of the drafter share."""
        gc.collect()
        for cache in reservation.caches.values():
            if id(cache.keys) not in self.there:
                self.there[id(cache.keys)] = cache.keys.nbytes + cache.values.nbytes
                weakref.finalize(cache.keys, self.there.pop, id(cache.keys))
        self.most = max(self.most, sum(self.there.values()))
        return super().reserve(reservation)


@pytest.mark.parametrize("drafter", ["random", "copy", "miss", "chance"])
def test_there_is_one_cache_at_a_time(drafter):
    """The rehearsal has one of its own, of as many pages: a device has memory for one of them."""
    backend = CacheCounting()
    report = started(backend=backend, drafter=drafter).report
    assert report.served
    assert backend.most == report.kv_cache


def test_interrupted_rehearsal_captures_nothing():
    """There is no second runner for the report, which has every request."""
    backend, shown = CountingReference(), ProgressRecord(stop="plain greedy", after=2)
    report = started(backend=backend, shown=shown, drafter="chance").report
    assert (report.interrupted, report.captured, report.steps, report.kv_cache > 0) == (True, (), (), True)
    assert [done.name for done in report.served] == [request.name for request in requests_of(20)]
    assert not any(done.tokens for done in report.served)
    assert backend.held == 0
    assert backend.reserved == backend.trials + 1  # Of the target alone, in the rehearsal.


def test_report_of_what_has_run_is_there_from_the_rehearsal_on():
    """Another rank may fail at any time: there is a report during the rehearsal, and one during the run."""
    offers, seen = [], []

    class OfferRecord(ProgressRecord):
        def __call__(self, task, total):
            seen.append((task, offers[-1]("rank 1 ended")))
            return super().__call__(task, total)

    registry = registry_of(CountingReference())
    launch(
        plan(SPEC, HERE, registry),
        registry,
        requests_of,
        RunRequest(page_size=4, drafter="copy", verify=True, warm_up=True),
        OfferRecord(),
        offer=offers.append,
    )
    assert [task for task, _ in seen] == ["plain greedy", "capture", "serve", "verify"]
    assert [report.stage for _, report in seen] == ["rehearsal", "capture", "serving", "verification"]
    assert all(report.interrupted and report.fault == "rank 1 ended" for _, report in seen)
    assert all(report.cache_memory is not None for _, report in seen)
    assert [bool(report.captured) for _, report in seen] == [False, False, True, True]
    assert [report.warm_up is not None for _, report in seen] == [False, False, True, True]
    assert seen[1][1].kv_cache > seen[0][1].kv_cache  # The drafter's, too.
