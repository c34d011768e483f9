"""How the program ends where it is interrupted."""

import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import click
import pytest

from capture_planner.cli.commands import CommandGroup
from capture_planner.cli.ending import INTERRUPTED, TERMINATED, exit_code_of, terminable


class Torn:
    """Gets a signal while it is destroyed, where Python ignores what is raised."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@contextmanager
def python_handler():
    """Ctrl-C as Python takes it, whatever the test run has."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interruption_is_one_line(capsys):
    """Click's own empty line does not come before it."""

    @click.group(cls=CommandGroup)
    def program():
        pass

    @program.command()
    def command():
        raise KeyboardInterrupt

    code = exit_code_of(lambda: program.main(["command"], standalone_mode=False), as_json=False)
    assert (code, capsys.readouterr().err) == (INTERRUPTED, "interrupted\n")


def test_an_interruption_in_a_destructor_is_not_lost(capsys):
    """It comes again a moment later, also where the thread sleeps, and no traceback is printed for the first."""

    def work():
        Torn()
        time.sleep(10)
        pytest.fail("nothing woke the thread")

    with python_handler(), terminable(), pytest.raises(KeyboardInterrupt):
        work()
    assert capsys.readouterr().err == ""


def test_a_second_sigterm_ends_at_once_with_a_line():
    """Also where the main thread waits in a library, so that no handler of Python runs."""
    program = """
import ctypes, os, signal, threading
from capture_planner.cli.ending import terminable
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
with terminable():
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        lock(mutex)
        threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        lock(mutex)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert (ran.returncode, ran.stderr) == (TERMINATED, "terminated\n")
