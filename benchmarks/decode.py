"""Decode speed of a plan beside the memory-bandwidth limit of this machine.

    python benchmarks/decode.py engines/model.plan --batch 1 8 32 --context 256

A step is timed inside the engine, from scheduling to the text of its tokens, and only steps in which every sequence
decodes and nothing is prefilled count. The limit is the time to read the weights and the step's keys and values once at
the bandwidth that a plain parallel read reaches here.
"""

import argparse
import json
import platform
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from trtcb import LLM, SamplingParams
from trtcb.bench.machine_limits import read_bandwidth
from trtcb.executor.stats import StepStats
from trtcb.plan import Plan


def decode_steps(path: Path, batch: int, context: int, steps: int, cpu_engine: str) -> list[float]:
    """Seconds of each step in which ``batch`` sequences around ``context`` tokens decode."""
    taken: list[float] = []

    def observe(step: StepStats) -> None:
        if step.generated_tokens == batch and not step.prompt_tokens:
            taken.append(step.step_s)

    rng = np.random.default_rng(0)
    num_tokens = steps + batch * context // 512 + 2  # the first prompts decode while the last are prefilled
    with LLM(path, on_step=observe, max_batch_size=batch, prefix_caching=False, cpu_engine=cpu_engine) as llm:
        prompts = rng.integers(0, llm.model.vocab_size, (batch, context - steps // 2)).tolist()
        llm.generate(prompts, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))
    return taken[-steps:]


def main() -> None:
    """Print one line per batch size, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--cpu-engine", default="auto")
    parser.add_argument("--output", type=Path, help="append the results to this JSON-lines file")
    arguments = parser.parse_args()

    with Plan.open(arguments.plan, verify="header") as plan:
        header = plan.header
        # a head is read whole each step; an embedding that is not the head as well only row by row
        weights = sum(t.num_bytes for t in plan.tensors.values() if not t.name.startswith("rope"))
        if "lm_head" in plan.tensors:
            weights -= plan.tensors["embedding"].num_bytes
    with ThreadPoolExecutor(1) as thread:  # its team of OpenMP workers ends with it, see CpuRuntime
        bandwidth = thread.submit(read_bandwidth).result()
    print(f"{arguments.plan.name}: {weights / 1e9:.3f} GB of weights a step; {bandwidth / 1e9:.1f} GB/s read")
    print("batch  context  ms/step  tokens/s  limit tokens/s  share of the limit")
    for batch in arguments.batch:
        times = decode_steps(arguments.plan, batch, arguments.context, arguments.steps, arguments.cpu_engine)
        median = statistics.median(times)
        read = weights + batch * arguments.context * header.model.kv_bytes_per_token(header.kv_dtype)
        limit = read / bandwidth
        print(
            f"{batch:5d}  {arguments.context:7d}  {median * 1e3:7.2f}  {batch / median:8.1f}  {batch / limit:14.1f}"
            f"  {limit / median:18.1%}",
            flush=True,
        )
        if arguments.output:
            record = {
                "plan": arguments.plan.name,
                "model": header.model.name,
                "weights": header.weight_dtype,
                "kv": header.kv_dtype.value,
                "cpu_engine": arguments.cpu_engine,
                "batch": batch,
                "context": arguments.context,
                "steps": len(times),
                "median_ms": round(median * 1e3, 3),
                "tokens_per_s": round(batch / median, 1),
                "read_gb_per_s": round(bandwidth / 1e9, 1),
                "share_of_limit": round(limit / median, 3),
                "machine": platform.processor() or platform.machine(),
            }
            with arguments.output.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
