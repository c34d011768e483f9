"""Flags and file -> ``ServeSettings``: what the engine's configuration classes make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capture_planner_tensorrt_llm.drafting import read_drafting
from capture_planner_tensorrt_llm.flags import OLD_KEYS, OPTIONS, options_of, read_flags
from capture_planner_tensorrt_llm.settings import GraphConfig, ServeSettings
from capture_planner_tensorrt_llm.values import Path, Problems, boolean, integer, mapping, only, shown

_CONFIG = "--config"
_READ = ("enable_attention_dp", "cuda_graph_config", "speculative_config")
_ENCODER = ("num_tokens", "max_num_token", "seq_lens", "max_seq_len")
# The most requests of a plan; of tokens it is 1 << 20.
_MOST = {"max_batch_size": 1 << 16}
_SPARSE = {"dsa": True, "deepseek_v4": False}
"""Sparse attention that skips its indexer for short sequences, each with whether it does so by default."""


def resolve(command: Sequence[str]) -> ServeSettings:
    """Return the settings of a command line; raises ``FlagError`` with all that is wrong with it."""
    problems = Problems()
    line = read_flags(command, problems)
    in_file = options_of(line, problems)
    keys = {row["key"] for row in OPTIONS["flags"].values()}
    keys |= {*_READ, *OPTIONS["ignored_keys"], *OPTIONS["emulated_values"]}
    only(in_file, keys, (_CONFIG,), problems, OLD_KEYS)
    values: dict[str, Any] = {**in_file, **line.values}
    given = values.get("sparse_attention_config")
    sparse: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    algorithm = sparse.get("algorithm")
    for name, emulated in OPTIONS["emulated_values"].items():
        # Of these two algorithms one setting alone changes graphs, which ``by_length`` carries.
        if name == "sparse_attention_config" and algorithm in _SPARSE:
            continue
        if name in values and values[name] not in emulated["values"]:
            problems.skip(_where(name, line.spelled), emulated["otherwise"])
    sizes = {
        name: _size(values, name, line.spelled, problems)
        for name in ("max_batch_size", "max_num_tokens", "tensor_parallel_size")
    }
    speculative = values.get("speculative_config")
    drafting = None if speculative is None else read_drafting(speculative, problems)
    graphs: GraphConfig | None = GraphConfig()
    if "cuda_graph_config" in values:
        graphs = _graphs(values["cuda_graph_config"], problems)
    dp = "enable_attention_dp"
    settings = ServeSettings(
        max_batch_size=sizes["max_batch_size"] or 2048,
        max_num_tokens=sizes["max_num_tokens"] or 8192,
        tensor=sizes["tensor_parallel_size"] or 1,
        attention_dp=dp in values and boolean(values[dp], (_CONFIG, dp), problems),
        graphs=graphs,
        drafting=drafting,
        by_length=algorithm in _SPARSE and bool(sparse.get("skip_indexer_for_short_seqs", _SPARSE[algorithm])),
        sources={name: "flag" if name in line.values else "file" for name in values},
        overridden=tuple(sorted(name for name in line.values if name in in_file)),
    )
    if problems:
        raise problems.error(line.placed)
    return settings


def _where(name: str, spelled: Mapping[str, str]) -> Path:
    """Return where a value was given: the flag as it was written, or the key in the file."""
    return (spelled[name],) if name in spelled else (_CONFIG, name)


def _size(values: Mapping[str, Any], name: str, spelled: Mapping[str, str], problems: Problems) -> int | None:
    """Return a number of at least 1; None where it is not given, and the engine's default holds."""
    value, path = values.get(name), _where(name, spelled)
    if value is None:
        if name == "tensor_parallel_size" and name in values and name not in spelled:
            problems.refuse(path, "expected an integer, got null", "give a number, or leave it out")
        return None
    number, most = integer(value, path, problems), _MOST.get(name, 1 << 20)
    if number is not None and not 1 <= number <= most:
        reason = f"nothing can be scheduled with {number}" if number < 1 else f"{number} is more than {most}"
        problems.skip(path, reason, f"give 1 to {most}")
        return None
    return number


def _graphs(value: Any, problems: Problems) -> GraphConfig | None:
    """Return ``cuda_graph_config``; None for null, which is no graphs."""
    path = (_CONFIG, "cuda_graph_config")
    data = None if value is None else mapping(value, path, problems)
    if data is None:
        return None
    # Without a mode, a key of encoders decides.
    mode = data.get("mode", "encode" if any(data.get(key) not in (None, 0) for key in _ENCODER) else "decode")
    if mode == "encode":
        problems.skip(path, "graphs of encoders", "give batch_sizes or max_batch_size")
        return None
    if mode != "decode":
        problems.refuse((*path, "mode"), f"expected decode or encode, got {shown(mode)}", "give decode")
    only(data, ("batch_sizes", "max_batch_size", "enable_padding", "mode"), path, problems, OLD_KEYS)
    sizes = _batch_sizes(data.get("batch_sizes"), (*path, "batch_sizes"), problems)
    top_path = (*path, "max_batch_size")
    top = integer(data.get("max_batch_size", 0), top_path, problems, low=0)
    if sizes and top and top != max(sizes):
        reason = f"it is {top}, and the largest of batch_sizes is {max(sizes)}; they must be equal"
        problems.refuse(top_path, reason, "remove it: batch_sizes is enough")
    if top is not None and top > 1 << 16:
        problems.skip(top_path, f"a size of {top}", f"give at most {1 << 16}")
        top = 0
    padding = boolean(data.get("enable_padding", False), (*path, "enable_padding"), problems)
    return GraphConfig(batch_sizes=sizes or None, max_batch_size=top or 0, enable_padding=padding)


def _batch_sizes(value: Any, path: Path, problems: Problems) -> tuple[int, ...]:
    if value is not None and not isinstance(value, list | tuple):
        problems.refuse(path, f"expected a list, got {shown(value)}", "write it as in [1, 2, 4]")
        return ()
    sizes = []
    for index, item in enumerate(value or ()):
        size = integer(item, (*path, index), problems)
        if size is not None and size < 1:
            problems.skip((*path, index), f"a graph of {size} requests", "give sizes from 1 on")
        elif size is not None:
            sizes.append(size)
    return tuple(sizes)
