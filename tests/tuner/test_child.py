"""An engine as a child: exit codes, streams, signals, and its end with its parent, in real processes."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner_tuner.child import run_engine

PARENT = """
import os, sys
from capture_planner_tuner.child import run_engine
sys.exit(run_engine(sys.argv[1:], os.environ))
"""
COUNTING = """
import signal, sys, time
seen = []
def took(number, frame):
    seen.append(number)
    if number == signal.SIGTERM:
        print(*seen, flush=True)
        sys.exit(3)
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, took)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


def parent(*words: str, **options: object) -> "subprocess.Popen[str]":
    """Start a process that runs an engine of those words."""
    return subprocess.Popen([sys.executable, "-c", PARENT, *words], text=True, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload,no-any-return]


@given(st.integers(0, 255))
def test_exit_code_is_the_engines(code: int) -> None:
    """Any that a process can have."""
    assert run_engine(["sh", "-c", f"exit {code}"], os.environ) == code


def test_end_is_seen_while_other_threads_take_signals() -> None:
    """A thread that blocks no signal may take SIGCHLD; without a look at the child the wait would never end."""
    program = """
import os, subprocess, threading, time
from capture_planner_tuner.child import run_engine
threading.Thread(target=threading.Event().wait, daemon=True).start()
poll = subprocess.Popen.poll
def slow(process):
    seen = poll(process)
    time.sleep(0.3)  # the engine ends between the look and the wait
    return seen
subprocess.Popen.poll = slow
assert run_engine(["sleep", "0.1"], os.environ) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV])
def test_signal_that_ends_the_engine_is_told_as_a_shell_does(number: signal.Signals) -> None:
    """128 and its number."""
    assert run_engine(["sh", "-c", f"kill -{int(number)} $$"], os.environ) == 128 + number


def test_environment_is_the_given_one_and_streams_pass_through() -> None:
    """Standard input too."""
    process = parent("sh", "-c", 'echo "$ONLY"; cat; echo oops >&2', stdin=subprocess.PIPE, stderr=subprocess.PIPE,
                     env={**os.environ, "ONLY": "yes"})  # fmt: skip
    out, err = process.communicate("typed\n", timeout=300)
    assert (out, err, process.returncode) == ("yes\ntyped\n", "oops\n", 0)


def test_missing_program_raises_and_leaves_signals_alone() -> None:
    """As ``exec`` does; nothing stays blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(FileNotFoundError):
        run_engine(["/nowhere/engine"], os.environ)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_sent_signals_reach_the_engine_once_each() -> None:
    """In any order, and the engine decides what they mean."""
    process = parent(sys.executable, "-c", COUNTING)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.2)
    out, _ = process.communicate(timeout=300)
    numbers = signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM
    assert out.split() == [str(int(number)) for number in numbers]
    assert process.returncode == 3


def test_key_of_the_terminal_reaches_the_engine_once() -> None:
    """The terminal sends Ctrl-C to the whole group; it is not sent on a second time."""
    keyboard, terminal = pty.openpty()
    process = parent(sys.executable, "-c", COUNTING, stdin=terminal, start_new_session=False,
                     preexec_fn=lambda: _take_terminal(terminal))  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.write(keyboard, b"\x03")
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=300)
    assert out.split() == [str(int(signal.SIGINT)), str(int(signal.SIGTERM))]
    assert process.returncode == 3
    os.close(keyboard)
    os.close(terminal)


def _take_terminal(terminal: int) -> None:
    """Begin a session whose terminal this is."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl(2)")
def test_engine_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """Where the parent is killed, the engine is asked to end."""
    noted = tmp_path / "pid"
    process = parent("sh", "-c", f"echo $$ > {noted}; echo ready; exec sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    with process:
        process.wait(timeout=300)
    engine = int(noted.read_text())
    deadline = time.monotonic() + 30
    while _runs(engine) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(engine)


def _runs(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
