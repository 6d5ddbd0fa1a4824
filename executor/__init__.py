"""From a plan to tokens: requests, the block pool, capacity policies, the scheduler, the engine loop and its runtimes."""
