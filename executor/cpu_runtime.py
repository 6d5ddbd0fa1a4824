"""The ``cpu`` target's runtime: a CPU engine, and the thread that its steps run on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from trtcb.errors import UsageError
from trtcb.executor.runtime import Batch, Float32, StepOutput
from trtcb.plugins.cpu import threads

if TYPE_CHECKING:
    from trtcb.executor.step_profile import OnProfile
    from trtcb.plan import Plan

T = TypeVar("T")

NOT_PROFILABLE = "Only the steps of the whole_step engine can be profiled: add --cpu-engine whole_step."


class CpuEngine(Protocol):
    """What runs the steps. Used by one thread at a time."""

    def run(self, batch: Batch) -> StepOutput:
        """Run one step and draw; -1 where a row's logits were not numbers."""

    def logits(self) -> Float32:
        """Logits ``[NL, vocab]`` of the last step; overwritten by the next."""

    def close(self) -> None:
        """Drop pools and weights, and let go of the plan."""


class CpuRuntime:
    """Runs a ``cpu`` plan, which it owns and closes; see :class:`~trtcb.executor.runtime.Runtime`.

    ``engine`` is ``portable`` (oneDNN's products, one call an operator), ``whole_step`` (all of a step in one call, on
    kernels of our own) or ``auto``, the faster one on this processor.

    A step of the whole-step engine runs on the thread that waits for it, in :meth:`wait`: to hand it to another thread
    and back costs 5 to 10 % of a short step. With ``overlaps`` it runs beside that thread, on one that stands for the
    device, from its launch on; so do all steps of the portable engine, as torch's threads belong to who made them.

    OpenMP keeps a team of workers for each thread that ever ran a parallel loop, and once there are more of them than
    cores, it stops letting idle ones spin: steps then take up to 1.5 times as long (measured at batch 32). A process
    should therefore have one such runtime open at a time, and use it from one thread.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        num_blocks: int,
        max_num_tokens: int,
        max_num_logits: int,
        num_threads: int | None = None,
        engine: str = "auto",
        overlaps: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = plan.header.limits.block_size
        self.healthy = True  # a failed step leaves nothing half done that the next one would read
        self._plan = plan
        self._steps: deque[Callable[[], StepOutput]] = deque()
        device = ThreadPoolExecutor(1, thread_name_prefix="trtcb-cpu")
        self._device = device if overlaps or engine == "portable" else None
        try:
            self._engine = device.submit(
                _open_engine,
                engine,
                plan,
                num_blocks=num_blocks,
                max_num_tokens=max_num_tokens,
                max_num_logits=max_num_logits,
                num_threads=num_threads,
            ).result()
        except BaseException:
            device.shutdown()
            raise
        if self._device is None:
            device.shutdown()  # and the team that it loaded with is gone

    def launch(self, batch: Batch) -> None:
        """Start one step. ``RuntimeError`` once closed: what kernels would read is gone."""
        self._steps.append(self._start(self._engine.run, batch))

    def wait(self) -> StepOutput:
        """Return what the oldest step drew; -1 where a row's logits were not numbers."""
        return self._steps.popleft()()

    def logits(self) -> Float32:
        """Logits ``[NL, vocab]`` of the last step, for evaluation; the next one overwrites them."""
        return self._engine.logits()

    def profile(self, on_profile: OnProfile) -> None:
        """Tell where the time of every step from now on goes: see :class:`~trtcb.executor.step_profile.StepProfile`.

        To be called between steps; ``on_profile`` is, on the thread of the steps, before :meth:`wait` returns. Raises
        ``UsageError`` for the portable engine.
        """
        self._engine = self._start(_profiled, self._engine, on_profile)()

    def close(self) -> None:
        """Finish the running step, drop pools, weights and steps nobody waited for, and close the plan."""
        if self.healthy:
            close_engine = self._start(self._engine.close)
            self.healthy = False
            close_engine()
            self._steps.clear()
            if self._device is not None:
                self._device.shutdown()
            self._plan.close()

    def _start(self, function: Callable[..., T], *arguments: Any) -> Callable[[], T]:
        """Start a function on the device's thread, or keep it for who asks for its result: call what this returns."""
        if not self.healthy:
            raise RuntimeError("this runtime is closed: open another")
        if self._device is None:
            return partial(function, *arguments)
        return self._device.submit(function, *arguments).result


def _open_engine(name: str, plan: Plan, *, num_threads: int | None, **sizes: Any) -> CpuEngine:
    threads.configure(num_threads)  # before numba or torch is imported
    if name in ("auto", "whole_step"):
        from trtcb.executor.step_engine import StepEngine

        return StepEngine(plan, **sizes)
    if name == "portable":
        from trtcb.executor.portable_engine import PortableEngine

        return PortableEngine(plan, **sizes)
    raise UsageError(f"There is no CPU engine '{name}': use auto, portable or whole_step.")


def _profiled(engine: CpuEngine, on_profile: OnProfile) -> CpuEngine:
    from trtcb.executor.step_engine import StepEngine
    from trtcb.executor.step_profile import ProfiledEngine

    if not isinstance(engine, StepEngine):
        raise UsageError(NOT_PROFILABLE)
    return ProfiledEngine(engine, on_profile)
