"""The choice of symmetric memory is collective: every rank exchanges the same topics, whatever its replica finds."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
import torch

from capture_planner_runner.ranks import collectives as symmetric
from support.rank_threads import on_ranks


@pytest.mark.parametrize(
    ("hosts", "expected"), [("aaaa", [None] * 4), ("aaab", [None, None, *["the ranks are on several hosts"] * 2])]
)
def test_replicas_on_one_host_and_on_several_answer_together(monkeypatch, hosts, expected):
    """Three GPUs of one machine and one of another: the first replica could share memory, the second could not."""
    monkeypatch.setattr(torch, "empty", lambda *size, device: SimpleNamespace(device=SimpleNamespace(index=0)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def absence(peers):
        place = attrs.evolve(peers.place, host=hosts[peers.place.rank])
        found = SimpleNamespace(place=place, exchange=peers.exchange)
        return symmetric._absence(found, torch.device("cuda"))

    assert on_ranks(4, absence, tensor=2) == expected
