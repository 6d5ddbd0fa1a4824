"""Fits the simulated machine to a plan on this one, from the real times of real steps."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from trtcb import __version__
from trtcb.bench.metrics import Slo
from trtcb.bench.table import counted
from trtcb.bench.targets import serve, warm_up
from trtcb.bench.workload import RandomWorkload
from trtcb.executor.config import EngineConfig
from trtcb.executor.step_time import StepTimeFit, fit_step_time
from trtcb.executor.virtual_time import SkippingClock, TimedRuntime


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted step time, with the engine it was measured on."""

    plan: str
    day: str
    fit: StepTimeFit
    engine: Mapping[str, int]

    def summary(self) -> str:
        """Say how good it is, in one line."""
        return (
            f"{self.fit.num_steps} steps of {self.plan}: the fitted time is off by {100 * self.fit.median_error:.1f} % "
            f"(median) and {100 * self.fit.p95_error:.1f} % (p95)"
        )

    def to_yaml(self) -> str:
        """Write it as a file for ``--sim``."""
        settings = {"step_time": asdict(self.fit.model), "engine": dict(self.engine)}
        head = f"# trtcb {__version__} bench calibrate, {self.day}\n# {self.summary()}\n"
        return head + yaml.safe_dump(settings, sort_keys=False)


def calibrate_plan(
    path: Path,
    *,
    num_prompts: int,
    seed: int,
    threads: int | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    on_finished: Callable[[int], None] = lambda count: None,
) -> Calibration:
    """Serve a workload that grows and shrinks the batch, and fit its steps. Takes a minute for a small model.

    ``on_phase`` is told what begins, ``on_finished`` how many requests a step has ended.
    """
    from trtcb.executor.served_model import ServedModel

    # Without prefix hits, so that prompts of all sizes are really computed.
    on_phase(f"opening {path}")
    served = ServedModel.from_plan(path, EngineConfig(prefix_caching=False, threads=threads), verify="header")
    try:
        on_phase("warming up")
        warm_up(served.runtime, served.config, served.model.vocab_size)
        timed = TimedRuntime(served.runtime)
        mean_len = max(1, min(192, served.config.max_seq_len // 4))
        source = RandomWorkload(
            num_prompts=num_prompts,
            random_input_len=mean_len,
            random_output_len=min(48, mean_len),
            random_range_ratio=0.9,
        )
        workload = source.generate(seed)
        on_phase(f"measuring {counted(num_prompts, 'request')}")
        result = serve(
            timed,
            served.config,
            SkippingClock(),
            served.model.vocab_size,
            workload,
            Slo(),
            on_finished=on_finished,
        )
        fit = fit_step_time(timed.loads, timed.seconds)
        # All requests are there from the start and no step overlaps another: the host does what the device does not.
        host_s = max(0.0, result.values["duration_s"] - sum(timed.seconds)) / len(timed.seconds)
        fit = replace(fit, model=replace(fit.model, host_s=float(f"{host_s:.4g}")))
        engine = {
            "num_blocks": served.runtime.num_blocks,
            "block_size": served.config.block_size,
            "max_batch_size": served.config.max_batch_size,
            "max_num_tokens": served.config.max_num_tokens,
            "max_seq_len": served.config.max_seq_len,
        }
        return Calibration(path.name, time.strftime("%Y-%m-%d"), fit, engine)
    finally:
        served.runtime.close()
