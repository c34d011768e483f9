"""What a scheduled batch is, worked out from its requests a second time."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from capture_planner.records.batch import batch_text
from capture_planner.records.model import Speculative
from capture_planner_conformance.served_rows import requests_by_state
from capture_planner_runner.execution.inputs import Array, ForwardStep
from capture_planner_runner.serving.states import AdmittedRequest
from support.runner_conformance.laws import RunnerCheck


def check_classified(
    step: ForwardStep, admitted: Sequence[AdmittedRequest], computed: Array | None, speculative: Speculative | None
) -> None:
    """Compare the batch of a step with the rows that it runs, and the rows with their requests.

    Whether a row is past its prompt follows from its first position and the prompt of its request, not from what the
    scheduler says (vllm#53051, vllm#49918).

    :param admitted: the requests that are being served.
    :param computed: ``int64[states]``: the tokens of each request that were computed before; None: neither they nor
        lengths are compared.
    """
    requests = requests_by_state(admitted)
    inputs, batch = step.inputs, step.batch
    counts, places = np.diff(inputs.query_start_loc), inputs.idx_mapping.tolist()
    first = inputs.positions[np.minimum(inputs.query_start_loc[:-1], len(inputs.positions) - 1)]
    lengths = np.array([len(requests[place].prompt) for place in places])
    adapters = set() if batch.role.is_drafter else {requests[place].adapter for place in places}
    past = first >= lengths
    alike, longest = bool((counts == counts[0]).all()), int(counts.max())
    expected = attrs.evolve(
        batch,
        num_reqs=len(counts),
        num_tokens=int(counts.sum()),
        query_len=longest if alike else None,
        past_prompt=bool(past.all()),
        active_loras=len(adapters) if any(adapters) else 0,
        max_query_len=longest if past.all() and not alike else None,
    )
    if batch != expected:
        message = f"the batch is dispatched as {batch_text(batch)}; its rows are {batch_text(expected)}"
        raise RunnerCheck.CLASSIFIED.violation(message)
    if computed is None:
        return
    longest = 1 if speculative is None else 1 + speculative.num_tokens
    for row, (place, count) in enumerate(zip(places, counts.tolist(), strict=True)):
        if first[row] != computed[place]:
            message = f"row {row} begins at position {first[row]}, and {computed[place]} tokens of its request are done"
            raise RunnerCheck.CLASSIFIED.violation(message)
        most = longest if past[row] else int(lengths[row] - first[row])
        if count > most:
            where = "past its prompt" if past[row] else "in its prompt"
            raise RunnerCheck.CLASSIFIED.violation(f"row {row}, {where}, has {count} tokens, and can have {most}")
