"""Lines that vLLM and SGLang log of their steps, written by the wheels' own functions, and read as those steps.

    PYTHONPATH=tests python tests/engines/oracle/run_log_lines.py --wheel WHEELS --count 2000

Needs the wheels of both engines or their unpacked sources in one folder, and msgspec. First the recorded lines of the
unit tests are written anew and compared, all but times; then ``--count`` random steps of each format are written and
read. Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from capture_planner.engines.logs import read_traffic
from capture_planner.measuring.traffic import SourceOptions
from engines.oracle.comparison import finish, options, oracle, say, sources
from support.log_steps import batches_of, read_batches

RECORDED = Path(__file__).parents[2] / "measuring" / "data" / "log_lines.json"
CLOCK = re.compile(r"pid=\d+|(\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d|(?<=throughput \(token/s\): )[\d.]+")
"""What a line has of the process and of the time at which it was written."""


def differences(vllm: Path, sglang: Path, arguments: argparse.Namespace, seen: Counter[str]) -> Iterator[str]:
    """Yield where the wheels write other lines than those recorded, and where reading finds other steps."""
    record = oracle("record_log_lines")
    for name, kept in json.loads(RECORDED.read_text("utf-8")).items():
        made = json.loads(json.dumps(record.recorded(vllm, sglang)))[name]
        seen["recorded lines"] += len(kept["text"].splitlines())
        if made["steps"] != kept["steps"] or CLOCK.sub("", made["text"]) != CLOCK.sub("", kept["text"]):
            yield f"{name}: the wheel writes other lines than {RECORDED.name} has; run record_log_lines.py"
    with tempfile.TemporaryDirectory() as folder:
        for name, made in record.recorded(vllm, sglang, seed=arguments.seed, count=arguments.count).items():
            path = Path(folder, f"{name}.log")
            path.write_bytes(made["text"].encode())
            traffic = read_traffic([str(path)], SourceOptions(decode_log_interval=1))[0]
            seen["steps"] += len(made["steps"])
            wanted, found = batches_of(name, made["steps"]), read_batches(name, traffic)
            if wanted != found:
                yield f"{name}: {wanted - found} is not read, and {found - wanted} is read that was not written"


def main() -> int:
    """Compare and print; exit code 1 on a difference."""
    parser = options(__doc__, "vllm")
    parser.set_defaults(count=2000)
    arguments = parser.parse_args()
    started, seen = time.perf_counter(), Counter[str]()
    folders = (sources(argparse.Namespace(wheel=arguments.wheel, package=name)) for name in ("vllm", "sglang"))
    found = list(differences(*folders, arguments, seen))
    for text in found:
        say(text)
    return finish("log_lines", arguments, dict(seen), len(found), time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
