"""A scheduler alone, driven by hand."""

from trtcb.executor.config import EngineConfig
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.scheduler import Scheduler, Step
from trtcb.executor.sequence import Sequence
from trtcb.executor.waiting_list import WaitingList


class WatchedList(WaitingList):
    """Counts what is looked at."""

    looked_at = 0

    def __iter__(self):
        for seq in super().__iter__():
            self.looked_at += 1
            yield seq


class Bench:
    """A scheduler whose every row draws ``token``. Requests are known by name; blocks have 10 tokens."""

    def __init__(self, policy: str, pool: int, **settings):
        defaults = {"block_size": 10, "max_num_tokens": 1000, "max_batch_size": 8, "prefix_caching": False}
        self.scheduler = Scheduler(EngineConfig(scheduler_policy=policy, **{**defaults, **settings}), pool)
        self.names: dict[Sequence, str] = {}
        self.sequences: dict[str, Sequence] = {}

    def add(
        self, name: str, length: int, new: int, *, priority: float = 0.5, prompt=None, salt: str = "", **request
    ) -> Sequence:
        prompt = prompt or tuple(1000 * len(self.names) + i for i in range(length))
        request = Request(name, tuple(prompt), SamplingParams(), priority=priority, cache_salt=salt, **request)
        seq = Sequence(request, max_tokens=new, seed=0, arrival_s=request.arrival_s)
        self.names[seq] = name
        self.sequences[name] = seq
        self.scheduler.add(seq)
        return seq

    def schedule(self) -> Step:
        step = self.scheduler.schedule()
        assert self.scheduler.audit() == []
        return step

    def step(self, token: int = 1) -> dict[str, int]:
        step = self.schedule()
        rows = {seq.request_id: 1 for seq in step.decodes} | {seq.request_id: size for seq, size in step.chunks}
        drawing = step.drawing
        self.scheduler.advance(step)
        self.scheduler.collect([token] * len(drawing))
        for seq in drawing:
            if seq.is_at_limit:
                self.scheduler.remove(seq)
        return rows

    def running(self) -> list[str]:
        return [seq.request_id for seq in self.scheduler.running]

    def waiting(self) -> list[str]:
        return [seq.request_id for seq in self.scheduler.waiting]

    def watch(self) -> WatchedList:
        watched = WatchedList()
        for seq in self.scheduler.waiting:
            watched.add(seq)
        self.scheduler.waiting = watched
        return watched
