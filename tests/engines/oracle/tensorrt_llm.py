"""TensorRT-LLM's own functions, taken out of its sources by name and run on plain stand-ins for what they read.

The folder is a checkout, or any part of one that has these functions at their paths.
"""

from __future__ import annotations

import ast
import bisect
import enum
import functools
import math
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

ARGS = "tensorrt_llm/llmapi/llm_args.py"
FILTER = "tensorrt_llm/_torch/pyexecutor/engine/cuda_graph.py"
GRAPHS = "tensorrt_llm/_torch/pyexecutor/cuda_graph_runner.py"
RUNNER = "tensorrt_llm/_torch/pyexecutor/engine/runners/decoder/runner.py"
MODES = "tensorrt_llm/_torch/speculative/interface.py"

MODE_OF = {
    "Eagle": "EAGLE3_ONE_MODEL",
    "Eagle3": "EAGLE3_ONE_MODEL",
    "MTP": "MTP_EAGLE_ONE_MODEL",
    "Draft_Target": "DRAFT_TARGET_ONE_MODEL",
    "SA": "SA",
    "PARD": "PARD",
    "DFlash": "DFLASH",
    "NGram": "NGRAM",
}

KeyType = namedtuple(
    "KeyType",
    "batch_size draft_len is_first_draft short_seq_len_mode is_all_greedy_sample sample_type num_contexts "
    "context_query_len num_encoder_tokens peft_cache_data_type use_lora_graph",
    defaults=(False, True, 0, 0, 0, 0, None, False),
)


class SampleType(enum.Enum):
    """One value: nothing is sampled in a graph."""

    FULL = 0


class NullLog:
    """Accepts every call and logs nothing."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class Sources:
    """Functions by file and name."""

    def __init__(self, folder):
        self._trees = {
            path: ast.parse((Path(folder) / path).read_text("utf-8")) for path in (ARGS, FILTER, GRAPHS, RUNNER, MODES)
        }
        self._globals = {
            "__name__": "oracle",
            "math": math,
            "bisect": bisect,
            "logger": NullLog(),
            "KeyType": KeyType,
            "SampleType": SampleType,
            "ExpertStatistic": SimpleNamespace(should_record=lambda: False),
            "Eagle3ResourceManager": type("Never", (), {}),
            "get_static_draft_len": lambda spec: 0 if spec is None else spec.static_draft_len,
            "IntEnum": enum.IntEnum,
            "auto": enum.auto,
        }
        self.modes = self._run(self._class(MODES, "SpeculativeDecodingMode"), "SpeculativeDecodingMode")
        self._globals["SpeculativeDecodingMode"] = self.modes

    @functools.cache  # noqa: B019 - one object, for as long as the oracle runs
    def function(self, path, name, owner=None):
        """Return a function, or a method as a function of ``self``; its types and decorators are left off."""
        body = self._trees[path].body if owner is None else self._class(path, owner).body
        found = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
        found.decorator_list, found.returns = [], None
        arguments = found.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            argument.annotation = None
        for node in ast.walk(found):
            if isinstance(node, ast.AnnAssign):
                node.annotation = ast.Name("object", ast.Load(), lineno=1, col_offset=0)
        return self._run(found, name)

    def _class(self, path, name):
        return next(n for n in self._trees[path].body if isinstance(n, ast.ClassDef) and n.name == name)

    def _run(self, node, name):
        exec(compile(ast.Module([node], []), "oracle", "exec"), self._globals)
        return self._globals[name]


class Engine:
    """What TensorRT-LLM makes of a case."""

    def __init__(self, sources, case):
        self._functions = {
            name: sources.function(path, name, owner)
            for path, owner, name in (
                (GRAPHS, "CUDAGraphRunner", "_get_padded_batch"),
                (GRAPHS, "CUDAGraphRunner", "_round_up_batch_size"),
                (GRAPHS, "CUDAGraphRunner", "_round_up_batch_size_with_draft_len"),
                (GRAPHS, "CUDAGraphRunner", "maybe_get_cuda_graph"),
                (GRAPHS, "CUDAGraphRunner", "get_graph_key"),
            )
        }
        flags = _flags(case.flags)
        self.most = flags.get("max_batch_size", 2048)
        self.tensor = flags.get("tp_size", flags.get("tensor_parallel_size", 1))
        self.attention_dp = case.config.get("enable_attention_dp", False)
        graphs = self._graphs(sources, case.config.get("cuda_graph_config", {}))
        self.spec = spec = self._speculative(sources, case.config.get("speculative_config"))
        width = 1 if spec is None else spec.tokens_per_gen_step
        self.enabled = graphs is not None
        self.padding = self.enabled and graphs.enable_padding
        sizes = graphs.batch_sizes if self.enabled else []
        if self.enabled and spec is not None and spec.draft_len_schedule is not None:
            self.padding = True
            sizes = sources.function(ARGS, "_merge_schedule_keys", "DecodeCudaGraphConfig")(
                sizes, spec.draft_len_schedule
            )
        admit = sources.function(FILTER, "filter_cuda_graph_batch_sizes")
        tokens = flags.get("max_num_tokens", 8192)
        self.sizes = admit(sizes, self.most, tokens, width, self.padding) if sizes else []
        self.shapes = self._shapes(sources) if self.enabled else []
        self.mapping = self._runner.mapping

    def _graphs(self, sources, config):
        if config is None:
            return None
        made = SimpleNamespace(
            batch_sizes=config.get("batch_sizes"),
            max_batch_size=config.get("max_batch_size", 0),
            enable_padding=config.get("enable_padding", False),
            _generate_cuda_graph_batch_sizes=sources.function(
                ARGS, "_generate_cuda_graph_batch_sizes", "BaseCudaGraphConfig"
            ),
        )
        return sources.function(ARGS, "validate_base_cuda_graph_config", "BaseCudaGraphConfig")(made)

    def _speculative(self, sources, config):
        if config is None:
            return None
        drafts = config["max_draft_len"]
        total = drafts
        if config.get("use_dynamic_tree"):
            total = config.get("max_total_draft_tokens", drafts * config["dynamic_tree_max_topK"])
        schedule = sources.function(ARGS, "validate_draft_len_schedule_and_sort", "DecodingBaseConfig")(
            None, config.get("draft_len_schedule"), SimpleNamespace(data={"max_draft_len": drafts})
        )
        spec = SimpleNamespace(
            max_draft_len=drafts,
            max_total_draft_tokens=total,
            static_draft_len=total,
            max_concurrency=config.get("max_concurrency"),
            draft_len_schedule=schedule,
            spec_dec_mode=sources.modes[MODE_OF[config["decoding_type"]]],
            _translated_from_max_concurrency=False,
        )
        name = "validate_max_concurrency_and_draft_len_schedule_mutually_exclusive"
        sources.function(ARGS, name, "DecodingBaseConfig")(spec)
        owner = "PARDDecodingConfig" if config["decoding_type"] == "PARD" else "DecodingBaseConfig"
        spec.tokens_per_gen_step = sources.function(ARGS, "tokens_per_gen_step", owner)(spec)
        width = sources.function(ARGS, "get_runtime_tokens_per_gen_step", owner)
        spec.width = lambda draft_len: width(spec, draft_len)
        return spec

    def _shapes(self, sources):
        spec = self.spec
        config = SimpleNamespace(
            spec_config=spec,
            cuda_graph_batch_sizes=self.sizes,
            original_max_draft_len=0 if spec is None else spec.max_draft_len,
            max_total_draft_tokens=0 if spec is None else spec.max_total_draft_tokens,
        )
        self._runner = SimpleNamespace(_config=config)
        mapping = sources.function(RUNNER, "_compute_dynamic_draft_len_mapping", "DecoderRunner")(self._runner)
        self._runner.mapping = self._runner._dynamic_draft_len_mapping = mapping
        listed = sources.function(RUNNER, "_get_graphs_to_capture", "DecoderRunner")(
            self._runner, sorted(self.sizes, reverse=True)
        )
        return list(dict.fromkeys(sorted(listed, reverse=True)))

    _runner = SimpleNamespace(mapping=None)

    def width(self, draft_len):
        """Tokens of a request at a draft length."""
        return 1 if self.spec is None else self.spec.width(draft_len)

    def answers(self, questions, *, together):
        """Requests of the graph that each rank replays, 0 for none."""
        widths = {self.width(draft_len): draft_len for draft_len in range(64)} if self.spec else {1: 0}
        ranks = []
        for num_reqs, query_len, past_prompt in questions:
            draft_len = None if query_len is None else widths.get(query_len)
            ranks.append((num_reqs, draft_len, past_prompt and query_len is not None))
        gathered = [[can, num_reqs, 0] for num_reqs, _, can in ranks]
        added = [self._padding(rank, gathered if together else [[rank[2], rank[0], 0]]) for rank in ranks]
        gathered = [[can, num_reqs + more, 0] for (num_reqs, _, can), more in zip(ranks, added, strict=True)]
        return [
            self._graph(rank, more, gathered if together else [[rank[2], rank[0] + more, 0]])
            for rank, more in zip(ranks, added, strict=True)
        ]

    def _self(self, gathered):
        captured = {KeyType(bs, k, False, sample_type=SampleType.FULL): {} for bs, k in self.shapes}
        for found in captured.values():
            found.update(attn_metadata="graph", spec_metadata=None)
        runner = SimpleNamespace(
            enabled=self.enabled,
            padding_enabled=self.padding,
            supported_batch_sizes=self.sizes,
            max_supported_batch_size=self.sizes[-1] if self.sizes else 0,
            dynamic_draft_len_mapping=self.mapping,
            graph_metadata=captured,
            _capture_allowed=False,
            config=SimpleNamespace(
                enable_attention_dp=self.attention_dp,
                mapping=SimpleNamespace(tp_size=self.tensor),
                batch_size=self.most,
                is_draft_model=False,
                use_mrope=False,
            ),
            _can_run_cuda_graph_batch=lambda batch: batch.can_run,
            _is_mixed_encoder_decoder_batch=lambda batch: False,
            _gather_adp_graph_batch_info=lambda *args: [(can, size, 0) for can, size, _ in gathered],
            _get_or_create_padding_dummy=lambda *args: object(),
            _get_seq_len_mode=lambda *args: False,
            _resolve_sample_type=lambda *args: SampleType.FULL,
        )
        for name, function in self._functions.items():
            setattr(runner, name, function.__get__(runner))
        return runner

    def _padding(self, rank, gathered):
        num_reqs, draft_len, can = rank
        if draft_len is None:
            return 0  # no step of the engine has such a length, so that there is nothing to ask
        batch = SimpleNamespace(can_run=can, batch_size=num_reqs, generation_requests=[])
        return self._self(gathered)._get_padded_batch(batch, None, draft_len)

    def _graph(self, rank, more, gathered):
        num_reqs, draft_len, can = rank
        if draft_len is None:
            return 0
        request = SimpleNamespace(py_draft_tokens=[0] * draft_len)
        batch = SimpleNamespace(
            can_run=can,
            batch_size=num_reqs + more,
            generation_requests=[request] * (num_reqs + more),
            context_requests=[],
        )
        attention, _, key = self._self(gathered).maybe_get_cuda_graph(batch, True, None)
        return 0 if attention is None else key.batch_size


def _flags(flags):
    """The values of flags that this oracle needs, as numbers; the last one holds."""
    words = [part for flag in flags for part in flag.split("=")]
    return {name.removeprefix("--"): int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
