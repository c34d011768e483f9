"""What the flash_attention executor refuses: libraries that are missing or old, layers, pages, scoring."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import BackendError, RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.plugins.backend import LayerCache, Metadata, Reservation, Scoring
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import DataType, Latent
from capture_planner.records.spec import Limits
from capture_planner_flash_attention import FlashAttention, libraries

LAYER, REQS, HEADS, HEAD_DIM = 3, 4, 2, 8
VERSIONS = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b36", "torch": "2.13.0"}
ENTRY = Entry(mode=GraphMode.FULL, num_tokens=REQS, num_reqs=REQS, query_len=1)


def never(*_: Any, **__: Any) -> None:
    """Stand in for a kernel that is not reached."""
    raise AssertionError("a kernel was called")


def with_sinks(q: object, s_aux: object = None) -> None:
    """Stand in for FlashAttention 3 as vLLM builds it."""
    raise AssertionError("a kernel was called")


FUNCTIONS: dict[str, dict[str, Any]] = {
    "flash_attn_interface": {"flash_attn_with_kvcache": with_sinks, "get_scheduler_metadata": never},
    "flash_attn.cute": {"flash_attn_varlen_func": never},
    "flash_attn": {"flash_attn_varlen_func": never, "flash_attn_with_kvcache": never},
}
"""The modules that are not installed where this runs; torch's is the real one."""


@contextmanager
def installed(**changes: dict[str, Any] | None) -> Iterator[None]:
    """Put stand-ins where the executor imports from; a module that is None cannot be imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, functions in (FUNCTIONS | changes).items():
            module = None
            if functions is not None:
                module = ModuleType(name)
                vars(module).update(functions)
            patch.setitem(sys.modules, name, module)
        yield


def reserved(library: libraries.Library, page_size: int | None = None, **changes: Any) -> Reservation:
    """Make the reservation of a small group on a library: four decodes of one token."""
    size = page_size or max(64, library.page_multiple)
    keys, values = (torch.zeros(3, size, 1, HEAD_DIM, dtype=torch.bfloat16) for _ in "kv")
    shape = {"num_layers": 1, "num_heads": HEADS, "num_kv_heads": 1, "head_dim": HEAD_DIM}
    fields = {
        "query_start_loc": torch.arange(REQS + 1, dtype=torch.int32),
        "seq_lens": torch.ones(REQS, dtype=torch.int32),
        "block_table": torch.ones(REQS, 2, dtype=torch.int32),
    }
    if library.ahead_of_time:
        fields["scheduler_metadata"] = torch.zeros(1 + 4 * REQS, dtype=torch.int32)
    device = Device(kind=DeviceKind.CUDA, name="H100", capability="9.0", memory=1, multiprocessors=132)
    return Reservation(
        role=Role.TARGET,
        group="all",
        attention=Attention(**shape | {"max_model_len": 128, "max_query_len": 1} | changes),
        environment=Environment(name="e", device=device, packages={library.package: VERSIONS[library.package]}),
        entries=(ENTRY,),
        limits=Limits(max_num_reqs=REQS, max_num_tokens=REQS),
        caches={LAYER: LayerCache(keys=keys, values=values)},
        page_size=size,
        fields=fields,
        workspace=torch.empty(0, dtype=torch.uint8),
        pinned=torch.empty(0, dtype=torch.uint8),
        device=torch.device("cpu"),
    )


def step(reservation: Reservation) -> Metadata:
    """Make the metadata of a FULL step."""
    return Metadata(
        entry=ENTRY,
        num_reqs=REQS,
        num_tokens=REQS,
        max_query_len=1,
        max_seq_len=128,
        fields=reservation.fields,
        host={name: field.numpy() for name, field in reservation.fields.items()},
    )


@given(st.sampled_from(libraries.LIBRARIES), st.integers(1, 600) | st.sampled_from([16, 64, 128, 256, 512, 768]))
def test_reserve_rejects_unsupported_page_sizes(library, page_size):
    """Refused in reserve exactly where the kernel would refuse, with what it takes."""
    reservation = reserved(library, page_size)
    with installed():
        if library in (libraries.FA3, libraries.FA4) or page_size % 256 == 0:
            FlashAttention().reserve(reservation)
        else:
            with pytest.raises(BackendError, match=rf"multiples of 256 tokens, not {page_size}; set the page size"):
                FlashAttention().reserve(reservation)


@pytest.mark.parametrize("library", libraries.LIBRARIES, ids=lambda library: library.package)
def test_reserve_names_a_missing_library(library):
    """Imported in reserve, not before; the message says what to install."""
    with installed(**{library.module: None}), pytest.raises(BackendError) as caught:
        FlashAttention().reserve(reserved(library))
    planned = f"{library.title} ({library.package} {VERSIONS[library.package]})"
    assert f"target, group all: the plan needs {planned}" in str(caught.value)
    assert f"install {library.package}" in str(caught.value)


@pytest.mark.parametrize(
    ("library", "functions", "says"),
    [
        (libraries.TORCH, {"varlen_attn_out": lambda out, query, key, value: None}, "takes no block_table"),
        (libraries.TORCH, {"varlen_attn": never}, "varlen_attn_out"),
        (libraries.FA2, {}, "flash_attn_with_kvcache"),
    ],
)
def test_reserve_rejects_libraries_without_the_calls(library, functions, says):
    """An older torch has the module and no block tables; flash_attn may be another's namespace."""
    with installed(**{library.module: functions}), pytest.raises(BackendError, match=says):
        FlashAttention().reserve(reserved(library))


def test_reserve_rejects_environments_without_a_library():
    """An environment that plans NEVER does not execute."""
    made = reserved(libraries.FA4)
    bare = attrs.evolve(made, environment=attrs.evolve(made.environment, packages={}))
    with pytest.raises(BackendError, match=r"No flash-attention library is installed; install flash-attn-4"):
        FlashAttention().reserve(bare)


@pytest.mark.parametrize(
    ("library", "changes", "says"),
    [
        (libraries.FA3, {"latent": Latent(kv_lora_rank=8, rope_head_dim=8)}, "not execute latent attention"),
        (libraries.FA3, {"kv_dtype": DataType.FP8}, "an FP8 cache, which needs scales"),
        (libraries.FA4, {"decode_context": 2}, "not execute decode context parallelism"),
        (libraries.FA4, {"head_dim": 16}, r"bfloat16 \[3, 64, 1, 8\], expected .* \[num_pages, 64, 1, 16\]"),
        (libraries.FA4, {"dtype": DataType.FLOAT16}, r"keys are torch.bfloat16 .*, expected torch.float16"),
    ],
)
def test_reserve_rejects_layers_that_are_only_planned(library, changes, says):
    """In reserve, before anything is captured."""
    with installed(), pytest.raises(BackendError, match=says):
        FlashAttention().reserve(reserved(library, **changes))


@pytest.mark.parametrize(
    ("library", "scoring", "says"),
    [
        (libraries.TORCH, Scoring(scale=1.0, softcap=2.0), "takes no softcap"),
        (libraries.TORCH, Scoring(scale=1.0, sinks=torch.zeros(HEADS)), "takes no attention sinks"),
        (libraries.FA2, Scoring(scale=1.0, sinks=torch.zeros(HEADS)), "takes no attention sinks"),
    ],
)
def test_attend_rejects_unsupported_scoring(library, scoring, says):
    """In attend, which is where it is known: nothing is left out of the scores in silence."""
    reservation = reserved(library)
    query = torch.zeros(REQS, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    with installed():
        runs = FlashAttention().reserve(reservation)
        runs.prepare(step(reservation))
        with pytest.raises(RunError, match=f"layer {LAYER}.*{says}"):
            runs.attend(LAYER, query, torch.empty_like(query), scoring, step(reservation))


def test_reserve_rejects_sinks_on_upstream_flash_attention_3():
    """Upstream's call has no parameter for them; vLLM's has."""
    upstream = {"flash_attn_with_kvcache": lambda q: None, "get_scheduler_metadata": never}
    with installed():
        FlashAttention().reserve(reserved(libraries.FA3, sinks=True))
    with (
        installed(flash_attn_interface=upstream),
        pytest.raises(BackendError, match="takes no attention sinks; install a build"),
    ):
        FlashAttention().reserve(reserved(libraries.FA3, sinks=True))


@pytest.mark.parametrize(("length", "fits"), [(1, True), (17, True), (18, False), (999, False)])
def test_prepare_rejects_a_schedule_longer_than_its_field(length, fits):
    """Nothing is cut off: another release may lay it out in another way."""
    made = FUNCTIONS["flash_attn_interface"] | {
        "get_scheduler_metadata": lambda *_, **__: torch.ones(length, dtype=torch.int32)
    }
    reservation = reserved(libraries.FA3)
    with installed(flash_attn_interface=made):
        runs = FlashAttention().reserve(reservation)
        if fits:
            runs.prepare(step(reservation))
            assert runs.layout() == (libraries.MAX_SPLITS, length)
        else:
            with pytest.raises(BackendError, match=f"scheduled {length} numbers, expected 1 to 17"):
                runs.prepare(step(reservation))
