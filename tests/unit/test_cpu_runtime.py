"""Where a cpu plan's steps run, with an engine that only says so."""

import threading
from types import SimpleNamespace

import pytest

from trtcb.executor import cpu_runtime
from trtcb.executor.cpu_runtime import CpuRuntime


class Witness:
    """An engine that notes the thread of each call, and fails on batch ``"bad"``."""

    def __init__(self):
        self.opened = threading.get_ident()
        self.ran, self.closed = [], 0

    def run(self, batch):
        self.ran.append((batch, threading.get_ident()))
        if batch == "bad":
            raise ValueError("bad batch")
        return batch

    def close(self):
        self.closed += 1


class StubPlan:
    header = SimpleNamespace(limits=SimpleNamespace(block_size=32))

    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


@pytest.fixture
def opened(monkeypatch):
    """Open a runtime, and its engine."""

    def open_runtime(**settings):
        made = []
        monkeypatch.setattr(cpu_runtime, "_open_engine", lambda *_, **__: made.append(Witness()) or made[0])
        runtime = CpuRuntime(StubPlan(), num_blocks=1, max_num_tokens=1, max_num_logits=1, **settings)
        return runtime, made[0]

    return open_runtime


def test_a_step_runs_where_it_is_waited_for(opened):
    runtime, engine = opened()
    assert engine.opened != threading.get_ident()
    runtime.launch("first")
    assert engine.ran == []
    assert runtime.wait() == "first"
    other = threading.Thread(target=lambda: (runtime.launch("second"), runtime.wait()))
    other.start()
    thread = other.ident
    other.join()
    assert engine.ran == [("first", threading.get_ident()), ("second", thread)]
    runtime.close()


@pytest.mark.parametrize("settings", [{"overlaps": True}, {"engine": "portable"}], ids=str)
def test_a_step_runs_beside_its_caller_if_it_must(opened, settings):
    runtime, engine = opened(**settings)
    for batch in ("first", "second"):
        runtime.launch(batch)
    assert [runtime.wait(), runtime.wait()] == ["first", "second"]
    assert {thread for _, thread in engine.ran} == {engine.opened}
    runtime.close()


@pytest.mark.parametrize("settings", [{}, {"overlaps": True}], ids=str)
def test_a_failed_step_is_told_in_its_turn_and_closing_closes_once(opened, settings):
    runtime, engine = opened(**settings)
    for batch in ("good", "bad", "good"):
        runtime.launch(batch)
    assert runtime.wait() == "good"
    with pytest.raises(ValueError, match="bad batch"):
        runtime.wait()
    assert runtime.wait() == "good"
    plan = runtime._plan
    runtime.close()
    runtime.close()
    assert [engine.closed, plan.closed, runtime.healthy] == [1, 1, False]


@pytest.mark.parametrize("settings", [{}, {"overlaps": True}], ids=str)
def test_nothing_runs_once_it_is_closed(opened, settings):
    """Kernels would read memory that is gone."""
    runtime, engine = opened(**settings)
    runtime.launch("never waited for")
    runtime.close()
    ran = len(engine.ran)
    with pytest.raises(RuntimeError, match="closed"):
        runtime.launch("late")
    with pytest.raises(RuntimeError, match="closed"):
        runtime.profile(print)
    with pytest.raises(IndexError):
        runtime.wait()
    assert len(engine.ran) == ran


@pytest.mark.parametrize("settings", [{}, {"overlaps": True}], ids=str)
def test_an_engine_that_does_not_open_leaves_no_thread(monkeypatch, settings):
    def fail(*_, **__):
        raise ValueError("no engine")

    monkeypatch.setattr(cpu_runtime, "_open_engine", fail)
    before = threading.active_count()
    with pytest.raises(ValueError, match="no engine"):
        CpuRuntime(StubPlan(), num_blocks=1, max_num_tokens=1, max_num_logits=1, **settings)
    assert threading.active_count() == before
