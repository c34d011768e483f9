"""The generated parts of the pages: reference tables from the code, and results of measurements."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum

import arriving_tables
import conformance_tables
import file_reference
import gallery_tables
import gpu_bench_tables
import gpu_equality_tables
import ranks_tables
from results import ROOT, table

from capture_planner import codec
from capture_planner.analysis import lint
from capture_planner.analysis.lint import core as lint_core
from capture_planner.codec.shipped import find_environment, shipped_environments
from capture_planner.engines import engines
from capture_planner.engines.check import ENGINE_RULES, OBSERVED_RULES
from capture_planner.planning.sizing.minimax import worst_ratio
from capture_planner.planning.sizing.policies import Context, decode_sizes
from capture_planner.records import backend, spec
from capture_planner.records.batch_space import Domain
from capture_planner.records.environment import Environment
from capture_planner.records.model import Speculative
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner.records.traffic import Traffic
from capture_planner.report.findings import DRIFT_CODE
from capture_planner_tuner.journal import JournalRecord


def rules() -> str:
    """Return all lint rules by class, then a section for each."""
    by_class: dict[str, list[str]] = {}
    sections = []
    for code, rule in sorted(lint.RULES.items()):
        kind = f"{rule.bug_class.name} ({rule.bug_class.value})"
        by_class.setdefault(kind, []).append(f"[{code}](#{code.lower()}) {rule.name}")
        sections += [f"### {code}", f"**{rule.name}**: {rule.severity.value}, class {kind}.", rule.explanation]
        fix = f"Fix: {rule.remedy}." + (f" Spec: `{'.'.join(rule.spec_path)}`." if rule.spec_path else "")
        sections += [f"Reported in {_links(rule.threads)}. {fix}" if rule.threads else fix]
    # Drift has a code and no rule, as it is found by comparison.
    by_class.setdefault("J (observability)", []).append(f"[{DRIFT_CODE}](#{DRIFT_CODE.lower()}) drift")
    return "\n\n".join(["\n".join(f"- {kind}: {', '.join(codes)}" for kind, codes in by_class.items()), *sections])


def engine_rules() -> str:
    """Return a section for each rule about an engine's flags."""
    sections = []
    for code, rule in sorted(ENGINE_RULES.items()):
        kind = f"{rule.bug_class.name} ({rule.bug_class.value})"
        sections += [f"### {code}", f"**{rule.name}**: {rule.severity.value}, class {kind}.", rule.explanation]
        sections += [f"Reported in {_links(rule.threads)}."]
        fixes = {name: installed.value.fixes.general.get(code) for name, installed in engines().items()}
        sections += ["\n".join(f"- {name}: {fix}." for name, fix in fixes.items() if fix)]
    return "\n\n".join(sections)


def observed_rules() -> str:
    """Return a section for each rule that only observations have."""
    sections = []
    for code, rule in sorted(OBSERVED_RULES.items()):
        kind = f"{rule.bug_class.name} ({rule.bug_class.value})"
        sections += [f"### {code}", f"**{rule.name}**: {rule.severity.value}, class {kind}.", rule.explanation]
        sections += [f"Fix: {rule.remedy}."]
    return "\n\n".join(sections)


def _links(threads: tuple[str, ...]) -> str:
    return ", ".join(f"[{thread}]({lint_core.link(thread)})" for thread in threads)


def fields() -> str:
    """Return the fields that the runner owns."""
    groups = {
        "each role": backend.COMMON_FIELDS,
        "the target, with drafts": backend.SPECULATIVE_FIELDS,
        "the target, with multimodal rope": backend.MROPE_FIELDS,
        "the target, with recurrent layers": backend.STATE_FIELDS,
        "each role, with replicas": backend.data_parallel_fields(1),
        "each role, with decode context parallelism": backend.DECODE_CONTEXT_FIELDS,
    }
    rows = []
    for role, declared in groups.items():
        for field in declared:
            fill = f"{field.value}" if field.fill is backend.Fill.CONSTANT else f"`{field.fill.value}`"
            axis = f"{field.axis.value} and {field.inner.value}" if field.inner else field.axis.value
            rows.append((f"`{field.name}`", role, axis, fill))
    return table(("field", "role", "one per", "padded with"), rows, text=4)


def _member_docs(enumeration: type[Enum]) -> Iterator[tuple[str, str]]:
    """Yield the value of each member of an enumeration with the docstring under it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(enumeration))).body[0]
    assert isinstance(body, ast.ClassDef)
    # The docstring of a member is the statement behind it.
    for member, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(member, ast.Assign) and isinstance(text, ast.Expr):
            yield ast.literal_eval(member.value), ast.literal_eval(text.value).replace("``", "`")


def policies() -> str:
    """Return every size policy with its docstring and its options."""
    rows = []
    for name, meaning in _member_docs(spec.Policy):
        # The record's own table, so that the page cannot differ from what it refuses.
        options = [f"`{option}`" for option, takers in spec._OPTIONS.items() if spec.Policy(name) in takers]
        rows.append((f"`{name}`", meaning, ", ".join(options) or "none"))
    return table(("policy", "sizes", "options"), rows, text=3)


def figures() -> str:
    """Return what each policy gives for up to 256 requests on an H100, without drafts and with K = 3."""
    limits, machine = spec.Limits(max_num_reqs=256, max_num_tokens=8192), find_environment("h100")
    minimax = {f"minimax, {n}": spec.Sizes(policy=spec.Policy.MINIMAX, graphs=n) for n in (35, 18)}
    # In the table already, or nothing without sizes or measurements.
    left_out = {"default", "minimax", "explicit", "measured"}
    others = {policy.value: spec.Sizes(policy=policy) for policy in spec.Policy if policy.value not in left_out}
    rows = []
    for name, sizes in {"default": spec.Sizes(), **minimax, **others}.items():
        cells = [name]
        for speculative in (None, codec.loads("{method: eagle3, num_tokens: 3}", Speculative)):
            context = Context(limits=limits, speculative=speculative, parallel=spec.Parallel(), environment=machine)
            choice = decode_sizes(sizes, Domain.upto(256), 4 if speculative else 1, context)
            worst = float(worst_ratio(choice.domain, choice.sizes) - 1)
            cells += [str(len(choice.sizes)), f"1 to {choice.sizes[-1]}", f"{worst:.1%}"]
        rows.append(cells)
    columns = ("graphs of 1 token", "covers", "worst", "graphs of 4 tokens", "covers", "worst")
    return table(("policy", *columns), rows)


def environments() -> str:
    """Return the shipped environments."""
    rows = []
    for name in shipped_environments():
        device = find_environment(name).device
        rows.append((f"`{name}`", device.name, device.capability or "none", f"{device.memory / (1 << 30):.0f} GiB"))
    return table(("name", "device", "compute capability", "memory"), rows, text=4)


def laws() -> str:
    """Return the property tests of the laws, each with the first line of its file."""
    rows = []
    paths = (ROOT / "tests" / "property").glob("test_law*.py")
    # By number: as texts, 10 comes before 2.
    for path in sorted(paths, key=lambda path: int(re.sub(r"\D", "", path.name))):
        statement = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()[0]
        rows.append(f"- {statement} ([{path.stem[5:]}](../../{path.relative_to(ROOT).as_posix()}))")
    return "\n".join(rows)


def _reference(kind: type, *elsewhere: type, written_by_hand: bool = False) -> str:
    """Return the reference of a file kind, without the records that another kind's reference has."""
    known = {name for other in elsewhere for name in _sections(other, written_by_hand)}
    found = _sections(kind, written_by_hand).items()
    return "\n\n".join(section for name, section in found if name not in known)


def _sections(kind: type, written_by_hand: bool) -> dict[str, str]:
    """Return the section of each record of a file kind, by the record's name."""
    text = file_reference.reference(kind, written_by_hand=written_by_hand)
    text = re.sub(r"``(.+?)``", r"`\1`", text).replace("``", "empty")
    sections = [section.strip() for section in re.split(r"^(?=### )", text, flags=re.M)[1:]]
    return {section.partition("\n")[0]: section for section in sections}


# Called only for a page that has the part: some need files that another page does without.
PARTS: dict[str, Callable[[], str]] = {
    "laws": laws,
    "rules": rules,
    "engine-rules": engine_rules,
    "observed-rules": observed_rules,
    "fields": fields,
    "policies": policies,
    "figures": figures,
    "environments": environments,
    "spec": lambda: _reference(spec.Spec, written_by_hand=True),
    "environment": lambda: _reference(Environment, written_by_hand=True),
    "plan": lambda: _reference(Plan, spec.Spec, Environment),
    "observation": lambda: _reference(Observation, Plan, spec.Spec, Environment),
    "profile": lambda: _reference(Profile, Plan, spec.Spec, Environment),
    "traffic": lambda: _reference(Traffic),
    "journal": lambda: _reference(JournalRecord),
    **ranks_tables.PARTS,
    **conformance_tables.PARTS,
    **gpu_bench_tables.PARTS,
    **gpu_equality_tables.PARTS,
    **gallery_tables.PARTS,
    **arriving_tables.PARTS,
}
