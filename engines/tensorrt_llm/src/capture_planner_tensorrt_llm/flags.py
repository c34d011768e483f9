"""The command line of ``trtllm-serve`` and its YAML file, as two mappings of the engine's own names."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from ruamel.yaml.error import YAMLError

from capture_planner.engines.parsing import did_you_mean, names
from capture_planner.engines.yaml_files import located_inside, read_yaml, refused_file
from capture_planner.errors import InvalidDocument, Problem
from capture_planner_tensorrt_llm.values import Problems, integer

FLAGS: dict[str, str] = {
    "--max_batch_size": "most requests in a batch",
    "--max_num_tokens": "most tokens in a batch",
    "--max_seq_len": "longest sequence, in tokens",
    "--max_beam_width": "beams of a request; 1 alone is emulated",
    "--tensor_parallel_size": "tensor-parallel ranks",
    "--tp_size": "the same",
    "--pipeline_parallel_size": "pipeline-parallel ranks",
    "--pp_size": "the same",
    "--context_parallel_size": "context-parallel ranks; 1 alone is emulated",
    "--cp_size": "the same",
    "--moe_expert_parallel_size": "ranks that the experts are spread over",
    "--ep_size": "the same",
    "--config": "a YAML file: cuda_graph_config, speculative_config, enable_attention_dp, ...",
    "--extra_llm_api_options": "the same",
    "--backend": "pytorch alone is emulated",
}
"""Flags that decide about graphs, and what they are for."""

FIELDS = {
    "--max_batch_size": "max_batch_size",
    "--max_num_tokens": "max_num_tokens",
    "--max_seq_len": "max_seq_len",
    "--max_beam_width": "max_beam_width",
    "--tensor_parallel_size": "tensor_parallel_size",
    "--tp_size": "tensor_parallel_size",
    "--pipeline_parallel_size": "pipeline_parallel_size",
    "--pp_size": "pipeline_parallel_size",
    "--context_parallel_size": "context_parallel_size",
    "--cp_size": "context_parallel_size",
    "--moe_expert_parallel_size": "moe_expert_parallel_size",
    "--ep_size": "moe_expert_parallel_size",
    "--backend": "backend",
}
"""The engine's own name of what a flag sets, which is also the key in a file."""

_FILES = ("--config", "--extra_llm_api_options")
_TEXT = {"backend"}

# Taken, and without a say in which graphs there are.
_IGNORED = names(
    """--tokenizer --custom_tokenizer --host --port --custom_module_dirs --log_level --gpus_per_node
    --moe_cluster_parallel_size --cluster_size --free_gpu_memory_fraction --kv_cache_free_gpu_memory_fraction
    --kv_cache_dtype --num_postprocess_workers --revision --reasoning_parser --tool_parser
    --metadata_server_config_file --server_role --otlp_traces_endpoint --disagg_cluster_uri --media_io_kwargs
    --chat_template"""
)
_SWITCHES = names("--trust_remote_code --fail_fast_on_attention_window_too_large --enable_chunked_prefill")


# Names of other engines, and options that only the file takes.
_RENAMED = {
    "--max-num-seqs": "--max_batch_size",
    "--max-running-requests": "--max_batch_size",
    "--max-num-batched-tokens": "--max_num_tokens",
    "--max-model-len": "--max_seq_len",
    "--cuda_graph_config": "--config FILE, with cuda_graph_config in it",
    "--cudagraph-capture-sizes": "--config FILE, with cuda_graph_config.batch_sizes in it",
    "--speculative_config": "--config FILE, with speculative_config in it",
    "--speculative-config": "--config FILE, with speculative_config in it",
    "--enable_attention_dp": "--config FILE, with enable_attention_dp in it",
}


@attrs.define
class Given:
    """What a command line gives."""

    values: dict[str, Any] = attrs.Factory(dict)
    """Under the engine's own names."""
    spelled: dict[str, str] = attrs.Factory(dict)
    """The flag that each came with."""
    file: str | None = None
    file_flag: str = "--config"
    """The flag that the file came with."""

    def placed(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return problems under the flag that the file came with, and with their places in it."""
        found = [
            attrs.evolve(problem, path=(self.file_flag, *problem.path[1:]))
            if problem.path[:1] == ("--config",)
            else problem
            for problem in problems
        ]
        try:
            return found if self.file is None else list(located_inside(found, self.file, self.file_flag))
        except (InvalidDocument, YAMLError):
            return found  # one of them says so


def read_flags(command: Sequence[str], problems: Problems) -> Given:
    """Return what is given: of a flag that is given twice, the last.

    One model may stand among the flags.
    """
    given = Given()
    words = deque(command)
    models = 0
    while words:
        word = words.popleft()
        if not word.startswith("-"):
            models += 1
            if models > 1:
                problems.refused((word,), "it takes one model, and this is another", remedy="leave it out")
            continue
        name, equals, value = word.partition("=")
        if name in _SWITCHES:
            if equals:
                problems.refused((name,), "it takes no value", remedy="it is a switch: write it without one")
            continue
        known = name in FIELDS or name in _FILES or name in _IGNORED
        if not known:
            problems.refused((name,), "it knows no such flag", remedy=_remedy(name))
        if not equals:
            if not words or (not known and words[0].startswith("-")):
                if known:
                    problems.refused((name,), "it needs a value", remedy="give its value behind it")
                continue
            value = words.popleft()
        if name in _FILES:
            given.file, given.file_flag = value, name
        elif name in FIELDS:
            field = FIELDS[name]
            given.values[field] = value if field in _TEXT else integer(value, (name,), problems)
            given.spelled[field] = name
    return given


def _remedy(flag: str) -> str:
    if flag in _RENAMED:
        return f"give {_RENAMED[flag]}"
    known = (*FIELDS, *_FILES, *_IGNORED, *_SWITCHES)
    return did_you_mean(flag, known, f"known are {', '.join(FLAGS)}")


def read_file(path: str, problems: Problems) -> Mapping[str, Any]:
    """Return what a YAML file holds; an empty one holds nothing."""
    try:
        data = read_yaml(path)
    except InvalidDocument as error:
        remedy = "name a YAML file of options"
        found = refused_file(error, "--config", "TensorRT-LLM refuses it", remedy)
        problems.found += found.problems
        return {}
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        remedy = "write one option: value on each line, as in max_batch_size: 64"
        says = "TensorRT-LLM refuses it: it is not a mapping at its top"
        problems.found.append(Problem(path=("--config",), file=path, line=1, message=says, remedy=remedy))
        return {}
    return data
