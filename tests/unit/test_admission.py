"""What can never be served is refused at submission, with numbers; the rest gets its limits and its seed."""

import pytest

from trtcb.errors import RequestError
from trtcb.executor.admission import Admission
from trtcb.executor.config import EngineConfig
from trtcb.executor.request import Request, SamplingParams


class Letters:
    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


def admission(num_blocks: int = 100, *, tokenizer=None, **settings) -> Admission:
    config = EngineConfig(**{"block_size": 10, "max_num_tokens": 50, "max_seq_len": 200, **settings})
    return Admission(config, num_blocks, 26, tokenizer)


def admit(admission: Admission, length: int = 5, *, prompt=None, priority=0.5, arrival_s=0.0, **params):
    tokens = tuple(range(5)) * 100
    prompt = tokens[:length] if prompt is None else prompt
    request = Request("r", prompt, SamplingParams(**params), priority=priority, arrival_s=arrival_s)
    return admission.sequence(request, 12.5)


def refused(admission: Admission, length: int = 5, **kwargs) -> RequestError:
    with pytest.raises(RequestError) as caught:
        admit(admission, length, **kwargs)
    return caught.value


@pytest.mark.parametrize(
    ("settings", "asked", "limit"),
    [
        ({}, 7, 7),
        ({}, 1000, 195),
        ({}, None, 195),
        ({"default_max_tokens": 16}, None, 16),
        ({"default_max_tokens": 16}, 20, 20),
        ({"default_max_tokens": 500}, None, 195),
    ],
)
def test_max_tokens(settings, asked, limit):
    assert admit(admission(**settings), max_tokens=asked).max_len == 5 + limit


def test_an_omitted_limit_is_cut_to_the_pool_but_an_asked_one_is_refused_with_numbers():
    small = admission(num_blocks=4)
    assert admit(small).max_len == 40
    assert admit(small, max_tokens=35).max_len == 40
    error = refused(small, max_tokens=36)
    assert "needs 5 KV blocks of 10 tokens (prompt 5 + max_tokens 36), but the pool has 4" in str(error)
    assert "max_tokens ≤ 35 would fit" in str(error)
    assert (error.param, error.code) == ("max_tokens", "context_length_exceeded")


@pytest.mark.parametrize("asked", [None, 1, 50])
def test_a_prompt_larger_than_the_pool_is_refused(asked):
    error = refused(admission(num_blocks=4), 40, max_tokens=asked)
    assert "but the pool has 4; the prompt alone fills it" in str(error)
    assert error.param == "prompt"


def test_a_prompt_must_leave_room_for_one_token():
    assert admit(admission(), 199).max_len == 200
    error = refused(admission(), 200)
    assert "The prompt has 200 tokens" in str(error)
    assert "shorten it to 199" in str(error)
    assert error.code == "context_length_exceeded"


def test_without_chunks_a_prompt_must_fit_into_one_step():
    whole = admission(chunked_prefill=False)
    assert admit(whole, 50).num_tokens == 50
    assert "max_num_tokens is 50" in str(refused(whole, 51))
    assert admit(admission(), 51).num_tokens == 51


@pytest.mark.parametrize("prompt", [(3, 26), (-1, 3)])
def test_ids_outside_the_vocabulary_are_refused(prompt):
    error = refused(admission(), prompt=prompt)
    assert "use ids from 0 to 25" in str(error)
    assert error.param == "prompt"


def test_an_empty_prompt_is_refused():
    assert refused(admission(), prompt=()).param == "prompt"


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *(("temperature", v) for v in (-0.1, NAN, INF, "hot", True)),
        *(("top_p", v) for v in (0.0, 1.1, -1.0, NAN)),
        *(("min_p", v) for v in (-0.1, 1.1, NAN)),
        *(("top_k", v) for v in (-1, 1.5, 1 << 31, True)),
        *(("max_tokens", v) for v in (0, -1, 1.5, True)),
        *(("seed", v) for v in (1.5, "x")),
        *(("stop", v) for v in (("",), ("a", ""), (3,))),
        ("stop_token_ids", ("x",)),
        *(("repetition_penalty", v) for v in (0.0, -1.0, 101.0, NAN, INF, True)),
        *(("presence_penalty", v) for v in (2.1, -2.1, NAN, "x")),
        *(("frequency_penalty", v) for v in (2.1, -2.1, NAN)),
        *(("min_tokens", v) for v in (-1, 1.5, True, 196)),
        *(("logprobs", v) for v in (-1, 21, 1.5, True)),
        *(("logit_bias", ((5, v),)) for v in (100.5, -101, NAN, "x")),
        *(("logit_bias", ((v, 1.0),)) for v in (26, -1, 1.0, "5")),
        ("logit_bias", ((5, 1.0),) * 1025),
        *(("logit_bias", v) for v in ((5,), ((5,),), ((5, 1.0, 2.0),), (None,))),
        *(("ignore_eos", v) for v in (0, None, "no")),
    ],
)
def test_bad_parameters_are_refused_by_name(param, value):
    assert refused(admission(tokenizer=Letters()), **{param: value}).param == param


@pytest.mark.parametrize("priority", [-0.1, 1.1, NAN])
def test_priority_is_from_0_to_1(priority):
    assert refused(admission(), priority=priority).param == "priority"


@pytest.mark.parametrize("prompt", [[1, 2], {1, 2}, range(3), b"\x01", "ab", None, 5, iter([1])])
def test_a_prompt_is_a_tuple(prompt):
    """A list could be changed later, and a sibling's prompt is looked up: in the engine thread, it must not fail."""
    with pytest.raises(RequestError, match="tuple of token ids") as caught:
        admission().sequence(Request("r", prompt, SamplingParams()), 0.0)
    assert caught.value.param == "prompt"


BAD_VALUES = {
    "huge": 10**5000,
    "below": -(10**5000),
    "large": 10**400,
    "surrogate": "\ud800",
    "lines": "a\nb" * 1000,
    "inside": (10**5000,),
}


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
@pytest.mark.parametrize("param", ["temperature", "min_tokens", "logprobs", "n", "top_k", "frequency_penalty"])
def test_whatever_is_wrong_the_sentence_is_short(param, value):
    error = refused(admission(), **{param: value})
    assert error.param == param
    assert len(str(error)) < 200
    assert str(error).isprintable()


def test_bounds_themselves_are_accepted():
    admit(admission(), temperature=0.0, top_p=1.0, min_p=0.0, top_k=0, max_tokens=1, priority=0.0)
    admit(admission(), temperature=100.0, min_p=1.0, top_k=(1 << 31) - 1, priority=1.0)


def test_bounds_of_what_edits_the_logits_are_accepted():
    admit(admission(), repetition_penalty=0.01, presence_penalty=-2.0, frequency_penalty=2.0, min_tokens=195)
    admit(admission(), repetition_penalty=100, presence_penalty=2, logprobs=20, logit_bias=((25, -100.0),) * 1024)


def test_min_tokens_must_be_within_the_limit():
    assert "may have 7 new tokens" in str(refused(admission(), max_tokens=7, min_tokens=8))
    assert admit(admission(), max_tokens=7, min_tokens=7).sampling is None  # no token ends it anyway


def test_end_tokens_outside_the_vocabulary_are_never_masked():
    ends = Admission(EngineConfig(), 100, 26, None, frozenset({3, 30}))
    seq = admit(ends, min_tokens=1, stop_token_ids=(7, 26))
    assert seq.sampling.bias(0)[0].tolist() == [3, 7]
    assert seq.sampling.bias(1)[0].tolist() == []
    assert admit(ends, min_tokens=1, stop_token_ids=(7,), ignore_eos=True).sampling.bias(0)[0].tolist() == [7]


def test_stop_strings_need_a_tokenizer():
    assert "use stop_token_ids" in str(refused(admission(), stop=("x",)))
    assert admit(admission(tokenizer=Letters()), stop=("x",)).text is not None
    assert admit(admission()).text is None


def test_seeds():
    assert admit(admission(), seed=7).seed == 7
    assert admit(admission(), seed=-1).seed == (1 << 64) - 1
    assert admit(admission(), seed=(1 << 64) + 5).seed == 5
    drawn = {admit(admission()).seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 1 << 64 for seed in drawn)


def test_arrival_is_the_callers_or_now():
    assert admit(admission()).arrival_s == 12.5
    assert admit(admission(), arrival_s=3.0).arrival_s == 3.0
