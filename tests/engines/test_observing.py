"""What the observers inside engines share: the clock of passes, and seconds from the environment."""

from hypothesis import given
from hypothesis import strategies as st

from capture_planner.engines.inside import PassClock, seconds_of


class Event:
    """An event of a device that runs one pass a millisecond, ``ready`` of them so far."""

    made = ready = 0

    def record(self):
        Event.made += 1
        self.at = Event.made

    def query(self):
        return self.at <= Event.ready

    def elapsed_time(self, other):
        return float(other.at - self.at)


@given(st.lists(st.tuples(st.sampled_from(["start", "stop", "drop", "read"]), st.integers(0, 6)), max_size=40))
def test_each_pass_has_one_time_once_the_device_is_done_with_it(steps):
    """A pass ends with the next one or with ``stop``; a dropped one has no time. Times come once, in order."""
    Event.made = Event.ready = 0
    clock, begun, ended, read = PassClock(Event), None, [], []
    for number, (step, ahead) in enumerate(steps):
        if step in ("start", "stop") and begun is not None:
            ended.append((begun[0], Event.made + 1 - begun[1], Event.made + 1))
        if step == "start":
            clock.start(number)
            begun = number, Event.made
        elif step != "read":
            getattr(clock, step)()
            begun = None
        Event.ready = min(Event.made, Event.ready + ahead)
        if step == "read":
            read += clock.passed()
            assert read == [(key, float(spent)) for key, spent, at in ended if at <= Event.ready]
    Event.ready = Event.made
    assert [*read, *clock.passed()] == [(key, float(spent)) for key, spent, _ in ended]


def test_seconds_that_are_no_number_are_the_default_with_a_warning(monkeypatch):
    """An unset and an empty variable are the default without one."""
    lines = []
    for value, expected in (("", 30.0), ("0.5", 0.5), ("soon", 30.0), ("nan", 30.0), ("-1", 30.0)):
        monkeypatch.setenv("SOME_SECONDS", value)
        assert seconds_of("SOME_SECONDS", 30.0, "files are written every", lines.append) == expected
    says = "SOME_SECONDS is no number of seconds: {!r}; files are written every 30 s"
    assert lines == [says.format(value) for value in ("soon", "nan", "-1")]
