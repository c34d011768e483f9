"""The fuzzers on a few inputs; ``tox -e fuzz`` runs them on many."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("script", "count"), [("fuzz_documents.py", 30), ("fuzz_inputs.py", 24)])
def test_fuzzers_find_nothing(script: str, count: int) -> None:
    """Another seed each time; the output has the command that repeats a violation."""
    for package in ("torch", "transformers", "tokenizers"):
        pytest.importorskip(package)
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--documents", str(count), "--jobs", "1"]
    # More time than a campaign allows: other tests share the cores.
    ran = subprocess.run([*command, "--seconds", "10", "--hang", "60"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
