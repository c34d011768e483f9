"""vLLM's own names of its flags, by which what it refuses is found in the file of ``--config``."""

from __future__ import annotations

from capture_planner_vllm.flags import table


def name_of(flag: str) -> str:
    """Return vLLM's own name of a flag, however it is written, or of its beginning; itself where there is none."""
    spelled = flag.partition("=")[0].partition(".")[0].replace("_", "-")
    spelled = spelled if spelled.startswith("-") else f"--{spelled}"
    every = [
        (name, dest) for dest, entry in table().items() for name in (*entry["names"], *entry.get("no", ()))
    ]
    exact = [dest for name, dest in every if name == spelled]
    begun = {dest for name, dest in every if name.startswith(spelled)}
    return exact[0] if exact else begun.pop() if len(begun) == 1 else spelled
