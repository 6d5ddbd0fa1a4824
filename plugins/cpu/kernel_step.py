"""Source of the function that runs a whole step: a table of kernel calls, worked off by all threads together.

All calls of a step run inside one parallel region: to start and end one costs microseconds, and a step has hundreds of
calls. Each is cut into parts that threads claim, and it is over when all its parts are done, not when all threads have
come: one that the system keeps waiting delays a call by no more than the part it was in. Only at the end of the step do
all meet, once. With one thread alone, all the work is done by that.

With ``PROFILE`` every part of a call is timed. Without it there is not one instruction for that.
"""

import time

from trtcb.plugins.cpu.simd import call_kernel, fetch_add, fetch_max, jit, load_acquire, pause, read_i64, stack

# --- constants of a specialisation ---
ROW_WORDS = 24
FIRST_ARGUMENT = 8
PROFILE = False
# --- end of constants ---

PARTS, CLAIMED, DONE = 1, 2, 3  # words of a row; the first is the kernel
BUSY, ENDED = 4, 5  # of a profile, nanoseconds: all parts together, and when the last of them ended
CLOCK = time.CLOCK_MONOTONIC  # that of time.monotonic_ns
NANOSECONDS = 1_000_000_000
SPINS = 2000  # pauses before a waiting thread offers its core to somebody else


@jit
def wait_until(counter: int, count: int, yield_address: int) -> None:
    """Wait for a counter to reach ``count``."""
    spins = 0
    while load_acquire(counter) < count:
        pause()
        spins += 1
        if spins >= SPINS:
            call_kernel(yield_address, 0, 0, 0)
            spins = 0


moment = stack(16)  # a struct timespec of 64 bits


@jit
def now(clock_address: int) -> int:
    """Nanoseconds of the clock that all threads share."""
    at = moment()
    call_kernel(clock_address, CLOCK, at, 0)
    nanoseconds: int = read_i64(at, 0) * NANOSECONDS + read_i64(at, 1)
    return nanoseconds


@jit
def plain_part(row: int, kernel: int, part: int, parts: int, clock_address: int) -> None:
    """Run one part of a call."""
    call_kernel(kernel, row + FIRST_ARGUMENT * 8, part, parts)


@jit
def timed_part(row: int, kernel: int, part: int, parts: int, clock_address: int) -> None:
    """Run one part of a call, and add its time to the row."""
    began = now(clock_address)
    call_kernel(kernel, row + FIRST_ARGUMENT * 8, part, parts)
    ended = now(clock_address)
    fetch_add(row + BUSY * 8, ended - began)
    fetch_max(row + ENDED * 8, ended)


run_part = timed_part if PROFILE else plain_part


def step(arguments: int, part: int, parts: int) -> None:
    """Arguments: table, number of calls, addresses of a function that yields the core and of one that tells the time.

    A call is ``ROW_WORDS`` words: the kernel's address, its number of parts, parts claimed and done (0 at the start),
    of a profile the parts' time and the last one's end (likewise), and from ``FIRST_ARGUMENT`` on its argument block.
    """
    table, num_calls, yield_address = read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 2)
    clock_address = read_i64(arguments, 3)
    for index in range(num_calls):
        row = table + index * ROW_WORDS * 8
        kernel, count = read_i64(row, 0), read_i64(row, PARTS)
        claimed = fetch_add(row + CLAIMED * 8, 1)
        while claimed < count:
            run_part(row, kernel, claimed, count, clock_address)
            fetch_add(row + DONE * 8, 1)
            claimed = fetch_add(row + CLAIMED * 8, 1)
        wait_until(row + DONE * 8, count, yield_address)


KERNELS = (step,)
