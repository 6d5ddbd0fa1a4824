"""What arrives when: seeded random workloads and trace files, the same for every configuration that is compared."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtcb.errors import UsageError, shown
from trtcb.executor.request import Request, SamplingParams

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
MAX_COUNT = 10_000_000  # of requests, and of tokens of one: beyond all memory, and far below what overflows
MAX_ARRIVAL_S = 1e10  # a trace may count from 1970; beyond this, microseconds are lost
MAX_OUTPUT_LEN_CV = 100.0
MAX_USER_CHARS = 256


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, one entry each ``[N]``. Request ``i`` is called ``str(i)`` and has the seed ``i``.

    ``output_len`` is where the answer would end by itself, which nobody knows beforehand; ``max_tokens`` is what the
    client declares, and an answer that would be longer is cut there. All prompts begin with the same ``prefix_len``
    tokens. ``users`` names whose request each one is; empty if nobody says.
    """

    arrival_s: Floats
    prompt_len: Ints
    output_len: Ints
    max_tokens: Ints
    priority: Floats
    prefix_len: int
    seed: int
    max_concurrency: int | None = None  # unfinished requests at most; later ones are held back
    users: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def answer_len(self) -> Ints:
        """Tokens that each answer has in fact."""
        return np.minimum(self.output_len, self.max_tokens)

    @property
    def ends(self) -> Ints:
        """Position of each request's last token, counted over prompt and output."""
        return self.prompt_len + self.answer_len - 1

    @property
    def num_cut(self) -> int:
        """Answers that end at their limit and would have been longer."""
        return int((self.output_len > self.max_tokens).sum())

    @property
    def declared_ratio(self) -> float:
        """Declared over true output length, in total. 1: everybody knew; below: answers were cut."""
        return float(self.max_tokens.sum() / self.output_len.sum())

    def within(self, max_seq_len: int) -> "Workload":
        """Lower limits to where prompt and answer together reach ``max_seq_len``, as an engine does."""
        room = np.maximum(1, max_seq_len - self.prompt_len)
        return replace(self, max_tokens=np.minimum(self.max_tokens, room))

    def requests(self, vocab_size: int) -> Iterator[Request]:
        """Make the requests one by one, with random prompts of ids below ``vocab_size``; the same at each call."""
        rng = np.random.default_rng([self.seed, 1])
        prefix = tuple(rng.integers(vocab_size, size=self.prefix_len).tolist())
        columns = (self.arrival_s, self.prompt_len, self.max_tokens, self.priority)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for number, (arrival_s, prompt_len, max_tokens, priority) in enumerate(rows):
            own = rng.integers(vocab_size, size=max(0, prompt_len - self.prefix_len)).tolist()
            yield Request(
                str(number),
                (*prefix[:prompt_len], *own),
                SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=number),
                priority=priority,
                arrival_s=arrival_s,
                tenant=self.users[number] if self.users else "",
            )


@dataclass(frozen=True, slots=True)
class RandomWorkload:
    """Requests at random, under the names of ``vllm bench serve``.

    Gaps between arrivals are gamma-distributed with shape ``burstiness`` (1: Poisson; below: bursts); an infinite
    ``request_rate`` sends everything at once. Lengths are uniform within ``± random_range_ratio``. An
    ``output_len_cv`` above 0 makes output lengths log-normal instead, with that coefficient of variation.
    ``max_tokens=None`` declares the true length; a number below it cuts the answer.
    """

    num_prompts: int = 1000
    request_rate: float = math.inf
    burstiness: float = 1.0
    random_input_len: int = 128
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    output_len_cv: float = 0.0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "random_input_len", "random_output_len"):
            check_count(f"--{name.replace('_', '-')}", getattr(self, name), 1)
        check_count("--random-prefix-len", self.random_prefix_len, 0)
        if not (self.request_rate > 0 and self.burstiness > 0):
            raise UsageError("--request-rate and --burstiness must be above 0; use inf to send everything at once.")
        if not 0 <= self.random_range_ratio < 1:
            raise UsageError(f"--random-range-ratio must be from 0 to below 1, not {self.random_range_ratio}.")
        if not 0 <= self.output_len_cv <= MAX_OUTPUT_LEN_CV:
            raise UsageError(f"--output-len-cv must be from 0 to {MAX_OUTPUT_LEN_CV:g}, not {self.output_len_cv}.")
        if self.max_tokens is not None:
            check_count("--max-tokens", self.max_tokens, 1)

    def generate(self, seed: int) -> Workload:
        """Draw the workload of this seed."""
        rng, count = np.random.default_rng([seed, 0]), self.num_prompts
        arrival_s = np.zeros(count)
        if math.isfinite(self.request_rate):
            # The first request comes after a gap, too: otherwise a run of one would have no arrival process.
            gaps = rng.gamma(self.burstiness, 1 / (self.request_rate * self.burstiness), count)
            arrival_s = np.cumsum(gaps)
        prompt_len = self._uniform(rng, self.random_input_len) + self.random_prefix_len
        if self.output_len_cv:
            sigma = math.sqrt(math.log1p(self.output_len_cv**2))
            drawn = rng.lognormal(math.log(self.random_output_len) - sigma**2 / 2, sigma, count)
            output_len = np.clip(np.rint(drawn), 1, MAX_COUNT).astype(np.int64)
        else:
            output_len = self._uniform(rng, self.random_output_len)
        max_tokens = output_len if self.max_tokens is None else np.full(count, self.max_tokens)
        return Workload(
            arrival_s, prompt_len, output_len, max_tokens, np.full(count, 0.5), self.random_prefix_len, seed
        )

    def __str__(self) -> str:
        rate = f"{self.request_rate:g} a second" if math.isfinite(self.request_rate) else "all at once"
        bursts = (
            f" in bursts ({self.burstiness:g})" if self.burstiness != 1 and math.isfinite(self.request_rate) else ""
        )
        spread = f" ± {100 * self.random_range_ratio:g} %" if self.random_range_ratio else ""
        prefix = f" after {self.random_prefix_len} that all share" if self.random_prefix_len else ""
        varied = f" on average (log-normal, variation {self.output_len_cv:g})" if self.output_len_cv else spread
        declared = "exactly that" if self.max_tokens is None else f"{self.max_tokens}, where longer ones are cut"
        return (
            f"random requests, {rate}{bursts}; prompts of {self.random_input_len}{spread} tokens{prefix}; "
            f"answers of {self.random_output_len}{varied} tokens; clients declare {declared}"
        )

    def _uniform(self, rng: np.random.Generator, mean: int) -> Ints:
        spread = math.floor(mean * self.random_range_ratio)
        return np.maximum(1, rng.integers(mean - spread, mean + spread, self.num_prompts, np.int64, endpoint=True))


class _TraceLine(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    arrival_s: Annotated[float, Field(ge=0, le=MAX_ARRIVAL_S, allow_inf_nan=False)] = 0.0
    prompt_len: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    output_len: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    priority: Annotated[float, Field(ge=0, le=1)] = 0.5
    user: Annotated[str, Field(max_length=MAX_USER_CHARS)] = ""


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Requests of a JSONL file: ``{"arrival_s": 0.5, "prompt_len": 20, "output_len": 80}`` a line, in any order.

    ``arrival_s`` is 0 if left out; ``max_tokens``, ``priority`` and ``user`` are optional. ``max_tokens`` given here
    stands in for a line's own that is missing; an answer that would be longer is cut. The seed changes the prompts'
    tokens and nothing else.
    """

    path: Path
    max_tokens: int | None = None

    def generate(self, seed: int) -> Workload:
        """Read the file; raises ``UsageError`` that names the line at fault."""
        try:
            text = self.path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"The trace {self.path} cannot be read: {reason(error)}. Name a JSONL file.") from None
        numbered = enumerate(text.splitlines(), 1)
        lines = [self._parse(number, line) for number, line in numbered if line.strip()]
        if not lines:
            raise UsageError(f"The trace {self.path} is empty: write one JSON object a line.")
        lines.sort(key=lambda line: line.arrival_s)
        output_len = np.array([line.output_len for line in lines])
        max_tokens = np.array([line.max_tokens or self.max_tokens or line.output_len for line in lines])
        return Workload(
            np.array([line.arrival_s for line in lines]),
            np.array([line.prompt_len for line in lines]),
            output_len,
            max_tokens,
            np.array([line.priority for line in lines]),
            prefix_len=0,
            seed=seed,
            users=tuple(line.user for line in lines),
        )

    def __str__(self) -> str:
        declared = "" if self.max_tokens is None else f"; clients declare {self.max_tokens} where a line says nothing"
        return f"trace {self.path}{declared}"

    def _parse(self, number: int, line: str) -> _TraceLine:
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise UsageError(f"{self.path}, line {number} is {shown(line)}: write a JSON object.")
            return _TraceLine.model_validate(fields)
        except ValidationError as error:
            item = error.errors()[0]
            place = f"{item['loc'][0]}: " if item["loc"] else ""
            raise UsageError(f"{self.path}, line {number}: {place}{item['msg']}.") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self.path}, line {number} is not JSON: {error}.") from None


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Say why a file cannot be read, without a number."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"


def check_count(flag: str, count: int, least: int) -> None:
    """Raise for a number of requests or tokens that makes no workload, naming its flag."""
    if not least <= count <= MAX_COUNT:
        raise UsageError(f"{flag} must be from {least} to {MAX_COUNT}, not {shown(count)}.")
