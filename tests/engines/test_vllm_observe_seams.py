"""Observing a vLLM that is not as expected: one part is left out, with a line, or strict mode stops."""

import importlib

import pytest

from capture_planner.engines.launch import STRICT
from capture_planner.errors import RunError
from capture_planner_vllm.inside import observe_seams as seams
from support.vllm_observed import observed, process, run, started, step

NEEDED = {seams.INIT, seams.CAPTURE_MODEL, seams.CAPTURE, seams.SPECIALIZE, seams.WARM_UP}
"""Functions without which the stand-in cannot start."""


@pytest.mark.parametrize(
    ("function", "damage"),
    [(each, "other parameters") for each in seams.SEAMS]
    + [(each, "missing") for each in seams.SEAMS if each not in NEEDED],
    ids=lambda value: getattr(value, "name", value),
)
def test_unknown_function_turns_one_part_off(function, damage, caplog):
    """With one line and a note in the file; the engine runs, and the rest is observed."""
    with process() as folder:
        break_seam(function, damage)
        runner = started()
        if damage != "missing":
            run(runner, step(4, 4, sampled=[3] * 4))
            runner.shutdown()
        files = list(folder.glob("*.yaml"))
        lines = [record.message for record in caplog.records if record.name == "capture_planner.vllm"]
        (line,) = (line for line in lines if function.part in line and function.name in line)
        if files:
            assert line in observed(folder).notes


@pytest.mark.parametrize("record", seams.RECORDS, ids=lambda record: record.name)
def test_unknown_fields_turn_one_part_off(record, caplog):
    """With one line; the engine runs, and the rest is observed."""
    with process() as folder:
        cls = getattr(importlib.import_module(record.module), record.name)
        del cls.__dataclass_fields__[record.fields[0]]
        runner = started()
        run(runner, step(4, 4, sampled=[3] * 4))
        runner.shutdown()
        (line,) = (each.message for each in caplog.records if "not observed" in each.message)
        assert record.fields[0] in line
        if record is seams.DESCRIPTOR:
            assert list(folder.iterdir()) == []
        else:
            seen = observed(folder)
            assert (seen.notes, seen.roles[0].steps) == ((line,), 1)
            assert bool(seen.drafted) is (record is seams.JOINED)


@pytest.mark.parametrize("function", seams.SEAMS, ids=lambda function: function.name)
def test_unknown_function_is_an_error_in_strict_mode(function):
    """Before the first step, with the name of the function."""
    with process(**{STRICT: "1"}):
        break_seam(function, "other parameters")
        with pytest.raises(RunError, match=function.name):
            started()


def break_seam(function, damage):
    """Make a function of the stand-in one that the wrapper does not know."""
    for each in seams.SEAMS:
        importlib.import_module(each.module)
    owner, name = function.owner()
    if damage == "missing":
        delattr(owner, name)
        return
    original = getattr(owner, name)

    def changed(*arguments, **named):
        return original(*arguments, **named)

    setattr(owner, name, changed)
