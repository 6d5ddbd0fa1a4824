"""What is compiled for other instruction sets than this CPU's, and that it means the same."""

import os
import platform
import subprocess
import sys

import pytest
from numba.core.registry import cpu_target

from trtcb.plugins.cpu.isa import accumulators
from trtcb.plugins.cpu.matrix_unit import is_usable

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for other x86 processors")

AVX2 = "+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt"
VNNI = f"{AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni"


def printed_by(module: str, cpu: str | None = None, features: str = "") -> list[str]:
    """What a module of these tests prints, compiling for this CPU or another."""
    other = {} if cpu is None else {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-m", f"tests.conformance.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **other})
    return done.stdout.split()


def without_matrix_unit() -> tuple[str, str]:
    """This CPU's name and features but for that unit."""
    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    return name, ",".join(feature for feature in features.split(",") if not feature.startswith("+amx"))


def test_int8_products_use_the_widest_instructions():
    assert printed_by("wide_product", "haswell", AVX2) == ["vpmaddwd"]
    assert printed_by("wide_product", "znver4", VNNI) == ["vpdpbusd"]  # multiplies and adds at once


def test_int4_products_use_the_widest_instructions():
    assert printed_by("group_product", "haswell", AVX2) == ["vpmaddubsw", "vpmaddwd"]
    assert printed_by("group_product", "znver4", VNNI) == ["vpdpbusd"]


def test_avx2_computes_the_same_bits():
    if accumulators() == 6:
        pytest.skip("this CPU has no wider vectors than AVX2")
    wide = printed_by("attention_digest", *without_matrix_unit())
    narrow = printed_by("attention_digest", "haswell", AVX2)
    assert (wide[0], narrow[0]) == ("24", "6")  # other tile shapes, too
    assert narrow[1:] == wide[1:]


def test_the_matrix_unit_computes_what_is_exact_in_bf16_alone():
    if not is_usable():
        pytest.skip("this CPU has no matrix unit that multiplies bf16")
    _, fp8, fp16 = printed_by("attention_digest")
    _, fp8_in_vectors, fp16_in_vectors = printed_by("attention_digest", *without_matrix_unit())
    assert fp16 == fp16_in_vectors
    assert fp8 != fp8_in_vectors


@pytest.mark.parametrize("kernels", [("fp32", "int8", "fp8"), ("64x128", "96x64", "33x192")])
def test_kernels_of_several_processes_do_not_lend_each_other_code(tmp_path, kernels):
    """The same functions of shared modules, made for other constants, get the same names from numba in each process."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for names in (*((kernel,) for kernel in kernels), kernels):
        command = [sys.executable, "-m", "tests.conformance.kernels_of_processes", *names]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.split() == ["True"] * len(names)
