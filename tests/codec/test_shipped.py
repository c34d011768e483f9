"""Shipped environments: found by name, found by file, and what is said where neither is there."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.codec import shipped as catalog
from capture_planner.errors import CapturePlannerError, InvalidDocument

SHIPPED = tuple(
    "a10 a100 b200 b300 cpu gb10 gb200 gb300 h100 h20 h200 "  # noqa: SIM905
    "l4 l40 l40s rtx-3090 rtx-4090 rtx-5090 rtx-pro-6000 t4".split()
)

# https://developer.nvidia.com/cuda/gpus, its legacy list, and the machines for single countries; without GT and GTX.
OTHERS = """
    A2 A16 A30 A30X A40 A10G A100X A800 A1000 A2000 A4000 A4500 A5000 A5500 A6000 B100 B30A B40 GB202 GH200 GB205
    H800 H100-NVL H100-PCIe H100X H200-NVL H20-3e L2 L20 L40G T4G T10 T40 T400 T500 T600 T1000 T1200 T2000 V100 V100S
    P4 P40 P100 M4 M6 M10 M40 M60 K10 K20 K40 K80 Thor Orin Xavier AGX-Orin Jetson-T4000 Jetson-T5000 R100 R200 VR200
    RTX-500 RTX-1000 RTX-2000 RTX-3000 RTX-3500 RTX-4000 RTX-4500 RTX-5000 RTX-5880 RTX-6000 RTX-6000D RTX-8000
    RTX-A500 RTX-A1000 RTX-A2000 RTX-A4000 RTX-A4500 RTX-A5000 RTX-A5500 RTX-A6000 RTX-2050 RTX-2060 RTX-2070 RTX-2080
    RTX-3050 RTX-3060 RTX-3070 RTX-3080 RTX-3090-Ti RTX-4050 RTX-4060 RTX-4070 RTX-4080 RTX-4090-D RTX-5050 RTX-5060
    RTX-5070 RTX-5080 RTX-5090-D RTX-PRO-500 RTX-PRO-1000 RTX-PRO-2000 RTX-PRO-3000 RTX-PRO-4000 RTX-PRO-4500
    RTX-PRO-5000 RTX-PRO-6000-Max-Q RTX-PRO-6000D TITAN-V TITAN-RTX MI100 MI210 MI250 MI250X MI300A MI300X MI308X MI325X
    MI350X MI355X HX370 GAUDI2 GAUDI3 910B 910C B60 BMG TPU-v5e TPU-v6e
""".split()  # noqa: SIM905


def test_the_environments_that_ship() -> None:
    assert tuple(catalog.shipped_environments()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_environment_has_the_name_of_its_file(name: str) -> None:
    assert catalog.find_environment(name).name == name


def test_the_package_has_what_the_repository_has() -> None:
    repository = Path(__file__).parent.parent.parent / "plans" / "environments"
    for name, path in catalog.shipped_environments().items():
        assert path.read_bytes() == (repository / f"{name}.yaml").read_bytes()


@pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="only tox installs the wheel")
def test_what_is_tested_is_the_installed_wheel() -> None:
    assert Path(catalog.__file__).is_relative_to(sysconfig.get_path("purelib"))


def test_an_environment_may_be_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    shutil.copy(catalog.shipped_environments()["t4"], mine)
    assert catalog.find_environment(str(mine)) == catalog.find_environment("t4")


def test_a_file_without_suffix_is_found_too(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text(codec.dumps(catalog.find_environment("cpu")), "utf-8")
    assert catalog.find_environment(str(mine)).name == "cpu"


@pytest.mark.parametrize("name", [name.lower() for name in SHIPPED] + ["H100", "RTX4090", "rtx_pro 6000", "Cpu"])
def test_a_name_is_found_in_any_case_and_with_any_separators(name: str) -> None:
    plain = name.lower().replace(" ", "").replace("_", "").replace("-", "")
    assert catalog.find_environment(name).name.replace("-", "") == plain


def suggested(name: str) -> str | None:
    """Return the environment that is offered for a name that none has."""
    with pytest.raises(CapturePlannerError, match="no environment is named") as caught:
        catalog.find_environment(name)
    found = re.search(r"did you mean (\S+)\?", str(caught.value))
    return found and found[1]


@pytest.mark.parametrize("spelled", [str.lower, str, lambda name: name.replace("-", "")])
def test_another_gpu_is_never_offered_a_near_one(spelled: Callable[[str], str]) -> None:
    offered = {name: suggested(spelled(name)) for name in OTHERS}
    assert offered == dict.fromkeys(OTHERS)


def slips(name: str) -> list[str]:
    """Return a name with one character left out, doubled, or swapped with the next."""
    ends = [(name[:at], name[at:]) for at in range(len(name))]
    return [start + typed for start, rest in ends for typed in (rest[1:], rest[0] + rest, rest[1::-1] + rest[2:])]


@given(st.sampled_from(SHIPPED), st.data())
def test_a_slip_of_the_fingers_is_offered_the_name_and_nothing_else(name: str, data: st.DataObject) -> None:
    typed = data.draw(st.sampled_from(slips(name)))
    near = {each.lower().replace("-", "") for each in (*SHIPPED, *OTHERS)}
    assume(typed.replace("-", "") not in near and len(typed) > 1)
    # 100 is a slip of both a100 and h100, so neither is offered.
    names = [each for each in SHIPPED if typed in slips(each)]
    assert suggested(typed) == (name if names == [name] else None)


@given(st.sampled_from((*SHIPPED, *OTHERS)), st.data())
def test_another_character_is_the_name_of_another_machine(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(name) - 1))
    typed = name[:at] + data.draw(st.sampled_from("abghlmrtvx0123456789")) + name[at + 1 :]
    assume(typed.lower().replace("-", "") not in {each.replace("-", "") for each in SHIPPED})
    offered = suggested(typed)
    assert offered is None or len(offered.replace("-", "")) != len(typed.replace("-", ""))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_environment_says_where_its_facts_are_from(name: str) -> None:
    head = catalog.shipped_environments()[name].read_text("utf-8").partition("version:")[0]
    older = {"a100", "b200", "cpu", "h100", "h200", "l40s", "t4"}
    assert name in older or "ultiprocessors: " in head


def test_a_far_name_lists_what_ships() -> None:
    with pytest.raises(CapturePlannerError, match=", ".join(SHIPPED)):
        catalog.find_environment("zebra")


def test_a_missing_file_is_said_to_be_missing() -> None:
    with pytest.raises(InvalidDocument, match=r"nowhere\.yaml: cannot be read"):
        catalog.find_environment("nowhere.yaml")


@pytest.mark.parametrize(
    ("output", "environment"),
    [
        (None, None),
        ("plans/locked/qwen3-8b.h100.yaml", "h100"),
        ("llama-3.1-8b.l40s.json", "l40s"),
        ("llama-3.1-8b.yaml", None),
        ("model.zebra.yaml", None),
        ("h100.yaml", None),
        ("model", None),
    ],
)
def test_an_output_file_may_state_its_environment(output: str | None, environment: str | None) -> None:
    assert catalog.environment_of_output(output) == environment
