"""Arguments, a case and faulty backends for tests of the command ``conformance``."""

from __future__ import annotations

from typing import Any

import attrs

from capture_planner.modes import Refresh
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner.records.backend import Axis, Fill, MetadataField, PaddingContract
from capture_planner_reference import Reference

FEW = ("--examples", "2", "--steps", "4", "--no-audits")
ONE = ("--dtype", "float32", "--heads", "2:1", "--head-dim", "4", "--page-size", "4", "--max-model-len", "16")
PLAIN = ("--examples", "20", "--steps", "4", *ONE, "--no-window", "--drafts", "0")
CASE = (
    '{"scene":{"shape":{"dtype":"float32","heads":2,"kv_heads":1,"head_dim":4,"page_size":4,"longest":16},'
    '"num_reqs":2,"num_tokens":4,"size_tokens":[4],"size_reqs":[2]},'
    '"steps":[{"do":"arrive","prompt":3,"computed":3},{"do":"forward","rows":[[0,1,0]]}]}'
)
TWO_THEN_ONE = (
    "--case",
    CASE.replace('"steps":[', '"steps":[{"do":"arrive","prompt":3,"computed":3},').replace(
        "[[0,1,0]]", '[[0,1,0],[1,1,0]]},{"do":"forward","rows":[[0,1,0]]'
    ),
    "--attack",
)
"""A large batch, and a small one after it."""


class BakedLength(Reference):
    """Reads the longest length while it is captured: a graph keeps it."""

    name = "baked"

    def reserve(self, reservation: Any) -> Any:
        from capture_planner_reference.executor import ReferenceExecutor

        class Executor(ReferenceExecutor):
            def attend(self, layer: int, query: Any, out: Any, scoring: Any, metadata: Any) -> None:
                longest = int(metadata.host["seq_lens"].max())
                lengths = metadata.fields["seq_lens"].clamp(max=longest)
                fields = {**metadata.fields, "seq_lens": lengths}
                super().attend(layer, query, out, scoring, attrs.evolve(metadata, fields=fields))

        return Executor(reservation)


class Unread(Reference):
    """Declares a field that it never reads."""

    name = "greedy"

    def padding(self, *arguments: object) -> PaddingContract:
        field = MetadataField(name="wanted", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0)
        return PaddingContract(fields=(field,))


class Unstable(Reference):
    """Declares another refresh at every second call."""

    name = "moody"
    calls = 0

    def refresh(self, *arguments: object) -> Any:
        Unstable.calls += 1
        return Refresh.IN_GRAPH if Unstable.calls % 2 else Refresh.HOST


class FaultyBackends:
    """A plugin with these backends."""

    @hookimpl
    def capture_planner_backends(self) -> tuple[Any, ...]:
        return (BakedLength(), Unread(), Unstable())
