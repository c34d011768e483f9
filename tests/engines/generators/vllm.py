"""Command lines of vLLM over every flag that bears on graphs, valid and not, and batches for them.

A command names its models as ``{models}/dense``: ``write_models`` makes those folders, each with nothing
but a ``config.json``, and ``Case.command_in`` puts the folder in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from capture_planner.codec.shipped import shipped_environments
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner_vllm.emulation.settings import RunnerVersion, VllmSettings
from engines.generators.vllm_draw import Draw
from engines.generators.vllm_models import write_models

__all__ = ["ENVIRONMENTS", "Case", "answer_of", "batches", "cases", "write_models"]

ENVIRONMENTS = tuple(name for name in shipped_environments() if name != "cpu")


@attrs.frozen(kw_only=True)
class Case:
    """One command line on one machine."""

    command: tuple[str, ...]
    environment: str
    variables: tuple[tuple[str, str], ...] = ()
    file: str = ""
    """What ``{models}/flags.yaml`` holds, where the command names it."""

    def command_in(self, folder: Path) -> list[str]:
        """Return the words with the models' folder in place, and write the file that they name."""
        if self.file:
            (folder / "flags.yaml").write_text(self.file.replace("{models}", str(folder)))
        return [word.replace("{models}", str(folder)) for word in self.command]

    def data(self) -> dict[str, Any]:
        """Return the case as JSON has it."""
        found: dict[str, Any] = {"command": list(self.command), "environment": self.environment}
        if self.file:
            found["file"] = self.file
        return found | ({"variables": dict(self.variables)} if self.variables else {})

    @classmethod
    def of(cls, data: dict[str, Any]) -> Case:
        """Return the case that ``data`` was written from."""
        variables = tuple(data.get("variables", {}).items())
        return cls(
            command=tuple(data["command"]),
            environment=data["environment"],
            variables=variables,
            file=data.get("file", ""),
        )


def cases(count: int, seed: int, wild: float = 0.03) -> Iterator[Case]:
    """Yield ``count`` command lines; the same seed yields the same lines."""
    random_ = random.Random(seed)
    for _ in range(count):
        drawn = Draw(random_, wild)
        command = drawn.command()
        variables: list[tuple[str, str]] = []
        if random_.random() < 0.12:
            variables.append(("VLLM_USE_V2_MODEL_RUNNER", random_.choice("01")))
        if random_.random() < 0.05:
            variables.append(("VLLM_USE_BREAKABLE_CUDAGRAPH", random_.choice("01")))
        if random_.random() < 0.03:
            variables.append(("VLLM_ALLOW_LONG_MAX_MODEL_LEN", random_.choice("01")))
        file = ""
        if random_.random() < 0.06:
            file = drawn.config_file()
            place = random_.randint(1, len(command)) if command[0].startswith("{models}") else len(command)
            # Not between a flag and its value: argparse would read --config as the value.
            place = place if place == len(command) or command[place].startswith("-") else len(command)
            command = (*command[:place], "--config", "{models}/flags.yaml", *command[place:])
        yield Case(command=command, environment=random_.choice(ENVIRONMENTS), variables=tuple(variables), file=file)


def batches(
    count: int,
    seed: int,
    *,
    roles: Sequence[Role],
    max_num_reqs: int,
    max_num_tokens: int,
    query_lens: Sequence[int],
    max_loras: int = 0,
) -> Iterator[Batch]:
    """Yield ``count`` batches that such an engine can be asked about; decodes and prefills in all sizes."""
    random_ = random.Random(seed)
    for _ in range(count):
        role = random_.choice(list(roles))
        reqs = random_.randint(1, max_num_reqs)
        query_len: int | None = random_.choice([*query_lens, 1])
        tokens = reqs * (query_len or 1)
        past_prompt = random_.random() < 0.8
        if random_.random() < 0.4 or tokens > max_num_tokens:
            reqs = min(reqs, max_num_tokens)
            tokens = random_.randint(reqs, max_num_tokens)
            query_len = tokens if reqs == 1 else None
            past_prompt = past_prompt and query_len is not None
        loras = random_.randint(0, max_loras + 1) if max_loras else 0
        yield Batch(
            role=role,
            num_reqs=reqs,
            num_tokens=tokens,
            query_len=query_len,
            past_prompt=past_prompt,
            active_loras=loras,
        )


def answer_of(settings: VllmSettings) -> dict[str, Any]:
    """Return settings in the form in which the engine's own answers are recorded."""
    draft: list[list[Any]] = []
    if settings.runner is RunnerVersion.V1 and settings.draft_prefill_mode is not None:
        # One dispatcher serves all positions.
        draft = [[0, settings.draft_prefill_mode.value]]
    elif settings.draft_query_len and settings.draft_decode_mode is not None:
        draft = [[settings.draft_query_len, settings.draft_decode_mode.value]]
    elif settings.draft_prefill_mode is not None:
        draft = [[settings.query_len, settings.draft_prefill_mode.value]]
        if settings.draft_decode_mode is not None:
            draft.append([1, settings.draft_decode_mode.value])
    overlap = settings.overlap
    split = {} if overlap is None else {"overlap": list(attrs.astuple(overlap))}
    encoder = {f"encoder{at or ''}": [[*each.budgets], each.max_items] for at, each in enumerate(settings.encoders)}
    return (
        split
        | encoder
        | {
            "runner": settings.runner.value,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "max_model_len": settings.max_model_len,
            "K": settings.num_speculative_tokens,
            "configured": settings.configured_mode.value,
            "compile": settings.compilation,
            "async": settings.async_scheduling,
            "method": settings.method,
            "schedule": None if settings.schedule is None else [list(entry) for entry in settings.schedule],
            "lora_cases": list(settings.lora_cases),
            "backend": settings.backend,
            "varlen": settings.varlen,
            "mode": settings.mode.value,
            "draft": draft,
            "sizes": list(settings.sizes),
            "max_size": settings.max_size,
        }
    )
