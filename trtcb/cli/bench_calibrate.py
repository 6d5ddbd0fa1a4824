"""``trtcb bench calibrate``: fit the simulated machine to a plan."""

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    plan: Annotated[Path, typer.Argument(help="The plan to measure.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="YAML file to write, for --sim.")] = Path("sim.yaml"),
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests to measure with.")] = 48,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workload.")] = 0,
) -> None:
    """Fit the simulated machine to a plan's step times."""
    from trtcb.bench.calibration import calibrate_plan
    from trtcb.cli.bench_options import check_writable

    check_writable(output)
    calibration = calibrate_plan(plan, num_prompts=num_prompts, seed=seed)
    output.write_text(calibration.to_yaml(), "utf-8")
    print(calibration.summary())
    print(f"wrote {output}")
