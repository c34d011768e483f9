"""Collectives of torch.distributed in recorded graphs: operators whose result is there once their work is waited for.

On a GPU the wait is an edge of the graph. Here each replay of one waits on the host, as the call that was recorded did.
"""

from __future__ import annotations

from typing import Any

import torch


def is_collective(operator: Any) -> bool:
    """Say whether an operator is a collective of ``torch.distributed``."""
    return bool(operator.namespace == "c10d")


def is_unfinished(operator: Any) -> bool:
    """Say whether it is a functional collective, whose result is a tensor that nothing has arrived in."""
    return bool(operator.namespace == "_c10d_functional")


def plain(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments without groups and reductions, which are objects that differ between processes."""
    return tuple(each for each in arguments if not isinstance(each, torch.ScriptObject))


def run_collective(operator: Any, arguments: Any, named: Any) -> None:
    """Run it, and wait until its tensors hold the result."""
    result = operator._op(*arguments, **named)
    work = result[-1] if isinstance(result, tuple | list) else result
    work.wait()
