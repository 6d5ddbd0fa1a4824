"""An engine in this process without arrivals: how much it does in all, and how long one batch takes."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtcb.bench.workload import RandomWorkload
from trtcb.errors import UsageError, ValidationFailedError
from trtcb.executor.llm import LLM
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.stats import StepStats

PERCENTILES = (10, 25, 50, 75, 90, 99)
_WARM_UP_SEED = 2**32


@dataclass(frozen=True, slots=True)
class Throughput:
    """All requests of a workload at once, from submission to the last answer."""

    elapsed_s: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, under the names of ``vllm bench throughput``."""
        total = self.num_prompt_tokens + self.num_output_tokens
        return {
            "elapsed_time": self.elapsed_s,
            "num_requests": self.num_requests,
            "total_num_tokens": total,
            "requests_per_second": self.num_requests / self.elapsed_s,
            "tokens_per_second": total / self.elapsed_s,
            "output_tokens_per_second": self.num_output_tokens / self.elapsed_s,
        }

    def __str__(self) -> str:
        values = self.to_json()
        return (
            f"Throughput: {values['requests_per_second']:.2f} requests/s, {values['tokens_per_second']:.2f} total "
            f"tokens/s, {values['output_tokens_per_second']:.2f} output tokens/s\n"
            f"{self.num_requests} requests, {self.num_prompt_tokens} prompt tokens, {self.num_output_tokens} output "
            f"tokens in {self.elapsed_s:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds of each batch, from its submission to its last token."""

    seconds: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, under the names of ``vllm bench latency``."""
        percentiles = {str(q): float(np.percentile(self.seconds, q)) for q in PERCENTILES}
        return {
            "avg_latency": float(np.mean(self.seconds)),
            "latencies": list(self.seconds),
            "percentiles": percentiles,
        }

    def __str__(self) -> str:
        values = self.to_json()
        lines = [f"{q}% percentile latency: {value:.4f} s" for q, value in values["percentiles"].items()]
        return "\n".join([f"Avg latency: {values['avg_latency']:.4f} s", *lines])


class AfterWarmUp:
    """Hands the engine's records on once so many requests have ended. To be given as ``on_step``."""

    def __init__(self, num_requests: int, *observers: Callable[[StepStats], None]) -> None:
        self._num_left = num_requests
        self._observers = observers

    def __call__(self, stats: StepStats) -> None:
        """Take in a record. That of the last request's end is still part of the warm-up."""
        if self._num_left > 0:
            self._num_left -= len(stats.finished)
            return
        for observer in self._observers:
            observer(stats)


def check_lengths(source: RandomWorkload, seed: int, max_seq_len: int) -> None:
    """Raise ``UsageError`` for a workload with sequences longer than an engine's, before that is loaded."""
    workload = source.generate(seed)
    longest = int((workload.prompt_len + workload.answer_len).max())
    if longest > max_seq_len:
        raise UsageError(
            f"The longest request has {longest} tokens with its answer, and this engine takes {max_seq_len}: lower "
            f"--input-len or --output-len, or use a plan built with --max-seq-len {longest}."
        )


def check_batch(batch: RandomWorkload, max_batch_size: int) -> None:
    """Raise ``UsageError`` for a batch that an engine does not run at once, before that is loaded."""
    if batch.num_prompts > max_batch_size:
        raise UsageError(
            f"--batch-size {batch.num_prompts} is more than the engine runs at once: use at most {max_batch_size}, "
            "or a plan built with a larger --max-batch-size."
        )


def measure_throughput(
    llm: LLM, source: RandomWorkload, seed: int, on_warm: Callable[[], None] = lambda: None
) -> Throughput:
    """Answer the workload of a seed, all at once, to its full lengths. Raises if an answer is not whole.

    ``on_warm`` is called when the requests that are no part of it have ended.
    """
    _answer(llm, _warm_up(llm, source))
    on_warm()
    requests = list(source.generate(seed).requests(llm.model.vocab_size))
    elapsed_s, num_output_tokens = _answer(llm, requests)
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    return Throughput(elapsed_s, len(requests), num_prompt_tokens, num_output_tokens)


def measure_latency(
    llm: LLM,
    batch: RandomWorkload,
    *,
    num_warmups: int,
    num_iters: int,
    seed: int,
    on_iter: Callable[[], None] = lambda: None,
) -> Latencies:
    """Answer one batch after another, of new prompts each time, so that no prefix is found in the cache."""
    seconds = []
    for number in range(num_warmups + num_iters):
        elapsed_s, _ = _answer(llm, batch.generate(seed + number).requests(llm.model.vocab_size))
        seconds.append(elapsed_s)
        on_iter()
    return Latencies(tuple(seconds[num_warmups:]))


def _warm_up(llm: LLM, source: RandomWorkload) -> list[Request]:
    """Make one short request that is none of the run's."""
    short = RandomWorkload(num_prompts=1, random_input_len=min(8, source.random_input_len), random_output_len=2)
    return list(short.generate(_WARM_UP_SEED).requests(llm.model.vocab_size))


def _answer(llm: LLM, requests: Iterable[Request]) -> tuple[float, int]:
    """Return seconds and output tokens of answering all, whatever end tokens the model draws."""
    asked = list(requests)
    params = [SamplingParams(max_tokens=r.params.max_tokens, temperature=0.0, ignore_eos=True) for r in asked]
    began_s = time.perf_counter()
    answers = llm.generate([request.prompt_token_ids for request in asked], params)
    elapsed_s = time.perf_counter() - began_s
    for number, (answer, wanted) in enumerate(zip(answers, params, strict=True)):
        if answer.error is not None or len(answer.token_ids) != wanted.max_tokens:
            why = answer.error or f"{len(answer.token_ids)} tokens instead of {wanted.max_tokens}"
            raise ValidationFailedError(f"Request {number} was not answered in full: {why}")
    return elapsed_s, sum(len(answer.token_ids) for answer in answers)
