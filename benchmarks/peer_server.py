"""A server as a process: started on a free port, waited for, and ended."""

import contextlib
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Where it answers, which process it is, and how long it took to be ready."""

    url: str
    pid: int
    start_s: float


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def server(
    command: Sequence[str | Path], port: int, ready: str, log: Path, *, timeout_s: float = 300.0
) -> Iterator[RunningServer]:
    """Run ``command`` until the block ends. Ready is when ``ready`` answers 200.

    Raises ``RuntimeError`` if it never does, or cannot be started.
    """
    url = f"http://127.0.0.1:{port}"
    began_s = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        except OSError as error:
            raise RuntimeError(f"{command[0]} cannot be started: {error}") from None
    try:
        while not _answers(url + ready):
            late = time.monotonic() - began_s > timeout_s
            if late or process.poll() is not None:
                tail = log.read_text(errors="replace").strip()[-500:]
                how = f"was not ready after {timeout_s:g} s" if late else f"ended with code {process.returncode}"
                raise RuntimeError(f"{command[0]} {how}: {tail}")
            time.sleep(_POLL_S)
        yield RunningServer(url, process.pid, time.monotonic() - began_s)
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
