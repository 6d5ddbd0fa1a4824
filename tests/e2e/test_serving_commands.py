"""``trtcb serve``, ``generate`` and ``chat`` on a plan whose runtime is the simulated one."""

import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.request

import openai
import orjson
import pytest

from tests.e2e.fake_llm import MODEL
from tests.e2e.tiny_tokenizer import tiny_assets, tiny_tokenizer
from trtcb.cli import main as cli
from trtcb.errors import OutOfMemoryError
from trtcb.executor import open_runtime
from trtcb.executor.request import SamplingParams
from trtcb.executor.sim_runtime import SimRuntime, expected_tokens
from trtcb.plan import PlanHeader, Section, write_plan
from trtcb.spec import BuildLimits, KVDtype

TOKENIZER = tiny_tokenizer()
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "fake.plan"
    header = PlanHeader(
        target="cpu",
        fingerprint={},
        model=MODEL,
        weight_dtype="fp32",
        kv_dtype=KVDtype.FP32,
        limits=BuildLimits(max_batch_size=8, max_num_tokens=256, max_seq_len=256, block_size=32),
        source={"model": "fake", "digest": "0" * 64},
        versions={},
    )
    assets = tiny_assets()
    sections = [
        Section.of_bytes("tokenizer", assets.tokenizer_json),
        Section.of_bytes("tokenizer_config", assets.config_json()),
    ]
    write_plan(path, header, sections, [])
    return path


@pytest.fixture
def configs():
    """What the commands of a test opened their engines with."""
    return []


@pytest.fixture
def run(monkeypatch, capsys, configs):
    """Run a command in this process; return its exit code and what it printed."""

    def open_sim(plan, config):
        configs.append(config)
        return SimRuntime(num_blocks=config.num_blocks or 64, block_size=config.block_size)

    monkeypatch.setattr(open_runtime, "open_runtime", open_sim)

    def run(*arguments, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return caught.value.code, printed.out, printed.err

    return run


def expected_text(ids, count):
    ids = list(ids)
    return TOKENIZER.decode(ids + expected_tokens(ids, GREEDY, count))[len(TOKENIZER.decode(ids)) :]


def test_generate_prints_the_text_and_how_fast_it_came(run, plan):
    code, out, err = run("generate", plan, "Once upon", "--max-tokens", 12)
    assert (code, out) == (0, expected_text(TOKENIZER.encode("Once upon"), 12) + "\n")
    assert err.startswith("9 prompt tokens, 12 generated in ")
    assert "tok/s" in err


def test_generate_reads_the_prompt_from_standard_input_and_stops_at_a_text(run, plan):
    text = expected_text(TOKENIZER.encode("Once upon"), 40)
    stop = next(char for char in text[5:] if char.isascii())
    code, out, _ = run("generate", plan, "-", "--max-tokens", 40, "--stop", stop, stdin="Once upon")
    assert (code, out) == (0, text[: text.index(stop)] + "\n")


def test_generate_can_use_the_chat_template(run, plan):
    code, out, err = run("generate", plan, "Hi", "--chat", "--max-tokens", 5)
    ids = TOKENIZER.encode_chat([{"role": "user", "content": "Hi"}])
    assert (code, out) == (0, TOKENIZER.decode(expected_tokens(ids, GREEDY, 5)) + "\n")
    assert err.startswith(f"{len(ids)} prompt tokens")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_engine_is_opened_as_asked(run, plan, configs, command):
    code, _, err = run(command, plan, "--cpu-engine", "portable", "--threads", 1, stdin="Hi")
    assert code == 0, err
    run(command, plan, stdin="Hi")
    assert [(config.cpu_engine, config.threads) for config in configs] == [("portable", 1), ("auto", None)]


def test_chat_remembers_forgets_and_leaves(run, plan):
    said = "Hi\n/reset\nHi\n\nMore\n/quit\n"
    code, out, _ = run("chat", plan, "--temperature", 0, "--max-tokens", 6, "--system", "Be brief.", stdin=said)
    assert code == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    first = TOKENIZER.decode(expected_tokens(TOKENIZER.encode_chat(messages), GREEDY, 6))
    assert out.count(first) == 2
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "More"}]
    assert TOKENIZER.decode(expected_tokens(TOKENIZER.encode_chat(messages), GREEDY, 6)) in out


def test_chat_survives_a_conversation_that_outgrew_the_context(run, plan):
    code, out, _ = run("chat", plan, "--max-tokens", 4, stdin="x" * 300 + "\nHi\n")
    assert code == 0
    assert "/reset begins anew" in out


def test_mistakes_are_one_sentence_and_an_exit_code(run, plan, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        cases = {
            ("serve",): (2, "--model"),
            ("serve", tmp_path / "none.plan"): (3, "none.plan"),
            ("serve", plan, "--port", busy): (7, "taken"),
            ("serve", plan, "--host", "0.0.0.0"): (2, "--insecure"),
            ("serve", plan, "--scheduler-policy", "max_utilisation"): (2, "scheduler_policy"),
            ("serve", plan, "--max-seq-len", 4096): (2, "256"),
            ("serve", plan, "--tensor-parallel-size", 2): (2, "parallelism"),
            ("serve", plan, "--api-key-file", tmp_path / "none"): (2, "key file"),
            ("generate", plan, ""): (2, "empty"),
            ("generate", plan, "x" * 300): (1, "300 tokens"),
            ("generate", plan, "Hi", "--cpu-engine", "onednn"): (2, "'whole_step'"),
        }
        for arguments, (expected, word) in cases.items():
            code, _, err = run(*arguments)
            assert code == expected, (arguments, err)
            assert word in err, (arguments, err)
            assert "Traceback" not in err


def test_verify_header_trusts_the_bodies_of_a_plan(run, plan, tmp_path, monkeypatch):
    data = bytearray(plan.read_bytes())
    at = data.index(b"assistant:")
    data[at : at + 10] = b"ASSISTANT:"
    damaged = tmp_path / "damaged.plan"
    damaged.write_bytes(data)
    code, _, err = run("serve", damaged, "--port", 0)
    assert (code, "tokenizer" in err) == (4, True)

    # Trusted, it gets as far as the runtime.
    def refuse(plan, config):
        raise OutOfMemoryError("got here")

    monkeypatch.setattr(open_runtime, "open_runtime", refuse)
    assert run("serve", damaged, "--port", 0, "--verify", "header")[0] == 5


def test_serve_shows_where_its_settings_come_from(run, plan, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("max_queue_size: 7\nport: 1234\n")
    code, out, _ = run("serve", plan, "--config", file, "--port", 4321, "--show-config")
    lines = {line.split(" = ")[0].strip(): line for line in out.splitlines()}
    assert code == 0
    assert "4321" in lines["port"]
    assert lines["port"].endswith("(flag)")
    assert lines["max_queue_size"].endswith(f"({file})")
    assert lines["host"].endswith("(default)")


def test_options_beyond_upstream_are_flags_and_settings(run, plan, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("queue_policy: wfq\ntenant_weights: {key0: 3, ada: 0.5}\n")
    flags = ["--watermark", 0.05, "--stall-free", "--max-prefill-tokens", 64, "--victim-policy", "cheapest"]
    code, out, _ = run("serve", plan, "--config", file, *flags, "--show-config")
    lines = {line.split(" = ")[0].strip(): line.split(" = ")[1] for line in out.splitlines()}
    assert code == 0
    for name in ("watermark", "stall_free", "max_prefill_tokens", "victim_policy"):
        assert lines[name].endswith("(flag)"), name
    assert "key0" in lines["tenant_weights"]
    code, out, _ = run("serve", plan, "--queue-policy", "priority", "--priority-ageing", 60, "--show-config")
    assert code == 0
    assert "60" in next(line for line in out.splitlines() if line.startswith("priority_ageing_s"))
    code, _, err = run("serve", plan, "--port", 0, "--priority-ageing", 60)
    assert code == 2
    assert "for queue_policy 'priority'" in err


SERVE = textwrap.dedent(
    """
    from trtcb.cli.main import main
    from trtcb.executor import open_runtime
    from trtcb.executor.sim_runtime import SimRuntime

    open_runtime.open_runtime = lambda plan, config: SimRuntime(num_blocks=64, block_size=config.block_size)
    main()
    """
)


def test_serve_says_what_it_serves_and_ends_with_a_signal(plan, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-key\n")
    arguments = ["serve", plan, "--port", 0, "--api-key-file", keys, "--served-model-name", "mine", "--max-num-seqs", 4]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        banner = [process.stdout.readline().rstrip() for _ in range(7)]
        facts = {line.split()[0]: " ".join(line.split()[1:]) for line in banner[1:]}
        assert banner[0] == "trtcb is ready"
        assert facts["model"] == "mine"
        assert facts["pool"] == "64 blocks of 32 = 2048 tokens"
        assert facts["auth"] == "1 key"
        assert facts["policy"].startswith("guaranteed_no_evict")
        api = openai.OpenAI(base_url=facts["url"], api_key="secret-key", max_retries=0)
        answer = api.completions.create(model="mine", prompt="Once upon", max_tokens=8, temperature=0)
        assert answer.choices[0].text == expected_text(TOKENIZER.encode("Once upon"), 8)
        ready = urllib.request.urlopen(facts["url"].removesuffix("/v1") + "/ready", timeout=5)
        assert orjson.loads(ready.read()) == {"status": "ready"}
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=10)
        assert process.returncode == 0, log
        assert "secret-key" not in log
        assert "Once upon" not in log
    finally:
        process.kill()
        process.wait()
