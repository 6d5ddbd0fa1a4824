"""The systems that are compared, one class each, all with the same two calls: make it, and have it generate.

Each is imported where its class is made, so that this file runs in any system's own Python. All are greedy, ignore end
tokens, and use ``threads`` threads.
"""

import json
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

MAX_IN_FLIGHT = 64
_PAD = 2


@dataclass(frozen=True)
class Ask:
    """One request: a prompt of token ids, and how many tokens are generated."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Load:
    """Requests that are there at once, of which at most ``in_flight`` may be in work at a time.

    ``is_kept`` says that the same prompts come again in later loads, and that their keys and values should be kept
    until then, so that only decoding is left to measure. Prompts of other loads are new each time.
    """

    asks: tuple[Ask, ...]
    in_flight: int
    is_kept: bool


Times = list[list[float]]
"""For each request of a load, the moment (``time.perf_counter``) at which each of its tokens was there."""


class System(Protocol):
    """A model that is loaded and idle."""

    facts: dict[str, str]  # versions, and settings worth telling

    def generate(self, load: Load) -> Times:
        """Serve a load to its end."""


def _groups(load: Load) -> Iterator[range]:
    """Static batches, in order."""
    for first in range(0, len(load.asks), load.in_flight):
        yield range(first, min(first + load.in_flight, len(load.asks)))


class Trtcb:
    """trtcb's engine, as its front doors use it. One pool holds what is kept beside what is new."""

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        from trtcb.executor.config import EngineConfig
        from trtcb.executor.served_model import ServedModel

        config = EngineConfig(max_batch_size=MAX_IN_FLIGHT, threads=threads, **options)
        self._engine = ServedModel.from_plan(model, config, verify="header").engine(self._on_deltas)
        self._engine.start()
        self._times: Times = []
        self._ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.facts = {"trtcb": version("trtcb"), "numba": version("numba")}

    def generate(self, load: Load) -> Times:
        """See :class:`System`."""
        from trtcb.executor.request import Request, SamplingParams

        self._times = [[] for _ in load.asks]
        num_running = 0
        try:
            for number, ask in enumerate(load.asks):
                if num_running == load.in_flight:
                    num_running -= 1
                    self._wait_for_one()
                params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
                self._engine.submit(Request(str(number), tuple(ask.prompt), params))
                num_running += 1
            while num_running:
                num_running -= 1
                self._wait_for_one()
        finally:  # after an error, too, nothing of this load runs into the next one
            for _ in range(num_running):
                self._ended.get()
        return self._times

    def _wait_for_one(self) -> None:
        error = self._ended.get()
        if error is not None:
            raise RuntimeError(error)

    def _on_deltas(self, deltas: Sequence[Any]) -> None:
        now_s = time.perf_counter()
        for delta in deltas:
            self._times[int(delta.request_id)] += [now_s] * len(delta.token_ids)
            if delta.finish_reason is not None:
                self._ended.put(delta.error)


class OpenVino:
    """OpenVINO GenAI's continuous batching. Loads that are kept have a pipeline of their own, with prefix caching."""

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        self._ov, self._genai = openvino, openvino_genai
        self._model, self._properties = model, {"INFERENCE_NUM_THREADS": threads, **options}
        self._pipelines: dict[bool, Any] = {}
        self._number = 0
        self._pipeline(False)
        self.facts = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}

    def generate(self, load: Load) -> Times:
        """See :class:`System`."""
        pipeline, waiting = self._pipeline(load.is_kept), deque(enumerate(load.asks))
        times: Times = [[] for _ in load.asks]
        running: dict[int, Any] = {}
        while waiting or running:
            while waiting and len(running) < load.in_flight:
                number, ask = waiting.popleft()
                running[number] = self._add(pipeline, ask)
            pipeline.step()
            now_s = time.perf_counter()
            for number, handle in list(running.items()):
                while handle.can_read():
                    times[number] += [now_s] * sum(len(output.generated_ids) for output in handle.read().values())
                if len(times[number]) >= load.asks[number].max_tokens:
                    del running[number]
        return times

    def _pipeline(self, is_kept: bool) -> Any:
        if is_kept not in self._pipelines:
            scheduler = self._genai.SchedulerConfig()
            scheduler.max_num_seqs, scheduler.cache_size = MAX_IN_FLIGHT, 1  # GB: three times what any load needs
            scheduler.max_num_batched_tokens = 512
            scheduler.enable_prefix_caching = is_kept
            pipeline = self._genai.ContinuousBatchingPipeline(self._model, scheduler, "CPU", self._properties)
            self._pipelines[is_kept] = pipeline
        return self._pipelines[is_kept]

    def _add(self, pipeline: Any, ask: Ask) -> Any:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = ask.max_tokens, True, False
        self._number += 1
        return pipeline.add_request(self._number, self._ov.Tensor(np.array([ask.prompt], np.int64)), config)


class OnnxRuntimeGenAi:
    """onnxruntime-genai's generator: static batches, padded on the left to the longest prompt. Keeps nothing."""

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        config = onnxruntime_genai.Config(model)
        session = {"session_options": {"intra_op_num_threads": threads, **options}}
        config.overlay(json.dumps({"model": {"decoder": session}}))
        self._model = onnxruntime_genai.Model(config)
        self.facts = {"onnxruntime-genai": version("onnxruntime-genai"), "onnxruntime": version("onnxruntime")}

    def generate(self, load: Load) -> Times:
        """See :class:`System`."""
        times: Times = []
        for group in _groups(load):
            steps = list(self._steps([load.asks[number] for number in group]))
            times += [steps[: load.asks[number].max_tokens] for number in group]
        return times

    def _steps(self, asks: Sequence[Ask]) -> Iterator[float]:
        import numpy as np

        width, count = max(len(ask.prompt) for ask in asks), max(ask.max_tokens for ask in asks)
        params = self._genai.GeneratorParams(self._model)
        length = width + count
        params.set_search_options(max_length=length, min_length=length, batch_size=len(asks), do_sample=False)
        generator = self._genai.Generator(self._model, params)
        padded = [[_PAD] * (width - len(ask.prompt)) + ask.prompt for ask in asks]
        generator.append_tokens(np.array(padded, np.int32))
        for _ in range(count):
            generator.generate_next_token()
            yield time.perf_counter()


class LlamaCpp:
    """llama.cpp's server, in this process (``xllamacpp``), with flash attention and an f16 cache.

    There is a server for each number of requests in flight, because a slot takes an equal share of the context, and one
    whose slots keep their prompts.
    """

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        import xllamacpp

        self._xllamacpp, self._model, self._threads, self._options = xllamacpp, model, threads, options
        self._servers: dict[tuple[int, int], Any] = {}
        self._server(1, 4096)
        system = xllamacpp.get_system_info().strip(" |")
        self.facts = {"xllamacpp": version("xllamacpp"), "llama.cpp built with": system}

    def generate(self, load: Load) -> Times:
        """See :class:`System`."""
        times: Times = [[] for _ in load.asks]
        slot_tokens = 4096 if load.in_flight == 1 else 896
        server = self._server(MAX_IN_FLIGHT, 384) if load.is_kept else self._server(load.in_flight, slot_tokens)

        def ask(number: int) -> None:
            slot = {"id_slot": number} if load.is_kept else {}
            self._ask(server, load.asks[number], times[number], {**slot, "cache_prompt": load.is_kept})

        with ThreadPoolExecutor(load.in_flight) as threads:
            list(threads.map(ask, range(len(load.asks))))
        return times

    def _ask(self, server: Any, ask: Ask, times: list[float], extra: dict[str, Any]) -> None:
        num_tokens = 0
        errors: list[str] = []

        def on_chunk(chunk: Any) -> None:
            nonlocal num_tokens
            if "error" in chunk:
                errors.append(json.dumps(chunk["error"]))
            elif chunk["choices"][0]["finish_reason"] is None:
                times.append(time.perf_counter())
            else:
                num_tokens = chunk["usage"]["completion_tokens"]

        body = {
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        server.handle_completions({**body, **extra}, on_chunk)
        if errors:
            raise RuntimeError(errors[0])
        # A token that ends inside a character comes with the next one's chunk.
        times += times[-1:] * (num_tokens - len(times))

    def _server(self, num_slots: int, slot_tokens: int) -> Any:
        key = (num_slots, slot_tokens)
        if key not in self._servers:
            params = self._xllamacpp.CommonParams()
            params.model.path = self._model
            params.n_parallel, params.n_ctx, params.kv_unified = num_slots, num_slots * slot_tokens, False
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._threads
            params.flash_attn_type = self._xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
            params.cache_ram_mib, params.port = 0, 0
            for name, value in self._options.items():
                setattr(params, name, value)
            self._servers[key] = self._xllamacpp.Server(params)
        return self._servers[key]


class Transformers:
    """PyTorch's transformers: static batches, padded on the left. The caches of loads that are kept stay."""

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options["dtype"])).eval()
        self._kept: dict[int, Any] = {}
        self.facts = {"transformers": version("transformers"), "torch": torch.__version__}

    def generate(self, load: Load) -> Times:
        """See :class:`System`."""
        times: Times = []
        with self._torch.inference_mode():
            for group in _groups(load):
                asks = [load.asks[number] for number in group]
                steps = list(self._decode_kept(asks) if load.is_kept else self._decode(asks, None))
                times += [steps[: ask.max_tokens] for ask in asks]
        return times

    def _decode_kept(self, asks: Sequence[Ask]) -> Iterator[float]:
        """Decode asks that are alike in both lengths, on their cache, which afterwards is as it was."""
        from transformers import DynamicCache

        if len(asks) not in self._kept:
            prompts = self._torch.tensor([ask.prompt[:-1] for ask in asks])
            out = self._model(prompts, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)
            self._kept[len(asks)] = out.past_key_values
        cache = self._kept[len(asks)]
        yield from self._decode(asks, cache)
        cache.crop(-asks[0].max_tokens)

    def _decode(self, asks: Sequence[Ask], cache: Any) -> Iterator[float]:
        torch = self._torch
        width, count = max(len(ask.prompt) for ask in asks), max(ask.max_tokens for ask in asks)
        prompts = torch.tensor([[_PAD] * (width - len(ask.prompt)) + ask.prompt for ask in asks])
        mask = torch.tensor([[0] * (width - len(ask.prompt)) + [1] * len(ask.prompt) for ask in asks])
        is_padded = not bool(mask.all())
        tokens = prompts if cache is None else prompts[:, -1:]
        for _ in range(count):
            extra = {"attention_mask": mask} if is_padded else {}
            out = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1, **extra)
            cache, tokens = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
            yield time.perf_counter()


SYSTEMS: dict[str, Callable[[str, int, dict[str, Any]], System]] = {
    "trtcb": Trtcb,
    "openvino": OpenVino,
    "onnxruntime-genai": OnnxRuntimeGenAi,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}
