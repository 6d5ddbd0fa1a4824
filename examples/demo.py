"""The whole way in one file: build SmolLM2-135M with an fp8 KV cache, serve it, and stream an answer over HTTP.

Run it with ``make demo``. Exits non-zero if the model does not know the capital of France or the server does not stop.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

from trtcb import __version__
from trtcb.errors import TrtcbError
from trtcb.plan import Plan
from trtcb.spec import KVDtype

PLAN = Path(__file__).resolve().parent.parent / "engines" / "demo-smollm2-135m-fp8.plan"
QUESTION = "What is the capital of France?"
TRTCB = [sys.executable, "-m", "trtcb"]
HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0


def main() -> int:
    """Build if needed, serve, ask, stop, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="what to build (as of `trtcb build --model`)")
    parser.add_argument("--plan", type=Path, default=PLAN, help="the plan to build and serve")
    parser.add_argument("--rebuild", action="store_true", help="build even if the plan is up to date")
    arguments = parser.parse_args()

    timings: dict[str, str] = {}
    if arguments.rebuild or not is_current(arguments.plan, arguments.model):
        start = time.perf_counter()
        command = ["build", "--model", arguments.model, "--kv-dtype", "fp8", "--output", str(arguments.plan)]
        subprocess.run([*TRTCB, *command], check=True)
        timings["build"] = f"{time.perf_counter() - start:.1f} s"

    start = time.perf_counter()
    with server(arguments.plan) as (process, port):
        timings["start"] = f"{time.perf_counter() - start:.1f} s"
        print(f"\n{QUESTION}")
        asked = time.perf_counter()
        arrivals = []
        answer = ""
        for text in stream_chat(port, QUESTION):
            arrivals.append(time.perf_counter())
            answer += text
            print(text, end="", flush=True)
        print()
        if len(arrivals) > 1:
            timings["first token"] = f"{(arrivals[0] - asked) * 1e3:.0f} ms"
            timings["rate"] = f"{(len(arrivals) - 1) / (arrivals[-1] - arrivals[0]):.0f} pieces/s"
        start = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        code = process.wait(STOP_TIMEOUT_S)
        timings["stop"] = f"{time.perf_counter() - start:.1f} s"

    print("\n" + "\n".join(f"{name:<12} {value}" for name, value in timings.items()))
    if code != 0:
        print(f"The server ended with code {code} instead of 0.", file=sys.stderr)
        return 1
    if "Paris" not in answer:
        print("The answer does not name Paris.", file=sys.stderr)
        return 1
    return 0


def is_current(path: Path, model: str) -> bool:
    """Whether the plan is there, whole, of this model with an fp8 cache, and made by this version."""
    try:
        with Plan.open(path) as plan:
            header = plan.header
            made_by_this = header.versions.get("trtcb") == __version__
            return made_by_this and header.kv_dtype is KVDtype.FP8 and header.source.get("model") == model
    except TrtcbError:
        return False


@contextmanager
def server(plan: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run ``trtcb serve`` on a free port until the block ends; yields the process and the port once it is ready."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen([*TRTCB, "serve", str(plan), "--port", str(port), "--log-level", "warning"])
    try:
        wait_until_ready(process, port)
        yield process, port
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Poll ``/ready`` until the engine has warmed up."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"The server ended with code {process.returncode} before it was ready.")
        try:
            with connection(port) as client:
                client.request("GET", "/ready")
                if client.getresponse().status == 200:
                    return
        except OSError:
            pass  # not listening yet
        time.sleep(0.1)
    raise SystemExit(f"The server was not ready after {START_TIMEOUT_S:.0f} s.")


def stream_chat(port: int, question: str) -> Iterator[str]:
    """Yield the pieces of a greedy answer as they arrive."""
    with connection(port) as client:
        client.request("GET", "/v1/models")
        model = json.load(client.getresponse())["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 64,
            "stream": True,
        }
        client.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = client.getresponse()
        if reply.status != 200:
            raise SystemExit(f"The server answered {reply.status}: {reply.read().decode()}")
        for line in reply:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise SystemExit(f"The server failed: {event['error']['message']}")
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]


def connection(port: int) -> "closing[HTTPConnection]":
    """Open a connection that closes with its block."""
    return closing(HTTPConnection(HOST, port, timeout=60))


if __name__ == "__main__":
    sys.exit(main())
