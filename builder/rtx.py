"""The ``tensorrt-rtx`` compiler: an engine of TensorRT-RTX out of a deferred graph, built without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtcb.builder.compiler import Compiled, CompileOptions
from trtcb.builder.export import build_graph, external_tensors, write_onnx
from trtcb.builder.report import OnProgress, OnStage
from trtcb.errors import TargetUnavailableError, TrtcbError
from trtcb.plan_writer import Section
from trtcb.plugins.ports import graph_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from trtcb.builder.checkpoint import Checkpoint
    from trtcb.builder.rtx_process import RtxJob
    from trtcb.spec import BuildLimits, KVDtype, ModelSpec

CAPABILITIES = (80, 86, 89, 120)
"""Compute capabilities (times ten) that a plan is built for: Ampere, Ada and Blackwell. bf16 needs the first."""

Shapes = dict[str, tuple[tuple[int, ...], ...]]


class RtxCompiler:
    """Compiles bf16 weights into an engine. What a step adds to the KV pools is an output, for the runtime to store."""

    target = "tensorrt-rtx"

    def __init__(self) -> None:
        """Raise ``TargetUnavailableError`` if TensorRT-RTX is not installed."""
        if importlib.util.find_spec("tensorrt_rtx") is None:
            raise TargetUnavailableError("TensorRT-RTX is not installed: pip install 'trtcb[rtx]'")

    def compile(
        self, checkpoint: Checkpoint, options: CompileOptions, on_stage: OnStage, on_progress: OnProgress
    ) -> Compiled:
        """Export the graph with its weights and build the engine; see :class:`~trtcb.builder.compiler.Compiler`."""
        spec, limits = checkpoint.spec, options.limits
        graph = build_graph(
            spec,
            dtype="bf16",
            kv_dtype=options.kv_dtype,
            block_size=limits.block_size,
            max_positions=limits.max_seq_len,
            deferred=True,
        )
        with tempfile.TemporaryDirectory(prefix="trtcb-") as name:
            folder = Path(name)
            on_stage("weights", sum(tensor.num_bytes for tensor in external_tensors(graph)))
            write_onnx(graph, checkpoint, folder / "model.onnx", on_progress)
            engine, facts = run_job(
                rtx_job(folder / "model.onnx", spec, options.kv_dtype, limits), on_stage, on_progress
            )
        return Compiled(
            fingerprint={"capabilities": " ".join(f"{c / 10}" for c in CAPABILITIES)},
            sections=(
                Section.of_bytes("graph", graph.SerializeToString()),
                Section.of_bytes("engine", engine),
                Section.of_json("network", facts),
            ),
            tensors=(),
            versions={"onnx": version("onnx"), "tensorrt_rtx": facts["tensorrt_rtx"]},
        )

    def prepare(self, checkpoint: Checkpoint, options: CompileOptions, on_progress: Callable[[str], None]) -> None:
        """Nothing: TensorRT-RTX compiles the rest on the machine that runs the engine."""


def rtx_job(
    path: Path,
    spec: ModelSpec,
    kv_dtype: KVDtype,
    limits: BuildLimits,
    *,
    dtype: Literal["fp16", "bf16"] = "bf16",
    capabilities: tuple[int, ...] = CAPABILITIES,
) -> RtxJob:
    """Describe the build of the ONNX file at ``path``: one profile for decoding, one for steps with prompts."""
    from trtcb.builder.rtx_process import RtxJob

    decode = _shapes(spec, kv_dtype, limits, max_rows=1, max_tokens=limits.max_batch_size)
    mixed = _shapes(spec, kv_dtype, limits, max_rows=limits.max_num_tokens, max_tokens=limits.max_num_tokens)
    return RtxJob(str(path), dtype, spec.num_layers, capabilities, (decode, mixed))


def run_job(job: RtxJob, on_stage: OnStage, on_progress: OnProgress) -> tuple[bytes, dict[str, Any]]:
    """Build in a process of its own, which is killed if this one is interrupted. Raises ``TrtcbError`` with the reason.

    Returns the engine and the facts about its network.
    """
    with tempfile.TemporaryDirectory(prefix="trtcb-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(job.to_json())
        command = [sys.executable, "-m", "trtcb.builder.rtx_process", str(folder / "job.json"), str(folder / "engine")]
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True) as process,
        ):
            try:
                facts = _watch(process, on_stage, on_progress)
            except BaseException:
                process.kill()
                raise
        if facts is None:
            last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
            raise TrtcbError(
                f"TensorRT-RTX's build ended with status {process.returncode} and no engine"
                + (f", last words: {last[0]}" if last else "")
                + ": use --target cpu, or report the model"
            )
        return (folder / "engine").read_bytes(), facts


def _watch(process: subprocess.Popen[bytes], on_stage: OnStage, on_progress: OnProgress) -> dict[str, Any] | None:
    """Pass progress on until the process ends; what it found, None if it did not come to an end."""
    facts: dict[str, Any] | None = None
    for text in process.stdout or ():
        line = json.loads(text)
        if "phase" in line:
            on_stage("engine", line["phase"])
        elif "step" in line:
            on_progress(line["step"])
        elif "error" in line:
            raise TrtcbError(line["error"])
        else:
            facts = line["done"]
    return facts


def _shapes(spec: ModelSpec, kv_dtype: KVDtype, limits: BuildLimits, *, max_rows: int, max_tokens: int) -> Shapes:
    """Least, likeliest and greatest shape of each input, for steps of up to ``max_rows`` tokens of one sequence."""
    blocks = -(-limits.max_seq_len // limits.block_size)
    slots = (
        limits.max_batch_size * blocks + 1
    ) * limits.block_size  # a full batch, and the block that padding writes to
    ranges: dict[str, tuple[int, ...]] = {
        "T": (1, max(1, max_tokens // 2), max_tokens),
        "B": (1, max(1, limits.max_batch_size // 2), limits.max_batch_size),
        "MB": (1, max(1, blocks // 4), blocks),
        "S": (1, max(1, max_rows // 2), max_rows),
        "SLOTS": (limits.block_size, max(limits.block_size, slots // 2), slots),
    }
    ranges |= {"NL": ranges["B"], "B1": tuple(number + 1 for number in ranges["B"])}
    return {
        port.name: tuple(
            tuple(ranges[size][i] if isinstance(size, str) else size for size in port.shape) for i in range(3)
        )
        for port in graph_inputs(spec, kv_dtype, deferred=True)
    }
