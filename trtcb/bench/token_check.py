"""Holds a loaded engine to the token law: what a request was streamed under load is what it gets alone."""

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtcb.errors import ValidationFailedError
from trtcb.executor.request import Delta

Ints = npt.NDArray[np.int64]


class TokenLog:
    """Token ids of each request of a workload in the order in which they were streamed; four bytes each."""

    def __init__(self, num_requests: int) -> None:
        self._tokens = [array("i") for _ in range(num_requests)]

    def add(self, deltas: Iterable[Delta]) -> None:
        """Take in what a step streamed."""
        for delta in deltas:
            self._tokens[int(delta.request_id)].extend(delta.token_ids)

    def of(self, number: int) -> "array[int]":
        """Tokens of one request."""
        return self._tokens[number]


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """How much was compared, in requests (of which so many were paused somewhere) and tokens a configuration."""

    num_requests: int
    num_paused: int
    num_tokens: int

    def __add__(self, other: "TokenCheck") -> "TokenCheck":
        return TokenCheck(
            self.num_requests + other.num_requests,
            self.num_paused + other.num_paused,
            self.num_tokens + other.num_tokens,
        )

    def __str__(self) -> str:
        return (
            f"{self.num_requests} requests, {self.num_paused} of them paused somewhere, were served alone as well: all "
            f"{self.num_tokens} tokens are those of every configuration under load."
        )


def chosen(num_pauses: Ints, is_served: npt.NDArray[np.bool_], count: int) -> list[int]:
    """Choose up to ``count`` of the requests that were served: the most paused first, then evenly spread ones."""
    served = np.flatnonzero(is_served)
    by_pauses = served[np.argsort(-num_pauses[served], kind="stable")]
    paused = by_pauses[num_pauses[by_pauses] > 0][:count]
    others = np.setdiff1d(served, paused)
    spread = others[np.linspace(0, len(others) - 1, min(count - len(paused), len(others))).astype(int)]
    return sorted({*paused.tolist(), *spread.tolist()})


def check_tokens(
    logs: Mapping[str, TokenLog],
    num_pauses: Ints,
    is_served: npt.NDArray[np.bool_],
    count: int,
    alone: Callable[[Collection[int]], TokenLog],
) -> TokenCheck:
    """Serve up to ``count`` requests alone, and compare each with what every configuration streamed.

    ``num_pauses`` ``[N]`` is over all configurations, ``is_served`` ``[N]`` by each of them. Raises
    ``ValidationFailedError`` that names the first token that differs.
    """
    numbers = chosen(num_pauses, is_served, count)
    solo = alone(numbers)
    for label, log in logs.items():
        for number in numbers:
            _compare(label, number, log.of(number), solo.of(number))
    num_paused = int((num_pauses[numbers] > 0).sum())
    return TokenCheck(len(numbers), num_paused, sum(len(solo.of(number)) for number in numbers))


def _compare(label: str, number: int, loaded: "array[int]", solo: "array[int]") -> None:
    if loaded == solo:
        return
    pairs = enumerate(zip(loaded, solo, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(loaded), len(solo)))
    here, there = (str(tokens[place]) if place < len(tokens) else "missing" for tokens in (loaded, solo))
    raise ValidationFailedError(
        f"Request {number} under {label}: token {place} of the answer is {here}, but {there} when the request is "
        "served alone. This breaks the token law: please report this."
    )
