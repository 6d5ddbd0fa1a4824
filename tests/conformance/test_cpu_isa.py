"""The vector vocabulary means the same on narrower instruction sets."""

import os
import platform
import subprocess
import sys

import pytest

from trtcb.plugins.cpu.isa import accumulators


def digest(**environment: str) -> list[str]:
    command = [sys.executable, "-m", "tests.conformance.attention_digest"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return done.stdout.split()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates AVX2 on a wider x86")
def test_avx2_computes_the_same_bits():
    if accumulators() == 6:
        pytest.skip("this CPU has no wider vectors than AVX2")
    wide = digest()
    narrow = digest(NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt")
    assert (wide[0], narrow[0]) == ("24", "6")  # other tile shapes, too
    assert narrow[1] == wide[1]
