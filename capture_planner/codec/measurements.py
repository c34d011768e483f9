"""The files that a spec names: its traffic and its profile."""

from __future__ import annotations

from pathlib import Path

from capture_planner.codec.reading import Document
from capture_planner.errors import InvalidDocument, Problem
from capture_planner.records.measurements import Measurements
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Spec
from capture_planner.records.traffic import Traffic


def load_measurements(source: Document | str | Path) -> Measurements | None:
    """Return the traffic and the profile that a spec's ``sizes`` names, or None where it names neither.

    Paths are relative to the spec's folder, for standard input to the working directory. Raises ``InvalidDocument``:
    a file that is missing, or one of the two not named, has its place in the spec; what is wrong inside a file, in it.

    :param source: the spec: a document, or the path of its file.
    """
    document = source if isinstance(source, Document) else Document.read(source)
    sizes = document.load(Spec).sizes
    names = {"traffic": sizes.traffic, "profile": sizes.profile}
    if not any(names.values()):
        return None
    folder, problems, files = Path(document.name).parent, [], {}
    for name, value in names.items():
        if value is None:
            problems.append(
                Problem(path=("sizes",), message=f"measured sizes need a {name}", remedy=f"give {name} too")
            )
        elif not (folder / value).is_file():
            message = f"no such file: {folder / value}"
            remedy = f"write it with `capture-planner {name}`; the path is relative to the spec"
            problems.append(Problem(path=("sizes", name), message=message, remedy=remedy))
        else:
            files[name] = folder / value
    if problems:
        raise InvalidDocument(document.place(problems))
    return Measurements(
        traffic=Document.read(files["traffic"]).load(Traffic), profile=Document.read(files["profile"]).load(Profile)
    )
