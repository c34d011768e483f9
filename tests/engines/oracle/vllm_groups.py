"""The attention groups of vLLM's layers, and the modes of its drafters, by the engine's own code."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.files import module_at

parts = module_at(Path(__file__).with_name("vllm_parts.py"))


class Groups:
    """What of ``VllmOracle`` stands for loading models; no layer is made."""

    _attn_utils: Any
    _fa_utils: Any
    _flash_attn: Any
    _support: Any

    @staticmethod
    def _legacy_draft_modes(config: Any, mode: Any) -> list[list[Any]]:
        """Have a drafter of model runner V1 make its keys; return the mode that it makes them for."""
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

        speculative = config.speculative_config
        if speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
            return []
        asked: list[Any] = []
        dispatcher = SimpleNamespace(initialize_cudagraph_keys=asked.append)
        read = SimpleNamespace(speculative_config=speculative, cudagraph_dispatcher=dispatcher)
        SpecDecodeBaseProposer.initialize_cudagraph_keys(read, mode)
        return [[0, asked[0].name]]

    def _draft_group(self, config: Any) -> Any:
        from vllm.config import set_current_vllm_config

        speculative = config.speculative_config
        independent = speculative.uses_draft_model()
        read = SimpleNamespace(
            speculative_config=speculative, vllm_config=config, draft_model_config=speculative.draft_model_config
        )
        if not config.use_v2_model_runner:
            from vllm.v1.spec_decode import draft_model, llm_base_proposer

            kind = draft_model.DraftModelProposer if independent else llm_base_proposer.SpecDecodeBaseProposer
            with parts.super_of(kind, read) as self_:
                if independent:
                    self_._raise_if_draft_tp_mismatch()
                draft = kind._create_draft_vllm_config(self_)
        elif independent:
            from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as standalone

            standalone.get_model = lambda vllm_config, **options: vllm_config
            draft = standalone.StandaloneARSpeculator.load_draft_model(read, None, set())
        elif speculative.use_dflash() or speculative.use_dspark():
            draft = parts.parallel_configuration(config)
        else:
            draft = speculative.apply_draft_overrides(config)
        # The loaders take the draft's model beside the configuration.
        draft = copy.copy(draft)
        draft.model_config = speculative.draft_model_config
        backends = importlib.import_module("vllm.compilation.backends")
        tag = "dspark_head" if speculative.use_dspark() else "draft_model"
        with set_current_vllm_config(draft), backends.set_model_tag(tag):
            return self._group(draft, "draft")

    def _group(self, config: Any, layer: str, attn_type: str = "decoder") -> Any:
        """Return the attention group of one layer, with the engine's backend and builder."""
        from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
        from vllm.v1.attention.selector import get_attn_backend
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

        model, cache = config.model_config, config.cache_config
        # As the layers do it when they are made.
        scheme = getattr(config.quant_config, "kv_cache_scheme", None)
        if scheme is not None and cache.cache_dtype == "auto" and not model.use_mla:
            cache.cache_dtype = "fp8"
        options = {"num_heads": model.get_num_attention_heads(config.parallel_config)}
        options["use_sparse"] = parts.is_sparse(config)
        if not model.use_mla:
            options = {
                "attn_type": attn_type,
                "has_sink": model.architecture == "GptOssForCausalLM",
                "use_mm_prefix": model.is_mm_prefix_lm,
                "has_sliding_window": model.get_sliding_window() is not None,
                "use_per_head_quant_scales": scheme is not None and scheme.get("strategy") == "attn_head",
            }
        backend = parts.backend_of_layer(config) or get_attn_backend(
            model.get_head_size(), model.dtype, cache.cache_dtype, use_mla=model.use_mla, **options
        )
        builder = backend.get_builder_cls()
        if builder.__module__ == self._flash_attn.__name__:
            # The class asks when its module is imported; here, one import serves many machines.
            builder._cudagraph_support = eval(self._support, {**vars(self._flash_attn), **vars(self._fa_utils)})
        chunk = model.attention_chunk_size
        if chunk is not None:
            builder = create_chunked_local_attention_backend(backend, chunk).get_builder_cls()
        kv_heads = model.get_num_kv_heads(config.parallel_config)
        kind = MLAAttentionSpec if model.use_mla else FullAttentionSpec
        spec = kind(
            block_size=16,
            num_kv_heads=kv_heads,
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
        )
        return parts.group(backend, builder, spec, layer)

    def _give_support(self, speculator: Any, config: Any, groups: Any) -> None:
        """Give a DFlash speculator what its ``__init__`` and ``set_attn`` find out."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal

        speculator.vllm_config = parts.without_context(config)
        draft = config.speculative_config.draft_model_config.hf_config
        anchored = config.speculative_config.use_dspark() and getattr(draft, "sample_from_anchor", True)
        speculator.num_query_per_req = config.num_speculative_tokens + (0 if anchored else 1)
        speculator.requires_non_causal = dflash_has_any_non_causal(draft)
        own = speculator.attn_vllm_config
        with set_current_vllm_config(own):
            speculator.attn_cg_support = self._attn_utils.get_attn_cg_support(groups, own)

    def _draft_modes(self, config: Any, groups: Any, mode: Any) -> list[list[Any]]:
        """Return (query length, mode) of the managers that the engine's speculator makes, in its order."""
        from vllm.v1.worker.gpu.spec_decode import init_speculator
        from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash
        from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator as modules
        from vllm.v1.worker.gpu.spec_decode.ngram import speculator as ngram
        from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as chain

        if config.speculative_config is None:
            return []
        made: list[list[Any]] = []

        def manager(vllm_config: Any, device: Any, mode: Any, decode_query_len: int) -> None:
            made.append([decode_query_len, mode.name])

        dflash.DFlashCudaGraphManager = chain.SpeculatorCudaGraphManager = modules.SpeculatorCudaGraphManager = manager
        for kind in (DraftModelSpeculator, ngram.NgramGPUSpeculator, *parts.subclasses(DraftModelSpeculator)):
            if "__init__" in vars(kind):
                kind.__init__ = parts.unmade
        speculator = init_speculator(config, None, None)
        speculator.vllm_config, speculator.device = config, None
        speculator.num_speculative_steps = config.num_speculative_tokens
        if config.speculative_config.use_dflash() or config.speculative_config.use_dspark():
            self._give_support(speculator, config, groups[1:])
        speculator.init_cudagraph_manager(mode)
        return made
