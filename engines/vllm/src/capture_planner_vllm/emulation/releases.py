"""The releases of vLLM that are emulated, and those that a table has.

In ``releases.json`` ``flags`` and ``names`` of older releases are recorded from the wheel by
``tests/engines/oracle/record_vllm.py``; ``lacks`` are the rules of newer releases that a release does not have, each
with a sentence and its place in vLLM. Rules ask with ``has``, and for a number with ``tabled``.
"""

from __future__ import annotations

from capture_planner.engines.releases import Releases

NEWEST = "0.33.0"
RELEASES = Releases("vLLM", __package__, NEWEST)

differences, differences_to, releases = RELEASES.differences, RELEASES.differences_to, RELEASES.emulated
followed, following, minor, base = RELEASES.followed, RELEASES.following, RELEASES.minor, RELEASES.base
has, tabled = RELEASES.has, RELEASES.value
