"""Thread layers, each in a process of its own: the choice is made once per process."""

import json
import os
import subprocess
import sys

import pytest

CPUS = len(os.sched_getaffinity(0))


def run(code: str, **environment: str) -> dict:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**env, **environment}
    )
    return json.loads(done.stdout.splitlines()[-1])


CONFIGURE = """
import json, os, sys
from trtcb.plugins.cpu import threads
assert "numba" not in sys.modules
layer = threads.configure({threads})
import numba
from trtcb.plugins.cpu.specialize import compile_launcher
out = dict(name=layer.name, threads=layer.num_threads, note=layer.note, numba=numba.get_num_threads(),
           layer=numba.threading_layer(), spin=os.environ.get("GOMP_SPINCOUNT"))
print(json.dumps(out))
"""


def test_all_cpus_by_default():
    out = run(CONFIGURE.format(threads=""))
    assert (out["threads"], out["numba"]) == (CPUS, CPUS)
    assert out["layer"] == out["name"]
    assert bool(out["note"]) == (out["name"] != "omp")
    assert out["spin"] == "10000"


def test_one_thread_and_a_wait_policy_of_ones_own():
    out = run(CONFIGURE.format(threads="1"), OMP_WAIT_POLICY="PASSIVE")
    assert (out["threads"], out["numba"], out["spin"]) == (1, 1, None)


SECOND = """
import json
from trtcb.errors import UsageError
from trtcb.plugins.cpu import threads
threads.configure(1)
out = [threads.configure().num_threads]
try: threads.configure(2)
except UsageError as error: out.append(str(error))
print(json.dumps(out))
"""


@pytest.mark.skipif(CPUS < 2, reason="needs two CPUs")
def test_a_second_engine_takes_what_the_first_one_left_and_more_is_refused():
    number, refusal = run(SECOND)
    assert number == 1
    assert "start another process" in refusal


FALLBACK = """
import json, sys
sys.modules["numba.np.ufunc.omppool"] = None  # as if libgomp were missing
from trtcb.plugins.cpu import threads
layer = threads.configure()
from trtcb.plugins.cpu.kernels import KernelConfig, load_kernels
from trtcb.spec import KVDtype
import numba, numpy as np
kernels = load_kernels(KernelConfig(9, 3, 64, 128, 96, 32, KVDtype.FP8, "fp32"))
x, out = np.ones((2000, 128), np.float32), np.zeros((2000, 128), np.float32)
gain = np.ones(128, np.float32)
kernels.rms_norm(x.ctypes.data, gain.ctypes.data, out.ctypes.data, 2000, 0.0)
print(json.dumps(dict(name=layer.name, layer=numba.threading_layer(), note=layer.note, ok=bool((out == 1).all()))))
"""


def test_without_libgomp_kernels_run_on_another_layer_and_say_so():
    out = run(FALLBACK)
    assert out["name"] == out["layer"] in ("tbb", "workqueue")
    assert "libgomp1" in out["note"]
    assert out["ok"]


@pytest.mark.parametrize("threads", [0, -1, CPUS + 1])
def test_a_number_that_cannot_be_had_is_refused(threads):
    out = run(
        "import json\nfrom trtcb.errors import UsageError\nfrom trtcb.plugins.cpu import threads\n"
        f"try: threads.configure({threads})\nexcept UsageError as error: print(json.dumps(str(error)))"
    )
    assert f"1 to {CPUS}" in out


TORCH = """
import json
from trtcb.plugins.cpu import threads
{first}
layer = threads.configure()
import torch
torch.ones(100, 100) @ torch.ones(100, 100)
print(json.dumps(dict(gomp=threads._num_gomp_runtimes(), name=layer.name, note=layer.note)))
"""


def test_torch_shares_the_runtime_if_it_comes_second_and_a_note_tells_if_it_does_not():
    second = run(TORCH.format(first=""))
    if second["name"] != "omp":
        pytest.skip("no libgomp on this system")
    assert (second["gomp"], second["note"]) == (1, "")
    first = run(TORCH.format(first="import torch"))
    assert ("earlier" in first["note"]) == (first["gomp"] > 1)
