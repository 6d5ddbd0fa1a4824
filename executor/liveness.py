"""Who has waited longest: what tells a queue that is merely long from one in which somebody starves."""

from collections import OrderedDict

from trtcb.executor.scheduler import Step
from trtcb.executor.sequence import Sequence


class Liveness:
    """Arrivals of requests that never ran and times of pauses, oldest first. O(1) per event. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Sequence, float] = OrderedDict()
        self._paused: OrderedDict[Sequence, float] = OrderedDict()

    @property
    def waiting_since_s(self) -> float | None:
        """Arrival of the request that has waited longest without ever running, on the engine's clock."""
        return next(iter(self._waiting.values()), None)

    @property
    def paused_since_s(self) -> float | None:
        """When the request that has been paused for longest was."""
        return next(iter(self._paused.values()), None)

    def queued(self, seq: Sequence) -> None:
        """Take note of an arrival."""
        self._waiting[seq] = seq.arrival_s

    def scheduled(self, step: Step, now_s: float) -> None:
        """Take note of who starts and who is paused."""
        for seq in step.paused:
            self._paused[seq] = now_s
        for seq in step.started:
            self._waiting.pop(seq, None)
            self._paused.pop(seq, None)

    def ended(self, seq: Sequence) -> None:
        """Forget a request."""
        self._waiting.pop(seq, None)
        self._paused.pop(seq, None)
