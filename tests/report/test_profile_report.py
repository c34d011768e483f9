"""Reports of profiles: what is in the file is shown."""

from __future__ import annotations

from hypothesis import given

from capture_planner.records.profile import Profile
from capture_planner.report.profile import profile_report
from capture_planner.report.writing import Grid
from support.strategies.profiles import profiles


@given(profiles())
def test_each_time_of_a_profile_is_shown(profile: Profile) -> None:
    """Curves and experts as staircases, from their least to their most tokens, and what each kind of step takes."""
    report = profile_report(profile)
    sections = {section.name: section for section in report.sections}
    shown = {f"curve-{number}": curve for number, curve in enumerate(profile.curves)}
    shown |= {f"experts-{each.role.value}": each for each in profile.experts}
    assert {name for name in sections if name.startswith(("curve-", "experts-"))} == set(shown)
    for name, times in shown.items():
        (grid,) = sections[name].parts
        assert isinstance(grid, Grid)
        rows = [[str(cell) for cell in row] for row in grid.rows]
        assert rows[0][0].partition(" to ")[0] == f"{times.tokens[0]:,}"
        assert rows[-1][0].rpartition(" to ")[2] == f"{times.tokens[-1]:,}"
        assert times.role.value in sections[name].title
    assert ("overheads" in sections) == bool(profile.overheads)
    if profile.overheads:
        (grid,) = sections["overheads"].parts
        assert isinstance(grid, Grid)
        assert [str(row[1]) for row in grid.rows] == [f"{each.floor:.3f}" for each in profile.overheads]
