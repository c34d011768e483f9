"""What the engines do by default, restated the slow way: enough to try exports on."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from pathlib import Path
from typing import Any

import attrs
from ruamel.yaml import YAML

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.engines.emulation import CapturedGraph, Emulation
from capture_planner.errors import FlagError, Problem
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Entry
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Limits, Lora, Parallel

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE


@attrs.frozen(kw_only=True)
class SearchManager:
    """A role whose graphs are searched one by one, in the order of ``rule``."""

    role: Role
    mode: GraphMode
    graphs: tuple[CapturedGraph, ...]
    rule: Any

    def dispatch(self, batch):
        """Return the first graph that the rule offers."""
        entry = self.rule(batch)
        if entry is None:
            return Dispatch(None, reason=Reason.UNCOVERED)
        return Dispatch(
            entry, entry.num_tokens - batch.num_tokens, 0 if entry.num_reqs is None else entry.num_reqs - batch.num_reqs
        )


def _read(command):
    """Return flags with their words."""
    found: dict[str, list[str]] = {}
    name = None
    for word in command:
        if word.startswith("--"):
            name = word[2:]
            assert name not in found, f"{word} is given twice"
            found[name] = []
        elif name is not None:
            found[name].append(word)
    return found


def _number(flags, name, default=1):
    return int(flags[name][0]) if name in flags else default


def _up(size, step):
    return -(-size // step) * step


# vLLM ------------------------------------------------------------------------------------------


def vllm_table(role, mode, sizes, query_lens, max_num_reqs, cases=(0,)):
    """One manager: every graph, then for each batch the least size of each kind that holds it."""
    graphs = []
    for size in sizes:
        for case in cases:
            if mode.is_separate:
                for q in query_lens:
                    tokens = _up(size, q)
                    if tokens <= max(sizes) and tokens // q <= max_num_reqs:
                        graphs.append(
                            Entry(mode=FULL, num_tokens=tokens, num_reqs=tokens // q, query_len=q, active_loras=case)
                        )
            if mode.mixed_mode is not NONE:
                reqs = min(size, max_num_reqs) if mode.mixed_mode is FULL else None
                graphs.append(Entry(mode=mode.mixed_mode, num_tokens=size, num_reqs=reqs, active_loras=case))
    graphs = list(dict.fromkeys(graphs))
    by_size = defaultdict(list)
    for graph in graphs:
        by_size[graph.mode, graph.active_loras, graph.num_tokens].append(graph)
    captured = {
        (kind, case): sorted({tokens for m, c, tokens in by_size if (m, c) == (kind, case)})
        for kind in (FULL, PIECEWISE)
        for case in cases
    }

    def rule(batch):
        adapters = 0 if role.is_drafter else batch.active_loras
        case = min((c for c in cases if c >= adapters), default=max(cases))
        for kind in (FULL, PIECEWISE):
            index = bisect_left(captured[kind, case], batch.num_tokens)
            for size in captured[kind, case][index : index + 1]:
                for graph in by_size[kind, case, size]:
                    if graph.query_len in (None, batch.uniform_query_len) and (
                        graph.num_reqs is None or graph.num_reqs >= batch.num_reqs
                    ):
                        return graph
        return None

    return SearchManager(
        role=role, mode=mode, graphs=tuple(CapturedGraph(role=role, entry=g) for g in graphs), rule=rule
    )


def vllm(command, environment):
    """Follow vLLM 0.33 with model runner V2, as far as an export needs it."""
    flags = _read(command)
    reqs, tokens = _number(flags, "max-num-seqs"), _number(flags, "max-num-batched-tokens")
    config = json.loads(flags["compilation-config"][0])
    mode = GraphMode[config["cudagraph_mode"]]
    sizes = sorted({size for size in config.get("cudagraph_capture_sizes", ()) if size <= tokens})
    data = _number(flags, "data-parallel-size")
    cases: tuple[int, ...] = (0,)
    lora = None
    if "enable-lora" in flags:
        lora = Lora(max_active=_number(flags, "max-loras"), specialize="specialize-active-lora" in flags)
        cases = lora.cases()
    speculative, lengths = None, [1]
    if "speculative-config" in flags:
        given = json.loads(flags["speculative-config"][0])
        tiers = given.get("num_speculative_tokens_per_batch_size", ()) if data == 1 else ()
        speculative = Speculative(
            method=Method(given["method"]),
            num_tokens=given["num_speculative_tokens"],
            schedule=tuple(tuple(tier) for tier in tiers),
        )
        lengths = sorted({1 + k for *_, k in speculative.tiers(reqs)})
    managers = [vllm_table(Role.TARGET, mode, sizes, lengths, reqs, cases)]
    if speculative is not None:
        managers.append(vllm_table(Role.DRAFT_PREFILL, mode, sizes, lengths, reqs))
        decode = GraphMode.FULL_DECODE_ONLY if mode.decode_mode is FULL else NONE
        managers.append(vllm_table(Role.DRAFT_DECODE, decode, sizes, [1], reqs))
    return _emulation("vllm", command, reqs, tokens, sizes, managers, speculative, lora)


# SGLang ----------------------------------------------------------------------------------------


def sglang(command, environment):
    """Follow SGLang 0.5.23: decodes by requests, prefills by tokens and never beyond twice."""
    flags = _read(command)
    reqs, tokens = _number(flags, "max-running-requests"), _number(flags, "chunked-prefill-size")
    width = _number(flags, "speculative-num-draft-tokens")
    kinds = {"full": FULL, "breakable": PIECEWISE, "disabled": NONE}
    decode, prefill = (kinds[flags[f"cuda-graph-backend-{phase}"][0]] for phase in ("decode", "prefill"))
    bs = [int(word) for word in flags.get("cuda-graph-bs-decode", ())]
    buckets = [int(word) for word in flags.get("cuda-graph-bs-prefill", ())]
    bs = sorted({min(size, reqs) for size in bs})
    mixed = [Entry(mode=prefill, num_tokens=size, num_reqs=reqs if prefill is FULL else None) for size in buckets]

    def role(name, tokens_each, entries):
        uniform = [
            Entry(mode=decode, num_tokens=size * tokens_each, num_reqs=size, query_len=tokens_each) for size in bs
        ]

        def rule(batch):
            if batch.uniform_query_len is not None:
                same = [e for e in uniform if e.query_len == batch.uniform_query_len]
                return next((e for e in same if e.num_reqs >= batch.num_reqs), None)
            found = next((e for e in entries if e.num_tokens >= batch.num_tokens), None)
            if found is None or found.num_tokens > 2 * batch.num_tokens:
                return None
            return found

        graphs = tuple(CapturedGraph(role=name, entry=entry) for entry in (*entries, *uniform))
        return SearchManager(role=name, mode=GraphMode.FULL_DECODE_ONLY, graphs=graphs, rule=rule)

    managers = [role(Role.TARGET, width, mixed)]
    if width > 1:
        managers += [role(Role.DRAFT_PREFILL, width, []), role(Role.DRAFT_DECODE, 1, [])]
    return _emulation("sglang", command, reqs, tokens, bs, managers, None, None)


# TensorRT-LLM ----------------------------------------------------------------------------------


def tensorrt_llm(command, environment):
    """Follow TensorRT-LLM: padded decodes of the target alone, with a length of drafts by batch size."""
    options = YAML(typ="safe", pure=True).load(Path(_read(command)["config"][0]).read_text())
    reqs, tokens = options["max_batch_size"], options["max_num_tokens"]
    config = options["cuda_graph_config"]
    speculative = options.get("speculative_config") or {}
    drafts, schedule = speculative.get("max_draft_len", 0), speculative.get("draft_len_schedule")
    sizes = sorted(config["batch_sizes"]) if config else []
    if schedule is not None:
        if schedule[min(schedule)] != drafts:
            raise FlagError([Problem(message="the first length is not the longest")])
        sizes = sorted({*sizes, *(last for last in schedule if sizes and last <= sizes[-1])})

    def length(count):
        if schedule is None:
            return drafts
        return next((schedule[last] for last in sorted(schedule) if last >= count), 0)

    most = min(reqs, tokens // (1 + drafts))
    sizes = [size for size in sizes if size <= most] + [most] * (most > 0 and any(s > most for s in sizes))
    entries = [
        Entry(mode=FULL, num_tokens=size * (1 + k), num_reqs=size, query_len=1 + k)
        for size in sorted(set(sizes))
        for k in sorted({length(size)} | ({drafts} if size == max(sizes) else set()))
    ]

    def rule(batch):
        fitting = [e for e in entries if e.query_len == batch.uniform_query_len and e.num_reqs >= batch.num_reqs]
        return next(iter(fitting), None)

    graphs = tuple(CapturedGraph(role=Role.TARGET, entry=entry) for entry in entries)
    manager = SearchManager(role=Role.TARGET, mode=GraphMode.FULL_DECODE_ONLY, graphs=graphs, rule=rule)
    return _emulation("tensorrt-llm", command, reqs, tokens, sizes, [manager], None, None)


def _emulation(engine, command, reqs, tokens, sizes, managers, speculative, lora):
    return Emulation(
        engine=engine,
        version="restated",
        command=tuple(command),
        settings=(),
        sizes=tuple(sizes),
        managers=tuple(managers),
        decisions=(),
        limits=Limits(max_num_reqs=reqs, max_num_tokens=tokens),
        speculative=speculative,
        lora=lora,
        parallel=Parallel(),
    )


EMULATORS = {"vllm": vllm, "sglang": sglang, "tensorrt-llm": tensorrt_llm}
