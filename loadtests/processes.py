"""Server process in its own session, measured through /proc, and always stopped.

`ServerProcess` is a context manager. Its exit (also after an error, Ctrl-C or SIGTERM) ends the whole family: every process of
that session and every descendant, even one that moved to another session. A process is signalled only if its pid and start time
were seen in the family: a process that reuses a pid is never hit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

PROC = Path("/proc")
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """Fields of /proc/PID/stat. `started`: start time in clock ticks since boot, which with the pid identifies a process."""

    pid: int
    parent: int
    session: int
    cpu_s: float
    started: int


def read_stat(pid: int) -> ProcessStat | None:
    """Return the fields of process `pid`; None if there is no such process, or it is a zombie."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if fields[0] == "Z":
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return ProcessStat(pid, int(fields[1]), int(fields[3]), cpu_s, int(fields[19]))


def family(root: int) -> list[ProcessStat]:
    """Return `root`, its descendants, and the members of its session, without zombies."""
    everyone = [stat for name in os.listdir(PROC) if name.isdigit() and (stat := read_stat(int(name)))]
    members = {root}
    while found := {stat.pid for stat in everyone if stat.parent in members or stat.session == root} - members:
        members |= found
    return [stat for stat in everyone if stat.pid in members]


def cpu_s(root: int) -> float:
    """Return the CPU seconds (user and system) that the family of `root` has used so far."""
    return sum(stat.cpu_s for stat in family(root))


def cpu_percent(root: int, seconds: float) -> float:
    """Return the CPU use of the family of `root` during the next `seconds`, in percent of one core."""
    before_cpu_s, before_s = cpu_s(root), time.perf_counter()
    time.sleep(seconds)
    return round(100 * (cpu_s(root) - before_cpu_s) / (time.perf_counter() - before_s), 1)


def resident_mib(root: int) -> float:
    """Return the sum of resident sets in MiB, from statm, which needs no page-table walk. Shared pages count once per process."""
    total = 0.0
    for stat in family(root):
        with contextlib.suppress(OSError):
            total += int((PROC / str(stat.pid) / "statm").read_text().split()[1]) * _PAGE_MIB
    return total


def peak_resident_mib(root: int) -> float:
    """Return the sum in MiB of the family's peak resident sets (VmHWM), which the kernel maintains at no cost."""
    total = 0.0
    for stat in family(root):
        with contextlib.suppress(OSError):
            status = (PROC / str(stat.pid) / "status").read_text()
            total += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0) / 1024
    return total


@contextlib.contextmanager
def stop_signals_deferred() -> Iterator[None]:
    """Context that defers Ctrl-C and SIGTERM until its end, so that a process being started is always stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    previous = {number: signal.signal(number, note) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if pending:
            signal.raise_signal(signal.Signals(pending[0]))


@contextlib.contextmanager
def stop_signals_as_interrupt() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise KeyboardInterrupt, so that every `with` block ends in order."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class CannotStart(Exception):
    """Error: the program does not exist or is not executable."""


class ServerProcess:
    """Running command whose output goes to the file `log`. `env`: variables added to the environment."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        grace_s: float = 15.0,
    ) -> None:
        self._command, self._log, self._env, self._cwd = list(command), log, dict(env or {}), cwd
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0

    def __enter__(self) -> Self:
        try:
            with stop_signals_deferred():
                self._start()
        except BaseException:
            # A Ctrl-C that came while we started is raised here, where `with` would not call __exit__.
            if self._process is not None:
                self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self.started_s = time.perf_counter()
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | self._env,
                    cwd=self._cwd,
                    start_new_session=True,
                )
            except OSError as error:
                raise CannotStart(f"cannot start {self._command[0]}: {error.strerror}") from None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def age_s(self) -> float:
        return time.perf_counter() - self.started_s

    def has_ended(self) -> bool:
        # Without reaping: as long as the ended leader is ours to wait for, its pid cannot go to anyone else.
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self, number: signal.Signals, limit_s: float) -> int | None:
        """Send signal `number` to the process. Return its exit code; None if it did not end within `limit_s` seconds."""
        assert self._process is not None
        self._process.send_signal(number)
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def log_tail(self, num_bytes: int = 600) -> str:
        return self._log.read_bytes()[-num_bytes:].decode(errors="replace").strip()

    def _stop(self) -> None:
        members: list[ProcessStat] = []
        try:
            members = family(self.pid)
            _send(members, signal.SIGTERM)
            deadline_s = time.perf_counter() + self._grace_s
            while any(map(_still_runs, members)) and time.perf_counter() < deadline_s:
                time.sleep(0.02)
        finally:
            # A second Ctrl-C cuts the wait short, never the kill.
            with stop_signals_deferred():
                while alive := [stat for stat in (*members, *family(self.pid)) if _still_runs(stat)]:
                    _send(alive, signal.SIGKILL)
                    time.sleep(0.01)
                assert self._process is not None
                self._process.wait()


def _send(members: Sequence[ProcessStat], number: signal.Signals) -> None:
    for stat in members:
        if _still_runs(stat):
            with contextlib.suppress(ProcessLookupError):
                os.kill(stat.pid, number)


def _still_runs(stat: ProcessStat) -> bool:
    now = read_stat(stat.pid)
    return now is not None and now.started == stat.started
