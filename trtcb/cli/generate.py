"""``trtcb generate``: complete one prompt."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from trtcb.cli.engine_flags import CPU_ENGINE_HELP
from trtcb.cli.session import Session, print_piece
from trtcb.errors import UsageError


def generate(
    plan: Annotated[Path, typer.Argument(help="The plan to run.", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="The text to complete; - reads it from standard input.")] = "-",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the likeliest k tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest share.")] = 1.0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least probability relative to the likeliest.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes random draws repeatable.", show_default=False)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    num_blocks: Annotated[int | None, typer.Option(help="KV pool in blocks.", show_default=False)] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV pool in bytes, such as 2GiB.", show_default=False)] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine. [one a core]")] = None,
    cpu_engine: Annotated[str | None, typer.Option(help=CPU_ENGINE_HELP)] = None,
) -> None:
    """Complete a prompt with a plan and print the text as it comes; how fast that was goes to standard error."""
    from trtcb.executor.request import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise UsageError("the prompt is empty: give a text, or - with one on standard input")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    settings = {
        "num_blocks": num_blocks,
        "kv_memory_bytes": kv_memory,
        "threads": threads,
        "cpu_engine": cpu_engine,
    }
    with Session.open(plan, None, settings) as session:
        tokenizer = session.llm.tokenizer
        ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
        speed = session.generate(tuple(ids), params, print_piece)
    print()
    print(speed, file=sys.stderr)
