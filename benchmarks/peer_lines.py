"""What is compared: the configurations of every system, and the lines of the table with their workloads and targets."""

import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Ask = tuple[list[int], int]
"""A prompt of token ids, and how many tokens are generated."""

CONTEXT = 257  # whole blocks of 32 and one token more, so that a kept prompt costs one token to begin again
GROUPS = ("single", "decode", "prefill", "offline")
_FIRST_ID, _LAST_ID = 1_000, 20_000  # ordinary tokens of every vocabulary that is not tiny


@dataclass(frozen=True, slots=True)
class Configuration:
    """One system with one model file. ``folder`` is the name of its virtual environment; trtcb has none."""

    name: str
    system: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether it is trtcb."""
        return self.system == "trtcb"


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are: a virtual environment a peer in ``peers``, their files in ``models``, trtcb's in ``plans``."""

    peers: Path
    models: Path
    plans: Path

    def python(self, configuration: Configuration) -> Path:
        """Return the interpreter of a configuration."""
        return Path(sys.executable) if configuration.is_ours else self.peers / configuration.system / "bin/python"

    def model(self, configuration: Configuration) -> Path:
        """Return its plan, or its model file or folder."""
        return (self.plans if configuration.is_ours else self.models) / configuration.model

    def missing(self, configuration: Configuration) -> str | None:
        """Say what it lacks to run here; None if nothing."""
        needed = (self.python(configuration), self.model(configuration))
        return next((f"no {path}" for path in needed if not path.exists()), None)

    def worker(self, configuration: Configuration, threads: int) -> list[str | Path]:
        """Make the command line of its worker."""
        script, options = Path(__file__).with_name("peer_worker.py"), json.dumps(configuration.options)
        python, model = self.python(configuration), self.model(configuration)
        return [python, script, configuration.system, model, str(threads), options]


# 3,072 blocks of 32 tokens hold 64 kept contexts and everything of a round beside them.
_TRTCB: dict[str, Any] = {"num_blocks": 3072}
_U8_CACHE = {"KV_CACHE_PRECISION": "u8"}
CONFIGURATIONS = (
    Configuration("trtcb int8", "trtcb", "int8.plan", _TRTCB),
    Configuration("trtcb bf16", "trtcb", "bf16.plan", _TRTCB),
    Configuration("trtcb int4", "trtcb", "int4.plan", _TRTCB),
    Configuration("openvino int8", "openvino", "openvino-int8", _U8_CACHE),
    Configuration("openvino fp16", "openvino", "openvino-fp16", _U8_CACHE),
    Configuration("openvino fp32", "openvino", "openvino-fp32", _U8_CACHE),
    Configuration("onnxruntime-genai int4", "onnxruntime-genai", "onnxruntime-int4"),
    Configuration("llama.cpp q8_0", "llama.cpp", "q8_0.gguf"),
    Configuration("llama.cpp q4_0", "llama.cpp", "q4_0.gguf"),
    Configuration("transformers bf16", "transformers", "hf", {"dtype": "bfloat16"}),
    Configuration("transformers fp32", "transformers", "hf", {"dtype": "float32"}),
)

_8_BIT = ("trtcb int8", "openvino int8", "llama.cpp q8_0")
_4_BIT = ("trtcb int4", "onnxruntime-genai int4", "llama.cpp q4_0")
_16_BIT = ("trtcb bf16", "openvino fp16", "openvino fp32", "transformers bf16", "transformers fp32")
# Without transformers: its static batches take minutes for what is seconds elsewhere.
_ALL = (*_8_BIT, *_4_BIT, "trtcb bf16", "openvino fp16")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the comparison. ``asks`` makes the requests of a round, the same for every configuration.

    ``target`` is what the best of trtcb's rates shall be, at least, over the best peer's. ``measure``, ``in_flight``
    and ``is_kept`` are as in ``peer_worker.py`` and ``peer_systems.py``.
    """

    name: str
    group: str
    target: float
    configurations: tuple[str, ...]
    measure: str
    in_flight: int
    asks: Callable[[int], Sequence[Ask]]
    is_kept: bool = False

    def message(self, round_number: int) -> dict[str, Any]:
        """Make what a worker is sent."""
        asks = self.asks(round_number)
        return {"measure": self.measure, "asks": asks, "in_flight": self.in_flight, "is_kept": self.is_kept}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything; ``Sizes.small()`` only shows that it runs."""

    single_tokens: int = 128
    decode_tokens: tuple[tuple[int, int], ...] = ((8, 33), (32, 25), (64, 17))
    prompts: tuple[int, ...] = (512, 2048)
    num_requests: int = 64
    offline_in_flight: tuple[int, ...] = (8, 32)

    @staticmethod
    def small() -> "Sizes":
        """Return the sizes of a smoke run."""
        return Sizes(12, ((8, 9),), (64,), 6, (8,))


def prompt(seed: str, length: int) -> list[int]:
    """Random token ids, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(length)]


def mixed_lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """Lengths of prompts, log-uniform from 32 to 512, and of outputs, 8 to 256 and exponential with a mean of 64."""
    rng = random.Random(seed)
    lengths = []
    for _ in range(count):
        num_prompt = round(math.exp(rng.uniform(math.log(32), math.log(512))))
        lengths.append((num_prompt, min(256, 8 + int(rng.expovariate(1 / (64 - 8))))))
    return lengths


def lines(sizes: Sizes, seed: int = 0) -> Iterator[Line]:
    """Yield all lines, in the order in which a round measures them."""

    def fresh(name: str, lengths: Sequence[tuple[int, int]]) -> Callable[[int], Sequence[Ask]]:
        """Prompts that no round had before, so that no prefix cache knows them."""
        return lambda round_number: [
            (prompt(f"{seed} {name} {round_number} {number}", num_prompt), num_output)
            for number, (num_prompt, num_output) in enumerate(lengths)
        ]

    def kept(count: int, num_output: int) -> Callable[[int], Sequence[Ask]]:
        return lambda _: [(prompt(f"{seed} kept {number}", CONTEXT), num_output) for number in range(count)]

    single = [(128, sizes.single_tokens)]
    for bits, configurations, target in (("8-bit", _8_BIT, 2.5), ("4-bit", _4_BIT, 1.8)):
        name = f"{bits} single stream, decode"
        yield Line(name, "single", target, configurations, "decode", 1, fresh(name, single))
    for bits, configurations, targets in (
        ("8-bit", _8_BIT, {8: 3.0, 32: 2.2, 64: 1.9}),
        ("16-bit", _16_BIT, {8: 2.2, 32: 1.5, 64: 1.3}),
    ):
        for batch, num_output in sizes.decode_tokens:
            name = f"{bits} batch {batch}, decode"
            asks = kept(batch, num_output)
            yield Line(name, "decode", targets[batch], configurations, "decode", batch, asks, is_kept=True)
    for bits, configurations, target in (("8-bit", _8_BIT, 1.2), ("16-bit", _16_BIT, 1.0)):
        for length in sizes.prompts:
            name = f"{bits} prefill of {length}"
            yield Line(name, "prefill", target, configurations, "prefill", 1, fresh(name, [(length, 1)]))
    for in_flight in sizes.offline_in_flight:
        name = f"{sizes.num_requests} mixed requests, batch {in_flight}"
        asks = fresh(name, mixed_lengths(sizes.num_requests, seed))
        yield Line(name, "offline", 1.8, _ALL, "output", in_flight, asks)
