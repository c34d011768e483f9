"""Command lines of vLLM that are hardly ever drawn, each with vLLM's answer on an H100.

The oracle gives them to vLLM, and the tests to us. Numbers in comments are lines of the release's files.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from engines.generators.vllm import Case

REFUSED: dict[str, Any] = {}
"""Marks a command line that vLLM refuses, and so do we."""
IGNORED: dict[str, Any] = {"ignored": True}
"""Marks a command line that vLLM refuses over a value with no effect on graphs, which we ignore."""


_V1 = "VLLM_USE_V2_MODEL_RUNNER=0 {models}/dense"
_LAUNCHES = (
    *("--data-parallel-external-lb", "-dp 2 --data-parallel-external-lb", "--data-parallel-rank 0"),
    *("-dp 2 --data-parallel-rank 2", "-dp 2 --data-parallel-rank -1", "--data-parallel-size-local 2"),
    *("-dp 2 --data-parallel-hybrid-lb", "-dp 2 --data-parallel-size-local 3"),
    "-dp 2 --data-parallel-hybrid-lb --data-parallel-external-lb --data-parallel-rank 0",
    "-dp 2 --data-parallel-rank 0 --data-parallel-size-local 2",
)
_NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
_SYNTHETIC = {"rejection_sample_method": "synthetic"}
_IGNORED_PARTS: tuple[dict[str, Any], ...] = (
    {"rejection_sample_method": "foo"},
    {"rejection_sample_method": None},
    {"draft_sample_method": "foo"},
    {"moe_backend": "foo"},
    {"draft_lm_head_quantization": "foo"},
    {"draft_lm_head_quantization": "fp8"},
    {"index_share_for_mtp_iteration": True},
    {"dspark_draft_topk": 0},
    {"revision": 5},
    {"code_revision": 5},
    {"fly_window_size": 0},
    {"rejection_sample_method": "fly", "fly_window_size": 3},
    {"rejection_sample_method": "fly", "num_speculative_tokens": 1},
    _SYNTHETIC,
    {**_SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.4]},
    {**_SYNTHETIC, "synthetic_acceptance_rates": [0.4, 0.5, 0.3]},
    {**_SYNTHETIC, "synthetic_acceptance_rates": [1.5, 0.5, 0.3]},
    {**_SYNTHETIC, "synthetic_acceptance_length": 5},
    {**_SYNTHETIC, "synthetic_acceptance_length": 2, "synthetic_acceptance_rates": [0.5, 0.4, 0.3]},
    {"synthetic_acceptance_rates": [0.5, 0.4, 0.3]},
    {"synthetic_acceptance_length": 2.5},
)
_TAKEN_PARTS: tuple[dict[str, Any], ...] = (
    {"kv_cache_dtype": "foo"},
    {"quantization": "foo"},
    {"dspark_draft_topk": 4},
    {"xpress_topc": 4},
    {"rejection_sample_method": "block", "draft_sample_method": "probabilistic", "moe_backend": "triton"},
    {"rejection_sample_method": "fly", "fly_window_size": 2},
    {**_SYNTHETIC, "synthetic_acceptance_rates": [1, 0.5, 0.5]},
    {**_SYNTHETIC, "synthetic_acceptance_length": 4},
)
_IGNORED_OF_DRAFTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("eagle3", "eagle3", {"dspark_draft_topk": 4}),
    ("eagle3", "eagle3", {"xpress_topc": 4}),
    ("dspark", "dspark", {"dspark_draft_topk": 999999}),
    ("draft_model", "draft", {"quantization": "foo"}),
    ("draft_model", "draft", {"use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"}),
    ("draft_model", "draft", {"use_heterogeneous_vocab": True, "use_local_argmax_reduction": True}),
)
_REFUSED_FIELDS = (
    *("-cc.splitting_ops=[1]", "-cc.splitting_ops=3", "-cc.splitting_ops=x"),
    '-ac \'{"flash_attn_version": "3"}\'',
)
_IGNORED_FIELDS = (
    *("-cc.custom_ops=[1]", "-cc.custom_ops='[\"foo\"]'", "-cc.custom_ops=3"),
    *('-cc.custom_ops=\'["all","none"]\'', "-cc.compile_ranges_endpoints=[0]"),
    *("-cc.compile_ranges_endpoints='[\"x\"]'", "-cc.cudagraph_num_of_warmups=x"),
    *("-cc.cudagraph_copy_inputs=maybe", "-cc.compile_cache_save_format=foo"),
)
_TAKEN_FIELDS = (
    *('-cc.custom_ops=\'["all","-foo"]\'', "-cc.compile_ranges_endpoints=[8,16]"),
    *("-cc.compile_ranges_endpoints=null", "-cc.splitting_ops=null"),
    *("-cc.cudagraph_num_of_warmups=-1", "-cc.compile_cache_save_format=unpacked"),
    "-ac.flash_attn_version=3",
)
_CHAIN = {"method": "mtp", "draft": [[3, "FULL_AND_PIECEWISE"], [1, "FULL_DECODE_ONLY"]]}


def _drafts(target: str, **config: Any) -> str:
    return f"{{models}}/{target} -sc {shlex.quote(json.dumps(config))}"


def _adaptive(target: str, method: str) -> str:
    config = {"method": method, "model": f"{{models}}/{method}", "num_speculative_tokens": 3}
    return _drafts(target, **config, enable_adaptive_verification=True)


def _suffix(part: str, value: Any) -> str:
    return _drafts("dense", method="suffix", num_speculative_tokens=3, **{f"suffix_decoding_{part}": value})


def _connects(name: str | None, **parts: Any) -> str:
    return f"{{models}}/dense --kv-transfer-config {shlex.quote(json.dumps(_connector(name, **parts)))}"


def _connector(name: str | None, role: str | None = "kv_both", **extra: Any) -> dict[str, Any]:
    found = {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}
    return {key: value for key, value in found.items() if value is not None}


DIRECTED: dict[str, dict[str, Any]] = {
    # config/vllm.py 3422: a copy of an MLA target's configuration has the draft's KV cache dtype
    _drafts("mla", **_NGRAM | {"method": "eagle3", "model": "{models}/eagle3", "kv_cache_dtype": "nvfp4"}): REFUSED,
    _drafts("dense", **_NGRAM | {"method": "eagle3", "model": "{models}/eagle3", "kv_cache_dtype": "fp8"}): {"K": 3},
    # config/vllm.py: a state of another length than the draft leaves to the model; prefix caching wants chunks
    _drafts("hybrid", method="dflash", model="{models}/causal", num_speculative_tokens=4)
    + " --no-enable-prefix-caching --disable-chunked-prefill --max-num-seqs 256": REFUSED,
    "{models}/hybrid --no-enable-prefix-caching": {"runner": "v2"},
    "{models}/hybrid --no-enable-prefix-caching --mamba-block-size 64": REFUSED,
    # config/speculative.py 1732: without a number, the depth of the tree is one; 1741: its ranges
    _drafts("dense", method="suffix", suffix_decoding_max_tree_depth=7): {"K": 7},
    _drafts("dense", method="suffix"): {"K": 24},
    _suffix("max_tree_depth", 0): IGNORED,
    _suffix("max_cached_requests", -1): IGNORED,
    _suffix("max_spec_factor", -0.5): IGNORED,
    _suffix("min_token_prob", 1.5): IGNORED,
    _suffix("min_token_prob", None): IGNORED,
    # config/speculative.py 1487, 1939: modules say nothing of K
    _drafts("mla", method="mtp"): REFUSED,
    _drafts("mla", method="mtp", model="{models}/mla"): REFUSED,
    _drafts("mla", model="{models}/mla"): REFUSED,
    _drafts("dense", method="dspark"): REFUSED,
    _drafts("dense", method="dspark", model="{models}/dspark"): {"K": 7},
    # config/speculative.py 717 to 1020: types and architectures with modules, whatever keys they have; 1499
    _drafts("hybrid", method="qwen3_next_mtp", num_speculative_tokens=2): _CHAIN,
    _drafts("glm", method="mtp", num_speculative_tokens=2): _CHAIN,
    _drafts("ernie", method="ernie_mtp", num_speculative_tokens=2): _CHAIN,
    _drafts("unstated", method="mtp", num_speculative_tokens=2): _CHAIN,
    _drafts("named", method="mtp", num_speculative_tokens=2): REFUSED,
    # config/speculative.py 1432 to 1502: the method is read off the draft
    _drafts("dense", model="{models}/hybrid", num_speculative_tokens=2): _CHAIN,
    _drafts("dense", method="draft_model", model="{models}/glm", num_speculative_tokens=2): _CHAIN,
    _drafts("dense", model="{models}/dsk", num_speculative_tokens=3): {
        "method": "dspark",
        "draft": [[3, "FULL_DECODE_ONLY"]],
    },
    _drafts("dense", method="draft_model", model="{models}/dsk"): {"method": "dspark", "K": 7},
    "VLLM_USE_V2_MODEL_RUNNER=0 " + _drafts("dense", model="{models}/dsk"): REFUSED,
    # transformers_utils/configs/eagle.py 50: the architecture that is looked for
    **{
        _drafts("dense", method="eagle", model=f"{{models}}/{model}", num_speculative_tokens=2): REFUSED
        for model in ("eagle3", "short", "moe", "oss", "hybrid")
    },
    _drafts("dense", method="eagle", model="{models}/mla", num_speculative_tokens=2): {"method": "eagle"},
    _drafts("dense", method="eagle3", model="{models}/short", num_speculative_tokens=2): {"method": "eagle3"},
    _drafts("dense", method="eagle3", model="{models}/mla", num_speculative_tokens=2): REFUSED,
    _drafts("dense", method="eagle3", model="{models}/dflash", num_speculative_tokens=2): REFUSED,
    _drafts("dense", method="dflash", model="{models}/eagle3", num_speculative_tokens=2): REFUSED,
    _drafts("dense", method="dflash", model="{models}/short", num_speculative_tokens=2): REFUSED,
    # v1/cudagraph_dispatcher.py 48: pieces want attention split off
    f"{_V1} -cc.splitting_ops='[\"vllm::unified_attention_with_output\"]'": REFUSED,
    f"{_V1} -cc.splitting_ops='[\"a\"]'": REFUSED,
    f"{_V1} -cc.splitting_ops='[\"a\"]' -cc.cudagraph_mode=PIECEWISE": REFUSED,
    f"{_V1} -cc.splitting_ops='[\"a\"]' -cc.cudagraph_mode=FULL": {"mode": "FULL"},
    f"{_V1} -cc.splitting_ops='[\"a\"]' -cc.use_inductor_graph_partition=true": REFUSED,
    f"{_V1} -cc.use_inductor_graph_partition=true -cc.backend=eager": REFUSED,
    f"{_V1} -cc.use_inductor_graph_partition=true": {"mode": "FULL_AND_PIECEWISE"},
    _drafts("dense", method="suffix") + " -cc.splitting_ops='[\"a\"]'": REFUSED,
    "{models}/dense -cc.splitting_ops='[\"a\"]'": {"mode": "FULL_AND_PIECEWISE"},
    # v1/cudagraph_dispatcher.py 92: sizes to compile for are on the grid
    f"{_V1} -cc.compile_sizes=[3]": IGNORED,
    f"{_V1} -cc.compile_sizes=[-8]": IGNORED,
    f"{_V1} -cc.compile_sizes=[8,0,513]": {"runner": "v1"},
    f"{_V1} -cc.compile_sizes=[3] -cc.cudagraph_mode=NONE": {"mode": "NONE"},
    f"{_V1} -cc.compile_sizes='[\"cudagraph_capture_sizes\"]'": {"runner": "v1"},
    _drafts("dense", method="suffix") + " -cc.compile_sizes='[\"cudagraph_capture_sizes\"]'": IGNORED,
    "{models}/dense -cc.compile_sizes=[3]": {"runner": "v2"},
    "{models}/dense -cc.compile_sizes='[1,\"x\"]'": IGNORED,
    "{models}/dense --enforce-eager -cc.compile_sizes='[1,\"x\"]'": IGNORED,
    "{models}/dense -cc.compile_sizes=8": IGNORED,
    # v1/attention/backends/mamba2_attn.py 108, 136: Mamba 2 takes what adaptive verification leaves of a batch
    _adaptive("falcon", "eagle3"): {"varlen": True, "mode": "FULL_AND_PIECEWISE"},
    _adaptive("falcon", "dspark"): {"varlen": True, "mode": "FULL_AND_PIECEWISE"},
    _adaptive("falcon", "eagle3") + " --attention-backend FLASHINFER": REFUSED,
    _adaptive("hybrid", "eagle3"): REFUSED,
    _adaptive("conv", "eagle3"): REFUSED,
    _adaptive("chunked", "eagle3"): REFUSED,
    # envs.py 778, 2149: any whole number, and nothing but 1
    "VLLM_USE_V2_MODEL_RUNNER=2 {models}/dense": {"runner": "v2"},
    "VLLM_USE_V2_MODEL_RUNNER=00 {models}/dense": {"runner": "v1"},
    "VLLM_USE_V2_MODEL_RUNNER=x {models}/dense": REFUSED,
    "VLLM_USE_BREAKABLE_CUDAGRAPH=true {models}/dense": {"compile": "VLLM_COMPILE"},
    "VLLM_USE_BREAKABLE_CUDAGRAPH=1 {models}/dense": {"compile": "NONE"},
    "{models}/dense -O01": {"mode": "PIECEWISE"},
    "{models}/dense -O 01": REFUSED,
    # config/scheduler.py 69
    "{models}/dense --max-num-active-seqs 0": IGNORED,
    "{models}/dense --max-num-active-seqs 1": {"max_num_seqs": 1024},
    # config/cache.py, config/scheduler.py, config/model.py: ranges of fields
    **{
        f"{{models}}/dense {words}": IGNORED
        for words in (
            *("--gpu-memory-utilization 0", "--gpu-memory-utilization 1.5", "--gpu-memory-utilization nan"),
            *("--long-prefill-token-threshold 999999", "--long-prefill-token-threshold -1"),
            *("--stream-interval 0", "--max-logprobs -2"),
        )
    },
    "{models}/dense --gpu-memory-utilization 1 --max-logprobs -1": {"runner": "v2"},
    # engine/arg_utils.py 2383 to 2530, config/parallel.py 545: what can be launched on one node
    **{f"{{models}}/dense {words}": IGNORED for words in ("-dp 2 --data-parallel-rank 0", *_LAUNCHES)},
    **{f"{{models}}/moe {words}": IGNORED for words in (*_LAUNCHES, "--enable-eplb", "--enable-eplb -ep")},
    "{models}/moe -dp 2 --data-parallel-rank 0": {"mode": "FULL_AND_PIECEWISE"},
    "{models}/moe -dp 2 --data-parallel-hybrid-lb --data-parallel-size-local 1": {"max_num_seqs": 1024},
    "{models}/moe --enable-eplb -ep -tp 2": {"max_num_seqs": 1024},
    # config/speculative.py 435 to 660, 1583 to 1660, 1939 to 2030: parts beside the graphs
    _drafts("dense", **_NGRAM | {"kv_cache_dtype": 5}): REFUSED,
    _drafts("dense", **_NGRAM | {"method": "custom_class"}): REFUSED,
    **{_drafts("dense", **_NGRAM | parts): IGNORED for parts in _IGNORED_PARTS},
    **{_drafts("dense", **_NGRAM | parts): {"K": 3} for parts in _TAKEN_PARTS},
    **{
        _drafts("dense", **_NGRAM | {"method": method, "model": f"{{models}}/{model}"} | parts): IGNORED
        for method, model, parts in _IGNORED_OF_DRAFTS
    },
    _drafts("dense", **_NGRAM | {"method": "eagle3", "model": "{models}/eagle3", "kv_cache_dtype": "foo"}): REFUSED,
    _drafts("mla", method="mtp", num_speculative_tokens=3, index_share_for_mtp_iteration=True): {"K": 3},
    # config/compilation.py, config/attention.py: kinds of fields
    **{f"{{models}}/dense {words}": REFUSED for words in _REFUSED_FIELDS},
    **{f"{{models}}/dense {words}": IGNORED for words in _IGNORED_FIELDS},
    **{f"{{models}}/dense {words}": {"runner": "v2"} for words in _TAKEN_FIELDS},
    # kv_connector/v1/lmcache_connector.py 70, multi_connector.py 143: which connectors work between layers
    _connects("LMCacheConnectorV1", use_layerwise=True): {"mode": "PIECEWISE"},
    _connects("LMCacheConnectorV1", use_layerwise=False): {"mode": "FULL_AND_PIECEWISE"},
    _connects("LMCacheMPConnector", use_layerwise=True): {"mode": "FULL_AND_PIECEWISE"},
    _connects(
        "MultiConnector", connectors=[_connector("NixlConnector"), _connector("LMCacheConnectorV1", use_layerwise=True)]
    ): {"mode": "PIECEWISE"},
    _connects("MultiConnector", connectors=[_connector("NixlConnector", use_layerwise=True)]): {
        "mode": "FULL_AND_PIECEWISE"
    },
    # config/model.py 570: a part that the model lacks is added, without attention heads
    **{
        f"{{models}}/{name} --hf-overrides '{{\"text_config\": {fields}}}'": REFUSED
        for name, fields in (("dense", "{}"), ("hybrid", '{"rope_scaling": null}'), ("whisper", "{}"))
    },
    """{models}/vision --hf-overrides '{"text_config": {"max_position_embeddings": 4096}}'""": {"max_model_len": 4096},
    # config/kv_transfer.py 95, kv_connector/factory.py 102
    _connects("LMCacheConnectorV1", role=None): IGNORED,
    _connects("LMCacheConnectorV1", role="both"): IGNORED,
    _connects("P2pNcclConnector"): REFUSED,
    _connects("MultiConnector", connectors=[_connector("Foo")]): REFUSED,
    _connects("MultiConnector", connectors=[_connector("NixlConnector", role=None)]): IGNORED,
    _connects("HiSparseConnector"): IGNORED,
    _connects(None): IGNORED,
}


_EAGLE3 = _NGRAM | {"method": "eagle3", "model": "{models}/eagle3"}
_OVERLAP = "-dp 2 --enable-expert-parallel --all2all-backend deepep_low_latency"
_ENCODER = '"cudagraph_mm_encoder": true, "encoder_cudagraph'
BOUNDARIES: tuple[tuple[str, str], ...] = (
    ("h100", "{models}/dense --max-cudagraph-capture-size 1"),
    ("h100", "{models}/dense --max-num-seqs 64 --max-num-batched-tokens 64 --enable-lora"),
    ("h100", "{models}/dense --max-model-len 32768"),
    ("h100", "{models}/dense -tp 16 -dcp 2"),
    ("h100", "{models}/dense -cc.mode=0"),
    ("h100", "{models}/dense -cc.mode=4"),
    ("h100", "{models}/moe --enable-expert-parallel --all2all-backend deepep_low_latency"),
    ("h100", f"VLLM_USE_V2_MODEL_RUNNER=1 {{models}}/moe {_OVERLAP} --enable-dbo"),
    (
        "h100",
        f"{{models}}/moe {_OVERLAP} --ubatch-size 2 --dbo-decode-token-threshold 2 --dbo-prefill-token-threshold 2",
    ),
    ("a100", "{models}/quantized"),
    ("b200", "{models}/mla --attention-backend CUTLASS_MLA"),
    ("b200", "{models}/sparse -tp 8"),
    ("h100", "{models}/gemma --kv-cache-dtype fp8"),
    ("b200", "{models}/dense --kv-cache-dtype fp8 --attention-backend FLASH_ATTN"),
    ("b200", "{models}/dense --kv-cache-dtype fp8 --attention-backend FLASH_ATTN -ac.flash_attn_version=3"),
    ("h100", _drafts("wide", **_NGRAM) + " --attention-backend FLASHINFER"),
    ("a100", "{models}/dense --attention-backend FLASHINFER"),
    ("gb10", "{models}/dense --attention-backend FLASHINFER"),
    ("h100", "{models}/oss --attention-backend FLASH_ATTN"),
    ("h100", _drafts("dense", **_EAGLE3, num_speculative_tokens_per_batch_size=[[1, 4, 3], [4, 8, 1]])),
    (
        "h100",
        _drafts("dense", **_NGRAM | {"method": "draft_model"}, model="{models}/draft", max_model_len=8192)
        + " --max-model-len 8192",
    ),
    (
        "h100",
        f"{{models}}/vision -cc '{{{_ENCODER}_token_budgets\": [8, 16], "
        '"encoder_cudagraph_max_vision_items_per_batch": 8}\'',
    ),
    ("h100", "{models}/vision --max-num-batched-tokens 64 --max-num-seqs 8 -cc.cudagraph_mm_encoder=true"),
    ("h100", f"{{models}}/vision -cc '{{{_ENCODER}_token_budgets\": [0, 16]}}'"),
    (
        "h100",
        """{models}/vision --hf-overrides '{"architectures": ["Qwen2_5_VLForConditionalGeneration"], """
        """"rope_scaling": null, "rope_parameters": null, "text_config": {"max_position_embeddings": 4096}}'""",
    ),
    ("h100", "{models}/dense -O"),
    ("h100", "{models}/dense --max-model-len 0 --max-num-batched-tokens 2048"),
    ("h100", "{models}/dense -cc.cudagraph_mode=FULL"),
    ("h100", "{models}/short --no-enable-chunked-prefill --max-num-batched-tokens 4096"),
    ("h100", "{models}/whisper"),
    ("h100", "{models}/moe --enable-dbo --all2all-backend deepep_high_throughput"),
    ("h100", "{models}/narrow --attention-backend TRITON_ATTN"),
    ("a100", "{models}/wide --dtype bfloat16"),
    ("b200", "{models}/large --kv-cache-dtype fp8 --attention-backend FLASH_ATTN"),
    ("b200", "{models}/wide --block-size 64 --attention-backend FLASH_ATTN"),
    ("b200", "{models}/sparse --attention-backend FLASH_ATTN_MLA_SPARSE_FA4"),
    ("h100", _drafts("dense", **_NGRAM) + " --attention-backend FLASHINFER -ac.use_trtllm_attention=false"),
    ("h100", _drafts("dense", model="ngram", num_speculative_tokens=3)),
    ("h100", _drafts("dense", **_EAGLE3) + " --max-num-batched-tokens 3 --max-num-seqs 3"),
    ("h100", _drafts("mla", method="mtp", num_speculative_tokens=3)),
    (
        "h100",
        _drafts(
            "dense",
            **_EAGLE3 | {"num_speculative_tokens": 1},
            num_speculative_tokens_per_batch_size=[[1, 4, 1], [5, 5, 0]],
        ),
    ),
    ("h100", _adaptive("falcon", "eagle3")),
    ("a100", _drafts("dense", **_NGRAM | {"method": "dflash", "model": "{models}/dflash"})),
)
"""Environment and command line at the values where a comparison of a rule changes its answer."""


def at_boundaries() -> Iterator[Case]:
    """Yield the command lines of ``BOUNDARIES``, and one with a file."""
    yield from (_case(line, environment) for environment, line in BOUNDARIES)
    command = ("{models}/dense", "--config", "{models}/flags.yaml")
    yield Case(command=command, environment="h100", file="max-num-seqs: 64")


def directed() -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield each command line with the parts of the answer that it is about; ``REFUSED`` for a refusal."""
    yield from ((_case(line, "h100"), answer) for line, answer in DIRECTED.items())


def _case(line: str, environment: str) -> Case:
    words = shlex.split(line)
    variables = []
    while words[0].startswith("VLLM_"):
        name, _, value = words.pop(0).partition("=")
        variables.append((name, value))
    return Case(command=tuple(words), environment=environment, variables=tuple(variables))
