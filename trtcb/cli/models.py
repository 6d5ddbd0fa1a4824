"""``trtcb models``: the presets, and fetching their files."""

from typing import TYPE_CHECKING, Annotated

import typer

from trtcb.errors import ModelNotFoundError, UsageError

if TYPE_CHECKING:
    from trtcb.builder.presets import Preset

app = typer.Typer(help="List the model presets and fetch their files.", no_args_is_help=False)
Name = Annotated[str, typer.Argument(help="Name of a preset, as listed by `trtcb models`.")]


@app.callback(invoke_without_command=True)
def show_models(context: typer.Context) -> None:
    """List the presets: size, hub id, and whether the files are on this machine."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    from trtcb.builder.presets import load_preset, preset_names

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("params", justify="right", no_wrap=True)
    table.add_column("hub id", overflow="fold")
    table.add_column("local", no_wrap=True)
    for preset in map(load_preset, preset_names()):
        table.add_row(preset.name, _count(preset.spec.num_params), preset.hub_id or "-", _local_state(preset))
    Console(highlight=False).print(table)


@app.command("pull")
def pull_model(name: Name) -> None:
    """Fetch a preset's files into the cache and print where they are."""
    from trtcb.builder.preset_files import pull
    from trtcb.builder.presets import load_preset

    typer.echo(pull(load_preset(name), report=lambda line: typer.echo(line, err=True)))


@app.command("path")
def print_path(name: Name) -> None:
    """Print where a preset's files are, and nothing else."""
    from trtcb.builder.preset_files import local_path
    from trtcb.builder.presets import load_preset

    preset = load_preset(name)
    if preset.random_weights:
        raise UsageError(f"The preset {name} has random weights and no files: build it as it is.")
    path = local_path(preset)
    if path is None:
        raise ModelNotFoundError(f"The preset {name} is not on this machine: run `trtcb models pull {name}`.")
    typer.echo(path)


def _local_state(preset: "Preset") -> str:
    from trtcb.builder.preset_files import local_path

    if preset.random_weights:
        return "generated"
    return "not fetched" if local_path(preset) is None else "fetched"


def _count(params: int) -> str:
    """``135M``, ``1.1B``."""
    return f"{params / 1e9:.1f}B" if params >= 1e9 else f"{params / 1e6:.1f}M"
