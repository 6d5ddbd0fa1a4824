"""From a plan to tokens: requests, the block pool, capacity policies, the scheduler, the engine and its runtimes."""
