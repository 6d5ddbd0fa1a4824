"""Source of the function that runs a whole step: a table of kernel calls, worked off by all threads together.

All calls of a step run inside one parallel region: to start and end one costs microseconds, and a step has hundreds of
calls. Each is cut into parts that threads claim, and it is over when all its parts are done, not when all threads have
come: one that the system keeps waiting delays a call by no more than the part it was in. Only at the end of the step do
all meet, once. With one thread alone, all the work is done by that.
"""

from trtcb.plugins.cpu.simd import call_kernel, fetch_add, jit, load_acquire, pause, read_i64

# --- constants of a specialisation ---
ROW_WORDS = 24
FIRST_ARGUMENT = 8
# --- end of constants ---

PARTS, CLAIMED, DONE = 1, 2, 3  # words of a row; the first is the kernel
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


def step(arguments: int, part: int, parts: int) -> None:
    """Arguments: table, number of calls, address of a function that yields the core.

    A call is ``ROW_WORDS`` words: the kernel's address, its number of parts, parts claimed and done (0 at the start),
    and from ``FIRST_ARGUMENT`` on its argument block.
    """
    table, num_calls, yield_address = read_i64(arguments, 0), read_i64(arguments, 1), read_i64(arguments, 2)
    for index in range(num_calls):
        row = table + index * ROW_WORDS * 8
        kernel, count = read_i64(row, 0), read_i64(row, PARTS)
        claimed = fetch_add(row + CLAIMED * 8, 1)
        while claimed < count:
            call_kernel(kernel, row + FIRST_ARGUMENT * 8, claimed, count)
            fetch_add(row + DONE * 8, 1)
            claimed = fetch_add(row + CLAIMED * 8, 1)
        wait_until(row + DONE * 8, count, yield_address)


KERNELS = (step,)
