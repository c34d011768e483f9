"""benchmarks/_sanitizer_reports.py: what compute-sanitizer prints, by kernel."""

from _sanitizer_reports import read

RACE = """\
========= {kind}: Race reported between Read access at {first}+0xab00
=========     and Write access at {second}+0x131c0 [3072 hazards]
=========
"""
XQA = "kernel_mha(unsigned int, Vec<__nv_bfloat16, (unsigned int)64> *, KVCacheList<(bool)1>, void *)"
OTHER = "void ours::_store<float, (int)4>(float *)"

MEMORY = """\
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to {function}.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame:  [0xd4a2] in cydriver.cpython-312-x86_64-linux-gnu.so
=========
========= Invalid __global__ read of size 4 bytes
=========     at {kernel}+0x10
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: {errors} errors
"""


def test_hazards_are_counted_by_the_kernel_of_the_first_access():
    """A warning is none, whatever its kernel; what is known is open, with its reason."""
    hazards = [("Error", XQA, XQA), ("Warning", OTHER, XQA), ("Error", OTHER, XQA), ("Error", XQA, OTHER)]
    text = "".join(RACE.format(kind=kind, first=first, second=second) for kind, first, second in hazards)
    data = read(text + "========= RACECHECK SUMMARY: 4 hazards displayed (3 errors, 1 warning)\n", "racecheck")
    assert data["places"] == {"kernel_mha": 2, "_store": 1}
    assert (data["errors"], data["warnings"], data["unexplained"]) == (3, 1, 1)
    assert "_store" in data["first"][0]
    assert data["known"]["kernel_mha"].startswith("open: FlashInfer")


def test_reports_are_known_for_one_tool_alone():
    """A probe of the driver is no finding, a wild read and what was not printed are."""
    text = MEMORY.format(function="cuGetProcAddress_v2", kernel=XQA, errors=3)
    data = read(text, "memcheck")
    assert data["places"] == {"cuGetProcAddress_v2": 1, "kernel_mha": 1}
    assert data["unexplained"] == 2
    assert data["first"][0] == "Invalid __global__ read of size 4 bytes"
    assert read(MEMORY.format(function="cuLaunchKernel", kernel=OTHER, errors=2), "memcheck")["unexplained"] == 2


def test_output_without_a_summary_is_no_report():
    """A tool that broke counts nothing; one that found nothing counts zero."""
    assert read("========= COMPUTE-SANITIZER\nsegmentation fault\n", "memcheck") == {}
    assert read("========= ERROR SUMMARY: 0 errors\n", "memcheck")["unexplained"] == 0
