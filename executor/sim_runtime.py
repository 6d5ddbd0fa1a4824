"""A runtime without a model: its next token is a hash of the tokens it finds through the block table.

Whatever is wrong with scheduling, blocks, slots or sampling settings changes its output or makes it raise, and what it
should have said is a plain function of the request.

Where logits matter, there are some: noise from the same hash, and above it the token that the hash is.
"""

import hashlib
import time
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from trtcb.executor.last_tokens import LastTokens
from trtcb.executor.request import SamplingParams
from trtcb.executor.runtime import Batch, Float32, Int32, StepOutput
from trtcb.executor.sim_logits import best_after_edits, edited, log_softmax, pseudo_logits, step_logprobs

_HOLE = -1


class SimRuntime:
    """Keeps token ids and positions where a real runtime keeps keys and values. Deterministic.

    ``wait`` raises ``RuntimeError`` if a row reads a position that was never written through its own block table.
    ``step_time_s`` makes each step take that long. ``healthy`` is what it tells the engine after a failed step.
    """

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int = 256, step_time_s: float = 0.0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.step_time_s = step_time_s
        self.healthy = True
        self._tokens = np.full((num_blocks, block_size), _HOLE, np.int32)
        self._positions = np.full((num_blocks, block_size), _HOLE, np.int32)
        self._batches: deque[Batch] = deque()
        self._last_tokens = LastTokens()

    def launch(self, batch: Batch) -> None:
        """Start one step."""
        self._batches.append(batch)

    def wait(self) -> StepOutput:
        """Copy blocks, write the step's tokens into theirs, then read every wanted row's context back and hash it."""
        if not self._batches:
            raise RuntimeError("no step is in flight: launch one first")
        batch = self._batches.popleft()
        if self.step_time_s:
            time.sleep(self.step_time_s)
        output = self._run(batch)
        self._last_tokens.drew(batch, output.tokens)
        return output

    def close(self) -> None:
        """Free nothing; there is nothing."""

    def _run(self, batch: Batch) -> StepOutput:
        sources, destinations = batch.copies.T
        self._tokens[destinations] = self._tokens[sources]
        self._positions[destinations] = self._positions[sources]
        self._tokens.reshape(-1)[batch.slot_mapping] = self._last_tokens.input_ids(batch)
        self._positions.reshape(-1)[batch.slot_mapping] = batch.positions
        rows = np.searchsorted(batch.cu_q, batch.logit_index, side="right") - 1
        favourites = [self._favourite(batch, index, row) for index, row in enumerate(rows.tolist())]
        sampling = batch.sampling
        if sampling.edits is None and sampling.num_logprobs is None:
            return StepOutput(np.array([token for token, _ in favourites], np.int32))
        logits = [pseudo_logits(digest, token, self.vocab_size) for token, digest in favourites]
        tokens = np.array([edited(row, sampling.edits, index).argmax() for index, row in enumerate(logits)], np.int32)
        return StepOutput(tokens, step_logprobs(logits, tokens, sampling.num_logprobs))

    def _favourite(self, batch: Batch, index: int, row: int) -> tuple[int, bytes]:
        length = int(batch.positions[batch.logit_index[index]]) + 1
        blocks = batch.block_tables[row, : -(-length // self.block_size)]
        if not np.array_equal(self._positions[blocks].reshape(-1)[:length], np.arange(length)):
            raise RuntimeError(f"row {row} reads positions that its block table does not hold")
        sampling = batch.sampling
        if int(sampling.position[index]) != length:
            raise RuntimeError(f"row {row} draws position {sampling.position[index]} after {length} tokens")
        settings = (
            float(sampling.temperature[index]),
            int(sampling.top_k[index]),
            float(sampling.top_p[index]),
            float(sampling.min_p[index]),
            int(sampling.seed[index]),
        )
        return _hash(self._tokens[blocks].reshape(-1)[:length], settings, self.vocab_size)


def expected_tokens(
    prompt: Sequence[int],
    params: SamplingParams,
    count: int,
    *,
    vocab_size: int = 256,
    eos_token_ids: Collection[int] = (),
) -> list[int]:
    """Return what :class:`SimRuntime` draws for a request, by no more than its definition. Ends are ignored.

    But for ``min_tokens``, which rules them out: then ``eos_token_ids`` must say what the engine's are.
    """
    settings = _settings(params)
    tokens = list(prompt)
    for _ in range(count):
        token, digest = _hash(np.array(tokens, np.int32), settings, vocab_size)
        if (
            params.logit_bias
            or params.min_tokens
            or (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)
        ):
            row = pseudo_logits(digest, token, vocab_size)
            token = best_after_edits(row, tokens, len(prompt), params, eos_token_ids)
        tokens.append(token)
    return tokens[len(prompt) :]


def expected_logprobs(
    prompt: Sequence[int], params: SamplingParams, tokens: Sequence[int], *, vocab_size: int = 256
) -> list[Float32]:
    """Return the logprobs ``[vocab_size]`` of which :class:`SimRuntime` tells some with each of a request's tokens."""
    settings = _settings(params)
    rows = []
    for index in range(len(tokens)):
        token, digest = _hash(np.array([*prompt, *tokens[:index]], np.int32), settings, vocab_size)
        rows.append(log_softmax(pseudo_logits(digest, token, vocab_size)))
    return rows


_Settings = tuple[float, int, float, float, int]


def _settings(params: SamplingParams) -> _Settings:
    return (
        float(np.float32(params.temperature)),
        params.top_k,
        float(np.float32(params.top_p)),
        float(np.float32(params.min_p)),
        params.seed or 0,
    )


def _hash(context: Int32, settings: _Settings, vocab_size: int) -> tuple[int, bytes]:
    """Return the favourite next token, and the hash that it is made of."""
    # A greedy row must not depend on the other settings.
    key = repr(settings).encode() if settings[0] > 0 else b""
    digest = hashlib.blake2b(context.astype("<i4").tobytes(), digest_size=8, key=hashlib.blake2b(key).digest()).digest()
    return int.from_bytes(digest, "little") % vocab_size, digest
