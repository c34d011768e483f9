"""Which attention backend runs, and what it supports: vLLM's choice on CUDA.

The order of the backends, the reasons for which each is passed over, and the support level that each one's
metadata builder reports, by machine, model, dtypes and block size.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from capture_planner.engines.parsing import refusal
from capture_planner.modes import GraphSupport
from capture_planner_vllm.model import Model
from capture_planner_vllm.refusals import not_emulated
from capture_planner_vllm.tables import names

FLAG = "--attention-backend"
_SM80, _SM90, _SM121 = (8, 0), (9, 0), (12, 1)
_ORDER = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
_ORDER_SM100 = ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
_MLA_ORDER = {
    10: ("FLASHINFER_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"),
    12: ("TRITON_MLA",),
}
_MLA_ELSE = ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA")
EMULATED = (*_ORDER, *_MLA_ORDER[10])
"""The backends whose support is known here."""

_PLAIN = ("auto", "float16", "bfloat16")
_E4M3 = ("fp8", "fp8_e4m3")
_E5M2 = (*_E4M3, "fp8_e5m2")
_PER_HEAD = ("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")
_CACHES = {
    "FLASH_ATTN": _E4M3,
    "FLASHINFER": (*_E5M2, "nvfp4", "nvfp4_4over6"),
    "TRITON_ATTN": (*_E5M2, *_PER_HEAD),
    "FLEX_ATTENTION": (),
    "FLASH_ATTN_MLA": (),
}
"""KV cache dtypes beside those of the model; MLA backends that are not listed have ``_E4M3``."""
_BLOCKS = {"FLASHMLA": 64, "CUTLASS_MLA": 128, "FLASHINFER_MLA": 32}
"""What a block of the KV cache is a multiple of; 16 for the others."""
_MLA_HEADS = (320, 512, 576)
_NO_DCP = ("FLEX_ATTENTION", "TRITON_ATTN")
_PACKED = "turboquant_"


@attrs.frozen(kw_only=True)
class Attention:
    """What decides a backend: the machine, the model, and the flags about attention and the KV cache."""

    capability: tuple[int, int]
    model: Model
    tensor: int = 1
    decode_context: int = 1
    flash_attn: int | None = None
    """``flash_attn_version`` where a flag sets it."""
    trtllm: bool | None = None
    """``use_trtllm_attention`` where a flag sets it."""
    adaptive: bool = False
    causal: bool = True
    cross: bool = False
    """Whether it is attention of a decoder to an encoder's states."""
    dtype: str = "bfloat16"
    """Of the weights and activations, as resolved."""
    cache: str = "auto"
    """``--kv-cache-dtype``, or what the checkpoint says of it."""
    block: int | None = None
    """``--block-size`` where it is given."""

    @property
    def _quantized(self) -> bool:
        return self.cache not in _PLAIN

    def flash_attn_version(
        self, head_size: int | None = None, *, block: int | None = None, wide: bool = False
    ) -> int | None:
        """Return the FlashAttention that runs here, or None where none does.

        ``wide`` says that the kernel for heads of 256 on Blackwell may run.
        """
        if self.capability < _SM80:
            return None
        major, head = self.capability[0], head_size or 0
        version = self.flash_attn or {9: 3, 10: 4}.get(major, 2)
        if major >= 10 and version == 3:
            version = 4 if major in (10, 11) else 2
        if version == 3 and major == 9 and head > 256:
            version = 4
        if version == 4 and head == 256 and major in (10, 11) and (not wide or self._spoils_wide(block)):
            version = 2
        if version == 4 and major >= 10 and head > 128 and head != 256:
            version = 2
        usable = {2: True, 3: major == 9, 4: major in (9, 10, 11)}[version]
        return version if usable else None

    def _spoils_wide(self, block: int | None) -> bool:
        model = self.model
        paged = block is not None and block % 128 != 0
        return model.sinks or model.soft_cap or self._quantized or paged or self.decode_context > 1

    @property
    def _trtllm_decode(self) -> bool:
        """Whether FlashInfer has a decode kernel here that takes several tokens of each request."""
        if self.trtllm is False:
            return False
        heads, kv_heads = self.model.heads // self.tensor, max(1, self.model.kv_heads // self.tensor)
        grouped = not self.model.heads or heads % kv_heads == 0
        return grouped and (self.capability == _SM90 or self.capability[0] in (10, 12))

    def support(self, backend: str) -> GraphSupport:
        """Return what the model's layers report with a backend on this machine: the least of all."""
        if self.model.chunked:
            return GraphSupport.NEVER
        own = self._support(backend)
        return min(own, GraphSupport.UNIFORM_BATCH) if self.model.recurrent else own

    def _support(self, backend: str) -> GraphSupport:
        if backend == "FLASH_ATTN":
            full = self.flash_attn_version() in (3, 4)
            return GraphSupport.ALWAYS if full else GraphSupport.UNIFORM_BATCH
        if backend == "FLASHINFER":
            if self.decode_context > 1:
                return GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
            if self.capability < _SM90:
                wide = self.causal
            else:
                wide = self._trtllm_decode and self._xqa_fits()
                wide = wide and (self.causal or self.capability[0] != 10)
            return GraphSupport.UNIFORM_BATCH if wide else GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if backend == "CUTLASS_MLA":
            return GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
        always = ("TRITON_ATTN", "FLEX_ATTENTION", "FLASHINFER_MLA")
        return GraphSupport.ALWAYS if backend in always else GraphSupport.UNIFORM_BATCH

    def _xqa_fits(self) -> bool:
        """Whether the decode kernel of Hopper and consumer Blackwell takes the heads and the KV cache."""
        if self.capability[0] == 10:
            return True
        size = self.model.head_size
        cached = not self.cache.startswith("nvfp4") or self.capability[0] == 12
        return cached and 16 <= size <= 256 and size % 16 == 0

    def refreshes(self, backend: str) -> bool:
        """Whether a backend can follow a draft's next position inside a graph."""
        if backend in ("FLASH_ATTN", "TRITON_MLA"):
            return self.decode_context == 1
        if backend == "FLASHINFER":
            return self.capability[0] == 10 and self._trtllm_decode and self.decode_context == 1
        return backend == "TRITON_ATTN"

    def varies(self, backend: str) -> bool:
        """Whether a decode graph takes any mix of query lengths up to 1 + K, as adaptive verification needs."""
        # No graph holds attention in chunks, and of recurrent layers Mamba 2's alone take query lengths that
        # only the device knows.
        if self.model.chunked or (self.model.recurrent and not self.model.varies):
            return False
        if self._support(backend) is GraphSupport.ALWAYS:
            return True
        return backend == "FLASHINFER" and self.capability[0] == 10 and self._trtllm_decode

    def unusable(self, backend: str) -> str | None:
        """Return why a backend cannot run here, or None where it can."""
        if backend.endswith("MLA") != self.model.mla:
            return "the model has MLA" if self.model.mla else "it is for MLA models"
        if not self._fits_machine(backend):
            return f"it does not run on compute capability {'.'.join(map(str, self.capability))}"
        floats = ("TRITON_ATTN", "FLEX_ATTENTION")
        if self.dtype == "float32" and backend not in floats:
            return "it has no float32"
        if not self._fits_heads(backend):
            return f"it has no heads of {self.model.head_size}"
        if not self._fits_cache(backend):
            return f"it has no KV cache of {self.cache}"
        base = self._block_base(backend)
        if self.block is not None and self.block % base:
            return f"its blocks are multiples of {base}, not {self.block}"
        if self.model.sinks and not self._has_sinks(backend):
            return "it has no attention sinks here"
        if self.cross and backend not in ("FLASH_ATTN", "TRITON_ATTN"):
            return "it has no attention to an encoder"
        if self.decode_context > 1 and backend in _NO_DCP:
            return "it has no decode context parallelism"
        on_device = self.capability[0] == 10 and self._trtllm_decode and self.decode_context == 1
        if self.adaptive and backend == "FLASHINFER" and not on_device:
            return "it plans from the host's query lengths, which adaptive verification changes"
        return None

    def _fits_machine(self, backend: str) -> bool:
        major = self.capability[0]
        return {
            "FLASH_ATTN": self.capability >= _SM80,
            "FLASHINFER": _SM80 <= self.capability <= _SM121,
            "FLASHINFER_MLA": major == 10,
            "CUTLASS_MLA": major == 10,
            "FLASH_ATTN_MLA": major == 9,
            "FLASHMLA": major == 9,
        }.get(backend, True)

    def _fits_heads(self, backend: str) -> bool:
        size = self.model.head_size
        if backend == "FLASH_ATTN":
            most = 512 if self.capability[0] in (9, 10, 11) else 256
            return size % 8 == 0 and size <= most
        if backend == "FLASHINFER":
            return size in (64, 128, 256, 512)
        if backend == "TRITON_ATTN":
            return size >= 32
        if backend == "FLASHINFER_MLA" and self.model.nope_size not in (64, 128, 192):
            return False
        return not self.model.mla or backend == "TRITON_MLA" or size in _MLA_HEADS

    def _fits_cache(self, backend: str) -> bool:
        if not self._quantized:
            return True
        if self.cache not in _CACHES.get(backend, _E4M3):
            return False
        major = self.capability[0]
        if backend == "FLASH_ATTN":
            size = self.model.head_size
            version = self.flash_attn_version(size, block=self.block, wide=True)
            first = self.flash_attn_version()
            if major == 9:
                return first in (3, 4) and (version == 3 or (version == 4 and size == 512))
            return major == 10 and first == version == 4
        if backend == "FLASHINFER" and self.cache.startswith("nvfp4"):
            if major in (8, 9, 12):
                return self.cache == "nvfp4" and self.model.head_size != 64 and not self.model.sinks
            return major == 10
        return True

    def _block_base(self, backend: str) -> int:
        if backend != "FLASH_ATTN":
            return _BLOCKS.get(backend, 16)
        size, major = self.model.head_size, self.capability[0]
        if major == 9 and size == 512 and self.cache in _E4M3 and self.flash_attn_version(size) == 4:
            return 64
        if size == 256 and major in (10, 11) and self.flash_attn_version(size, wide=True) == 4:
            return 128
        return 16

    def _has_sinks(self, backend: str) -> bool:
        if backend == "FLASH_ATTN":
            return self.capability >= _SM90 and self.flash_attn_version() in (3, 4)
        if backend == "FLASHINFER":
            return self.trtllm is not False and (self.capability == _SM90 or self.capability[0] in (10, 12))
        return backend == "TRITON_ATTN"

    def choose(self, flag: str, asked: str | None) -> str:
        """Return the backend that runs; raises ``FlagError`` where the one asked for cannot."""
        if self.cache.startswith(_PACKED):
            remedy = "give auto, fp8 or another dtype of the engine's own"
            raise not_emulated("--kv-cache-dtype", self.cache, remedy)
        if asked is not None:
            if asked not in EMULATED:
                reason = f"{asked} is not emulated"
                raise not_emulated(flag, "", f"give one of {', '.join(EMULATED)}", reason=reason)
            found = self.unusable(asked)
            if found is not None:
                remedy = "leave the flag out, or give another"
                raise self.model.refusal(flag, f"vLLM refuses {asked} here: {found}", remedy)
            return asked
        if self.model.mla:
            order: Sequence[str] = _MLA_ORDER.get(self.capability[0], _MLA_ELSE)
        else:
            order = _ORDER_SM100 if self.capability[0] == 10 and self.causal else _ORDER
        reasons = {backend: self.unusable(backend) for backend in order}
        for backend, why in reasons.items():
            if why is None:
                return backend
        listed = "; ".join(f"{backend}: {why}" for backend, why in reasons.items())
        reason = f"vLLM finds no attention backend for this machine, model and KV cache: {listed}"
        raise self.model.refusal(flag, reason, "change what the reasons name")


def backend_name(flag: str, text: str | None) -> str | None:
    """Return a backend in vLLM's capitals, None for ``auto``; raises ``FlagError`` for an unknown one."""
    if text is None or text.lower() == "auto":
        return None
    if text.upper() not in names()["backends"]:
        raise refusal(flag, f"vLLM has no backend {text}", f"give one of {', '.join(EMULATED)}")
    return text.upper()
