"""Command lines of TensorRT-LLM and batches to ask about, drawn from a seed: the same ones each time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import attrs

DECODING_TYPES = ("Eagle", "Eagle3", "MTP", "Draft_Target", "SA", "PARD", "DFlash", "NGram")

Question = tuple[int, int | None, bool]
"""Requests, the tokens that each has (None: they differ, by one), and whether all are past their prompt."""


@attrs.frozen(kw_only=True)
class Case:
    """Flags, the file beside them, and batches."""

    flags: tuple[str, ...]
    config: dict[str, Any]
    """What the YAML file holds."""
    batches: tuple[Question, ...]
    ranks: tuple[tuple[Question, ...], ...]
    """Batches of the attention-DP ranks of one step, several steps."""


def cases(seed: int) -> Iterator[Case]:
    """Yield cases without end; a few have a schedule and no size left, which the engine fails on."""
    draw = random.Random(seed)
    while True:
        yield _case(draw)


def _case(draw: random.Random) -> Case:
    flags: list[str] = []
    most = 2048
    if draw.random() < 0.8:
        most = _count(draw, 700)
        flags += ["--max_batch_size", str(most)]
    if draw.random() < 0.6:
        tokens = draw.choice((_count(draw, 64), _count(draw, 2048), most, 8192))
        flags.append(f"--max_num_tokens={tokens}")
    tensor = draw.choice((1, 1, 2, 4, 8))
    if tensor > 1:
        flags += [draw.choice(("--tp_size", "--tensor_parallel_size")), str(tensor)]
        if draw.random() < 0.3:
            flags += ["--ep_size", str(tensor)]
    if draw.random() < 0.1:
        flags += ["--pp_size", "2", "--max_seq_len", "4096"]
    config: dict[str, Any] = {}
    width = 1
    if draw.random() < 0.5:
        config["speculative_config"], width = _speculative(draw)
    if draw.random() < 0.9:
        config["cuda_graph_config"] = _graphs(draw, most)
    if draw.random() < 0.4:
        config["enable_attention_dp"] = draw.random() < 0.8
    if draw.random() < 0.2:
        config["disable_overlap_scheduler"] = True
    return Case(
        flags=tuple(flags),
        config=config,
        batches=tuple(_question(draw, most, width) for _ in range(12)),
        ranks=tuple(_step(draw, most, width, tensor) for _ in range(4)),
    )


def _count(draw: random.Random, most: int) -> int:
    """Draw a count whose size is spread evenly, on and beside the steps that lists have."""
    count = int(most ** draw.random())
    return max(1, draw.choice((count, -(-count // 8) * 8, 1 << count.bit_length() - 1)))


def _graphs(draw: random.Random, most: int) -> dict[str, Any] | None:
    if draw.random() < 0.05:
        return None
    graphs: dict[str, Any] = {}
    kind = draw.random()
    if kind < 0.4:
        graphs["max_batch_size"] = draw.choice((_count(draw, 1024), most))
    elif kind < 0.8:
        sizes = [_count(draw, 600) for _ in range(draw.randint(1, 8))]
        graphs["batch_sizes"] = sizes
        if draw.random() < 0.2:
            graphs["max_batch_size"] = max(sizes)
    if draw.random() < 0.7:
        graphs["enable_padding"] = draw.random() < 0.6
    return graphs


def _speculative(draw: random.Random) -> tuple[dict[str, Any], int]:
    """Return a ``speculative_config`` and the most tokens that a request has with it."""
    kind = draw.choice(DECODING_TYPES)
    drafts = draw.choice((1, 2, 3, 4, 5, 7))
    config: dict[str, Any] = {"decoding_type": kind, "max_draft_len": drafts}
    width = 2 * drafts if kind == "PARD" else 1 + drafts
    if kind in ("Eagle", "Eagle3", "Draft_Target"):
        config["speculative_model"] = "draft"
    choice = draw.random()
    if choice < 0.35:
        config["draft_len_schedule"] = _schedule(draw, drafts)
    elif choice < 0.6:
        config["max_concurrency"] = _count(draw, 300)
    elif choice < 0.75 and kind in ("Eagle", "Eagle3", "MTP"):
        breadth = draw.randint(1, 5)
        config |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": breadth}
        width = 1 + breadth * drafts
        if draw.random() < 0.5:
            config["max_total_draft_tokens"] = draw.randint(drafts, breadth * drafts)
            width = 1 + int(config["max_total_draft_tokens"])
    return config, width


def _schedule(draw: random.Random, drafts: int) -> dict[int, int]:
    """Draw a schedule in any order of its thresholds; now and then one whose lengths rise again."""
    thresholds = sorted({_count(draw, 300) for _ in range(draw.randint(1, 4))})
    lengths = [draw.randint(0, drafts) for _ in thresholds[1:]]
    if draw.random() < 0.8:
        lengths.sort(reverse=True)
    tiers = list(zip(thresholds, [drafts, *lengths], strict=True))
    draw.shuffle(tiers)
    return dict(tiers)


def _question(draw: random.Random, most: int, width: int) -> Question:
    num_reqs = min(_count(draw, most), most)
    query_len = draw.choice((width, width, 1, draw.randint(1, width), draw.randint(1, width + 2)))
    if draw.random() < 0.1:
        return num_reqs, None, True
    return num_reqs, query_len, draw.random() < 0.9


def _step(draw: random.Random, most: int, width: int, ranks: int) -> tuple[Question, ...]:
    """Draw the batches of ranks: near each other, so that they can agree."""
    num_reqs, query_len, _ = _question(draw, most, width)
    spread = draw.choice((0, 1, 7))
    return tuple((max(1, num_reqs - draw.randint(0, spread)), query_len, draw.random() < 0.97) for _ in range(ranks))
