"""Plant an error into each comparison of an emulation in turn, and count the configurations until an oracle notices.

    PYTHONPATH=tests python tests/engines/oracle/run_planted.py --engine vllm --wheel WHEEL --count 300

``<`` becomes ``<=``, ``>`` becomes ``>=``, and the other way round: the boundary moves by one. What the engine answers
does not depend on the error, so that it is asked once for each configuration. Prints, for each comparison, after how
many configurations the answers differed, those that were never noticed, and the median.
"""

from __future__ import annotations

import ast
import gc
import importlib
import pkgutil
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import attrs

from capture_planner.codec.shipped import find_environment
from capture_planner.errors import FlagError
from engines.generators import sglang as sglang_drawing
from engines.generators import sglang_answers, vllm_managers
from engines.generators.vllm import Case, cases, write_models
from engines.generators.vllm_directed import at_boundaries, directed
from engines.oracle import run_sglang, run_vllm_config, run_vllm_managers
from engines.oracle.comparison import finish, options, oracle, say, sources

Question = Callable[[], bool]
"""Whether the emulation's answer to one configuration is the engine's."""
_UNASKED = ("export", "fixes", "forward_passes", "launch", "logs", "size_list")
"""Modules that no oracle asks: what they write is emulated again, and proved so, by other tests."""
_OTHER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


@attrs.frozen
class Site:
    """One operator of one comparison in a function."""

    module: ModuleType
    function: str
    """Qualified name of the outermost function around it."""
    line: int
    says: str
    code: CodeType = attrs.field(repr=False, eq=False)
    """The function's code with the error."""


def sites(package: str) -> Iterator[Site]:
    """Yield the comparisons of a package's modules, each with the code of its function where it is wrong by one."""
    folder = importlib.import_module(package)
    for found in pkgutil.iter_modules(folder.__path__, f"{package}."):
        if found.name.rpartition(".")[2] in _UNASKED:
            continue
        module = importlib.import_module(found.name)
        assert module.__file__ is not None
        source = Path(module.__file__).read_text(encoding="utf-8")
        number = 0
        while (planted := _planted(source, number)) is not None:
            number += 1
            tree, node = planted
            code = compile(tree, module.__file__, "exec")
            function = next(_functions(code, node.lineno), None)
            if function is not None:
                yield Site(module, function.co_qualname, node.lineno, ast.unparse(node), function)


def _planted(source: str, number: int) -> tuple[ast.Module, ast.Compare] | None:
    """Return a tree with the operator of that number replaced, and the comparison; None: there are fewer."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for index, operator in enumerate(node.ops) if isinstance(node, ast.Compare) else ():
            if type(operator) not in _OTHER:
                continue
            if number == 0:
                node.ops[index] = _OTHER[type(operator)]()
                return tree, node
            number -= 1
    return None


def _functions(code: CodeType, line: int) -> Iterator[CodeType]:
    """Yield the outermost function that has the line; classes are looked into."""
    for each in code.co_consts:
        if isinstance(each, CodeType) and line in _lines(each):
            yield from [each] if each.co_flags & 0x2 else _functions(each, line)


def _lines(code: CodeType) -> set[int | None]:
    """Return the lines of code and of the functions in it, which do not exist before it runs."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {at for *_, at in code.co_lines()}.union(*map(_lines, inner))


def _live(site: Site) -> list[FunctionType]:
    """Return the function objects with the code."""
    return [
        each
        for each in gc.get_objects()
        if isinstance(each, FunctionType)
        and each.__module__ == site.module.__name__
        and each.__code__.co_qualname == site.function
        and each.__code__.co_firstlineno == site.code.co_firstlineno
    ]


def noticed(site: Site, questions: list[Question]) -> int | None:
    """Return how many configurations it takes until an answer differs; None: more than there are."""
    live = _live(site)
    before = [each.__code__ for each in live]
    for each in live:
        each.__code__ = site.code
    _forget(site.module)
    try:
        for index, agrees in enumerate(questions):
            if not _agrees(agrees):
                return index + 1
        return None
    finally:
        for each, code in zip(live, before, strict=True):
            each.__code__ = code
        _forget(site.module)


def _agrees(question: Question) -> bool:
    try:
        return question()
    except Exception:  # an error that is planted may end in any other
        return False


def _forget(module: ModuleType) -> None:
    for each in vars(module).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()


def _vllm_config(wheel: Path, count: int, seed: int) -> list[Question]:
    module = oracle("vllm_config")
    engine = module.VllmOracle(wheel)
    folder = Path(tempfile.mkdtemp())
    write_models(folder)
    found: list[Question] = []
    lines = [case for case, _ in directed()] + [*cases(count, seed, 0.01)]
    for case in (*at_boundaries(), *random.Random(seed).sample(lines, len(lines))):
        environment = find_environment(case.environment)
        theirs: Any = engine.answer(case.command_in(folder), environment, dict(case.variables))
        refused = isinstance(theirs, module.EngineRefusal)

        def agrees(case: Case = case, theirs: Any = theirs, refused: bool = refused) -> bool:
            # Each case has flags of its own in the one file that commands name.
            words = [f"{name}={value}" for name, value in case.variables] + case.command_in(folder)
            ours = run_vllm_config._ours(words, find_environment(case.environment))
            # The two refuse together, or answer alike: what is refused over a flag without effect is not asked here.
            if isinstance(ours, FlagError) or refused:
                return isinstance(ours, FlagError) == refused
            return not run_vllm_config._difference(ours, theirs, refused)

        found.append(agrees)
    return found


def _vllm_managers(wheel: Path, count: int, seed: int) -> list[Question]:
    found: list[Question] = []
    with oracle("vllm_managers").engine(wheel) as engine:
        for case in (*vllm_managers.BOUNDARIES, *vllm_managers.cases(seed, count)):
            theirs = run_vllm_managers.plain(engine.answers(case))

            def agrees(case: Any = case, theirs: Any = theirs) -> bool:
                return not run_vllm_managers.differences(
                    case, run_vllm_managers.plain(vllm_managers.answers(case)), theirs
                )

            found.append(agrees)
    return found


def _sglang(wheel: Path, count: int, seed: int) -> list[Question]:
    own = oracle("sglang").Sglang(wheel)
    folder = Path(tempfile.mkdtemp())
    found: list[Question] = []
    for index in range(count):
        drawn = random.Random(f"{seed}:{index}")
        case = sglang_drawing.case(drawn, index)
        place = folder / str(index)
        place.mkdir()
        command = sglang_drawing.written(case, place)
        batches = sglang_drawing.batches(drawn, 12, loras=any("lora" in word for word in case.command))
        counts = sglang_drawing.ranks(drawn, 6)
        at_edges, more = sglang_answers.edges(drawn, command, case.environment)
        batches, counts = [*batches, *at_edges], [*counts, *more]
        theirs = own.ask(command, case.environment, batches, counts)

        def agrees(
            command: Any = command, case: Any = case, batches: Any = batches, counts: Any = counts, theirs: Any = theirs
        ) -> bool:
            ours = sglang_answers.emulated(command, case.environment, batches, counts)
            return not run_sglang.differences(theirs, ours)

        found.append(agrees)
    return found


ENGINES = {
    "vllm": ("capture_planner_vllm.emulation", (_vllm_config, _vllm_managers)),
    "sglang": ("capture_planner_sglang.emulation", (_sglang,)),
}


def main() -> int:
    """Plant, ask and print; exit code 1 where the median is above 50."""
    parser = options(__doc__, "vllm")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    arguments = parser.parse_args()
    arguments.package = arguments.engine
    package, kinds = ENGINES[arguments.engine]
    wheel, started = sources(arguments), time.perf_counter()
    every = [kind(wheel, arguments.count, arguments.seed) for kind in kinds]
    # Configurations that differ without an error, over values that decide nothing, tell nothing.
    asked = [[question for question in kind if _agrees(question)] for kind in every]
    counts: list[int] = []
    missed: list[Site] = []
    for site in sites(package):
        after = [count for questions in asked if (count := noticed(site, questions)) is not None]
        where = f"{site.module.__name__.rpartition('.')[2]}.py:{site.line} {site.function}: {site.says}"
        say(f"{min(after) if after else 'never':>5}  {where}")
        if after:
            counts.append(min(after))
        else:
            missed.append(site)
    median = statistics.median(counts)
    say(f"median {median}, {sum(count <= 50 for count in counts)} within 50, {len(missed)} never in {arguments.count}")
    totals = {
        "errors planted": len(counts) + len(missed),
        "configurations": arguments.count,
        "never noticed": len(missed),
    }
    finish("planted", arguments, totals, 0, time.perf_counter() - started)
    return int(median > 50)


if __name__ == "__main__":
    sys.exit(main())
