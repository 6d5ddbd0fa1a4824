"""A plan's own runtime, fed known text: logits after every token of it, or the greedy text that follows."""

from collections.abc import Iterator, Sequence

from trtcb.errors import TargetUnavailableError, ValidationFailedError
from trtcb.evaluation.piece import Piece, pack
from trtcb.executor.config import EngineConfig
from trtcb.executor.cpu_runtime import CpuRuntime
from trtcb.executor.open_runtime import pool_blocks
from trtcb.executor.runtime import Batch, Float32, Int32
from trtcb.plan import Plan

# Logits of this many tokens are held at a time: 48 MiB of them with a vocabulary of 49,152.
_CHUNK_TOKENS = 256


class Scorer:
    """Scores one sequence at a time on a runtime of its own, which is open while the scorer's context is.

    Takes over ``plan`` and closes it. ``num_tokens`` is the most that a call's sequences hold together; ``chunk`` are
    the tokens of a step. A call forgets nothing: the cache of positions before ``start`` is what earlier calls left
    there. A process should have one scorer open at a time, as :class:`~trtcb.executor.cpu_runtime.CpuRuntime` says.

    Raises, before anything is loaded, :class:`TargetUnavailableError` for a plan whose logits cannot be read here, and
    :class:`~trtcb.errors.OutOfMemoryError` where the weights and a pool of that size do not fit.
    """

    def __init__(self, plan: Plan, *, num_tokens: int, threads: int | None = None, cpu_engine: str = "auto") -> None:
        if plan.header.target != "cpu":
            raise TargetUnavailableError(
                f"{plan.path} is for the target '{plan.header.target}', whose logits cannot be read: "
                "rebuild it with --target cpu"
            )
        limits = plan.header.limits
        self.name = str(plan.path)
        self.chunk = min(max(_CHUNK_TOKENS, limits.block_size), limits.max_num_tokens)
        self._plan = plan
        self._threads = threads
        self._cpu_engine = cpu_engine
        self._block_size = limits.block_size
        config = EngineConfig(
            max_batch_size=self.chunk,  # the rows of a step that have logits
            max_num_tokens=self.chunk,
            max_seq_len=limits.max_seq_len,
            block_size=limits.block_size,
            num_blocks=-(-num_tokens // limits.block_size),
        )
        self._blocks = range(pool_blocks(plan, config))

    def __enter__(self) -> "Scorer":
        self._runtime = CpuRuntime(
            self._plan,
            num_blocks=len(self._blocks),
            max_num_tokens=self.chunk,
            max_num_logits=self.chunk,
            num_threads=self._threads,
            engine=self._cpu_engine,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.close()

    def logits(self, tokens: Sequence[int], start: int = 0) -> Iterator[Float32]:
        """Logits ``[n, vocab]`` after each token of ``tokens``, ``chunk`` at a time; the next ones overwrite them."""
        for begin in range(0, len(tokens), self.chunk):
            part = tokens[begin : begin + self.chunk]
            batch = pack([Piece(part, start + begin, self._blocks, "all")], self._block_size)
            self._run(batch)
            yield self._runtime.logits()[: len(part)]

    def read(self, tokens: Sequence[int], start: int = 0) -> None:
        """Put ``tokens`` into the cache, and want no logits."""
        for begin in range(0, len(tokens), self.chunk):
            part = tokens[begin : begin + self.chunk]
            self._run(pack([Piece(part, start + begin, self._blocks, "none")], self._block_size))

    def greedy(self, prompts: Sequence[Sequence[int]], num_new: int) -> Iterator[list[int]]:
        """The likeliest next token of every prompt, ``num_new`` times, each continued by its own."""
        tables, first = [], 0
        for prompt in prompts:
            size = -(-(len(prompt) + num_new) // self._block_size)
            tables.append(self._blocks[first : first + size])
            first += size
        tokens = [self._prefill(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
        yield tokens
        for step in range(num_new - 1):
            drawn: list[int] = []
            for begin in range(0, len(prompts), self.chunk):
                rows = range(begin, min(begin + self.chunk, len(prompts)))
                pieces = [Piece([tokens[row]], len(prompts[row]) + step, tables[row], "last") for row in rows]
                drawn += self._run(pack(pieces, self._block_size)).tolist()
            tokens = drawn
            yield tokens

    def _prefill(self, prompt: Sequence[int], table: Sequence[int]) -> int:
        drawn = None
        for begin in range(0, len(prompt), self.chunk):
            part = prompt[begin : begin + self.chunk]
            drawn = self._run(pack([Piece(part, begin, table, "last")], self._block_size))
        if drawn is None:
            raise ValueError("a prompt has at least one token")
        return int(drawn[-1])

    def _run(self, batch: Batch) -> Int32:
        self._runtime.launch(batch)
        tokens = self._runtime.wait().tokens
        if (tokens < 0).any():
            raise ValidationFailedError(
                f"{self.name} computes logits that are not numbers: rebuild it from good weights"
            )
        return tokens
