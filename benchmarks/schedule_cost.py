"""What a scheduling pass costs in the steady state, by the number of waiting requests.

256 requests generate while others wait; prefix matching is on and half of the prompts share a beginning. The last rows
are passes in which everybody who waits shares a prefix that is just being computed, with places and memory to spare,
so that each pass must find out that nobody may start. Prints medians in microseconds; judges nothing.
"""

import argparse
import gc
import statistics
import time

from trtcb.executor.config import EngineConfig
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.scheduler import Scheduler
from trtcb.executor.sequence import Sequence

RUNNING = 256
BLOCK_SIZE = 32
PROMPT = 4 * BLOCK_SIZE + 1
STEM = tuple(range(3 * BLOCK_SIZE))


def main() -> None:
    """Print a table per policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=300, help="scheduling passes per number")
    passes = parser.parse_args().passes
    depths = (0, 256, 1024, 4096)
    gc.disable()  # as its pauses would be charged to whichever pass they hit
    print(f"{RUNNING} running; waiting:".ljust(44) + "".join(f"{depth:>9}" for depth in depths))
    for policy in ("guaranteed_no_evict", "max_utilization", "static_batch"):
        row("steady state", policy, [steady(policy, "fcfs", depth, passes) for depth in depths])
    for queue in ("srtf", "wfq"):
        row(f"steady state, {queue}", "max_utilization", [steady("max_utilization", queue, d, passes) for d in depths])
    for policy in ("guaranteed_no_evict", "max_utilization"):
        row("all wait for one prefix", policy, [one_prefix(policy, depth, passes) for depth in depths])


def row(case: str, policy: str, microseconds: list[float]) -> None:
    """Print one line of the table."""
    print(f"{case:24}{policy:20}" + "".join(f"{value:9.1f}" for value in microseconds), flush=True)


def steady(policy: str, queue: str, num_waiting: int, passes: int) -> float:
    """Median pass while the batch is full."""
    scheduler = make_scheduler(policy, queue, max_batch_size=RUNNING)
    for number in range(RUNNING + num_waiting):
        stem = STEM if number % 2 else ()
        scheduler.add(sequence(number, (*stem, *range(1000 * number, 1000 * number + PROMPT - len(stem)))))
    while len(scheduler.running) < RUNNING or not all(seq.generating for seq in scheduler.running):
        advance(scheduler)
    return median_us(scheduler, passes)


def one_prefix(policy: str, num_waiting: int, passes: int) -> float:
    """Median pass while one prompt is computed that all who wait begin with."""
    scheduler = make_scheduler(policy, "fcfs", max_batch_size=2 * RUNNING)
    for number in range(RUNNING):
        scheduler.add(sequence(number, tuple(range(1000 * number, 1000 * number + PROMPT))))
    while len(scheduler.running) < RUNNING or not all(seq.generating for seq in scheduler.running):
        advance(scheduler)
    prompt = tuple(range(1 << 20, (1 << 20) + PROMPT))
    for number in range(1 + num_waiting):
        scheduler.add(sequence(RUNNING + number, (*prompt, number)))
    seconds = []
    for _ in range(passes):  # of the same step, which is never applied: its prompt stays half computed
        start = time.perf_counter()
        scheduler.schedule()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def make_scheduler(policy: str, queue: str, max_batch_size: int) -> Scheduler:
    """Make a scheduler with memory for everybody who may run at once."""
    config = EngineConfig(
        scheduler_policy=policy,
        queue_policy=queue,
        max_batch_size=max_batch_size,
        max_num_tokens=RUNNING * (PROMPT + 1),  # so that a static batch forms in one step
        block_size=BLOCK_SIZE,
    )
    return Scheduler(config, num_blocks=max_batch_size * 130)


def sequence(number: int, prompt: tuple[int, ...]) -> Sequence:
    """Make a request that outlives the benchmark."""
    request = Request(str(number), prompt, SamplingParams(), tenant=f"tenant-{number % 7}")
    return Sequence(request, max_tokens=4000, seed=0, arrival_s=0.0)


def advance(scheduler: Scheduler) -> float:
    """Run a step on nothing, and return the seconds that scheduling it took."""
    start = time.perf_counter()
    step = scheduler.schedule()
    seconds = time.perf_counter() - start
    scheduler.advance(step)
    scheduler.collect([1] * len(step.drawing))
    return seconds


def median_us(scheduler: Scheduler, passes: int) -> float:
    """Median time of a pass over so many steps."""
    return statistics.median(advance(scheduler) for _ in range(passes)) * 1e6


if __name__ == "__main__":
    main()
