"""An engine core on the sim runtime, checked after every step, and the answers that each of its requests must get."""

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.property.reference_policies import Reference
from trtcb.executor.config import EngineConfig
from trtcb.executor.core import EngineCore
from trtcb.executor.request import Delta, FinishReason, Request, SamplingParams, fan_out
from trtcb.executor.runtime import Batch, StepOutput
from trtcb.executor.sequence import Sequence
from trtcb.executor.sim_runtime import SimRuntime, expected_logprobs, expected_tokens

VOCAB_SIZE = 23
EOS = 3


class FaultyRuntime(SimRuntime):
    """Fails the next step in the way that ``fault`` names: ``row`` (blames one), ``nan`` (of one) or ``batch``."""

    fault: tuple[str, int] | None = None
    victim: int | None = None  # batch row that the last fault hit
    num_copies: int = 0
    num_failed_copies: int = 0  # of steps that failed because of one row, so that others repeat them

    def wait(self) -> StepOutput:
        batch: Batch | None = self._batches[0]
        output = super().wait()
        tokens = output.tokens
        fault, self.fault = self.fault, None
        self.num_copies += 0 if batch is None else len(batch.copies)
        if fault is None or batch is None:
            return output
        kind, number = fault
        if kind == "batch":
            raise RuntimeError("injected")
        if kind == "nan" and len(tokens):
            index = number % len(tokens)
            self.victim = int(np.searchsorted(batch.cu_q, batch.logit_index[index], side="right")) - 1
            tokens[index] = -1
        elif kind == "row":
            self.num_failed_copies += len(batch.copies)
            error = RuntimeError("injected")
            error.request_index = self.victim = number % (len(batch.cu_q) - 1)
            raise error
        return output


class Letters:
    """A tokenizer with a letter for each token."""

    def decode(self, ids):
        return "".join(chr(97 + token) for token in ids)


@dataclass
class World:
    """Drives one core and holds every request to the token law: its tokens are those it would get alone."""

    config: EngineConfig
    num_blocks: int
    deltas: dict[str, list[Delta]] = field(default_factory=lambda: defaultdict(list))
    requests: dict[str, Request] = field(default_factory=dict)
    num_pauses: int = 0
    num_hit_tokens: int = 0
    num_steps: int = 0
    num_stopped_by_text: int = 0
    num_counted: int = 0  # tokens, by the records of the passes
    num_dropped: int = 0  # rows whose request had ended before they were collected

    def __post_init__(self) -> None:
        self.runtime = FaultyRuntime(
            num_blocks=self.num_blocks, block_size=self.config.block_size, vocab_size=VOCAB_SIZE
        )
        self.core = EngineCore(
            self.runtime, self.config, tokenizer=Letters(), eos_token_ids=[EOS], vocab_size=VOCAB_SIZE
        )

    @property
    def scheduler(self):
        return self.core.scheduler

    def live(self) -> list[str]:
        return [i for i in self.requests if not self.deltas[i] or self.deltas[i][-1].finish_reason is None]

    def submit(self, request: Request) -> Sequence:
        seq = self.core.admission.sequence(request, 0.0)
        self.requests[request.request_id] = request
        self.core.add(seq)
        return seq

    def abort(self, request_id: str) -> None:
        self.core.abort(request_id)

    def force_pause(self, number: int) -> None:
        running = self.scheduler.running
        if running:
            self.scheduler.pause(running[number % len(running)])
            self.check()

    def step(self) -> None:
        if not self.core.has_work:
            return
        # The real pass must decide as the specification, read aloud, does.
        reference = self._reference()
        choice = self.scheduler._policy.select(self.scheduler._active_list())
        assert [s.request_id for s in choice.fitting] == [s.request_id for s in reference.fitting]
        assert [s.request_id for s in choice.paused] == [s.request_id for s in reference.paused]

        outcome = self.core.step()
        self.num_steps += 1
        self.num_dropped += sum(seq.ended for flight in self.core._in_flight for seq in flight.step.drawing)
        for delta in outcome.deltas:
            self.deltas[delta.request_id].append(delta)
        if outcome.stats is not None:
            self.num_pauses += outcome.stats.num_pauses
            self.num_hit_tokens += outcome.stats.prefix_hit_tokens
            assert outcome.stats.audit_failures == 0
            assert outcome.stats.num_rows <= self.config.max_batch_size
            assert len(outcome.stats.ttft_s) + len(outcome.stats.itl_s) == outcome.stats.generated_tokens
            self.num_counted += outcome.stats.generated_tokens
            spent = outcome.stats.prompt_tokens + outcome.stats.recomputed_tokens
            assert spent <= min(self.config.max_num_tokens, self.config.max_prefill_tokens or spent)
        self.check()

    def _offered(self) -> list[Sequence]:
        """Everybody whom a sibling that waits may fork from; they are siblings indeed."""
        offers = [(seq, source) for seq in self.scheduler.waiting for source in self.scheduler.siblings.sources(seq)]
        for seq, source in offers:
            assert seq.request.fork_group == source.request.fork_group != ""
            assert seq.request.prompt_token_ids == source.request.prompt_token_ids
            assert seq.request.cache_salt == source.request.cache_salt
        return [source for _, source in offers]

    def _reference(self) -> Reference:
        return Reference(
            self.scheduler,
            self.config.scheduler_policy,
            self.config.block_size,
            self.config.max_batch_size,
            self.config.prefix_caching,
            self.config.watermark,
            self.config.victim_policy,
        )

    def check(self) -> None:
        assert self.scheduler.pool.is_consistent()
        assert self.scheduler.audit() == []
        assert self.scheduler.running == sorted(self.scheduler.running)
        assert list(self.scheduler.waiting) == sorted(self.scheduler.waiting)
        assert self.scheduler.num_paused == sum(seq.num_pauses > 0 for seq in self.scheduler.waiting)
        for seq in self.scheduler.running:
            capacity = min(len(seq.blocks) * self.config.block_size, seq.max_len - 1)
            assert seq.room == capacity - seq.num_computed
            assert seq.room >= 0
        for seq in [*self.scheduler.running, *self.scheduler.waiting]:
            assert len(seq.token_ids) <= seq.num_tokens <= len(seq.token_ids) + self.config.overlap_depth
        for seq in self.scheduler.waiting:
            if self.scheduler.siblings.in_work(seq):
                holding = [*self.scheduler.running, *(s for s in self.scheduler.settling if s.started)]
                siblings = [s for s in holding if s.request.fork_group == seq.request.fork_group]
                assert any(not s.generating or self.scheduler._is_in_flight(s) for s in siblings)
        for seq in self._offered():
            assert seq.started
            assert seq.num_computed >= seq.num_prompt_tokens - 1
        for seq in self.scheduler.waiting:
            assert seq.num_tokens == len(seq.token_ids)
            assert (seq.slot, seq.blocks, seq.num_computed) == (-1, [], 0)
        if self.config.scheduler_policy != "max_utilization":
            generating = [seq for seq in self.scheduler.running if seq.generating]
            promised = sum(-(-seq.max_len // self.config.block_size) - len(seq.blocks) for seq in generating)
            assert promised <= self.scheduler.pool.num_free

    def run_to_end(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "no end in sight"
        self.finish()

    def finish(self) -> None:
        """Everything is given back, and everybody got the right answer and one end."""
        outcome = self.core.step()
        for delta in outcome.deltas:
            self.deltas[delta.request_id].append(delta)
        assert self.scheduler.pool.num_used == 0
        assert self.scheduler.pool.num_free == self.num_blocks
        assert self.scheduler.num_free_slots == self.config.max_batch_size
        assert self.scheduler.reserved_blocks == 0
        assert not self.scheduler.siblings._groups
        assert not self.scheduler.siblings._group_of
        assert not self.scheduler.siblings._owed
        if self.config.queue_policy == "wfq":
            assert self.scheduler._queue._tags == {}
        assert self.scheduler.settling == {}
        assert self.core.recorder.num_audit_failures == 0
        assert self.num_counted == sum(len(delta.token_ids) for deltas in self.deltas.values() for delta in deltas)
        for request_id, request in self.requests.items():
            check_answer(request, self.deltas[request_id], self.config)
            last = self.deltas[request_id][-1]
            ends = {*request.params.stop_token_ids, EOS}
            self.num_stopped_by_text += last.finish_reason is FinishReason.STOP and last.token_ids[0] not in ends


def check_answer(request: Request, deltas: list[Delta], config: EngineConfig) -> None:
    assert [d.finish_reason is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]
    tokens = [token for delta in deltas for token in delta.token_ids]
    text = "".join(delta.text for delta in deltas)
    expected, expected_text, reason = expected_answer(request, config)
    if deltas[-1].finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        assert tokens == expected[: len(tokens)]
        assert expected_text.startswith(text)
    else:
        assert (tokens, text, deltas[-1].finish_reason) == (expected, expected_text, reason)
    check_logprobs(request, deltas, tokens)


def check_logprobs(request: Request, deltas: list[Delta], tokens: list[int]) -> None:
    """An entry for each token, whose numbers are those of the tokens before it."""
    count = request.params.logprobs
    if count is None:
        assert all(delta.logprobs is None for delta in deltas)
        return
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert [entry.token_id for entry in entries] == tokens
    rows = expected_logprobs(request.prompt_token_ids, request.params, tokens, vocab_size=VOCAB_SIZE)
    for entry, row in zip(entries, rows, strict=True):
        assert entry.logprob == row[entry.token_id]
        assert list(entry.top) == sorted(enumerate(row.tolist()), key=lambda item: -item[1])[:count]


def expected_answer(request: Request, config: EngineConfig) -> tuple[list[int], str, FinishReason]:
    """By the definition of the sim model, and nothing of the engine."""
    params = request.params
    room = config.max_seq_len - len(request.prompt_token_ids)
    limit = min(params.max_tokens or room, room)
    tokens = expected_tokens(request.prompt_token_ids, params, limit, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    letters = Letters().decode(tokens)
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1], letters[:index], FinishReason.STOP
        matched = [stop for stop in params.stop if letters[params.min_tokens : index + 1].endswith(stop)]
        if matched:
            return tokens[: index + 1], letters[: index + 1 - max(map(len, matched))], FinishReason.STOP
    return tokens, letters, FinishReason.LENGTH


def random_config(rng: random.Random, policy: str, max_len: int) -> EngineConfig:
    block_size = rng.choice([1, 2, 3, 4, 8])
    chunked = rng.random() < 0.7
    least = block_size if chunked else max_len
    options = random_options(rng, policy, least=block_size if chunked else None)
    return EngineConfig(
        scheduler_policy=policy,
        chunk_policy=rng.choice(["equal_progress", "first_come_first_served"]),
        block_size=block_size,
        max_batch_size=rng.choice([1, 2, 3, 8, 8]),
        max_num_tokens=least + rng.choice([0, 1, 5, 40]),
        max_seq_len=max_len,
        chunked_prefill=chunked,
        prefix_caching=rng.random() < 0.6,
        overlap_depth=rng.choice([0, 1]),
        **options,
    )


def random_options(rng: random.Random, policy: str, least: int | None) -> dict:
    """Options beyond upstream, most of them off. ``least`` tokens of a prompt must run at a time; None: all of them."""
    options: dict = {}
    if rng.random() < 0.5:
        return options
    options["queue_policy"] = rng.choice(["fcfs", "priority", "srtf", "wfq"])
    options["watermark"] = rng.choice([0.0, 0.05, 0.3, 0.9])
    options["stall_free"] = rng.random() < 0.5
    if policy == "max_utilization":
        options["victim_policy"] = rng.choice(["newest", "cheapest"])
    if options["queue_policy"] == "priority":
        options["priority_ageing_s"] = rng.choice([None, 1.0, 100.0])
    if options["queue_policy"] == "wfq":
        options["tenant_weights"] = rng.choice([{}, {"a": 3.0, "b": 0.5}])
    if least is not None:
        options["max_prefill_tokens"] = rng.choice([None, least, least + 3])
    return options


def random_logit_params(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """Some of what changes the logits or tells of them; now and then nothing."""
    bias = tuple((rng.randrange(VOCAB_SIZE), rng.uniform(-3, 3)) for _ in range(rng.randint(1, 4)))
    return {
        "repetition_penalty": rng.choice([1.0, 1.0, 0.8, 1.5]),
        "presence_penalty": rng.choice([0.0, 0.0, 1.0, -0.5]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.4, -0.3]),
        "logit_bias": rng.choice([(), bias]),
        "min_tokens": rng.choice([0, rng.randint(0, max_tokens)]),
        "logprobs": rng.choice([None, None, 0, 3, 20]),
    }


def with_random_stops(rng: random.Random, request: Request) -> Request:
    """The same request, with stop strings as often as not; they need an engine with a tokenizer."""
    stops = rng.choice([(), (), ("a", "ba"), ("bc", "cbc", "kk"), tuple("efgh")])
    return replace(request, params=replace(request.params, stop=stops))


def with_siblings(rng: random.Random, requests: list[Request]) -> list[Request]:
    """Some requests become several answers to their prompt, which may end and be drawn differently; names lie at times.

    A liar is in the same group, with another prompt or salt.
    """
    answers: list[Request] = []
    for request in requests:
        count = rng.choice([1, 1, 2, 3, 5])
        for one in fan_out(request, count):
            params = one.params
            max_tokens = max(params.min_tokens, rng.randint(1, params.max_tokens or 1))
            one = replace(one, params=replace(params, max_tokens=max_tokens))
            if count > 1 and rng.random() < 0.1:
                one = replace(one, prompt_token_ids=(*one.prompt_token_ids[:-1], rng.randrange(VOCAB_SIZE)))
            elif count > 1 and rng.random() < 0.1:
                one = replace(one, cache_salt="third")
            answers.append(one)
    return answers


def random_requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts that share beginnings, some equal, with mixed limits, ends, seeds, priorities and salts."""
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 6, 12]))]
    requests: list[Request] = []
    for number in range(count):
        if requests and rng.random() < 0.25:
            prompt = rng.choice(requests).prompt_token_ids
        else:
            prompt = (*stem, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 14))))
        is_sampled = rng.random() < 0.5
        params = SamplingParams(
            max_tokens=rng.randint(1, 20),
            temperature=rng.choice([0.5, 1.0]) if is_sampled else 0.0,
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.1]),
            seed=rng.randrange(1 << 40),
            stop_token_ids=(7,) if rng.random() < 0.3 else (),
            ignore_eos=rng.random() < 0.5,
        )
        if rng.random() < 0.5:
            params = replace(params, **random_logit_params(rng, params.max_tokens or 1))
        requests.append(
            Request(
                f"r{number}",
                prompt,
                params,
                priority=rng.choice([0.5, 0.5, 0.5, 0.2, 0.9]),
                cache_salt=rng.choice(["", "", "", "other"]),
                tenant=rng.choice(["", "a", "b"]),
                arrival_s=float(number),
            )
        )
    return requests
