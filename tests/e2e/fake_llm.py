"""A test double of ``AsyncLLM``: the same methods over no model, with faults that a real engine cannot be asked for."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from tests.e2e.tiny_tokenizer import BOS, EOS, VOCAB_SIZE, tiny_tokenizer
from trtcb.errors import DrainingError
from trtcb.executor.config import EngineConfig
from trtcb.executor.request import Delta, FinishReason, Request
from trtcb.executor.stats import EngineSnapshot, StepStats
from trtcb.spec import ModelSpec

MODEL = ModelSpec(
    name="fake",
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=VOCAB_SIZE,
    max_position=4096,
    bos_token_id=BOS,
    eos_token_ids=(EOS,),
)


class FakeEngine:
    """The part of ``Engine`` that the server touches."""

    def __init__(self) -> None:
        self.config = EngineConfig()
        self.aborted: set[str] = set()

        self.state = "running"
        self.error: str | None = None
        self.has_work = False
        self.last_progress_s = 0.0

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            state=self.state,
            error=self.error,
            policy="guaranteed_no_evict",
            num_running=1,
            num_waiting=2,
            num_paused=3,
            num_blocks=10,
            free_blocks=3,
            cached_blocks=2,
            used_blocks=5,
            reserved_blocks=4,
            steps=7,
            last_step_s=0.01,
            last_progress_s=self.last_progress_s or time.monotonic(),
            has_work=self.has_work,
            audit_failures=0,
            oldest_waiting_s=1.5,
            oldest_paused_s=2.5,
        )


class FakeLLM:
    """Answers every prompt with ``text``, one token a ``step_s``.

    ``refuse`` is called at submission; the token number ``fail_at`` ends in an engine error; while ``gate`` is not set
    no token comes, warm-up included. ``left`` holds (request id, time) of streams that were closed before their end.
    """

    def __init__(
        self,
        text: str = "Hello, world!",
        *,
        step_s: float = 0.0,
        fail_at: int | None = None,
        refuse: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self.model = MODEL
        self.tokenizer = tiny_tokenizer()
        self.engine = FakeEngine()
        self.text = text
        self.step_s = step_s
        self.fail_at = fail_at
        self.refuse = refuse
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: list[Request] = []
        self.left: list[tuple[str, float]] = []
        self.observers: list[Callable[[StepStats], None]] = []
        self.num_running = 0
        self.is_draining = False
        self.is_closed = False

    async def start(self) -> None:
        pass

    async def stream(self, request: Request) -> AsyncGenerator[Delta, None]:
        if not request.request_id.startswith("warmup"):
            self.refuse(request)
            self.requests.append(request)
        if self.is_draining:
            raise DrainingError("draining")
        self.num_running += 1
        is_over = False
        try:
            async for delta in self._deltas(request):
                is_over = delta.finish_reason is not None
                yield delta
        finally:
            self.num_running -= 1
            if not is_over:
                self.left.append((request.request_id, time.perf_counter()))

    async def _deltas(self, request: Request) -> AsyncGenerator[Delta, None]:
        num_prompt = len(request.prompt_token_ids)
        ids = self.tokenizer.encode(self.text)
        limit = min(len(ids), request.params.max_tokens or len(ids))
        for index, token in enumerate(ids[:limit]):
            await self._step()
            if request.request_id in self.engine.aborted:
                yield Delta(request.request_id, finish_reason=FinishReason.ABORT)
                return
            if index == self.fail_at and request in self.requests:
                yield Delta(
                    request.request_id, finish_reason=FinishReason.ERROR, error="kernel died in /opt/secret/lib.so"
                )
                return
            reason = None
            if index + 1 == limit:
                reason = FinishReason.STOP if limit == len(ids) else FinishReason.LENGTH
            yield Delta(
                request.request_id,
                token_ids=(token,),
                text=self.tokenizer.decode([token]),
                finish_reason=reason,
                num_prompt_tokens=num_prompt,
                num_cached_tokens=num_prompt // 2,
            )

    async def _step(self) -> None:
        await asyncio.sleep(self.step_s)
        while not self.gate.is_set():
            await asyncio.sleep(0.001)  # an abort must get through a closed gate
            if self.engine.aborted:
                return

    def observe_steps(self, observer: Callable[[StepStats], None]) -> None:
        self.observers.append(observer)

    async def drain(self, timeout_s: float | None = None) -> None:
        self.is_draining = True
        while self.num_running:
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        self.is_closed = True
