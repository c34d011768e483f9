"""The command line of ``trtllm-serve`` and its YAML file, as two mappings of the engine's own names."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from capture_planner.codec import read
from capture_planner.engines.tensorrt_llm.values import Notes, integer, names
from capture_planner.errors import InvalidDocument

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


@attrs.define
class Given:
    """What a command line gives."""

    values: dict[str, Any] = attrs.Factory(dict)
    """Under the engine's own names."""
    spelled: dict[str, str] = attrs.Factory(dict)
    """The flag that each came with."""
    file: str | None = None


def read_flags(command: Sequence[str], notes: Notes) -> Given:
    """Return what is given: of a flag that is given twice, the last.

    The program's name, ``serve`` and one model may stand among the flags.
    """
    given = Given()
    words = deque(command)
    while words and words[0] in ("trtllm-serve", "serve"):
        words.popleft()
    models = 0
    while words:
        word = words.popleft()
        if not word.startswith("-"):
            models += 1
            if models > 1:
                notes.refused((word,), "it takes one model, and this is another", remedy="leave it out")
            continue
        name, equals, value = word.partition("=")
        if name in _SWITCHES:
            if equals:
                notes.refused((name,), "it takes no value")
            continue
        known = name in FIELDS or name in _FILES or name in _IGNORED
        if not known:
            notes.refused((name,), "it knows no such flag", remedy=f"known are {', '.join(FLAGS)}")
        if not equals:
            if not words or (not known and words[0].startswith("-")):
                if known:
                    notes.refused((name,), "it needs a value")
                continue
            value = words.popleft()
        if name in _FILES:
            given.file = value
        elif name in FIELDS:
            field = FIELDS[name]
            given.values[field] = value if field in _TEXT else integer(value, (name,), notes)
            given.spelled[field] = name
    return given


def read_file(path: str, notes: Notes) -> Mapping[str, Any]:
    """Return what a YAML file holds; an empty one holds nothing."""
    where = ("--config",)
    try:
        text = read(path)
    except InvalidDocument as error:
        notes.refused(where, f"{path} {error.problems[0].message}")
        return {}
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)  # as PyYAML, which the engine uses
    try:
        data = yaml.load(text)
    except DuplicateKeyError as error:
        notes.unfollowed(where, f"{path}: {error.problem}, of which the last would hold", remedy="keep one")
        return {}
    except (YAMLError, ValueError, RecursionError) as error:
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        notes.refused(where, f"{path} is not YAML: {reason}")
        return {}
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        notes.refused(where, f"{path} is not a mapping at its top")
        return {}
    return data
