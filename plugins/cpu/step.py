"""A whole step as one function call: a table of kernel calls, made once, of which a step only fills in a few words."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from trtcb.plugins.cpu.specialize import Progress, compile_kernels, compile_launcher, load_module


class StepWord(Enum):
    """What differs from step to step: sizes, and addresses of the step's arrays."""

    NUM_TOKENS = "num_tokens"
    NUM_LOGITS = "num_logits"
    TABLE_WIDTH = "table_width"
    INPUT_IDS = "input_ids"
    POSITIONS = "positions"
    SLOT_MAPPING = "slot_mapping"
    BLOCK_TABLES = "block_tables"
    LOGIT_INDEX = "logit_index"
    ITEMS = "items"
    NUM_ITEMS = "num_items"
    TOKEN_PARTS = "token_parts"  # noqa: S105
    LOGIT_PARTS = "logit_parts"


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel's address, its number of parts, and up to 15 arguments, as they are or to be filled in at each step."""

    kernel: int
    parts: int | StepWord
    arguments: tuple[int | StepWord, ...]


class StepFunction:
    """Runs a list of kernel calls, one after the other, each on several threads.

    Belongs to one thread. What the calls point at must stay alive.
    """

    def __init__(self, calls: Sequence[KernelCall], *, on_progress: Progress | None = None) -> None:
        self._function = compile_step(on_progress)
        self._launch = compile_launcher()
        self._yield = _address_of_yield()
        module = load_module("kernel_step", {})
        words, first = module.ROW_WORDS, module.FIRST_ARGUMENT
        self._memory = np.zeros((len(calls) + 1) * words, np.int64)
        start = -self._memory.ctypes.data % 64 // 8  # parts are counted on another cache line than arguments are read
        self._table = self._memory[start : start + len(calls) * words].reshape(len(calls), words)
        places: dict[StepWord, list[int]] = {word: [] for word in StepWord}
        for index, call in enumerate(calls):
            self._table[index, 0] = call.kernel
            for place, value in ((module.PARTS, call.parts), *enumerate(call.arguments, first)):
                if isinstance(value, StepWord):
                    places[value].append(index * words + place)
                else:
                    self._table[index, place] = value
        self._places = [(word, np.array(found, np.intp)) for word, found in places.items() if found]
        self._counters = [module.CLAIMED, module.DONE, words - 1]  # the last is for kernels that claim items

    def run(self, words: Mapping[StepWord, int], *, num_threads: int) -> None:
        """Run all calls with these words filled in, on up to ``num_threads`` threads; 1 is the calling one."""
        flat = self._table.reshape(-1)
        for word, places in self._places:
            flat[places] = words[word]
        self._table[:, self._counters] = 0
        arguments = (self._table.ctypes.data, len(self._table), self._yield)
        self._launch(self._function.address, num_threads, *arguments, *(0,) * 9)


def compile_step(on_progress: Progress | None = None) -> Any:
    """Compile the function, or load it from the user's cache."""
    return compile_kernels("kernel_step", {}, on_progress)["step"]


def _address_of_yield() -> int:
    """Address of the C library's ``sched_yield``, which ignores the arguments it is given."""
    address = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    if address is None:
        raise RuntimeError("this C library has no sched_yield")
    return address
