"""The token law under load: what is compared, and that a wrong token is found wherever it is."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from trtcb.bench import targets
from trtcb.bench.ab import Comparison, compare
from trtcb.bench.metrics import Slo
from trtcb.bench.targets import Setup, SimTarget
from trtcb.bench.token_check import TokenCheck, TokenLog, check_tokens, chosen
from trtcb.bench.workload import RandomWorkload
from trtcb.errors import UsageError, ValidationFailedError
from trtcb.executor.request import Delta
from trtcb.executor.runtime import Batch, StepOutput
from trtcb.executor.sim_runtime import SimRuntime

POLICIES = ["static_batch", "guaranteed_no_evict", "max_utilization"]
LOAD = RandomWorkload(num_prompts=30, request_rate=40, random_input_len=40, random_output_len=60, random_prefix_len=16)


def run(*, num_checked: int = 12, repeats: int = 1, num_blocks: int = 24) -> Comparison:
    target = replace(SimTarget.load("builtin"), check_contents=True)
    setups = [Setup.parse(text, {**target.engine, "num_blocks": num_blocks}, 30) for text in POLICIES]
    return compare(
        setups,
        target,
        LOAD,
        slo=Slo(),
        seed=0,
        repeats=repeats,
        on_run=lambda *_: None,
        num_checked=num_checked,
    )


def test_every_policy_streams_the_tokens_of_the_solo_run() -> None:
    comparison = run()
    pauses = [result.runs[0].requests.num_pauses for result in comparison.results]
    assert [int(column.sum()) for column in pauses] == [r.runs[0].values["pauses"] for r in comparison.results]
    paused = int((pauses[2] > 0).sum())
    assert paused > 0
    assert comparison.check == TokenCheck(12, min(12, paused), 12 * 60)
    assert run(repeats=2).check.num_requests == 24
    assert run(num_checked=0).check is None
    assert run(num_checked=1000).check.num_requests == 30


class OneWrongToken(SimRuntime):
    """Draws another token for one request at one place, but never when it is alone."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self._launched: list[Batch] = []

    def launch(self, batch: Batch) -> None:
        self._launched.append(batch)
        super().launch(batch)

    def wait(self) -> StepOutput:
        output, sampling = super().wait(), self._launched.pop(0).sampling
        is_wrong = (sampling.seed == 7) & (sampling.position == 40 + 16 + 20) & (len(sampling.seed) > 1)
        return StepOutput(np.where(is_wrong, output.tokens ^ 1, output.tokens).astype(np.int32), output.logprobs)


def test_a_wrong_token_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SimRuntime", OneWrongToken)
    with pytest.raises(
        ValidationFailedError, match=r"Request 7 under static_batch: token 20 of the answer is \d+, but"
    ):
        run(num_checked=30)


def _log(*answers: list[int]) -> TokenLog:
    log = TokenLog(len(answers))
    for number, tokens in enumerate(answers):
        for token in tokens:
            log.add([Delta(str(number), (token,))])
    return log


@pytest.mark.parametrize(
    ("loaded", "complaint"),
    [
        ([1, 2, 4], "token 2 of the answer is 4, but 3"),
        ([1, 2], "token 2 of the answer is missing, but 3"),
        ([1, 2, 3, 9], "token 3 of the answer is 9, but missing"),
    ],
)
def test_any_difference_is_found(loaded: list[int], complaint: str) -> None:
    one, served = np.ones(1, np.int64), np.ones(1, np.bool_)
    assert check_tokens({"a": _log([1, 2, 3])}, one, served, 1, lambda _: _log([1, 2, 3])) == TokenCheck(1, 1, 3)
    with pytest.raises(ValidationFailedError, match=complaint):
        check_tokens({"a": _log([1, 2, 3]), "b": _log(loaded)}, one, served, 1, lambda _: _log([1, 2, 3]))


def test_paused_requests_are_chosen_first_and_the_others_are_spread() -> None:
    num_pauses = np.array([0, 0, 3, 0, 1, 0, 0, 2, 0, 0])
    everybody = np.ones(10, np.bool_)
    assert chosen(num_pauses, everybody, 2) == [2, 7]
    assert chosen(num_pauses, everybody, 5) == [0, 2, 4, 7, 9]
    assert chosen(num_pauses, everybody, 50) == list(range(10))
    assert chosen(num_pauses, np.arange(10) != 2, 2) == [4, 7]  # one that was refused somewhere
    assert chosen(num_pauses, ~everybody, 2) == []


def test_a_simulation_without_contents_has_no_tokens_to_check() -> None:
    target = SimTarget.load("builtin")
    setup = Setup.parse("max_utilization", target.engine, 1)
    with pytest.raises(UsageError, match="--check-contents"):
        target.alone(setup.config, RandomWorkload(num_prompts=1).generate(0), [0])


def test_command_line() -> None:
    command = [sys.executable, "-m", "trtcb", "bench", "policy", *POLICIES, "--num-prompts", "10", "--num-blocks", "20"]
    checked = [*command, "--check-contents", "--check-tokens", "4"]
    result = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("4 requests, ")
    refused = subprocess.run([*command, "--check-tokens", "4"], capture_output=True, text=True, check=False)
    assert (refused.returncode, "--check-contents" in refused.stderr) == (2, True)
