"""Record the answers of vLLM's own graph managers in ``golden/vllm_managers.json``; needs torch.

PYTHONPATH=tests python tests/engines/oracle/record_vllm_managers.py UNPACKED_WHEEL
"""

import json
import sys
from pathlib import Path

from engines.generators import vllm_managers as cases
from support.files import module_at

HERE = Path(__file__).parent
SEED, COUNT = 33, 400


def main() -> None:
    """Write the answers of each case, by its number."""
    oracle = module_at(HERE / "vllm_managers.py")
    with oracle.engine(sys.argv[1]) as engine:
        answers = [
            {
                **engine.answers(cases.case(SEED, index)),
                "schedule": engine.schedule_answer(cases.schedule_case(SEED, index)),
            }
            for index in range(COUNT)
        ]
    lines = ",\n".join(json.dumps(answer, separators=(",", ":")) for answer in answers)
    text = f'{{"engine":"vllm","version":"0.33.0","seed":{SEED},"answers":[\n{lines}\n]}}\n'
    (HERE.parent / "golden" / "vllm_managers.json").write_text(text)


if __name__ == "__main__":
    main()
