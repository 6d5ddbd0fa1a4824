"""The front doors: asyncio streams and lists of prompts, over the sim runtime."""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import threading
import time

import pytest

from tests.unit.test_engine import WAIT_S, Gated
from trtcb.errors import DrainingError, DrainTimeoutError, EngineDeadError, QueueFullError, RequestError, UsageError
from trtcb.executor import llm as llm_module
from trtcb.executor.admission import Admission
from trtcb.executor.config import EngineConfig
from trtcb.executor.llm import LLM, AsyncLLM, Completion
from trtcb.executor.request import FinishReason, Request, SamplingParams, fan_out
from trtcb.executor.sim_runtime import SimRuntime, expected_logprobs, expected_tokens
from trtcb.spec import ModelSpec

VOCAB = 23
MODEL = ModelSpec(
    name="sim", hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
    vocab_size=VOCAB, max_position=512, eos_token_ids=(3,),
)  # fmt: skip
SETTINGS = {"block_size": 4, "max_batch_size": 8, "max_num_tokens": 64, "max_seq_len": 200}


class Letters:
    eos_token_ids = frozenset({4})

    def encode(self, text):
        return [ord(c) - 97 for c in text]

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


def request(name: str, prompt=(5, 6, 7), **params) -> Request:
    return Request(
        name, tuple(prompt), SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params})
    )


def answer(prompt=(5, 6, 7), count=8) -> list[int]:
    return expected_tokens(prompt, SamplingParams(temperature=0.0), count, vocab_size=VOCAB)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL + 1, logger="trtcb")


@contextlib.asynccontextmanager
async def serving(**settings):
    runtime = Gated()
    served = AsyncLLM(runtime, EngineConfig(**{**SETTINGS, **settings}), tokenizer=Letters(), model=MODEL)
    served.runtime = runtime
    await served.start()
    try:
        yield served
    finally:
        runtime.gate.set()
        await served.close()
        assert not served.engine.snapshot().is_alive
        assert runtime.closed_by == ["trtcb-engine"]


async def idle(served: AsyncLLM) -> None:
    assert await asyncio.to_thread(served.engine.wait_idle, WAIT_S)
    await asyncio.sleep(0.02)


class TestAsync:
    async def test_concurrent_streams_get_their_own_tokens_in_order(self):
        async with serving() as served:

            async def read(number: int):
                prompt = (number % VOCAB, 1)
                deltas = [d async for d in served.stream(request(f"r{number}", prompt))]
                assert [t for d in deltas for t in d.token_ids] == answer(prompt)
                assert [d.finish_reason for d in deltas] == [None] * 7 + [FinishReason.LENGTH]
                assert "".join(d.text for d in deltas) == Letters().decode(answer(prompt))

            await asyncio.gather(*(read(number) for number in range(50)))
            assert served._streams == {}

    async def test_one_wakeup_of_the_loop_per_step(self, monkeypatch):
        async with serving() as served:
            calls = []
            loop_call = served._loop.call_soon_threadsafe

            def call_soon_threadsafe(callback, deltas):
                calls.append(len(deltas))
                loop_call(callback, deltas)

            monkeypatch.setattr(served._loop, "call_soon_threadsafe", call_soon_threadsafe)
            served.runtime.gate.clear()
            streams = [served.stream(request(f"r{n}", (n,))) for n in range(8)]
            heads = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await asyncio.sleep(0.05)
            served.runtime.gate.set()
            await asyncio.gather(*heads)
            for stream in streams:
                assert len([d async for d in stream]) == 7
            assert len(calls) <= 9
            assert sum(calls) == 64

    async def test_refusals_come_from_the_first_anext_before_it_waits(self):
        async with serving(max_batch_size=1, max_queue_size=1) as served:
            refused = asyncio.ensure_future(anext(served.stream(request("r", max_tokens=0))))
            await asyncio.sleep(0)
            assert refused.done()
            with pytest.raises(RequestError):
                refused.result()
            served.runtime.gate.clear()
            heads = []
            for name in ("running", "waiting"):
                heads.append((stream := served.stream(request(name)), asyncio.ensure_future(anext(stream))))
                assert await asyncio.to_thread(served.runtime.entered.wait, WAIT_S)
            with pytest.raises(QueueFullError):
                await anext(served.stream(request("third")))
            served.runtime.gate.set()
            for stream, head in heads:
                await head
                assert len([d async for d in stream]) == 7

    async def test_closing_the_stream_aborts_the_request(self):
        async with serving() as served:
            stream = served.stream(request("r", max_tokens=150))
            await anext(stream)
            await stream.aclose()
            await idle(served)
            assert served.engine.snapshot().used_blocks == 0
            assert served._streams == {}

    async def test_a_cancelled_reader_aborts_its_request(self):
        async with serving() as served:
            served.runtime.gate.clear()

            async def read():
                async with contextlib.aclosing(served.stream(request("r", max_tokens=150))) as stream:
                    async for _ in stream:
                        pass

            task = asyncio.ensure_future(read())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            served.runtime.gate.set()
            await idle(served)
            assert served.engine.snapshot().used_blocks == 0

    async def test_a_dropped_stream_aborts_its_request(self):
        async with serving() as served:
            stream = served.stream(request("r", max_tokens=150))
            await anext(stream)
            del stream
            gc.collect()
            await asyncio.sleep(0)
            await idle(served)
            assert served.engine.snapshot().used_blocks == 0

    async def test_an_id_is_in_use_until_the_engine_has_told_its_end(self):
        async with serving() as served:
            served.runtime.gate.clear()
            stream = served.stream(request("r"))
            head = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.02)
            with pytest.raises(RequestError, match="in use"):
                await anext(served.stream(request("r")))
            head.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await head
            await stream.aclose()
            with pytest.raises(RequestError, match="in use"):
                await anext(served.stream(request("r")))
            served.runtime.gate.set()
            await idle(served)
            assert len([d async for d in served.stream(request("r"))]) == 8

    async def test_a_late_end_of_one_request_is_not_taken_for_the_nexts(self):
        async with serving() as served:
            stream = served.stream(request("r", max_tokens=150))
            await anext(stream)
            await stream.aclose()
            assert served.engine.wait_idle(WAIT_S)  # holds the loop up: it has not heard of the end yet
            with pytest.raises(RequestError, match="in use"):
                await anext(served.stream(request("r")))
            await asyncio.sleep(0.02)
            assert len([d async for d in served.stream(request("r"))]) == 8

    async def test_a_reader_that_never_reads_is_cut_off_and_others_are_not(self, monkeypatch):
        monkeypatch.setattr(llm_module, "MAX_STREAM_BACKLOG", 20)
        async with serving() as served:
            served.runtime.step_time_s = 0.005
            ends = {}
            served.observe_steps(lambda stats: ends.update({f.request_id: f.reason for f in stats.finished}))
            slow = served.stream(request("slow", max_tokens=150))
            await anext(slow)
            assert len([d async for d in served.stream(request("quick", max_tokens=50))]) == 50
            await idle(served)
            assert served.engine.snapshot().used_blocks == 0
            rest = [d async for d in slow]
            assert [d.finish_reason for d in rest] == [None] * 20 + [FinishReason.ERROR]
            assert "The reader fell 20 tokens behind" in rest[-1].error
            assert served._streams == {}
            assert ends == {"slow": FinishReason.ABORT, "quick": FinishReason.LENGTH}

    async def test_a_backlog_that_ends_in_time_is_whole(self, monkeypatch):
        monkeypatch.setattr(llm_module, "MAX_STREAM_BACKLOG", 7)
        async with serving() as served:
            stream = served.stream(request("r"))
            first = await anext(stream)
            await idle(served)
            deltas = [first] + [d async for d in stream]
            assert [t for d in deltas for t in d.token_ids] == answer()

    async def test_draining(self):
        async with serving() as served:
            served.runtime.gate.clear()
            stream = served.stream(request("r"))
            head = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.02)
            with pytest.raises(DrainTimeoutError, match=r"after 0\.05 s"):
                await served.drain(0.05)
            with pytest.raises(DrainingError):
                await anext(served.stream(request("late")))
            served.runtime.gate.set()
            await served.drain(WAIT_S)
            await head
            assert len([d async for d in stream]) == 7

    async def test_closing_ends_open_streams_with_an_error(self):
        async with serving() as served:
            stream = served.stream(request("r", max_tokens=150))
            await anext(stream)
            await served.close()
            assert [d async for d in stream][-1].error == "The engine was closed."
            with pytest.raises(EngineDeadError):
                await anext(served.stream(request("late")))

    async def test_a_dead_engine_ends_open_streams(self):
        async with serving() as served:
            served.runtime.healthy = False
            served.runtime.gate.clear()
            stream = served.stream(request("r"))
            head = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.02)
            served.runtime.failure = RuntimeError("lost")
            served.runtime.gate.set()
            delta = await head
            assert (delta.finish_reason, "lost" in delta.error) == (FinishReason.ERROR, True)

    async def test_steps_can_be_observed(self):
        steps, more = [], []
        runtime = Gated()
        served = AsyncLLM(runtime, EngineConfig(**SETTINGS), tokenizer=None, model=MODEL, on_step=steps.append)
        served.observe_steps(more.append)
        await served.start()
        assert len([d async for d in served.stream(request("r"))]) == 8
        await idle(served)
        assert steps == more
        assert sum(s.generated_tokens for s in steps) == 8
        await served.close()

    def test_an_engine_outlives_its_loop(self):
        runtime = Gated()
        served = AsyncLLM(runtime, EngineConfig(**SETTINGS), tokenizer=None, model=MODEL)

        async def begin():
            await served.start()
            runtime.gate.clear()
            served.engine.submit(request("r"))

        asyncio.run(begin())
        runtime.gate.set()
        assert served.engine.wait_idle(WAIT_S)
        assert served.engine.close(WAIT_S)
        assert served.engine.snapshot().error is None


@pytest.fixture
def llm():
    with LLM(runtime=Gated(), tokenizer=Letters(), model=MODEL, **SETTINGS) as made:
        yield made


class TestLLM:
    PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    def test_text_and_ids_in_the_order_given(self, llm):
        completions = llm.generate(["fgh", (1, 2), "fgh"], self.PARAMS)
        first = Completion(Letters().decode(answer()), tuple(answer()), FinishReason.LENGTH, 3, 0)
        assert completions[0] == completions[2] == first
        assert completions[1].token_ids == tuple(answer((1, 2)))

    def test_each_prompt_may_have_its_params(self, llm):
        params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (2, 5)]
        assert [len(c.token_ids) for c in llm.generate(["fgh", "fgh"], params)] == [2, 5]
        with pytest.raises(UsageError, match="2 prompts and 1 params"):
            llm.generate(["a", "b"], params[:1])

    def test_no_prompts_no_completions(self, llm):
        assert llm.generate([]) == []

    def test_ends_of_model_and_tokenizer_count(self, llm):
        params = SamplingParams(max_tokens=150, temperature=1.0, seed=1)
        for number in range(20):
            (completion,) = llm.generate([(number, 5)], params)
            if completion.finish_reason is FinishReason.STOP:
                assert completion.token_ids[-1] in (3, 4)
                assert not {3, 4} & set(completion.token_ids[:-1])
        ends = {llm.generate([(n, 6)], params)[0].token_ids[-1] for n in range(20)}
        assert {3, 4} <= ends

    def test_more_prompts_than_the_queue_takes(self):
        with LLM(runtime=Gated(), tokenizer=Letters(), model=MODEL, **SETTINGS, max_queue_size=2) as llm:
            prompts = [(n % VOCAB, n // VOCAB) for n in range(60)]
            completions = llm.generate(prompts, self.PARAMS)
        assert [list(c.token_ids) for c in completions] == [answer(p) for p in prompts]

    def test_a_short_queue_does_not_keep_the_batch_small(self):
        batches = []

        def on_step(stats):
            batches.append(stats.num_rows)
            time.sleep(0.01)

        with LLM(runtime=Gated(), model=MODEL, on_step=on_step, **SETTINGS, max_queue_size=1) as llm:
            llm.generate([(n,) for n in range(4)], SamplingParams(max_tokens=50, ignore_eos=True))
        assert max(batches) == 4

    def test_threads_share_one_engine(self, llm):
        results = {}

        def work(number):
            results[number] = llm.generate([(number, n) for n in range(10)], self.PARAMS)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, completions in results.items():
            assert [list(c.token_ids) for c in completions] == [answer((number, n)) for n in range(10)]
        assert llm._answers == {}

    def test_a_bad_prompt_is_named_before_anything_runs(self, llm):
        with pytest.raises(RequestError, match="Prompt 1: The prompt is empty") as caught:
            llm.generate([(1,), ()], self.PARAMS)
        assert caught.value.param == "prompt"
        assert llm._engine.snapshot().steps == 0

    def test_a_failed_request_is_a_completion_with_an_error(self, llm):
        llm._engine._runtime.failure = RuntimeError("once")
        (completion,) = llm.generate(["fgh"], self.PARAMS)
        assert (completion.finish_reason, "once" in completion.error) == (FinishReason.ERROR, True)

    def test_a_closed_engine_says_so(self, llm):
        llm.close()
        llm.close()
        with pytest.raises(EngineDeadError):
            llm.generate(["fgh"], self.PARAMS)
        assert llm._answers == {}

    def test_leaving_early_leaves_nothing_behind(self, llm, monkeypatch):
        submit = llm._engine.submit

        def second_fails(request):
            if request.request_id.endswith("1"):
                raise EngineDeadError("gone")
            submit(request)

        monkeypatch.setattr(llm._engine, "submit", second_fails)
        with pytest.raises(EngineDeadError):
            llm.generate([(1,), (2,)], SamplingParams(max_tokens=150, ignore_eos=True))
        assert llm._engine.wait_idle(WAIT_S)
        assert llm._answers == {}
        assert llm._engine.snapshot().used_blocks == 0

    def test_an_interrupt_right_after_a_submission_leaves_nothing_behind(self, llm, monkeypatch):
        submit, runtime = llm._engine.submit, llm._engine._runtime

        def interrupted(request):
            submit(request)
            raise KeyboardInterrupt

        monkeypatch.setattr(llm._engine, "submit", interrupted)
        runtime.gate.clear()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([(1,)], SamplingParams(max_tokens=150, ignore_eos=True))
        runtime.gate.set()
        assert llm._engine.wait_idle(WAIT_S)
        assert llm._engine.snapshot().steps < 3

    def test_misuse_is_named(self, llm):
        with pytest.raises(UsageError, match="prompts is a list"):
            llm.generate("text")
        with pytest.raises(UsageError, match="either the path of a plan, or a runtime"):
            LLM()
        with pytest.raises(UsageError, match="either the path of a plan, or a runtime"):
            LLM("x.plan", runtime=Gated())
        with pytest.raises(UsageError, match="together with its model"):
            LLM(runtime=Gated())
        with pytest.raises(UsageError, match="did you mean 'max_num_seqs'"):
            LLM("x.plan", max_num_seq=4)
        with LLM(runtime=Gated(), model=MODEL, **SETTINGS) as silent, pytest.raises(UsageError, match="no tokenizer"):
            silent.generate(["a"])


def test_logprobs_come_with_the_completion_that_asked_for_them():
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    asked = [params, dataclasses.replace(params, logprobs=0), dataclasses.replace(params, logprobs=2)]
    with LLM(runtime=SimRuntime(num_blocks=64, block_size=4, vocab_size=VOCAB), model=MODEL, **SETTINGS) as llm:
        without, drawn, top = llm.generate([[5, 6, 7]] * 3, asked)
    assert without.logprobs is None
    rows = expected_logprobs([5, 6, 7], params, top.token_ids, vocab_size=VOCAB)
    for row, token, one, two in zip(rows, top.token_ids, drawn.logprobs, top.logprobs, strict=True):
        assert (one.token_id, one.logprob, one.top) == (token, float(row[token]), ())
        assert (two.token_id, two.logprob) == (token, float(row[token]))
        best = row.argsort()[::-1][:2].tolist()
        assert two.top == tuple((i, float(row[i])) for i in best)


def test_answers_to_one_prompt_differ_in_id_and_seed():
    one = request("r", seed=5)
    assert fan_out(one, 1) == [one]
    assert [(each.request_id, each.params.seed) for each in fan_out(one, 3)] == [("r-0", 5), ("r-1", 6), ("r-2", 7)]
    assert all(each.prompt_token_ids == one.prompt_token_ids for each in fan_out(one, 3))
    assert [each.params.seed for each in fan_out(request("r"), 2)] == [None, None]
    assert [each.fork_group for each in fan_out(one, 3)] == ["r"] * 3
    assert [each.params.n for each in fan_out(request("r", n=2), 2)] == [1, 1]


def test_several_answers_to_a_prompt_are_the_outputs_of_its_completion(monkeypatch):
    all_sent = threading.Event()

    class Held(SimRuntime):
        def wait(self):
            assert all_sent.wait(WAIT_S)
            return super().wait()

    def submit_and_tell(self, waiting, running):
        submit(self, waiting, running)
        all_sent.set()

    submit = LLM._submit
    monkeypatch.setattr(LLM, "_submit", submit_and_tell)
    prompts, asked = [[5, 6, 7], [8, 9], [10, 11]], SamplingParams(max_tokens=6, seed=40, ignore_eos=True)
    each = [dataclasses.replace(asked, n=n) for n in (3, 1, 2)]
    steps = []
    runtime = Held(num_blocks=64, block_size=4, vocab_size=VOCAB)
    with LLM(runtime=runtime, model=MODEL, on_step=steps.append, **SETTINGS) as llm:
        completions = llm.generate(prompts, each)
        with pytest.raises(RequestError, match="Prompt 1: n must be a whole number of at least 1, not 0"):
            llm.generate(prompts, [asked, dataclasses.replace(asked, n=0), asked])
        with pytest.raises(RequestError, match="Prompt 0: params must be SamplingParams"):
            llm.generate([[1]], [{"n": 1}])
        with pytest.raises(RequestError, match="Prompt 0: seed must be a whole number"):
            llm.generate([[1]], dataclasses.replace(asked, n=2, seed="x"))
    assert [len(completion.outputs) for completion in completions] == [3, 1, 2]
    for completion, prompt in zip(completions, prompts, strict=True):
        assert completion.outputs[0] is completion
        for index, output in enumerate(completion.outputs):
            seeded = dataclasses.replace(asked, seed=40 + index)
            assert list(output.token_ids) == expected_tokens(prompt, seeded, 6, vocab_size=VOCAB)
            assert output.num_cached_tokens == (len(prompt) - 1 if index else 0)
    assert sum(step.prompt_tokens for step in steps) == (3 + 1 + 1) + 2 + (2 + 1)


def test_the_engine_itself_gives_one_answer_a_request():
    admission = Admission(EngineConfig(), num_blocks=64, vocab_size=VOCAB, tokenizer=None)
    with pytest.raises(RequestError, match="A request has one answer, not n=2"):
        admission.sequence(request("r", n=2), 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_salt": None},
        {"cache_salt": 5},
        {"request_id": b"x"},
        {"arrival_s": "x"},
        {"arrival_s": float("nan")},
        {"params": None},
        {"params": SamplingParams(stop="ab")},
        {"params": SamplingParams(stop=None)},
        {"params": SamplingParams(stop_token_ids=7)},
        {"prompt_token_ids": (1, True)},
        {"prompt_token_ids": ("a",)},
    ],
)
def test_a_malformed_request_is_refused_and_harms_nobody(changes):
    admission = Admission(EngineConfig(), num_blocks=100, vocab_size=50, tokenizer=None)
    request = Request("a", (1, 2, 3), SamplingParams())
    admission.sequence(request, 0.0)
    with pytest.raises(RequestError):
        admission.sequence(dataclasses.replace(request, **changes), 0.0)


async def test_a_stream_needs_the_loop_the_engine_was_started_on():
    llm = AsyncLLM(SimRuntime(num_blocks=64, block_size=4), EngineConfig(**SETTINGS), tokenizer=None, model=MODEL)
    with pytest.raises(UsageError, match="start"):
        await anext(llm.stream(request("early")))
    await llm.start()
    deltas = [delta async for delta in llm.stream(request("now", max_tokens=2))]
    assert deltas[-1].finish_reason is not None
    await llm.close()


def test_an_empty_list_of_params_is_not_the_default():
    with (
        LLM(runtime=SimRuntime(num_blocks=64, block_size=4), model=MODEL, **SETTINGS) as llm,
        pytest.raises(UsageError, match="params"),
    ):
        llm.generate([[1], [2]], [])
