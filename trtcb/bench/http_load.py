"""Sends a workload to a server on its schedule, from one event loop, and keeps what came of every request."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from trtcb.bench.http_client import ApiClient, Reply, check_access, unreachable
from trtcb.bench.prompt_style import PromptStyle, request_body
from trtcb.bench.workload import RandomWorkload, Workload
from trtcb.errors import TrtcbError, UsageError
from trtcb.executor.request import Request

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Asking:
    """How requests are put: what is the same for all of them."""

    model: str
    style: PromptStyle
    vocab_size: int
    temperature: float
    ignore_eos: bool

    def body(self, request: Request) -> bytes:
        """Encode a request of a workload."""
        params = replace(request.params, temperature=self.temperature, ignore_eos=self.ignore_eos)
        return request_body(replace(request, params=params), self.style, self.model)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request of a run. ``sent_s`` counts from the run's start; ``lag_s`` is how late this client sent it."""

    number: int
    sent_s: float
    lag_s: float
    reply: Reply


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What a run came to. Of ``num_requests``, those without an answer were cut off or never sent (Ctrl-C)."""

    answers: tuple[Answer, ...]
    num_requests: int
    num_cut_off: int
    duration_s: float


class LoadGenerator:
    """One run of a workload against a server.

    Each request is sent when it is due. With ``max_concurrency`` it is held back while so many are unfinished, and is
    due when one of them ends. ``on_answer`` is called as each one is in.
    """

    def __init__(
        self,
        client: ApiClient,
        asking: Asking,
        workload: Workload,
        on_answer: Callable[[Answer], None] = lambda answer: None,
    ) -> None:
        self._client = client
        self._asking = asking
        self._workload = workload
        self._on_answer = on_answer
        self._answers: list[Answer] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, stop: asyncio.Event) -> LoadRun:
        """Send everything and wait for all answers, or until ``stop`` is set: then what still runs is cut off."""
        began_s = time.perf_counter()
        sending = asyncio.ensure_future(self._send_all(began_s))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            num_cut_off = sum(not task.done() for task in self._tasks)
            for task in (sending, stopping, *self._tasks):
                task.cancel()
            await asyncio.gather(sending, stopping, *self._tasks, return_exceptions=True)
        ends_s = [answer.sent_s + answer.reply.e2e_s for answer in self._answers]
        duration_s = time.perf_counter() - began_s if stop.is_set() else max(ends_s, default=0.0)
        return LoadRun(tuple(self._answers), len(self._workload), num_cut_off, duration_s)

    async def _send_all(self, began_s: float) -> None:
        # A place holds the moment since when it is free.
        places: asyncio.Queue[float] = asyncio.Queue()
        for _ in range(self._workload.max_concurrency or len(self._workload)):
            places.put_nowait(began_s)
        first_s = float(self._workload.arrival_s[0])
        for number, request in enumerate(self._workload.requests(self._asking.vocab_size)):
            body = self._asking.body(request)  # before it is due, so that this costs no lateness
            due_s = began_s + request.arrival_s - first_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            due_s = max(due_s, await places.get())
            task = asyncio.ensure_future(self._send(number, body, began_s, due_s))
            task.add_done_callback(lambda _: places.put_nowait(time.perf_counter()))
            self._tasks.append(task)
        await asyncio.gather(*self._tasks)

    async def _send(self, number: int, body: bytes, began_s: float, due_s: float) -> None:
        sent_s = time.perf_counter()
        reply = await self._client.ask(body)
        if reply.failure is None:
            reply = self._checked(number, reply)
        answer = Answer(number, sent_s - began_s, sent_s - due_s, reply)
        self._answers.append(answer)
        self._on_answer(answer)

    def _checked(self, number: int, reply: Reply) -> Reply:
        """Hold a reply's counts against what was asked for."""
        most, count = int(self._workload.max_tokens[number]), reply.num_output_tokens
        if not (count == most if self._asking.ignore_eos else 1 <= count <= most):
            wanted = f"{most}" if self._asking.ignore_eos else f"1 to {most}"
            detail = f"usage says {count} output tokens, asked for {wanted}"
            return Reply(e2e_s=reply.e2e_s, failure="wrong token count", detail=detail)
        length = int(self._workload.prompt_len[number])
        if self._asking.style is PromptStyle.IDS and reply.num_prompt_tokens != length:
            detail = f"usage says {reply.num_prompt_tokens} prompt tokens, {length} were sent"
            return Reply(e2e_s=reply.e2e_s, failure="wrong token count", detail=detail)
        return reply


async def warm_up(client: ApiClient, asking: Asking, workload: Workload, number: int = 0) -> tuple[Asking, str]:
    """Send one short request, and return how this server has to be asked, and why if that is not as given.

    A server that refuses token ids is sent words. Raises an error that names the fix if it answers neither.
    """
    length = int(workload.prompt_len[0])
    max_tokens = min(_WARM_UP_TOKENS, int(workload.max_tokens[0]))
    # A seed that no run has: the warm-up must not put a prompt of the run into the server's prefix cache.
    source = RandomWorkload(num_prompts=1, random_input_len=length, random_output_len=max_tokens)
    (request,) = source.generate(2**32 + workload.seed + number).requests(asking.vocab_size)
    reply = await client.ask(asking.body(request))
    if (reply.failure or "").startswith(("HTTP 400", "HTTP 422")) and asking.style is PromptStyle.IDS:
        in_words = replace(asking, style=PromptStyle.WORDS)
        second = await client.ask(in_words.body(request))
        if second.failure is None:
            return in_words, reply.detail
    if reply.failure is None:
        return asking, ""
    raise await _explained(client, asking.model, reply, f"{length} prompt and {max_tokens} output tokens")


async def _explained(client: ApiClient, model: str, reply: Reply, lengths: str) -> TrtcbError:
    """Turn the failure of a warm-up into an error that names the fix."""
    kind, detail = reply.failure or "", reply.detail
    if kind == "no connection":
        return unreachable(client.base_url, detail)
    if kind.startswith(("HTTP 401", "HTTP 403")):
        check_access(int(kind.split()[1]))
    if kind.startswith("HTTP 404"):
        names = await client.models()
        if model not in names:
            return UsageError(f"The server has no model '{model}': choose --model from {', '.join(names)}.")
        return UsageError(
            f"There is nothing at {client.url} (HTTP 404): set --endpoint, such as /v1/completions or "
            "/v1/chat/completions."
        )
    if kind == "no stream":
        return UsageError(f"{client.url} does not stream ({detail}): set --endpoint to a route that does.")
    failure = f"{kind}{': ' if detail else ''}{detail.rstrip('.')}"
    if kind.startswith(("HTTP 400", "HTTP 413", "HTTP 422")):
        fix = "if that is too long, lower --random-input-len or the trace's lengths"
        return TrtcbError(f"The warm-up request, of {lengths}, failed: {failure}; {fix}.")
    return TrtcbError(f"The warm-up request failed: {failure}.")
