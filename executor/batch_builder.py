"""Turns a step's decisions into packed arrays, from per-slot arrays that are only touched where something changed."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from trtcb.executor.config import EngineConfig
from trtcb.executor.runtime import UNKNOWN_TOKEN, Batch, Int32, SamplingRows
from trtcb.executor.sampling_state import logit_edits
from trtcb.executor.scheduler import Step
from trtcb.executor.sequence import Sequence

_slot_of = attrgetter("slot")


class BatchBuilder:
    """The slot table: one row per slot with what the next step needs of its sequence.

    Must see every step in order: :meth:`build` takes over what the scheduler changed for it and counts it as run,
    :meth:`learn` then takes the tokens of the oldest step that was built. :meth:`rollback` undoes all that are between.
    """

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        slots = config.max_batch_size
        self._block_size = config.block_size
        blocks_per_slot = min(num_blocks, -(-config.max_seq_len // config.block_size))
        self._block_table = np.zeros((slots, blocks_per_slot), np.int32)
        self._num_blocks = np.zeros(slots, np.int32)
        self._num_computed = np.zeros(slots, np.int32)
        self._last_token = np.zeros(slots, np.int32)
        self._temperature = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int32)
        self._top_p = np.zeros(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._seed = np.zeros(slots, np.uint64)
        self._has_edits = np.zeros(slots, np.bool_)
        self._num_logprobs = np.zeros(slots, np.int32)
        self._unknown: deque[npt.NDArray[np.intp]] = deque()  # of each step in flight, the slots that draw
        self._decodes: list[Sequence] = []
        self._decode_slots = np.zeros(0, np.intp)
        self._sampled_slots: npt.NDArray[np.intp] | None = None
        self._sampled: SamplingRows

    def build(self, step: Step) -> Batch:
        """Pack one step, before :meth:`Scheduler.advance`. Decoding rows come first, in the step's order.

        The arrays are the caller's; those that stay the same from step to step may be shared by several batches.
        """
        for seq in step.started:
            self._fill_slot(seq)
        for seq in step.grown:
            self._append_blocks(seq)
        slots, sizes = self._rows(step)
        starts = self._num_computed[slots]
        cu_q = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(sizes, out=cu_q[1:])

        if not step.chunks:
            positions, row_slots = starts, slots
        else:
            row_slots = np.repeat(slots, sizes)
            positions = np.arange(cu_q[-1], dtype=np.int32) + np.repeat(starts - cu_q[:-1], sizes)
        input_ids = self._input_ids(step, cu_q)
        blocks = self._block_table[row_slots, positions // self._block_size]

        logit_index, drawing = cu_q[:-1], slots
        if step.chunks:
            logit_rows = self._logit_rows(step)
            logit_index, drawing = cu_q[1:][logit_rows] - np.int32(1), slots[logit_rows]
        batch = Batch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=blocks * np.int32(self._block_size) + positions % np.int32(self._block_size),
            cu_q=cu_q,
            block_tables=self._block_table[:, : int(self._num_blocks[slots].max())][slots],
            slots=slots,
            logit_index=logit_index,
            sampling=self._sampling(step, drawing, positions[logit_index] + np.int32(1)),
            copies=np.array(step.copies, np.int32).reshape(-1, 2),
        )
        self._num_computed[slots] += sizes
        self._last_token[drawing] = UNKNOWN_TOKEN
        self._unknown.append(drawing)
        return batch

    def learn(self, tokens: Int32) -> None:
        """Take note of what the oldest step in flight drew, ``[NL]``."""
        self._last_token[self._unknown.popleft()] = tokens
        for drawing in self._unknown:
            self._last_token[drawing] = UNKNOWN_TOKEN

    def rollback(self, holding: Iterable[Sequence]) -> None:
        """Forget the steps in flight, after :meth:`Scheduler.rollback`. ``holding`` are all that have a slot."""
        self._unknown.clear()
        for seq in holding:
            self._num_computed[seq.slot] = seq.num_computed
            self._last_token[seq.slot] = seq.token_ids[-1]

    def _rows(self, step: Step) -> tuple[npt.NDArray[np.intp], Int32]:
        """Slot and number of tokens of each row."""
        if step.decodes != self._decodes:  # unchanged from step to step, mostly
            self._decodes = step.decodes
            self._decode_slots = np.fromiter(map(_slot_of, step.decodes), np.intp, len(step.decodes))
        sizes = np.ones(step.num_rows, np.int32)
        if not step.chunks:
            return self._decode_slots, sizes
        sizes[len(step.decodes) :] = [size for _, size in step.chunks]
        return np.concatenate([self._decode_slots, [seq.slot for seq, _ in step.chunks]], dtype=np.intp), sizes

    def _logit_rows(self, step: Step) -> npt.NDArray[np.bool_]:
        """Mask of the rows whose next token is wanted."""
        mask = np.ones(step.num_rows, np.bool_)
        mask[len(step.decodes) :] = [seq.num_computed + size == seq.num_tokens for seq, size in step.chunks]
        return mask

    def _input_ids(self, step: Step, cu_q: Int32) -> Int32:
        input_ids = np.empty(cu_q[-1], np.int32)
        num_decodes = len(step.decodes)
        input_ids[:num_decodes] = self._last_token[self._decode_slots]
        for (seq, size), start in zip(step.chunks, cu_q[num_decodes:].tolist(), strict=False):
            input_ids[start : start + size] = seq.token_ids[seq.num_computed : seq.num_computed + size]
        return input_ids

    def _sampling(self, step: Step, slots: npt.NDArray[np.intp], position: Int32) -> SamplingRows:
        if slots is not self._sampled_slots:  # the same array for the same sequences, see `_rows`
            num_logprobs = self._num_logprobs[slots]
            self._sampled_slots = slots
            self._sampled = SamplingRows(
                temperature=self._temperature[slots],
                top_k=self._top_k[slots],
                top_p=self._top_p[slots],
                min_p=self._min_p[slots],
                seed=self._seed[slots],
                position=position,
                num_logprobs=num_logprobs if (num_logprobs >= 0).any() else None,
            )
        edits = logit_edits(step.drawing) if self._has_edits[slots].any() else None
        return replace(self._sampled, position=position, edits=edits)

    def _fill_slot(self, seq: Sequence) -> None:
        slot, params = seq.slot, seq.request.params
        self._block_table[slot] = 0
        self._num_blocks[slot] = 0
        self._num_computed[slot] = seq.num_computed
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = seq.seed
        self._has_edits[slot] = seq.sampling is not None
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs

    def _append_blocks(self, seq: Sequence) -> None:
        slot, num_blocks = seq.slot, len(seq.blocks)
        first = int(self._num_blocks[slot])
        if num_blocks == first + 1:  # a slice costs ten times as much
            self._block_table[slot, first] = seq.blocks[first]
        else:
            self._block_table[slot, first:num_blocks] = seq.blocks[first:]
        self._num_blocks[slot] = num_blocks
