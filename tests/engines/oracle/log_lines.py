"""Lines that vLLM 0.33.0 and SGLang 0.5.23 log of their steps, written by their own functions."""

from __future__ import annotations

import ast
import dataclasses
import enum
import io
import logging
import sys
import time
import types
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from support.files import module_at

loading = module_at(Path(__file__).with_name("vllm_loading.py"))
METRICS = "srt.managers.scheduler_components.metrics_reporter"


def captured(formatter: logging.Formatter) -> tuple[logging.Logger, io.StringIO]:
    """Return a logger, and the text that it writes."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(formatter)
    logger = logging.Logger("engine")
    logger.addHandler(handler)
    return logger, text


def vllm_logger(folder: Path, colored: bool) -> tuple[logging.Logger, io.StringIO]:
    """Return a logger with vLLM's own format and formatter."""
    tree = ast.parse((folder / "vllm/logger.py").read_text())
    scope: dict[str, Any] = {"envs": SimpleNamespace(VLLM_LOGGING_PREFIX="")}
    for name in ("_FORMAT", "_DATE_FORMAT"):
        node = next(n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name)
        exec(compile(ast.Module([node], []), "logger.py", "exec"), scope)
    module = module_at(folder / "vllm/logging_utils/formatter.py")
    kind = module.ColoredFormatter if colored else module.NewLineFormatter
    logger, text = captured(kind(scope["_FORMAT"], datefmt=scope["_DATE_FORMAT"]))
    logger.addFilter(lambda record: setattr(record, "vllm_process_name", "APIServer") or True)
    return logger, text


def vllm_iterations(folder: Path, steps: list[dict[str, Any]], colored: bool = False) -> str:
    """Return a log with a line for each step; its keys are the fields of ``SchedulerIterationDetails``."""
    logger, text = vllm_logger(folder, colored)
    stats: dict[str, Any] = {"dataclass": dataclasses.dataclass}
    details = loading.extract(folder, "vllm.v1.metrics.stats", "SchedulerIterationDetails", stats)
    scope: dict[str, Any] = {"logger": logger}
    log = loading.extract(folder, "vllm.v1.metrics.loggers", "_log_iteration_details", scope, owner="LoggingStatLogger")
    name = loading.extract(folder, "vllm.v1.metrics.loggers", "_log_prefix_for_engine", {}, owner="LoggingStatLogger")
    reporter = SimpleNamespace(kv_cache_device="GPU", engine_index=-1)
    reporter._log_prefix_for_engine = lambda engine: name(reporter, engine)
    for step in steps:
        numbers = {key: value for key, value in step.items() if key != "engine"}
        log(reporter, SimpleNamespace(iteration_details=details(**numbers), kv_cache_usage=0.031), step["engine"])
    return text.getvalue()


def vllm_graph_tables(folder: Path, tables: list[list[tuple[int, int, str]]], mode: str) -> str:
    """Return a log with a table for each list of steps: tokens, padded tokens, mode."""
    logger, text = vllm_logger(folder, False)
    scope: dict[str, Any] = {"Counter": Counter, "dataclasses": dataclasses, "logger": logger, "Any": Any}
    scope["CUDAGraphMode"], scope["Callable"] = str, Any
    stat = loading.extract(folder, "vllm.compilation.cuda_graph", "CUDAGraphStat", scope)
    logging_class = loading.extract(folder, "vllm.compilation.cuda_graph", "CUDAGraphLogging", scope)
    table = logging_class(mode, [1, 2, 4, 8, 16])
    for steps in tables:
        for tokens, padded, ran in steps:
            table.observe(stat(tokens, padded, padded - tokens, ran))
        table.log(logger.info)
    return text.getvalue()


def sglang_log(folder: Path, steps: list[dict[str, Any]]) -> str:
    """Return a log of prefills and decodes: ``prefill`` with seqs, tokens and replayed tokens, or ``decode`` with
    requests and whether drafts are verified. Every decode is logged.
    """
    logger, text = captured(logging.Formatter("[%(asctime)s TP0] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    observer = "sglang.srt.managers.scheduler_components.pool_stats_observer"
    pools: dict[str, Any] = {"dataclasses": dataclasses}
    stats = loading.extract(folder, observer, "PoolStats", pools)
    modes = enum.Enum("DisaggregationMode", "NULL PREFILL DECODE")
    disagg = SimpleNamespace(language_only=False)
    scope: dict[str, Any] = {
        "logger": logger, "time": time, "DisaggregationMode": modes, "LOG_FORWARD_ITERS": False,
        "RECORD_STEP_TIME": False, "ENABLE_METRICS_DEVICE_TIMER": False, "get_disagg": lambda: disagg,
        "get_spec": lambda: SimpleNamespace(speculative_num_draft_tokens=4, speculative_num_steps=3),
    }  # fmt: skip
    owner = "SchedulerMetricsReporter"
    names = ("report_prefill_stats", "report_decode_stats")
    prefill, decode = (loading.extract(folder, f"sglang.{METRICS}", name, scope, owner=owner) for name in names)
    ragged = types.ModuleType("sglang.srt.speculative.ragged_verify")
    kinds = enum.Enum("RaggedVerifyMode", "OFF CAP_ACCEPT")
    ragged.RaggedVerifyMode, ragged.read_ragged_verify_mode = kinds, lambda: kinds.OFF  # type: ignore[attr-defined]
    parents = {name: types.ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.speculative")}
    with patch.dict(sys.modules, parents | {ragged.__name__: ragged}):
        for step in steps:
            reporter = MagicMock()
            reporter.is_stats_logging_rank, reporter.current_scheduler_metrics_enabled = True, False
            reporter.enable_mfu_metrics, reporter.decode_log_interval = False, 1
            reporter.scheduler_status_logger, reporter._graph_backend_label = None, "cuda graph"
            reporter.last_decode_stats_tic = reporter.last_prefill_stats_tic = time.perf_counter() - 0.01
            reporter.forward_ct_decode, reporter.num_generated_tokens = 0, 12
            reporter.step_time_dict = defaultdict(list)
            reporter.scheduler.waiting_queue = []
            reporter.scheduler.disaggregation_mode = modes.NULL
            pool = stats(full_num_used=3456, full_token_usage=0.05, full_available_size=1, full_evictable_size=0)
            if step.get("hybrid"):
                pool = dataclasses.replace(
                    pool, is_hybrid_swa=True, swa_num_used=100, swa_token_usage=0.01, is_hybrid_ssm=True,
                    mamba_num_used=3, mamba_usage=0.2,
                )  # fmt: skip
            reporter.scheduler.pool_stats_observer.get_pool_stats.return_value = pool
            if "prefill" in step:
                seqs, tokens, replayed = step["prefill"]
                counts = SimpleNamespace(
                    log_input_tokens=tokens, log_replay_tokens=replayed, log_hit_tokens=7, num_new_seqs=seqs,
                    new_token_ratio=0.5, num_running_reqs=SimpleNamespace(total=12), num_pending_tokens=3,
                )  # fmt: skip
                prefill(reporter, MagicMock(forward_iter=9), counts, False)
            else:
                requests, speculative = step["decode"]
                reporter.scheduler.spec_algorithm.is_none.return_value = not speculative
                reporter.scheduler.spec_algorithm.is_dspark.return_value = False
                reporter.spec_num_accept_tokens, reporter.spec_num_forward_ct = 24 * requests, 10 * requests
                reporter.spec_num_correct_drafts = 14 * requests
                reporter.spec_num_cap_tokens = reporter.spec_num_block_accept_tokens = 0
                decode(reporter, True, MagicMock(reqs=[None] * requests, forward_iter=9))
    return text.getvalue()


def forward_passes(folder: Path, steps: list[dict[str, Any]]) -> str:
    """Return messages as JSON lines, encoded by msgspec; the keys of a step are those of the scheduled requests."""
    import msgspec

    path = folder / "sglang/srt/observability/forward_pass_metrics.py"
    module = types.ModuleType("forward_pass_metrics")
    with patch.dict(sys.modules, {module.__name__: module}):  # msgspec looks annotations up in the module
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
    lines = []
    for index, step in enumerate(steps):
        scheduled = module.ScheduledRequestMetrics(**step)
        metrics = module.ForwardPassMetrics(
            worker_id="0", counter_id=index, wall_time=0.0098, scheduled_requests=scheduled
        )
        lines.append(msgspec.json.encode(metrics).decode())
    return "\n".join(lines) + "\n"
