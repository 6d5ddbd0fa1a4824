"""A runtime together with what is known of its model: what an engine needs, whoever uses it."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, Protocol

from trtcb.executor.config import EngineConfig
from trtcb.executor.engine import Engine
from trtcb.executor.request import Delta
from trtcb.executor.runtime import Runtime
from trtcb.executor.stats import StepStats
from trtcb.spec import ModelSpec


class TextTokenizer(Protocol):
    """The part of a tokenizer that serving text needs."""

    @property
    def eos_token_ids(self) -> Collection[int]:
        """Every id that ends a text."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` as a prompt, BOS included if the model wants one."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, special tokens left out; incomplete UTF-8 becomes U+FFFD."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Runtime, settings, tokenizer (None: token ids only) and model of one engine to be."""

    runtime: Runtime
    config: EngineConfig
    tokenizer: Any
    model: ModelSpec

    @staticmethod
    def from_plan(
        path: "str | PathLike[str]", config: EngineConfig, *, verify: Literal["full", "header"] = "full"
    ) -> "ServedModel":
        """Open a plan on its target, within the limits it was built for; ``verify`` is :meth:`Plan.open`'s.

        Raises what opening and checking it raises.
        """
        # Here, because the target's libraries take seconds to import and an injected runtime needs none of them.
        from trtcb.executor.open_runtime import open_runtime
        from trtcb.plan import Plan
        from trtcb.tokenizer import Tokenizer, TokenizerAssets

        plan = Plan.open(path, verify=verify)
        try:
            config = config.within(plan.header.limits)
            assets = TokenizerAssets.from_sections(plan.section("tokenizer"), plan.section("tokenizer_config"))
            return ServedModel(open_runtime(plan, config), config, Tokenizer(assets), plan.header.model)
        except BaseException:
            plan.close()
            raise

    def engine(
        self, on_deltas: Callable[[list[Delta]], None], on_step: Callable[[StepStats], None] | None = None
    ) -> Engine:
        """Make an engine that owns the runtime, not started yet. All end tokens of model and tokenizer count."""
        eos_token_ids = set(self.model.eos_token_ids)
        if self.tokenizer is not None:
            eos_token_ids.update(self.tokenizer.eos_token_ids)
        return Engine(
            self.runtime,
            self.config,
            tokenizer=self.tokenizer,
            eos_token_ids=eos_token_ids,
            vocab_size=self.model.vocab_size,
            on_deltas=on_deltas,
            on_step=on_step,
        )
