"""The ``trtcb`` command: finds the subcommand, imports it alone, and turns errors into one sentence and an exit code.

Exit codes: 0 ok, 1 failure, 2 usage, 3 model or plan not found, 4 plan corrupt or incompatible, 5 does not fit in
memory, 6 validation failed, 7 port busy, 8 target unavailable, 9 drain timed out, 130 Ctrl-C.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from trtcb import __version__
from trtcb.cli.flag_groups import GroupedCommand
from trtcb.errors import TrtcbError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand and where it lives, ``module:name``: a function whose parameters are options, or a group of such."""

    summary: str
    target: str

    def load(self) -> "Callable[..., Any] | typer.Typer":
        """Import it."""
        module, name = self.target.split(":")
        loaded: Callable[..., Any] | typer.Typer = getattr(import_module(module), name)
        return loaded


COMMANDS = {
    "build": Command("Compile a model into a plan file.", "trtcb.cli.build:build"),
    "serve": Command("Serve a plan over the OpenAI HTTP API.", "trtcb.cli.serve:serve"),
    "generate": Command("Complete prompts with a plan, without a server.", "trtcb.cli.generate:generate"),
    "chat": Command("Talk to a plan in the terminal.", "trtcb.cli.chat:chat"),
    "eval": Command("Measure how far a plan is from its model.", "trtcb.cli.eval:evaluate"),
    "bench": Command("Measure a server, an engine, or scheduling policies.", "trtcb.cli.bench:app"),
    "export": Command("Write a model's ONNX graph, with its weights.", "trtcb.cli.export:export"),
    "inspect": Command("Show what is inside a plan.", "trtcb.cli.inspect:inspect"),
    "models": Command("List the models known by name.", "trtcb.cli.models:app"),
    "doctor": Command("Show what works on this machine.", "trtcb.cli.doctor:doctor"),
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit the process. Every ``TrtcbError`` ends as one sentence on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        command_line(arguments)(args=arguments, prog_name="trtcb")
    except TrtcbError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, _InterruptedError):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _fail(f"{place}{error.strerror or error}", 1)
    sys.exit(0)


class _InterruptedError(Exception):
    """Ctrl-C, under a name that Typer does not know: it would end the process without a word."""


class _Root(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _InterruptedError from None


def command_line(arguments: Sequence[str]) -> typer.Typer:
    """Build the parser for these arguments. Only the subcommand they name is imported; the others are known by name."""
    # Plain help: typer's rich help costs another 0.15 s of imports.
    app = typer.Typer(
        cls=_Root,
        help="Build LLM engines ahead of time, and serve them with in-flight batching.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    # Options of the root take no values, so the first word is the subcommand.
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        loaded = command.load() if name == chosen else _not_chosen
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=name)
        else:
            app.command(name, short_help=command.summary, cls=GroupedCommand)(loaded)
    return app


def _not_chosen() -> None:
    """Stand for a subcommand that these arguments do not name."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trtcb {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
