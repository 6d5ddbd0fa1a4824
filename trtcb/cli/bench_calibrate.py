"""``trtcb bench calibrate``: fit the simulated machine to a plan."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    plan: Annotated[Path, typer.Argument(help="The plan to measure.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="YAML file to write, for --sim.")] = Path("sim.yaml"),
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests to measure with.")] = 48,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workload.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the engine. [one a core]")] = None,
) -> None:
    """Fit the simulated machine to a plan's step times."""
    from trtcb.bench.calibration import calibrate_plan
    from trtcb.cli.bench_options import check_writable, write_results
    from trtcb.cli.bench_progress import progress_bar

    check_writable(output)
    with progress_bar("requests", num_prompts) as advance:
        calibration = calibrate_plan(
            plan,
            num_prompts=num_prompts,
            seed=seed,
            threads=threads,
            on_phase=lambda phase: print(phase, file=sys.stderr),
            on_finished=advance,
        )
    print(calibration.summary())
    write_results(output, calibration.to_yaml())
