"""``trtcb export``: the intermediate graph, for other tools to look at or run."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from trtcb.config import BuildConfig
from trtcb.config_sources import resolve
from trtcb.errors import UsageError
from trtcb.memory import format_size


def export(
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="A folder of safetensors, a .gguf file, a preset or a hub id.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .onnx file to write.", show_default=False)],
    weight_dtype: Annotated[
        str | None, typer.Option("--weight-dtype", "--dtype", help="auto, fp32 or bf16. [auto]")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option("--kv-dtype", "--kv-cache-dtype", help="auto, fp32, bf16, fp16, int8 or fp8. [auto]")
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option("--max-seq-len", "--max-model-len", help="Rows of the rotary tables.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", "--tokens-per-block", help="Tokens in one KV block. [32]")
    ] = None,
    random_weights: Annotated[bool | None, typer.Option("--random-weights", help="Invent the weights.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of --random-weights. [0]")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.", show_default=False)] = None,
) -> None:
    """Write a model as ONNX: one graph with paged attention, its weights in FILE.data beside it."""
    flags = {
        "model": model,
        "weight_dtype": weight_dtype,
        "kv_dtype": kv_dtype,
        "max_seq_len": max_seq_len,
        "block_size": block_size,
        "random_weights": random_weights,
        "seed": seed,
        "revision": revision,
    }
    config = resolve(BuildConfig, flags=flags).config
    if config.weight_dtype in ("int8", "int4"):
        raise UsageError(
            f"A graph is exported in fp32 or bf16, and a build rounds it to {config.weight_dtype}: "
            "use --weight-dtype bf16."
        )

    from trtcb.builder.build import compile_options, open_checkpoint
    from trtcb.builder.export import build_graph
    from trtcb.builder.onnx_file import external_tensors, write_onnx
    from trtcb.cli.progress import stage_display

    with stage_display() as display:
        display.on_stage("model", 0)
        checkpoint = open_checkpoint(config)
        options = compile_options(config, checkpoint.spec, checkpoint.weight_dtype)
        display.on_stage("graph", 0)
        graph = build_graph(
            checkpoint.spec,
            dtype=options.weight_dtype.table_dtype,
            kv_dtype=options.kv_dtype,
            block_size=options.limits.block_size,
            max_positions=options.limits.max_seq_len,
        )
        size = sum(tensor.num_bytes for tensor in external_tensors(graph))
        display.on_stage("weights", size)
        write_onnx(graph, checkpoint, output, display.on_progress)
    for note in checkpoint.notes:
        print(f"warning: {note}", file=sys.stderr)
    print(f"{output}: {len(graph.graph.node)} nodes, weights of {format_size(size)} in {output.name}.data")
