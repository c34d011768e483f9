"""The fuzzers on a few inputs; ``tox -e fuzz`` runs them on many."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COUNTS = {"fuzz_documents": 20, "fuzz_inputs": 20}
BOTH = """
import importlib, sys
codes = {}
for name, count in zip(sys.argv[2::2], sys.argv[3::2]):
    sys.argv[0] = f"{name}.py"  # which the command that repeats a violation has in it
    # More time than a campaign allows: other tests share the cores.
    sys.argv[1:] = ["--documents", count, "--jobs", "1", "--seconds", "10", "--hang", "60"]
    codes[name] = importlib.import_module(name).main()
sys.exit(any(codes.values()))
"""


def test_fuzzers_find_nothing() -> None:
    """Another seed each time; the output has the command that repeats a violation."""
    for package in ("torch", "transformers", "tokenizers"):
        pytest.importorskip(package)
    campaigns = [str(word) for name, count in COUNTS.items() for word in (name, count)]
    # One process for both, which import the same; the limits and the audit of the second one stay in it.
    command = [sys.executable, "-c", BOTH, "", *campaigns]
    ran = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert ran.stdout.count("no violation (found 0): met") == len(COUNTS)
