"""The examples run, and show what they claim."""

from examples.custom_policy import ShortPromptsFirst, main, simulate
from trtcb.executor.config import EngineConfig


def test_a_policy_of_ones_own_decides_who_runs():
    own, upstream = simulate(ShortPromptsFirst()), simulate("guaranteed_no_evict")
    short = [f"r{number}" for number in range(0, 40, 2)]
    assert len(own) == len(upstream) == 40
    assert max(own[name] for name in short) < max(upstream[name] for name in short)
    assert EngineConfig(scheduler_policy=ShortPromptsFirst()).policy_name == "ShortPromptsFirst"


def test_it_prints_a_line_per_policy(capsys):
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["guaranteed_no_evict", "max_utilization", "ShortPromptsFirst"]
