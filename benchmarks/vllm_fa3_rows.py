r"""Rows that FlashAttention 3 leaves unwritten in vLLM's FULL graphs: kernels and calls of vLLM 0.33, none of ours.

    python benchmarks/vllm_fa3_rows.py --seconds 60 --output vllm_fa3_rows.json

vLLM's FLASH_ATTN makes a schedule ahead of each forward (``get_scheduler_metadata``), in a buffer that the graph's
kernel reads. The runner captures a graph for mixed batches with ``max_query_len = num_tokens`` and ``max_seq_len =
max_model_len``, and builds the schedule of a replay with the maxima of its batch (``DefaultModelState.prepare_attn``).
From the maxima ``get_scheduler_metadata`` derives whether attention is causal or windowed, and from this whether the
schedule has a list of heads per request (hopper/flash_api.cpp of vllm-project/flash-attention, 617264c): single tokens
need none with heads up to 64 and beyond 128. The captured kernel reads that list nevertheless, finds zeros, and divides
by them, so that requests whose keys are not split get a block beyond their last one.

Each case captures one call as ``FlashAttentionImpl.forward`` makes it and replays it with schedules of both kinds, by
the batch's maxima and by the capture's, over an output that is filled with a mark. Rows are compared with the same
kernel without a graph, called with the batch's maxima, and this with attention in float32.

Needs vLLM 0.33 and a GPU of compute capability 9.x. Exit code 1 where the kernel without a graph is wrong, or a case
breaks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import attrs

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported

import torch
from _bench import CONSOLE, finish, parser, table

HEAD_SIZES = (64, 128, 256, 96, 192, 32)
HEADS, KV_HEADS = 8, 2
MAX_MODEL_LEN, PAGE = 4096, 16
NUM_SPLITS = 32
"""Of vLLM: ``flash_attn_max_num_splits_for_cuda_graph``, with which it captures and builds."""
MARK = -13824.0
"""In the output before each replay; exact in bfloat16, and far from what attention of normal values computes."""
TOLERANCE = 0.05
"""In bfloat16, whose values here are below 4: splits of another number are summed in another order."""
SHORT, LONG, WINDOW = 24, 1000, 128
"""Keys of a request: in one block; in several, which are split in small batches. And a window between them."""


@attrs.frozen
class RowCase:
    """One graph, and one batch that it serves.

    :param head_size: of queries, keys and values.
    :param num_reqs: requests and tokens of the graph, as many of both.
    :param longest: ``max_query_len`` of the capture: 1 in a graph for decodes, else ``num_reqs``.
    :param window: keys that a token sees, or None.
    :param queries: tokens of each request of the batch.
    :param keys: keys of each request, its tokens included.
    """

    head_size: int
    num_reqs: int
    longest: int
    window: int | None
    queries: tuple[int, ...]
    keys: int


@attrs.frozen
class Rows:
    """What became of a batch's rows after a replay; ``difference`` is the largest among the written ones."""

    unwritten: int
    wrong: int
    difference: float


def cases() -> Iterator[RowCase]:
    """Yield graphs for mixed batches, which run single tokens or one query of two, and graphs for decodes."""
    for head_size in HEAD_SIZES:
        for num_reqs in (8, 64):
            some = (1, num_reqs // 2, num_reqs)
            for longest, window in ((num_reqs, None), (num_reqs, WINDOW), (1, WINDOW), (1, None)):
                for keys in (SHORT, LONG):
                    for count in some:
                        yield RowCase(head_size, num_reqs, longest, window, (1,) * count, keys)
                    if longest > 1:
                        yield RowCase(head_size, num_reqs, longest, window, (2,) + (1,) * (num_reqs // 2 - 1), keys)


class Call:
    """The tensors of one graph, and FlashAttention 3 called on them as vLLM's FLASH_ATTN does."""

    def __init__(self, case: RowCase, kernels: Any, device: str) -> None:
        self.case, self._kernels = case, kernels
        draw = torch.Generator(device).manual_seed(0)
        pages = -(-max(case.keys, case.num_reqs) // PAGE)
        shape = (case.num_reqs * pages + 1, KV_HEADS, PAGE, 2 * case.head_size)
        cache = torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)
        # vLLM's layout: [blocks, heads, page, keys and values].
        self.keys, self.values = torch.split(cache.transpose(1, 2), case.head_size, dim=-1)
        rows = (case.num_reqs, HEADS, case.head_size)
        self.query = torch.randn(rows, generator=draw, device=device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.query)
        self.starts = torch.zeros(case.num_reqs + 1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(case.num_reqs, dtype=torch.int32, device=device)
        self.table = torch.zeros(case.num_reqs, MAX_MODEL_LEN // PAGE, dtype=torch.int32, device=device)
        # Page 0 is the one of padding.
        order = 1 + torch.randperm(case.num_reqs * pages, generator=draw, device=device, dtype=torch.int32)
        self.table[:, :pages] = order.view(case.num_reqs, pages)
        # FlashAttentionMetadataBuilder.__init__: 1 + round_up(batch, 4) * 4.
        self.buffer = torch.zeros(1 + -(-case.num_reqs // 4) * 16, dtype=torch.int32, device=device)

    def fill(self, queries: tuple[int, ...], keys: int) -> None:
        """Write the lengths of a batch; padded requests have no tokens and no keys."""
        padding = self.case.num_reqs - len(queries)
        starts = [0, *accumulate(queries)]
        self.starts.copy_(torch.tensor([*starts, *[starts[-1]] * padding], dtype=torch.int32))
        self.lengths.copy_(torch.tensor([keys] * len(queries) + [0] * padding, dtype=torch.int32))

    def schedule(self, longest: int, keys: int) -> torch.Tensor:
        """Return the schedule of the batch, as ``_get_scheduler_metadata`` has it made with these maxima."""
        result: torch.Tensor = self._kernels.get_scheduler_metadata(
            batch_size=self.case.num_reqs,
            max_seqlen_q=longest,
            max_seqlen_k=keys,
            num_heads_q=HEADS,
            num_heads_kv=KV_HEADS,
            headdim=self.case.head_size,
            cache_seqlens=self.lengths,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self.starts,
            page_size=PAGE,
            causal=True,
            window_size=self._window,
            num_splits=NUM_SPLITS,
        )
        return result

    def store(self, schedule: torch.Tensor) -> torch.Tensor:
        """Copy a schedule into the graph's buffer, zeros behind it, as ``_store_scheduler_metadata`` does."""
        self.buffer[: len(schedule)] = schedule
        self.buffer[len(schedule) :] = 0
        return self.buffer[: len(schedule)]

    def attend(self, longest: int, keys: int, schedule: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention of all rows to ``out``."""
        self._kernels.flash_attn_varlen_func(
            q=self.query,
            k=self.keys,
            v=self.values,
            out=out,
            cu_seqlens_q=self.starts,
            max_seqlen_q=longest,
            seqused_k=self.lengths,
            max_seqlen_k=keys,
            softmax_scale=self.case.head_size**-0.5,
            causal=True,
            window_size=list(self._window),
            block_table=self.table,
            softcap=0,
            scheduler_metadata=schedule,
            fa_version=3,
            num_splits=NUM_SPLITS,
        )

    def exact(self) -> torch.Tensor:
        """Return the attention of the batch's rows in float32, ``[tokens, heads, head_size]``."""
        case, lengths = self.case, torch.tensor(self.case.queries)
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(self.query.device)
        seen = [case.keys - query + 1 + number for query in case.queries for number in range(query)]
        visible = torch.tensor(seen, device=self.query.device)[:, None]
        position = torch.arange(case.keys, device=self.query.device)
        hidden = (position >= visible) | (position < visible - (case.window or case.keys))
        pages = self.table[owner, : -(-case.keys // PAGE)].long()
        keys, values = (each[pages].flatten(1, 2)[:, : case.keys].float() for each in (self.keys, self.values))
        grouped = self.query[: len(owner)].float().view(len(owner), KV_HEADS, -1, case.head_size)
        scores = torch.einsum("thgd,tkhd->thgk", grouped, keys) * case.head_size**-0.5
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("thgk,tkhd->thgd", weights, values).flatten(1, 2)

    @property
    def _window(self) -> tuple[int, int]:
        return (-1, -1) if self.case.window is None else (self.case.window - 1, 0)


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of one call."""
    call()  # kernels load at their first launch
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def compared(out: torch.Tensor, expected: torch.Tensor) -> Rows:
    """Return how many of the batch's rows are as they were before, and how many others are wrong."""
    found, expected = out[: len(expected)].float().flatten(1), expected.float().flatten(1)
    unwritten = (found == MARK).any(dim=1)
    difference = (found - expected).abs().amax(dim=1).nan_to_num(torch.inf)[~unwritten]
    largest = difference.max().item() if len(difference) else 0.0
    return Rows(int(unwritten.sum()), int((difference > TOLERANCE).sum()), largest)


def measure(case: RowCase, kernels: Any, device: str) -> dict[str, Any]:
    """Capture as vLLM's runner does, replay with schedules by both maxima, and compare the rows."""
    call, maxima = Call(case, kernels, device), (case.longest, MAX_MODEL_LEN)
    call.fill((1,) * case.num_reqs, 1)  # InputBatch.make_dummy
    frozen = call.store(call.schedule(*maxima))
    replay = captured(lambda: call.attend(*maxima, frozen, call.out))

    call.fill(case.queries, case.keys)
    own, tokens = (max(case.queries), case.keys), sum(case.queries)
    eager = torch.full_like(call.out, MARK)
    made = call.schedule(*own)
    call.attend(*own, made.clone(), eager)
    result = {"eager": compared(eager, call.exact())}
    for name, by in (("batch", own), ("capture", maxima)):
        call.store(call.schedule(*by))
        call.out.fill_(MARK)
        replay()
        result[name] = compared(call.out, eager[:tokens])
    lengths = {"captured": len(frozen), "replayed": len(made)}
    return {
        **attrs.asdict(case, filter=lambda field, _: field.name != "queries"),
        "max_query_len": own[0],
        "rows": tokens,
        "schedule": lengths,
        "layouts_differ": len(frozen) != len(made),
        **{name: attrs.asdict(rows) for name, rows in result.items()},
    }


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what holds over all cases."""
    unwritten = [each for each in results if each["batch"]["unwritten"]]
    return {
        "cases": len(results),
        "rows": sum(each["rows"] for each in results),
        "unwritten by the batch's maxima": sum(each["batch"]["unwritten"] for each in results),
        "wrong by the batch's maxima": sum(each["batch"]["wrong"] for each in results),
        "unwritten by the capture's maxima": sum(each["capture"]["unwritten"] for each in results),
        "wrong by the capture's maxima": sum(each["capture"]["wrong"] for each in results),
        "wrong without a graph": sum(each["eager"]["unwritten"] + each["eager"]["wrong"] for each in results),
        "head sizes with unwritten rows": sorted({each["head_size"] for each in unwritten}),
        "unwritten only where layouts differ": all(each["layouts_differ"] for each in unwritten),
    }


def show(results: list[dict[str, Any]]) -> None:
    """Print a line per head size, graph and batch, with both schedules."""
    lines = table(
        "Unwritten rows of the batch's, and wrong ones in brackets",
        *("head size", "window", "graph's max_query_len", "batch's", "keys", "rows"),
        *("by the batch's maxima", "by the capture's", "schedule: captured, replayed"),
    )
    for each in results:
        counts = (f"{each[name]['unwritten']} ({each[name]['wrong']})" for name in ("batch", "capture"))
        facts = (each["head_size"], each["window"] or "-", each["longest"], each["max_query_len"], each["keys"])
        lines.add_row(*map(str, (*facts, each["rows"])), *counts, ", ".join(map(str, each["schedule"].values())))
    CONSOLE.print(lines)


def main() -> int:
    """Run, print and write after each head size."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="begin no case after so many")
    arguments = options.parse_args()
    import vllm
    from vllm import vllm_flash_attn

    if not vllm_flash_attn.is_fa_version_supported(3):
        raise SystemExit(f"FlashAttention 3: {vllm_flash_attn.fa_version_unsupported_reason(3)}")
    results: list[dict[str, Any]] = []
    broke, until, drawn = None, time.monotonic() + arguments.seconds, list(cases())
    for case in drawn:
        if time.monotonic() > until:
            break
        try:
            results.append(measure(case, vllm_flash_attn, "cuda"))
        except Exception as error:  # an illegal access ends all that this process could do on the GPU
            broke = f"{case}: {type(error).__name__}: {error}"
            break
        if len(results) % 56 == 0:
            CONSOLE.print(f"{len(results)} of {len(drawn)} cases, head size {case.head_size}")
            finish(arguments, {"summary": summary(results), "results": results})
    show(results)
    found = {
        "vllm": vllm.__version__,
        "summary": summary(results),
        "cases drawn": len(drawn),
        "broke": broke,
        "results": results,
    }
    for name, value in (*found["summary"].items(), ("broke", broke)):
        CONSOLE.print(f"{name}: {value}", highlight=False, markup=False)
    finish(arguments, found)
    return int(broke is not None or found["summary"]["wrong without a graph"] > 0)


if __name__ == "__main__":
    sys.exit(main())
