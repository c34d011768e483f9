"""The benchmark of SGLang under a plan: the stand-ins for libraries that are not installed."""

import importlib.util
import os
import subprocess
import sys

import pytest
from _standins import InertName, write_standins
from hypothesis import given
from hypothesis import strategies as st
from sglang_arriving import libraries

KERNELS = """
import cutlass
import cutlass.cute as cute
from cutlass.cute import experimental as cute_ext
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.utils import blackwell_helpers

class Kernel(cute.Kernel):
    step: cutlass.Int32 | None = None

    @cute.kernel
    def __call__(self, x: cute.Tensor):
        return tcgen05.mma(x, cutlass.Float32(0))

@cute.experimental.jit
def wrapper(kernel: cutlass.Constexpr[int], x: cute.Tensor):
    kernel(x)

def launch(x):
    cute.compile(wrapper, Kernel(), from_dlpack(x))
"""
"""What SGLang's CUTLASS modules do at import, and what they do with their kernels."""

CALLS = {
    "kernels.launch(1)": "cutlass.cute.runtime.from_dlpack",
    "kernels.wrapper(kernels.Kernel(), 1)": "cutlass.Float32",
    "kernels.cute.compile(kernels.wrapper, 1)": "cutlass.cute.compile",
    "kernels.cute_ext.launch()": "cutlass.cute.experimental.launch",
}


@pytest.fixture
def child(tmp_path):
    """Return a function that runs Python code with the stand-in on PYTHONPATH."""
    (tmp_path / "kernels.py").write_text(KERNELS, "utf-8")
    paths = os.pathsep.join([str(tmp_path), str(write_standins(tmp_path / "standins"))])

    def called(code):
        variables = {**os.environ, "PYTHONPATH": paths}
        return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=300)

    return called


def test_modules_of_kernels_are_imported_and_keep_their_functions(child):
    answer = child("import kernels; print(type(kernels.wrapper).__name__, kernels.Kernel.__mro__[1:] == (object,))")
    assert (answer.returncode, answer.stdout) == (0, "function True\n"), answer.stderr


@pytest.mark.parametrize("call", CALLS)
def test_kernel_that_is_compiled_or_run_stops_with_the_name_that_was_called(child, call):
    answer = child(f"import kernels; {call}")
    assert answer.returncode == 1
    assert f"LibraryAbsentError: {CALLS[call]} was called, but cutlass is a stand-in here" in answer.stderr


def test_stand_in_has_no_version_and_no_metadata(child):
    """What asks whether CUTLASS is installed, or which one, is not told that it is."""
    assert "AttributeError" in child("import cutlass; cutlass.__version__").stderr
    assert (
        "PackageNotFoundError" in child("from importlib import metadata; metadata.version('nvidia-cutlass-dsl')").stderr
    )


@given(
    st.lists(st.one_of(st.integers(), st.text(), st.none(), st.just(len)), max_size=3),
    st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=2),
)
def test_calls_other_than_a_decorators_raise(values, named):
    with pytest.raises(ImportError, match=r"cute\.copy was called"):
        InertName("cutlass.cute").copy(*values, **named)


def test_every_library_is_replaced_by_itself(child):
    """As SGLang's module for latent attention imports it, next to the other stand-in."""
    code = (
        "import cutlass.cute; from flash_mla import mega; from flash_mla.flash_mla_interface import SchedMeta; mega(1)"
    )
    assert "LibraryAbsentError: flash_mla.mega was called, but flash_mla is a stand-in" in child(code).stderr


def test_absent_libraries_are_replaced_for_children(monkeypatch, tmp_path):
    """What is said to be replaced is what children can import."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PYTHONPATH", "plugin")
    assert libraries(tmp_path) == {"cutlass": "absent, replaced", "flash_mla": "absent, replaced"}
    assert os.environ["PYTHONPATH"].split(os.pathsep) == ["plugin", str(tmp_path / "standins")]
    assert {path.name for path in (tmp_path / "standins").iterdir()} == {"cutlass", "flash_mla"}
