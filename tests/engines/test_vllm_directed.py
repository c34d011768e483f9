"""Command lines whose answer is known from vLLM's own code: ours is the same."""

import pytest

from capture_planner.codec.shipped import find_environment
from capture_planner.errors import FlagError, NotEmulated
from capture_planner_vllm import emulate, resolve
from engines.generators.vllm import answer_of, write_models
from engines.generators.vllm_directed import REFUSED, directed


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the folder of the models that the command lines name."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.mark.parametrize(("case", "answer"), list(directed()))
def test_the_answer_is_vllms(case, answer, models):
    """Each line is refused where vLLM refuses it, and answered as by vLLM in what the line is about."""
    words = [f"{name}={value}" for name, value in case.variables] + case.command_in(models)
    if answer is REFUSED:
        with pytest.raises(FlagError) as caught:
            resolve(words, find_environment(case.environment))
        assert not isinstance(caught.value, NotEmulated)
        return
    found = answer_of(resolve(words, find_environment(case.environment))[0])
    assert {name: found[name] for name in answer} == answer


def test_sizes_below_one_matter_where_something_is_captured(models):
    """A graph of no tokens fails when it is captured; where no mode is left, nothing is captured."""
    words = ["--cudagraph-capture-sizes", "0", "1"]
    machine = find_environment("h100")
    with pytest.raises(FlagError, match="fails when it captures"):
        emulate([str(models / "dense"), *words], machine)
    without = ["-cc.cudagraph_mode=FULL_DECODE_ONLY", "-cc.mode=0"]
    found = emulate([str(models / "chunked"), *words, *without], machine)
    assert [graph for manager in found.managers for graph in manager.graphs] == []


def test_variables_of_no_bearing_are_accepted_and_shown():
    """Logs, ports and caches decide nothing; a variable that became a flag is refused with the flag."""
    machine = find_environment("h100")
    found = emulate(["VLLM_LOGGING_LEVEL=DEBUG", "VLLM_USE_V1=1", "m", "--port", "1"], machine)
    shown = {each.name: each for each in found.settings}
    assert shown["not_relevant"].value == ["port", "VLLM_LOGGING_LEVEL", "VLLM_USE_V1"]
    with pytest.raises(FlagError, match="use --attention-backend"):
        emulate(["VLLM_ATTENTION_BACKEND=FLASHINFER", "m"], machine)
    with pytest.raises(NotEmulated):
        emulate(["VLLM_NO_SUCH=1", "m"], machine)
