"""``trtcb bench``: measure a server, an engine, or scheduling policies against each other."""

import typer

from trtcb.cli.bench_calibrate import calibrate
from trtcb.cli.bench_offline import bench_latency, bench_throughput
from trtcb.cli.bench_options import BenchCommand
from trtcb.cli.bench_policy import PolicyCommand, bench_policy
from trtcb.cli.bench_serve import bench_serve
from trtcb.cli.flag_groups import GroupedCommand

app = typer.Typer(help="Measure a server, an engine, or scheduling policies against each other.", no_args_is_help=True)
app.command("serve", cls=BenchCommand)(bench_serve)
app.command("throughput", cls=GroupedCommand)(bench_throughput)
app.command("latency", cls=GroupedCommand)(bench_latency)
app.command("policy", cls=PolicyCommand)(bench_policy)
app.command("calibrate")(calibrate)
