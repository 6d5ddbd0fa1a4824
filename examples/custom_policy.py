"""A capacity policy of your own, run beside two of the built-in ones on a simulated model.

``ShortPromptsFirst`` is all there is to write: it sees every request in order with what it would cost in blocks, and
says who may run. Here, newcomers with short prompts pass those with long ones, and nobody is ever paused.
"""

import statistics

from trtcb.executor.active_list import ActiveList
from trtcb.executor.config import EngineConfig
from trtcb.executor.core import EngineCore
from trtcb.executor.policies import CapacityPolicy, Choice
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.sequence import Sequence
from trtcb.executor.sim_runtime import SimRuntime


class ShortPromptsFirst:
    """Continue all that started, then start as many short prompts as are sure to fit, whatever their place in line."""

    def select(self, active: ActiveList) -> Choice:
        """Choose who runs in the next step."""
        fitting: list[Sequence] = list(active.running)
        free_blocks = active.free_blocks - active.reserved_blocks
        for seq in sorted(active.waiting, key=lambda seq: seq.num_tokens):
            need = active.blocks_to_completion(seq)
            if len(fitting) == active.max_requests or need > free_blocks:
                break
            fitting.append(seq)
            free_blocks -= need
            active.admit(seq)
        return Choice(fitting, paused=[])


def main() -> None:
    """Print the median step at which a request's last token came, under each policy."""
    for policy in ("guaranteed_no_evict", "max_utilization", ShortPromptsFirst()):
        ends = simulate(policy)
        name = policy if isinstance(policy, str) else type(policy).__name__
        print(f"{name:20} median end: step {statistics.median(ends.values()):5.1f}, last: step {max(ends.values())}")


def simulate(policy: str | CapacityPolicy, num_requests: int = 40) -> dict[str, int]:
    """Run requests whose prompts are long and short by turns; returns the step in which each ended."""
    config = EngineConfig(scheduler_policy=policy, block_size=16, max_batch_size=8, max_num_tokens=256)
    runtime = SimRuntime(num_blocks=64, block_size=config.block_size)
    core = EngineCore(runtime, config, tokenizer=None, eos_token_ids=[], vocab_size=runtime.vocab_size)
    for number in range(num_requests):
        prompt = tuple((number + i) % runtime.vocab_size for i in range(200 if number % 2 else 20))
        params = SamplingParams(max_tokens=32, temperature=0.0)
        core.add(core.admission.sequence(Request(f"r{number}", prompt, params), now_s=0.0))
    ends: dict[str, int] = {}
    step = 0
    while core.has_work:
        step += 1
        for delta in core.step().deltas:
            if delta.finish_reason is not None:
                ends[delta.request_id] = step
    return ends


if __name__ == "__main__":
    main()
