"""``new-backend``: any name that a spec can write gives a distribution, and nothing is overwritten."""

from __future__ import annotations

import ast
import importlib
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.cli.new_backend import refuse_name, slug, template_files, write_template
from capture_planner.errors import CapturePlannerError
from capture_planner.records._base import Name, constraints
from support.commands import Run

(RULE,) = constraints(Name)
NAMES = st.from_regex(RULE.schema()["pattern"].replace("$", r"\Z"))


@given(name=NAMES)
def test_every_name_gives_a_distribution_that_can_be_read(name: str) -> None:
    """Python that parses, TOML that reads, and a module that can be imported, whatever the name."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "new"
        written = write_template(name, folder)
        assert {path.relative_to(folder).as_posix() for path in written} == {
            file.replace("my_attention", slug(name)) for file in template_files()
        }
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
        (module,) = project["project"]["entry-points"]["capture_planner"].values()
        assert module.isidentifier()
        assert (folder / "src" / module / "__init__.py").is_file()
        assert project["project"]["name"] == module.replace("_", "-")
        for path in written:
            text = path.read_text("utf-8")
            assert "my-attention" not in text or "my-attention" in name
            if path.suffix == ".py":
                ast.parse(text)
        assert f'name = "{name}"' in (folder / "src" / module / "backend.py").read_text("utf-8")
        assert f'backend = "{name}"' in (folder / "tests" / "test_conformance.py").read_text("utf-8")


@given(name=st.text(max_size=8).filter(lambda text: RULE.problem(text) is not None))
def test_what_no_spec_can_name_is_refused(name: str) -> None:
    """With the rule, before anything is written."""
    with pytest.raises(CapturePlannerError, match="the name of a backend must be"):
        refuse_name(name)


@pytest.mark.parametrize("name", ["../up", "-acme", "", "Reference", "reference"])
def test_a_bad_or_taken_name_leaves_nothing(
    name: str, call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a path nor an option nor a module that is installed."""
    monkeypatch.chdir(tmp_path)
    said = call("new-backend", "--", name)
    assert said.code == 1
    assert said.err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("into", [None, "here"])
def test_a_folder_that_is_there_is_left_alone(
    into: str | None, call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second time, it is refused, and what an author changed is as it was."""
    monkeypatch.chdir(tmp_path)
    command = ("new-backend", "acme", *(("--into", into) if into else ()))
    folder = tmp_path / (into or "capture-planner-acme")
    first = call(*command)
    assert first.code == 0
    assert f"cd {folder.name} && " in first.out
    (folder / "README.md").write_text("mine", "utf-8")
    again = call(*command)
    assert again.code == 1
    assert "already exists" in again.err
    assert (folder / "README.md").read_text("utf-8") == "mine"


@pytest.mark.parametrize(("first", "second"), [("a b", "a+b"), ("acme", "Acme"), ("a.b", "a/b")])
def test_names_that_give_one_folder_are_told_apart(
    first: str, second: str, call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused: names that differ in a character may give the same folder."""
    monkeypatch.chdir(tmp_path)
    assert call("new-backend", first).code == 0
    again = call("new-backend", second)
    assert again.code == 1
    assert "already exists, and is not overwritten" in again.err


@pytest.mark.parametrize("into", [(), ("--into", "elsewhere")])
def test_a_module_that_is_installed_is_refused(
    into: tuple[str, ...], call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its backend is called, and wherever the new one goes: two modules of a name hide each other."""
    monkeypatch.chdir(tmp_path)
    installed = tmp_path / "installed" / "capture_planner_some_mla"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(installed.parent))
    said = call("new-backend", "Some MLA", *into)
    assert said.code == 1
    assert "the module capture_planner_some_mla is installed" in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["installed"]


def test_a_name_beside_a_taken_one_says_what_they_share(call: Run) -> None:
    """Not only that the other is installed: nobody asked for it."""
    said = call("new-backend", "Reference")
    assert said.code == 1
    assert "both are the module capture_planner_reference" in said.err


def test_a_folder_that_cannot_be_made_is_refused(call: Run, tmp_path: Path) -> None:
    """Folders above it are not invented."""
    said = call("new-backend", "acme", "--into", str(tmp_path / "no" / "such"))
    assert said.code == 1
    assert "cannot be created" in said.err
    assert list(tmp_path.iterdir()) == []


def test_what_is_half_written_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves no folder that looks like a backend."""
    # By its name: the package has a command that is named as the module.
    module = importlib.import_module("capture_planner.cli.new_backend")
    monkeypatch.setattr(module, "template_files", lambda: {"a.py": "", "a.py/b.py": ""})
    with pytest.raises(CapturePlannerError, match="cannot be written"):
        write_template("acme", tmp_path / "acme")
    assert list(tmp_path.iterdir()) == []
