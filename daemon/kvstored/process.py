"""A command that serves, as a process: its signals, its exit status, its last words.

Invariants
1. Whatever goes wrong ends in one clear text on standard error and a status: 0 done, 1 failed, 2 wrong settings,
   3 something needed does not answer. A traceback is for our own bugs only.
2. The first SIGTERM or SIGINT starts one orderly drain with one deadline; the second ends the process at once.
   SIGHUP is a stop where it means that the terminal is gone, else it changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from kvstore.errors import KVStoreError, PeerUnreachable, UsageError
from kvstored.logs import fields, logging_to
from kvstored.notify import Notifier
from kvstored.sources import Fault

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes
    ----------
    name : str
        Its name, and that of its logger.
    extra : str
        The extra of the distribution that brings what it needs.
    dependencies : sequence
        The modules which that extra brings.
    close_s : float
        What closing may take after the drain's own deadline before the process is ended.
    memory_fix : str
        What to do where memory runs out.
    drain_loss : str
        What is gone if the drain is cut short, if anything is.
    """

    name: str
    extra: str
    dependencies: Sequence[str]
    close_s: float
    memory_fix: str = "free memory on this machine"
    drain_loss: str = ""

    def run(self, body: Callable[[], int]) -> int:
        """Return the exit status of `body`, the whole of the command."""
        _fill_standard_descriptors()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        hangup = signal.getsignal(signal.SIGHUP)
        if not sys.stderr.isatty():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            return body()
        except BrokenPipeError:
            # Whoever read our output went away; nothing more can be told, not even at interpreter exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_FAILED
        finally:
            signal.signal(signal.SIGHUP, hangup or signal.SIG_DFL)  # what is started from here later has its own

    def serve(self, log_level: str, log_format: str, body: Callable[[], None]) -> int:
        """Return the exit status of `body`, which serves and logs."""
        try:
            with logging_to(sys.stderr.fileno(), log_level, log_format):
                body()
            return EXIT_DONE
        except KeyboardInterrupt:  # before the loop listens for signals
            self.tell("interrupted while it started; nothing is lost")
            return EXIT_FAILED
        except (KVStoreError, OSError, MemoryError, ModuleNotFoundError, ExceptionGroup) as exc:
            return self._fail(exc)

    async def until_stopped(self, serving: Coroutine[Any, Any, None], drain_s: float, notifier: Notifier) -> None:
        """Serve until a signal, or until serving fails. Cancelling `serving` is what asks it to drain and return."""
        async with asyncio.TaskGroup() as group:
            watchdog = group.create_task(notifier.keep_watchdog())
            task = group.create_task(serving)
            with self._stopping(task.cancel, drain_s, notifier):
                await asyncio.wait([task])
            watchdog.cancel()
        self._log.info("stopped")

    def allow_descriptors(self, needed: int, what: str) -> None:
        """Raise the limit of descriptors as far as it goes, and tell if `what` may not all have one."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if hard < needed:
            self._log.warning(f"descriptors may run out before {what}", extra=fields(ulimit_n=hard, needed=needed))

    def tell(self, text: str) -> None:
        """Tell whoever started it."""
        sys.stderr.write(f"{self.name}: {text}\n")

    def tell_faults(self, faults: Sequence[Fault]) -> int:
        """Tell what is wrong with the settings; returns the status that stands for it."""
        count = len(faults)
        self.tell(f"{count} fault{'s' if count > 1 else ''} in the settings; nothing was started")
        for fault in faults:
            sys.stderr.write(f"  {fault}\n")
        return EXIT_USAGE

    # ---- inside

    @property
    def _log(self) -> logging.Logger:
        return logging.getLogger(self.name)

    @contextmanager
    def _stopping(self, stop: Callable[[], object], drain_s: float, notifier: Notifier) -> Generator[None, None, None]:
        """Call `stop` at the first signal inside the block; end the process at the second, or past the deadline."""
        loop = asyncio.get_running_loop()
        limit_s = drain_s + self.close_s
        deadline: asyncio.TimerHandle | None = None

        def signalled(name: str) -> None:
            nonlocal deadline
            if deadline is not None:
                loss = self.drain_loss and f": {self.drain_loss}"
                self._end_now(f"a second signal ({name}) cut the drain short{loss}")
            self._log.info("stopping", extra=fields(signal=name, drain_s=drain_s))
            notifier.stopping(f"draining for up to {drain_s:g} s", limit_s + self.close_s)
            deadline = loop.call_later(
                limit_s, self._end_now, f"not stopped {limit_s:g} s after {name}: raise --drain-timeout"
            )
            stop()

        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in signals:
            is_stop = number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # nohup ignores it, too
            loop.add_signal_handler(number, signalled if is_stop else self._tell_of, number.name)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            if deadline is not None:
                deadline.cancel()

    def _tell_of(self, name: str) -> None:
        fix = "settings are read at the start only: restart"
        self._log.warning("signal ignored", extra=fields(signal=name, fix=fix))

    def _end_now(self, why: str) -> NoReturn:
        with suppress(OSError):  # nobody may be there to read it
            os.write(sys.stderr.fileno(), f"{self.name}: {why}\n".encode())
        os._exit(EXIT_FAILED)

    def _fail(self, exc: Exception) -> int:
        """Tell what ended it and return the status that stands for it; what is no known error is raised again."""
        causes = list(_leaves(exc))
        for cause in causes:
            if isinstance(cause, ModuleNotFoundError) and cause.name in self.dependencies:
                self.tell(f"{cause.name} is not installed: pip install 'kvstored[{self.extra}]'")
            elif isinstance(cause, KVStoreError):
                self.tell(str(cause))
            elif isinstance(cause, OSError):
                self.tell(f"{cause.strerror}{f': {cause.filename}' if cause.filename else ''} (errno {cause.errno})")
            elif isinstance(cause, MemoryError):
                self.tell(f"out of memory: {self.memory_fix}")
            else:
                raise exc
        if any(isinstance(cause, UsageError) for cause in causes):
            return EXIT_USAGE
        if any(isinstance(cause, PeerUnreachable) for cause in causes):
            return EXIT_UNREACHABLE
        return EXIT_FAILED


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for part in cast("BaseExceptionGroup[BaseException]", exc).exceptions:
            yield from _leaves(part)
    else:
        yield exc


def _fill_standard_descriptors() -> None:
    """Let whatever was closed lead nowhere: else a file or socket of ours gets its number, and what is told there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
