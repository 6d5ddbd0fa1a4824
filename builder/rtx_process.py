"""Builds one TensorRT-RTX engine, in a process of its own: ``python -m trtcb.builder.rtx_process JOB ENGINE``.

A process of its own because a parser that meets what it does not expect may abort the whole process, and because one
that is deep in an optimisation does not hear of Ctrl-C. Needs no GPU. Tells what it does on stdout, a JSON object a
line: ``{"phase": steps}``, ``{"step": 1}`` after one of them; at the end ``{"done": facts}`` or ``{"error": why}``.
"""

import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
import tensorrt_rtx as trt

from trtcb.plugins.ports import GraphDtype

_DTYPES = {"fp16": trt.float16, "bf16": trt.bfloat16}
_SEVERITIES = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR, trt.ILogger.WARNING)
_NO_DEVICE = "cudaError 35"  # there is no driver here, and none is needed
_UNUSED = "nused"  # an input or output that the parser dropped, and with it what the graph means


@dataclass(frozen=True, slots=True)
class RtxJob:
    """What to build. ``profiles`` have, for each input, the least, likeliest and greatest shape.

    ``capabilities`` are compute capabilities (times ten) that the engine shall run on.
    """

    onnx: str
    dtype: GraphDtype
    num_layers: int
    capabilities: tuple[int, ...]
    profiles: tuple[dict[str, tuple[tuple[int, ...], ...]], ...]

    def to_json(self) -> str:
        """Text for :meth:`from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "RtxJob":
        """Inverse of :meth:`to_json`."""
        return RtxJob(**json.loads(text))


class RtxBuildError(Exception):
    """The engine cannot be built; says why."""


class _Log(trt.ILogger):  # type: ignore[misc]
    """Keeps what TensorRT complains about."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.complaints: list[str] = []

    def log(self, severity: trt.ILogger.Severity, message: str) -> None:
        if severity in _SEVERITIES and _NO_DEVICE not in message:
            self.complaints.append(message)


class _Progress(trt.IProgressMonitor):  # type: ignore[misc]
    """Tells of the outermost phase; those inside it come in no foreseeable number."""

    def __init__(self) -> None:
        trt.IProgressMonitor.__init__(self)
        self._outermost: str | None = None
        self._steps_left = 0

    def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
        if parent is None:
            self._outermost, self._steps_left = phase, num_steps
            tell({"phase": num_steps})

    def step_complete(self, phase: str, step: int) -> bool:
        if phase == self._outermost:
            self._advance(1)
        return True

    def phase_finish(self, phase: str) -> None:
        if phase == self._outermost:
            self._advance(self._steps_left)  # the end stands for the last step

    def _advance(self, steps: int) -> None:
        self._steps_left -= steps
        tell({"step": steps})


def tell(line: dict[str, Any]) -> None:
    """Print a line for the parent process."""
    print(json.dumps(line), flush=True)


def build_engine(job: RtxJob) -> tuple[bytes, dict[str, Any]]:
    """Return the engine, and what was found in its network. Raises :class:`RtxBuildError`."""
    log = _Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    # its own inliner mixes up values of functions that are called more than once; weights stay in their file, as a
    # message of protobuf ends at 2 GiB
    path = Path(job.onnx).with_suffix(".inlined.onnx")
    onnx.save(onnx.inliner.inline_local_functions(onnx.load(job.onnx, load_external_data=False)), path)
    if not parser.parse_from_file(str(path)):
        errors = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise RtxBuildError(f"TensorRT-RTX does not take the graph: {errors}")
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    _check(job, layers, log)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    progress = _Progress()
    config.progress_monitor = progress
    for profile in job.profiles:
        config.add_optimization_profile(_profile(builder, network, profile))
    config.num_compute_capabilities = len(job.capabilities)
    for index, capability in enumerate(job.capabilities):
        config.set_compute_capability(_capability(capability), index)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise RtxBuildError(f"TensorRT-RTX could not build the engine: {'; '.join(log.complaints[-3:])}")
    return bytes(engine), _facts(job, network, layers)


def _check(job: RtxJob, layers: list[Any], log: _Log) -> None:
    """Hold the parsed network against the graph: what was dropped or widened would show as a wrong or slow engine."""
    kinds = Counter(layer.type.name for layer in layers)
    wide = [
        layer.name
        for layer in layers
        if layer.type == trt.LayerType.MATRIX_MULTIPLY and layer.get_output(0).dtype != _DTYPES[job.dtype]
    ]
    if wide:
        raise RtxBuildError(
            f"TensorRT-RTX would not multiply in {job.dtype} in {len(wide)} layers, the first {wide[0]}"
        )
    if kinds["ATTENTION_INPUT"] != job.num_layers:
        raise RtxBuildError(f"TensorRT-RTX found attention in {kinds['ATTENTION_INPUT']} of {job.num_layers} layers")
    if kinds["SCATTER"]:
        raise RtxBuildError("the network writes into its pools, which only graphs with plugins do")
    dropped = [message for message in log.complaints if _UNUSED in message]
    if dropped:
        raise RtxBuildError(f"TensorRT-RTX leaves a part of the graph out: {dropped[0]}")


def _profile(builder: Any, network: Any, shapes: dict[str, Any]) -> Any:
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        name = network.get_input(index).name
        profile.set_shape(name, *map(tuple, shapes[name]))
    return profile


def _capability(capability: int) -> Any:
    known = getattr(trt.ComputeCapability, f"SM{capability}", None)
    if known is None:
        raise RtxBuildError(f"TensorRT-RTX {trt.__version__} does not build for compute capability {capability / 10}")
    return known


def _facts(job: RtxJob, network: Any, layers: list[Any]) -> dict[str, Any]:
    def tensors(count: int, get: Any) -> dict[str, str]:
        return {get(i).name: f"{get(i).dtype.name.lower()} {list(get(i).shape)}" for i in range(count)}

    return {
        "tensorrt_rtx": trt.__version__,
        "capabilities": list(job.capabilities),
        "layers": dict(Counter(layer.type.name.lower() for layer in layers).most_common()),
        "inputs": tensors(network.num_inputs, network.get_input),
        "outputs": tensors(network.num_outputs, network.get_output),
        "profiles": [{name: [list(shape) for shape in shapes] for name, shapes in p.items()} for p in job.profiles],
    }


def main() -> None:
    """Run the job in the file that the first argument names, and write the engine to the second."""
    job = RtxJob.from_json(Path(sys.argv[1]).read_text())
    sys.stdout = os.fdopen(os.dup(1), "w")  # ours; whatever a library prints to descriptor 1 goes to stderr
    os.dup2(2, 1)
    try:
        engine, facts = build_engine(job)
    except RtxBuildError as error:
        tell({"error": str(error)})
        return
    Path(sys.argv[2]).write_bytes(engine)
    tell({"done": facts})


if __name__ == "__main__":
    main()
