"""A short benchmark for CI: builds a small random model, runs the three policies on it, and prints what it measured.

It judges nothing, because shared machines are noisy; it fails only if something does not run.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from trtcb import LLM, SamplingParams
from trtcb.builder.build import build
from trtcb.config import BuildConfig
from trtcb.executor.stats import StepStats


def main() -> None:
    """Print a line per policy."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.plan"
        start = time.perf_counter()
        build(BuildConfig(model="tiny-random", random_weights=True, kv_dtype="fp8", output=path, max_seq_len=512))
        print(f"build {time.perf_counter() - start:.2f} s, plan {path.stat().st_size / 1e6:.1f} MB")
        prompts = [rng.integers(0, 256, n).tolist() for n in rng.integers(8, 128, 64)]
        params = [SamplingParams(max_tokens=int(n), temperature=0, ignore_eos=True) for n in rng.integers(8, 64, 64)]
        for policy in ("static_batch", "guaranteed_no_evict", "max_utilization"):
            steps: list[StepStats] = []
            with LLM(path, on_step=steps.append, scheduler_policy=policy, max_batch_size=16, num_blocks=48) as llm:
                start = time.perf_counter()
                completions = llm.generate(prompts, params)
                seconds = time.perf_counter() - start
            tokens = sum(len(completion.token_ids) for completion in completions)
            print(
                f"{policy:20s} {tokens / seconds:8.0f} tokens/s  {len(steps):4d} steps"
                f"  {sum(step.num_pauses for step in steps):3d} pauses"
                f"  schedule {statistics.median(step.schedule_s for step in steps) * 1e6:5.0f} us (median)"
            )


if __name__ == "__main__":
    main()
