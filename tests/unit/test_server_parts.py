"""Parts of the server that need no server."""

import pytest

from trtcb.server.errors import scrub
from trtcb.server.metrics import StepHistogram
from trtcb.server.schemas import UNSUPPORTED, ChatRequest, CompletionRequest, parse


@pytest.mark.parametrize(
    ("message", "scrubbed"),
    [
        ("cannot map /opt/models/llama.plan: no memory", "cannot map llama.plan: no memory"),
        ("File '/usr/lib/python3/x.py', line 3", "File 'x.py', line 3"),
        ("in ~/.cache/trtcb/kernels/ now", "in ... now"),
        ("see /v1/models and/or ask, 1/2 of them", "see models and/or ask, 1/2 of them"),
        ("http://127.0.0.1:8000/v1/models", "http://127.0.0.1:8000/v1/models"),
        ("tokens per second: 3/s", "tokens per second: 3/s"),
    ],
)
def test_messages_lose_their_paths(message, scrubbed):
    assert scrub(message) == scrubbed


def test_no_supported_field_is_listed_as_unsupported():
    assert not UNSUPPORTED.keys() & (CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys())


def test_every_neutral_value_is_accepted_and_changes_nothing():
    import orjson

    plain = {"model": "m", "prompt": "x"}
    for name, neutral in UNSUPPORTED.items():
        for value in (None, *neutral):
            assert parse(orjson.dumps({**plain, name: value}), CompletionRequest) == CompletionRequest(**plain), name


def test_a_histogram_puts_a_bound_into_its_own_bucket():
    histogram = StepHistogram("h_seconds", "h", (0.1, 1.0))
    histogram.observe((0.1, 0.10001, 1.0, 5.0))
    histogram.observe(())
    (family,) = histogram.collect()
    assert [(s.labels.get("le"), s.value) for s in family.samples if s.name == "h_seconds_bucket"] == [
        ("0.1", 1.0),
        ("1.0", 3.0),
        ("+Inf", 4.0),
    ]
