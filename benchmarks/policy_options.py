"""What each scheduling option buys, on the real scheduler with an invented step time and a virtual clock.

Every option runs beside its default on the same seeded arrivals. The model of time (a step takes ``BASE_S`` and
``TOKEN_S`` a token) decides the absolute numbers, so only the comparison within a pair means anything.
"""

import random
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from trtcb.executor.config import EngineConfig
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.scheduler import Scheduler, Step
from trtcb.executor.sequence import Sequence

BASE_S, TOKEN_S = 0.010, 0.0001
COLUMNS = ("tok/s", "pauses", "recomp.", "wait p50", "wait p99", "gap p99", "e2e mean")


@dataclass(frozen=True)
class Arrival:
    """A request to come: ``limit`` is what it declares, ``length`` what it will generate."""

    time_s: float
    prompt: int
    limit: int
    length: int
    tenant: str = ""
    priority: float = 0.5


@dataclass
class Run:
    """What came of it. Waits are from arrival to first token, gaps between two tokens of a request."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_pauses: int = 0
    num_recomputed: int = 0
    gaps: list[float] = field(default_factory=list)
    waits: dict[Sequence, float] = field(default_factory=dict)
    e2e: dict[Sequence, float] = field(default_factory=dict)

    def numbers(self) -> str:
        """One line in the order of ``COLUMNS``."""
        waits = list(self.waits.values())
        return (
            f"{self.num_tokens / self.seconds:9.0f}{self.num_pauses:9d}{self.num_recomputed:9d}"
            f"{np.median(waits):9.2f}{np.percentile(waits, 99):9.2f}{np.percentile(self.gaps, 99):9.3f}"
            f"{np.mean(list(self.e2e.values())):9.2f}"
        )


def simulate(arrivals: list[Arrival], num_blocks: int, *, host_s: float = 0.0, **settings) -> Run:
    """Run all arrivals to their ends. ``host_s`` is the engine's own time for a step."""
    config = EngineConfig(**{"block_size": 16, "max_num_tokens": 1024, **settings})
    scheduler = Scheduler(config, num_blocks)
    run, now, last, lengths = Run(), 0.0, {}, {}
    in_flight, device_free_s = deque(), 0.0
    coming = sorted(arrivals, key=lambda arrival: arrival.time_s)[::-1]
    while coming or scheduler.has_work or in_flight:
        if not scheduler.has_work and not in_flight:
            now = max(now, coming[-1].time_s)
        while coming and coming[-1].time_s <= now:
            arrival = coming.pop()
            seq = make_sequence(arrival, len(lengths))
            lengths[seq] = arrival.length
            scheduler.add(seq)
        step = scheduler.schedule()
        run.num_recomputed += step.recomputed_tokens
        run.num_pauses += len(step.paused)
        if step.num_rows:
            now += host_s
            num_tokens = len(step.decodes) + sum(size for _, size in step.chunks)
            device_free_s = max(now, device_free_s) + BASE_S + TOKEN_S * num_tokens
            scheduler.advance(step)
            in_flight.append((step, device_free_s))
        if len(in_flight) > (config.overlap_depth if step.num_rows else 0):
            step, end_s = in_flight.popleft()
            now = max(now, end_s)
            finish(scheduler, step, now, run, last, lengths)
    run.seconds = now
    return run


def finish(scheduler: Scheduler, step: Step, now: float, run: Run, last: dict, lengths: dict) -> None:
    """Account for a step that has run."""
    lost = set(scheduler.collect([1] * len(step.drawing)))
    drawing = [seq for row, seq in enumerate(step.drawing) if row not in lost]
    run.num_tokens += len(drawing)
    for seq in drawing:
        if seq in last:
            run.gaps.append(now - last[seq])
        else:
            run.waits[seq] = now - seq.arrival_s
        last[seq] = now
        if seq.num_generated >= lengths[seq]:
            run.e2e[seq] = now - seq.arrival_s
            scheduler.remove(seq)


def make_sequence(arrival: Arrival, number: int) -> Sequence:
    """Give an arrival a prompt that it shares with nobody."""
    prompt = tuple(range(10_000 * number, 10_000 * number + arrival.prompt))
    request = Request(str(number), prompt, SamplingParams(), priority=arrival.priority, tenant=arrival.tenant)
    return Sequence(request, max_tokens=arrival.limit, seed=0, arrival_s=arrival.time_s)


def poisson(rate: float, count: int, **of) -> list[Arrival]:
    """Seeded arrivals with prompts of 20 to 400 tokens and exponential lengths, 100 in the mean, declared as 512."""
    rng, now, arrivals = random.Random(3), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        length = min(512, 1 + int(rng.expovariate(1 / 100)))
        arrivals.append(
            Arrival(**{"time_s": now, "prompt": rng.randint(20, 400), "limit": 512, "length": length, **of})
        )
    return arrivals


def compare(title: str, arrivals: list[Arrival], num_blocks: int, *variants: dict, **common) -> None:
    """Print the default and each variant."""
    print(f"\n{title:36}" + "".join(f"{name:>9}" for name in COLUMNS))
    for options in ({}, *variants):
        name = ", ".join(f"{key}={value}" for key, value in options.items()) or "default"
        print(f"  {name:34}{simulate(arrivals, num_blocks, **common, **options).numbers()}", flush=True)


def main() -> None:
    """Print all comparisons."""
    tight = poisson(15.0, 600)
    util = {"scheduler_policy": "max_utilization"}
    compare("watermark", tight, 400, *({"watermark": share} for share in (0.02, 0.05, 0.1, 0.2)), **util)
    compare("victim", tight, 400, {"victim_policy": "cheapest"}, **util)
    compare("victim, with watermark 0.02", tight, 400, {"victim_policy": "cheapest"}, watermark=0.02, **util)
    compare("max_prefill_tokens", tight, 4000, {"max_prefill_tokens": 256}, {"max_prefill_tokens": 64})
    whole = {"scheduler_policy": "max_utilization", "chunked_prefill": False, "max_seq_len": 1024}
    rng = random.Random(4)
    mixed = [replace(arrival, priority=rng.choice([0.0, 1.0])) for arrival in poisson(22.0, 600, prompt=400)]
    compare("stall_free (no chunks, 2 priorities)", mixed, 4000, {"stall_free": True}, **whole)
    exact = [Arrival(a.time_s, a.prompt, a.length, a.length) for a in poisson(30.0, 600)]
    compare("srtf (exact limits)", exact, 400, {"queue_policy": "srtf"})
    steady = poisson(13.0, 600)
    for host_s in (0.001, 0.005):
        compare(f"overlap (host {1000 * host_s:g} ms a step)", steady, 4000, {"overlap_depth": 1}, host_s=host_s)
    tenants()
    ageing()


def tenants() -> None:
    """A burst of one tenant in front of the steady trickle of another."""
    burst = poisson(200.0, 300, tenant="burst", limit=100)
    trickle = poisson(2.0, 30, tenant="trickle", limit=100)
    arrivals = [Arrival(a.time_s, a.prompt, a.limit, min(a.length, a.limit), a.tenant) for a in burst + trickle]
    print(f"\n{'wfq: mean wait by tenant':36}{'burst':>9}{'trickle':>9}")
    for options in ({}, {"queue_policy": "wfq"}, {"queue_policy": "wfq", "tenant_weights": {"burst": 4.0}}):
        waits = simulate(arrivals, 400, **options).waits
        means = [np.mean([w for seq, w in waits.items() if seq.request.tenant == t]) for t in ("burst", "trickle")]
        name = ", ".join(f"{key}={value}" for key, value in options.items()) or "default"
        print(f"  {name:50}" + "".join(f"{mean:9.2f}" for mean in means))


def ageing() -> None:
    """A few requests of low priority among many of high."""
    rng = random.Random(5)
    arrivals = [
        Arrival(a.time_s, a.prompt, a.length, a.length, priority=1.0 if rng.random() < 0.9 else 0.0)
        for a in poisson(30.0, 600)
    ]
    print(f"\n{'priority_ageing: longest wait':36}{'low':>9}{'high':>9}")
    for seconds in (None, 30.0, 5.0):
        waits = simulate(arrivals, 400, queue_policy="priority", priority_ageing_s=seconds).waits
        longest = [max(w for seq, w in waits.items() if seq.request.priority == p) for p in (0.0, 1.0)]
        print(f"  {f'priority_ageing_s={seconds}':34}" + "".join(f"{wait:9.2f}" for wait in longest))


if __name__ == "__main__":
    main()
