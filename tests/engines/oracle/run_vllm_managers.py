"""vLLM's own graph managers beside ours, over random configurations and batches.

Needs the unpacked wheel, and torch; no GPU and no installed engine. Prints every difference with the case's
number, by which it can be made again, and exits with 1 on any.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any

from capture_planner_vllm.emulation.releases import NEWEST, following, releases
from engines.generators import vllm_managers as cases
from engines.oracle.comparison import finish, options, oracle, release_in, say, sources


def plain(value: Any) -> Any:
    """Return the value as JSON has it."""
    return json.loads(json.dumps(value))


def differences(case: cases.Case, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return what differs, in words."""
    found = []
    for role in sorted({*ours["graphs"], *theirs["graphs"]}):
        mine, engines = ours["graphs"].get(role), theirs["graphs"].get(role)
        if mine != engines:
            found.append(f"graphs of {role}: {mine} for the engine's {engines}")
    for kind, asked in (("batches", case.batches), ("steps", case.steps)):
        for question, mine, engines in zip(asked, ours[kind], theirs[kind], strict=True):
            if mine != engines:
                found.append(f"{question}: {mine} for the engine's {engines}")
    return found


def main() -> int:
    """Compare and print; exit code 1 on a difference."""
    arguments = options(__doc__, "vllm", seed=0).parse_args()
    seen: Counter[str] = Counter()
    differing, started = 0, time.perf_counter()
    folder = sources(arguments)
    arguments.release = release_in(folder)
    release = arguments.release if arguments.release in releases() else NEWEST
    say(f"vLLM {arguments.release} against the emulation of {release}")
    with following(release), oracle("vllm_managers").engine(folder) as engine:
        every = (*cases.BOUNDARIES, *cases.cases(arguments.seed, arguments.count))
        for index, case in enumerate(every, -len(cases.BOUNDARIES)):
            ours, theirs = plain(cases.answers(case)), plain(engine.answers(case))
            found = differences(case, ours, theirs)
            wanted = cases.schedule_case(arguments.seed, index)
            mine, engines = cases.schedule_answer(wanted), engine.schedule_answer(wanted)
            if mine != engines:
                found.append(f"{wanted}: {mine} for the engine's {engines}")
            for text in found:
                say(f"seed {arguments.seed}, case {index}, {case.configuration}: {text}")
            differing += bool(found)
            seen["configurations"] += 1
            seen["batches"] += len(case.batches)
            seen["steps of several ranks"] += len(case.steps)
            seen["answers"] += sum(len(row) for row in ours["batches"])
            seen["answers"] += sum(len(rank) for step in ours["steps"] for rank in step)
            seen["managers"] += len(ours["graphs"])
            seen["schedules"] += 1
            seen["schedules refused"] += mine is None
    return finish("vllm_managers", arguments, dict(seen), differing, time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
