"""Ranks in one process: their threads run one at a time, in an order that is drawn, on a clock of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import attrs


class Kill(BaseException):
    """Ends a thread whose rank is gone."""


@attrs.define(eq=False)
class Task:
    """One thread, and when it goes on."""

    wake: float
    turn: threading.Semaphore = attrs.Factory(lambda: threading.Semaphore(0))
    done: bool = False
    killed: bool = False
    thread: threading.Thread | None = None


class World:
    """Runs tasks in turns, and a board for them. Every access to the board is a point at which another goes on."""

    def __init__(self, order: Random) -> None:
        self.now = 0.0
        self.texts: dict[str, str] = {}
        self._order = order
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._main = threading.Semaphore(0)

    def clock(self) -> float:
        return self.now

    def start(self, work: Callable[[], Any], delay: float = 0.0) -> Task:
        """Start a thread; ``work`` may raise ``Kill``."""
        task = Task(wake=self.now + delay)

        def body() -> None:
            task.turn.acquire()
            try:
                if not task.killed:
                    work()
            except Kill:
                pass
            finally:
                task.done = True
                self._main.release()

        task.thread = threading.Thread(target=body, daemon=True)
        task.thread.start()
        self._tasks.append(task)
        return task

    def kill(self, *tasks: Task) -> None:
        """End threads: the current one at once, others where they are."""
        for task in tasks:
            task.killed, task.wake = True, self.now
        if self._current in tasks:
            raise Kill

    def pause(self, seconds: float) -> None:
        """Let others go on until the clock has moved by ``seconds``."""
        task = self._current
        assert task is not None
        task.wake = self.now + seconds
        self._main.release()
        task.turn.acquire()
        if task.killed:
            raise Kill

    def run(self, seconds: float) -> None:
        """Run until all tasks are done, or the clock has moved by ``seconds``; then end what is left."""
        end = self.now + seconds
        while (waiting := [task for task in self._tasks if not task.done]) and self.now <= end:
            self.now = max(self.now, min(task.wake for task in waiting))
            self._resume(self._order.choice([task for task in waiting if task.wake <= self.now]))
        for task in self._tasks:
            if not task.done:
                task.killed = True
                self._resume(task)

    def _resume(self, task: Task) -> None:
        self._current = task
        task.turn.release()
        self._main.acquire()

    # The board ----------------------------------------------------------------------------------

    def post(self, key: str, text: str) -> None:
        self.pause(0)
        self.texts[key] = text

    def read(self, keys: Sequence[str]) -> tuple[str | None, ...]:
        self.pause(0)
        return tuple(self.texts.get(key) for key in keys)

    def claim(self, key: str, text: str) -> str:
        self.pause(0)
        self.texts[key] = self.texts.get(key) or text
        return self.texts[key]

    def erase(self, key: str) -> None:
        self.pause(0)
        self.texts.pop(key, None)
