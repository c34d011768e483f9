"""The rehearsal of drafters that know the answers: it is over before the run takes its memory."""

import gc
import weakref

import pytest

from support.launches import CountingReference, started

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
