"""A worker process as ``peers.py`` sees it: it is asked one thing at a time, and stands still in between."""

import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any


class WorkerError(Exception):
    """A worker that answered an error, or that is no more: then ``is_dead``."""

    def __init__(self, reason: str, *, is_dead: bool) -> None:
        super().__init__(reason)
        self.is_dead = is_dead


class Worker:
    """Starts ``command`` and reads its first line; what it prints to standard error goes to ``log``.

    Raises :class:`WorkerError` if it cannot be started, or does not say in time that it is ready. Between questions the
    process is stopped by a signal, so that no thread of it spins while another is measured.
    """

    def __init__(self, command: Sequence[str | Path], log: Path, *, timeout_s: float) -> None:
        self._log, self._timeout_s = log, timeout_s
        self._rest = b""
        with log.open("wb") as errors:
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
                )
            except OSError as error:
                raise WorkerError(f"cannot be started: {error}", is_dead=True) from None
        try:
            self.facts: dict[str, str] = self._read("facts")["facts"]
        except BaseException:
            self.close()
            raise
        self._process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, message: dict[str, Any]) -> float:
        """Return the rate that it measured; raises :class:`WorkerError`."""
        self._process.send_signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            reply = self._read("rate", "error")
        except BrokenPipeError:
            raise self._dead("died") from None
        finally:
            self._process.send_signal(signal.SIGSTOP)
        if "error" in reply:
            raise WorkerError(reply["error"], is_dead=False)
        return float(reply["rate"])

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self, *keys: str) -> dict[str, Any]:
        """Read one line, if it comes in time and has one of the ``keys``."""
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            if not select.select([self._process.stdout], [], [], self._timeout_s)[0]:
                self._process.kill()
                raise self._dead(f"gave no answer for {self._timeout_s:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._dead("died")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not (isinstance(reply, dict) and reply.keys() & set(keys)):
            self._process.kill()
            raise self._dead(f"answered {line[:80]!r}")
        return dict(reply)

    def _dead(self, how: str) -> WorkerError:
        try:
            code = self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:  # it has closed its output, and hangs as it is taken down
            self._process.kill()
            code = self._process.wait()
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        return WorkerError(f"{how} (exit code {code}): {''.join(last)[:200]}", is_dead=True)
