"""vLLM's own graph managers, observed: graphs, counts and answers, over random configurations and batches.

Needs the unpacked wheel, and torch; no GPU and no installed engine. Checks first that the wheel has the functions and
attributes that are observed. Exits with 1 on any difference.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from engines.generators import vllm_managers as cases
from engines.oracle.comparison import finish, options, oracle, say, sources


def main() -> int:
    """Compare and print; exit code 1 on a difference."""
    parser = options(__doc__, "vllm", seed=0)
    parser.set_defaults(count=500)
    arguments = parser.parse_args()
    observing = oracle("vllm_observe")
    seen: Counter[str] = Counter()
    found, started = list(observing.problems(sources(arguments))), time.perf_counter()
    for text in found:
        say(text)
    differing = len(found)
    with oracle("vllm_managers").engine(sources(arguments)) as engine:
        for index in range(arguments.count):
            case = cases.case(arguments.seed, index)
            if case.configuration.runner != "v2":
                continue
            observed = observing.ObservedEngine(engine, case)
            differences = list(observed.differences())
            for text in differences:
                say(f"seed {arguments.seed}, case {index}, {case.configuration}: {text}")
            differing += bool(differences)
            seen["configurations"] += 1
            seen["batches"] += len(case.batches)
            seen["steps of several ranks"] += len(case.steps)
            seen["throw-away captures"] += observed.tried
            seen["managers"] += len(observed.tracks)
            seen["answers read from files"] += observed.read
            seen["graphs"] += sum(len(track.graphs) for track in observed.tracks)
    return finish("vllm_observe", arguments, dict(seen), differing, time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
