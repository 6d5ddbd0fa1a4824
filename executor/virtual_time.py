"""Clocks that skip idle time, and the runtimes that make steps take virtual time and end where a script says."""

import time
from collections import deque

import numpy as np
import numpy.typing as npt

from trtcb.executor.runtime import Batch, Runtime, StepOutput
from trtcb.executor.step_time import StepLoad, StepTime


class VirtualClock:
    """Stands still until somebody moves it. Seconds from 0."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        """Present time."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds

    def jump_to(self, now_s: float) -> None:
        """Skip to a later moment; an earlier one changes nothing."""
        self._now_s = max(self._now_s, now_s)


class SkippingClock:
    """Runs with real time, seconds from 0, but can skip what nobody needs to wait through."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def __call__(self) -> float:
        """Present time."""
        return time.monotonic() - self._start_s

    def jump_to(self, now_s: float) -> None:
        """Skip to a later moment; an earlier one changes nothing."""
        self._start_s = min(self._start_s, time.monotonic() - now_s)


class BlankRuntime:
    """Keeps nothing and draws token 0 everywhere: for runs in which only lengths and times matter."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_tokens: deque[int] = deque()

    def launch(self, batch: Batch) -> None:
        """Start one step."""
        self._num_tokens.append(len(batch.logit_index))

    def wait(self) -> StepOutput:
        """Finish the oldest."""
        if not self._num_tokens:
            raise RuntimeError("no step is in flight: launch one first")
        return StepOutput(np.zeros(self._num_tokens.popleft(), np.int32))

    def close(self) -> None:
        """Free nothing; there is nothing."""


class VirtualTimeRuntime:
    """Runs steps on ``inner``, however long that takes, and moves a virtual clock by what ``step_time`` says.

    The device is a timeline: a step begins when it is launched and the one before it has ended. The host's time for a
    step moves the clock when it is launched: the device waits for it, unless it has another step to run meanwhile.
    """

    def __init__(self, inner: Runtime, clock: VirtualClock, step_time: StepTime) -> None:
        self.num_blocks = inner.num_blocks
        self.block_size = inner.block_size
        self._inner = inner
        self._clock = clock
        self._step_time = step_time
        self._ends_s: deque[float] = deque()  # of the steps in flight
        self._free_s = 0.0  # when the device will have run them all

    def launch(self, batch: Batch) -> None:
        """Let the host's time pass, and start one step."""
        self._clock.advance(self._step_time.host_s)
        self._inner.launch(batch)
        self._free_s = max(self._clock(), self._free_s) + self._step_time.seconds(StepLoad.of(batch))
        self._ends_s.append(self._free_s)

    def wait(self) -> StepOutput:
        """Finish the oldest, and let the time until its end pass."""
        self._clock.jump_to(self._ends_s.popleft())
        return self._inner.wait()

    def close(self) -> None:
        """Close ``inner``."""
        self._inner.close()


class TimedRuntime:
    """Runs steps on ``inner`` and notes each one's load and real seconds, from launch to result.

    What a step spent behind the one before it does not count.
    """

    def __init__(self, inner: Runtime) -> None:
        self.num_blocks = inner.num_blocks
        self.block_size = inner.block_size
        self.loads: list[StepLoad] = []
        self.seconds: list[float] = []
        self._inner = inner
        self._starts_s: deque[float] = deque()
        self._free_s = 0.0

    def launch(self, batch: Batch) -> None:
        """Start one step."""
        self.loads.append(StepLoad.of(batch))
        self._starts_s.append(time.perf_counter())
        self._inner.launch(batch)

    def wait(self) -> StepOutput:
        """Finish the oldest."""
        start_s = max(self._starts_s.popleft(), self._free_s)
        output = self._inner.wait()
        self._free_s = time.perf_counter()
        self.seconds.append(self._free_s - start_s)
        return output

    def close(self) -> None:
        """Close ``inner``."""
        self._inner.close()


class ScriptedRuntime:
    """Runs steps on ``inner``, but every request draws ``end_token`` at a position that was decided beforehand.

    ``ends[seed]`` is that position, counted over prompt and output, for the request with that sampling seed. So output
    lengths follow a workload whatever the model would say, and the scheduler cannot know them.
    """

    def __init__(self, inner: Runtime, ends: npt.NDArray[np.int64], end_token: int) -> None:
        self.num_blocks = inner.num_blocks
        self.block_size = inner.block_size
        self._inner = inner
        self._ends = ends
        self._end_token = end_token
        self._is_end: deque[npt.NDArray[np.bool_]] = deque()  # of the steps in flight

    def launch(self, batch: Batch) -> None:
        """Start one step."""
        sampling = batch.sampling
        self._is_end.append(self._ends[sampling.seed.astype(np.intp)] == sampling.position)
        self._inner.launch(batch)

    def wait(self) -> StepOutput:
        """Finish the oldest, and put in the ends that are due."""
        is_end = self._is_end.popleft()
        output = self._inner.wait()
        return StepOutput(np.where(is_end, np.int32(self._end_token), output.tokens), output.logprobs)

    def close(self) -> None:
        """Close ``inner``."""
        self._inner.close()
