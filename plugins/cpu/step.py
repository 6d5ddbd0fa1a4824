"""A whole step as one function call: a table of kernel calls, made once, of which a step only fills in a few words."""

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from trtcb.plugins.cpu.specialize import Progress, compile_kernels, compile_launcher, load_module

Int64 = npt.NDArray[np.int64]


class StepWord(IntEnum):
    """What differs from step to step: sizes, and addresses of the step's arrays."""

    NUM_TOKENS = auto()
    NUM_LOGITS = auto()
    TABLE_WIDTH = auto()
    INPUT_IDS = auto()
    POSITIONS = auto()
    SLOT_MAPPING = auto()
    BLOCK_TABLES = auto()
    LOGIT_INDEX = auto()
    ITEMS = auto()
    NUM_ITEMS = auto()
    TOKEN_PARTS = auto()
    LOGIT_PARTS = auto()


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel's address, its number of parts, and up to 15 arguments, as they are or to be filled in at each step."""

    kernel: int
    parts: int | StepWord
    arguments: tuple[int | StepWord, ...]


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long each of the ``C`` calls of one step took, in nanoseconds of ``time.monotonic_ns``.

    A call's wall time is from the end of the call before it, or from ``began_ns``, to the end of its last part; its
    busy time is that of all its parts together, so at most ``num_threads`` times the wall time. The difference is time
    in which threads had nothing to do but wait for others. A thread that the system keeps waiting counts as busy.
    """

    began_ns: int  # before the threads were woken
    ended_ns: int  # when all had met again
    num_threads: int
    wall_ns: Int64  # [C]
    busy_ns: Int64  # [C]


class StepFunction:
    """Runs a list of kernel calls, one after the other, each on several threads.

    Belongs to one thread. What the calls point at must stay alive. With ``profile`` its steps can be timed; they cost
    two readings of the clock a part more.
    """

    def __init__(
        self, calls: Sequence[KernelCall], *, profile: bool = False, on_progress: Progress | None = None
    ) -> None:
        self._profile = profile
        self._function = compile_step(on_progress, profile=profile)
        self._launch = compile_launcher()
        self._addresses = (_address_of("sched_yield"), _address_of("clock_gettime"))
        module = load_module("kernel_step", {})
        words, first = module.ROW_WORDS, module.FIRST_ARGUMENT
        self._memory = np.zeros((len(calls) + 1) * words, np.int64)
        start = -self._memory.ctypes.data % 64 // 8  # parts are counted on another cache line than arguments are read
        self._table = self._memory[start : start + len(calls) * words].reshape(len(calls), words)
        places: list[tuple[StepWord, int]] = []
        for index, call in enumerate(calls):
            self._table[index, 0] = call.kernel
            for place, value in ((module.PARTS, call.parts), *enumerate(call.arguments, first)):
                if isinstance(value, StepWord):
                    places.append((value, index * words + place))
                else:
                    self._table[index, place] = value
        self._words = sorted({word for word, _ in places})
        self._which = np.array([self._words.index(word) for word, _ in places], np.intp)
        self._places = np.array([place for _, place in places], np.intp)
        self._counters = [module.CLAIMED, module.DONE, words - 1]  # the last is for kernels that claim items
        self._times = [module.BUSY, module.ENDED]

    def run(self, words: Mapping[StepWord, int], *, num_threads: int) -> None:
        """Run all calls with these words filled in, on up to ``num_threads`` threads; 1 is the calling one."""
        self._fill_in(words)
        self._work_off(num_threads)

    def run_timed(self, words: Mapping[StepWord, int], *, num_threads: int) -> CallTimes:
        """Do the same, and tell how long it took. ``RuntimeError`` without ``profile``."""
        if not self._profile:
            raise RuntimeError("these calls are not timed: make the step function with profile=True")
        self._fill_in(words)
        self._table[:, self._times] = 0
        began_ns = time.monotonic_ns()
        self._work_off(num_threads)
        ended_ns = time.monotonic_ns()
        busy_ns, call_ended_ns = self._table[:, self._times].T.copy()
        # a call of no parts never ends: it takes no time
        call_ended_ns = np.maximum.accumulate(np.concatenate([[began_ns], call_ended_ns]))
        return CallTimes(began_ns, ended_ns, num_threads, np.diff(call_ended_ns), busy_ns)

    def _fill_in(self, words: Mapping[StepWord, int]) -> None:
        values = np.array([words[word] for word in self._words], np.int64)
        self._table.reshape(-1)[self._places] = values[self._which]
        self._table[:, self._counters] = 0

    def _work_off(self, num_threads: int) -> None:
        arguments = (self._table.ctypes.data, len(self._table), *self._addresses)
        self._launch(self._function.address, num_threads, *arguments, *(0,) * 8)


def compile_step(on_progress: Progress | None = None, *, profile: bool = False) -> Any:
    """Compile the function, or load it from the user's cache; with ``profile`` the one that times its calls."""
    return compile_kernels("kernel_step", {"PROFILE": profile}, on_progress)["step"]


def _address_of(function: str) -> int:
    """Address of a function of the C library. One that takes fewer arguments than it is given ignores the rest."""
    address = ctypes.cast(getattr(ctypes.CDLL(None), function), ctypes.c_void_p).value
    if address is None:
        raise RuntimeError(f"this C library has no {function}")
    return address
