"""What a runtime remembers between steps: the last token drawn in each slot, which the next step may have to read."""

import numpy as np

from trtcb.executor.runtime import Batch, Int32


class LastTokens:
    """One token a slot. Used by whatever runs the steps, in the order in which it runs them."""

    def __init__(self) -> None:
        self._tokens = np.zeros(0, np.int32)

    def input_ids(self, batch: Batch) -> Int32:
        """Input ids ``[T]`` of a step, those that were unknown when it was launched filled in."""
        starts = batch.cu_q[:-1]
        rows = np.flatnonzero(batch.input_ids[starts] < 0)
        if not len(rows):
            return batch.input_ids
        input_ids = batch.input_ids.copy()
        input_ids[starts[rows]] = self._tokens[batch.slots[rows]]
        return input_ids

    def drew(self, batch: Batch, tokens: Int32) -> None:
        """Remember a step's ``tokens [NL]``. One that is no token is kept as 0: nobody wants what follows it."""
        slots = batch.slots
        if not len(tokens) == len(slots) == len(batch.input_ids):  # with one token a row, each draws one
            slots = slots[np.searchsorted(batch.cu_q, batch.logit_index, side="right") - 1]
        missing = int(slots.max(initial=-1)) + 1 - len(self._tokens)
        if missing > 0:
            self._tokens = np.append(self._tokens, np.zeros(missing, np.int32))
        self._tokens[slots] = np.maximum(tokens, 0)
