"""Where in the file of ``--config`` stands what vLLM refuses."""

from __future__ import annotations

from collections.abc import Sequence

from ruamel.yaml.error import YAMLError

from capture_planner.engines.vllm.flags import table
from capture_planner.engines.yaml_files import located
from capture_planner.errors import FlagError, InvalidDocument


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


def in_its_file(error: FlagError, command: Sequence[str]) -> FlagError:
    """Return an error with the places of what stands in the file of ``--config``."""
    words = list(command)
    if words.count("--config") != 1 or words[-1] == "--config":
        return error
    path = words[words.index("--config") + 1]
    given = {name_of(word) for word in words if word.startswith("-")}
    try:
        return FlagError(located(error.problems, path, given, name_of))
    except (InvalidDocument, YAMLError):
        return error  # it is about the file itself
