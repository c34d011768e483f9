"""What holds for each backend of this repository."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphSupport, Role
from capture_planner.plugins import registry
from capture_planner.records.model import DataType, Latent
from capture_planner_flash_attention import FlashAttention
from capture_planner_flashinfer import FlashInfer
from capture_planner_reference import Reference
from capture_planner_triton import Triton

BACKENDS = {backend.name: backend for backend in (Reference(), Triton(), FlashAttention(), FlashInfer())}
LATENT = Latent(kv_lora_rank=512, rope_head_dim=64)
KERNEL_LIBRARIES = {"torch", "triton", "flash_attn", "flash_attn_interface", "flashinfer"}

each_backend = pytest.mark.parametrize("name", BACKENDS)


@each_backend
def test_distribution_registers_the_backend(name):
    assert registry.load_backends()[name].distribution == f"capture-planner-{name.replace('_', '-')}"


@each_backend
def test_package_imports_without_torch_and_kernels(imports, name):
    assert not KERNEL_LIBRARIES & imports(f"capture_planner_{name}")


@each_backend
@given(
    role=st.sampled_from(list(Role)),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    kv_heads=st.sampled_from([1, 2, 8, 32]),
    dtype=st.sampled_from([DataType.BFLOAT16, DataType.FLOAT16]),
)
def test_newer_gpus_never_lower_support(machine, layers, name, role, head_dim, kv_heads, dtype):
    model = layers(head_dim=head_dim, num_kv_heads=kv_heads, dtype=dtype, kv_dtype=dtype)
    levels = [
        BACKENDS[name].support(role, model, machine(capability)).level
        for capability in ("7.0", "7.5", "8.0", "8.9", "9.0", "10.0")
    ]
    assert levels == sorted(levels)


@each_backend
@given(
    capability=st.sampled_from([None, "7.5", "8.0", "9.0", "10.0", "12.0", "99.0"]),
    packages=st.sampled_from([{}, {"torch": "2.12.0"}, None]),
    head_dim=st.sampled_from([100, 128, 512, 1024]),
    kv_dtype=st.sampled_from(list(DataType)),
    latent=st.sampled_from([None, LATENT]),
)
def test_every_machine_gets_a_reason_that_names_it(
    machine, layers, name, capability, packages, head_dim, kv_dtype, latent
):
    """With the longest name of a device that a file may have."""
    backend = BACKENDS[name]
    where = machine(capability) if packages is None else machine(capability, packages)
    where = attrs.evolve(where, device=attrs.evolve(where.device, name="G" * 128))
    model = layers(head_dim=head_dim, kv_dtype=kv_dtype, latent=latent)
    support = backend.support(Role.TARGET, model, where)
    assert "G" * 128 in support.reason
    if support.level is GraphSupport.NEVER:
        assert not backend.padding(Role.TARGET, model, where).fields
