"""The CPU engines side by side on one plan or several: decode and prefill, interleaved, medians and ratios.

    python benchmarks/cpu_engines.py engines/bf16.plan engines/int8.plan --batch 1 8 --rounds 3

Each measurement is a process of its own, because threads are set up once per process. A decode step is timed inside
the engine, and only steps in which every sequence decodes count; a prefill is one whole prompt, chunked as the plan is.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ENGINES = ("portable", "whole_step")


def measure(path: Path, engine: str, batches: list[int], context: int, prompt: int, steps: int) -> dict[str, float]:
    """Tokens per second of each case, in this process."""
    from decode import decode_steps

    from trtcb import LLM, SamplingParams

    found = {}
    for batch in batches:
        seconds = statistics.median(decode_steps(path, batch, context, steps, engine))
        found[f"decode, batch {batch}, context {context}"] = batch / seconds
    with LLM(path, prefix_caching=False, cpu_engine=engine) as llm:
        rng = np.random.default_rng(0)
        times = []
        for _ in range(3):  # the first one warms up
            ids = rng.integers(0, llm.model.vocab_size, prompt).tolist()
            start = time.perf_counter()
            llm.generate([ids], SamplingParams(max_tokens=1, temperature=0))
            times.append(time.perf_counter() - start)
    found[f"prefill, {prompt} tokens"] = prompt / min(times[1:])
    return found


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path, nargs="+")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write all measurements to this JSON file")
    parser.add_argument("--only", choices=ENGINES, help="measure this engine here, and print JSON")
    arguments = parser.parse_args()
    if arguments.only:
        sizes = (arguments.batch, arguments.context, arguments.prompt, arguments.steps)
        print(json.dumps(measure(arguments.plans[0], arguments.only, *sizes)))
        return
    runs: dict[str, dict[str, list[float]]] = {}
    for _ in range(arguments.rounds):
        for path in arguments.plans:
            for engine in ENGINES:
                sizes = {name: getattr(arguments, name) for name in ("context", "prompt", "steps")}
                flags = [f"--{name}={size}" for name, size in sizes.items()]
                command = [sys.executable, __file__, path, "--only", engine, *flags, "--batch"]
                command += map(str, arguments.batch)
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                for case, rate in json.loads(done.stdout.splitlines()[-1]).items():
                    key = f"{path.stem}: {case}"
                    runs.setdefault(key, {}).setdefault(engine, []).append(rate)
    print("| tokens/s, medians | portable | whole step | ratio |\n|---|---|---|---|")
    for case, rates in runs.items():
        portable, whole = (statistics.median(rates[engine]) for engine in ENGINES)
        print(f"| {case} | {portable:,.1f} | {whole:,.1f} | {whole / portable:.2f} |")
    if arguments.output:
        record = {"machine": platform.processor() or platform.machine(), "rounds": arguments.rounds, "rates": runs}
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
