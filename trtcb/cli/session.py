"""An engine in this process, for the commands that need no server."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtcb.cli.plan_path import plan_path
from trtcb.config import ServeConfig
from trtcb.config_sources import resolve
from trtcb.errors import TrtcbError

if TYPE_CHECKING:
    from trtcb.executor.llm import AsyncLLM
    from trtcb.executor.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Speed:
    """What a generation took; times in seconds from submission."""

    num_prompt_tokens: int
    num_tokens: int
    first_token_s: float
    total_s: float

    def __str__(self) -> str:
        rest_s = self.total_s - self.first_token_s
        rate = (
            f"{(self.num_tokens - 1) / rest_s:.1f} tok/s after it" if self.num_tokens > 1 and rest_s > 0 else "no more"
        )
        return (
            f"{self.num_prompt_tokens} prompt tokens, {self.num_tokens} generated in {self.total_s:.2f} s; "
            f"first after {self.first_token_s:.2f} s, {rate}"
        )


class Session:
    """An open plan on an event loop of its own, so that reading the terminal may block. A context manager."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self.llm = llm
        self._loop = asyncio.new_event_loop()
        self._num_requests = 0

    @classmethod
    def open(cls, plan: Path | None, model: str | None, settings: Mapping[str, Any]) -> "Session":
        """Load a plan with some of the settings of :class:`ServeConfig`."""
        from trtcb.executor.llm import AsyncLLM
        from trtcb.plan import Plan

        path = plan_path(plan, model)
        with Plan.open(path, verify="header") as opened:
            limits = opened.header.limits
        config = resolve(ServeConfig, flags=settings).config.fit(limits)
        return cls(AsyncLLM.from_plan(path, config.engine))

    def __enter__(self) -> "Session":
        self._loop.run_until_complete(self.llm.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self.llm.close())
        self._loop.close()

    def generate(self, prompt: "tuple[int, ...]", params: "SamplingParams", on_text: Callable[[str], None]) -> Speed:
        """Complete a prompt, handing text over as it comes. Ctrl-C ends it and raises ``KeyboardInterrupt``."""
        task = self._loop.create_task(self._generate(prompt, params, on_text))
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise

    async def _generate(
        self, prompt: "tuple[int, ...]", params: "SamplingParams", on_text: Callable[[str], None]
    ) -> Speed:
        from trtcb.executor.request import FinishReason, Request

        self._num_requests += 1
        request = Request(f"cli-{self._num_requests}", prompt, params)
        began = time.perf_counter()
        first_s, num_tokens = 0.0, 0
        async for delta in self.llm.stream(request):
            first_s = first_s or time.perf_counter() - began
            num_tokens += len(delta.token_ids)
            on_text(delta.text)
            if delta.finish_reason is FinishReason.ERROR:
                raise TrtcbError(delta.error or "the engine failed on this request")
        return Speed(len(prompt), num_tokens, first_s, time.perf_counter() - began)


def print_piece(text: str) -> None:
    """Show text at once, as a stream should."""
    print(text, end="", flush=True)
