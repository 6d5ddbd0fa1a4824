"""Times the CPU target's kernels: memory traffic for decode and row kernels, arithmetic for prefill.

python benchmarks/bench_kernels.py --kv fp8 bf16 --sequences 64 --context 256
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from trtcb.plugins.cpu import threads
from trtcb.plugins.cpu.kernels import CpuKernels, KernelConfig, PoolAddresses, allocate_pools, load_kernels
from trtcb.plugins.cpu.pools import pool_nbytes_per_block
from trtcb.plugins.cpu.sampling import Sampler
from trtcb.plugins.reference import QUANT_MAX, encode
from trtcb.spec import KVDtype


@dataclass(frozen=True, slots=True)
class Settings:
    """Sampling settings of a batch of rows."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    position: np.ndarray


def best_and_median_us(work: Callable[[], None], repeat: int) -> tuple[float, float]:
    """Microseconds of one call: the minimum (least disturbed) and the median."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e6)
    return min(times), float(np.median(times))


def report(name: str, work: Callable[[], None], repeat: int, amount: float, unit: str) -> None:
    """Print one line; ``amount`` is bytes or operations of a call, so amount / us / 1000 is G/s."""
    best, median = best_and_median_us(work, repeat)
    rate = amount / best / 1e3
    print(f"{name:34} best {best:9.1f} us  median {median:9.1f} us  {rate:7.1f} {unit}", flush=True)


def make_pools(config: KernelConfig, num_layers: int, num_blocks: int) -> list[dict[str, np.ndarray]]:
    """Pools of several layers, so that a repeated call does not find its data in the caches."""
    layers = []
    rng = np.random.default_rng(0)
    for _ in range(num_layers):
        arrays = allocate_pools(config, num_blocks)
        for name in ("k", "v"):
            values = rng.normal(size=arrays[name].shape).astype(np.float32)
            if config.kv_dtype.is_quantized:
                values *= QUANT_MAX[config.kv_dtype] / 4
                dtype = ml_dtypes.float8_e4m3fn if config.kv_dtype is KVDtype.FP8 else np.int8
                arrays[name][...] = values.astype(dtype).view(np.int8)
                arrays[f"{name}_scale"][...] = 0.01
            else:
                arrays[name][...] = encode(values, config.kv_dtype)[0]
        layers.append(arrays)
    return layers


class AttentionBench:
    """One batch of equal sequences, run over one layer after the other."""

    def __init__(
        self, kernels: CpuKernels, num_sequences: int, cached: int, new: int, layers: list[dict[str, np.ndarray]]
    ) -> None:
        config = kernels.config
        width = -(-(cached + new) // config.block_size)
        num_blocks = layers[0]["k"].shape[0]
        rng = np.random.default_rng(1)
        self.kernels = kernels
        self.tables = rng.permutation(num_blocks)[: num_sequences * width].astype(np.int32)
        self.width = width
        self.cu_q = (np.arange(num_sequences + 1) * new).astype(np.int32)
        self.positions = np.tile(np.arange(cached, cached + new), num_sequences).astype(np.int32)
        num_rows = num_sequences * new
        self.query = rng.normal(size=(num_rows, config.num_heads * config.head_dim)).astype(np.float32) / 8
        self.out = np.zeros(self.query.shape, ml_dtypes.bfloat16)
        self.plan = kernels.plan_attention(self.cu_q.ctypes.data, self.positions.ctypes.data, num_sequences, num_rows)
        arrays = (self.query, self.tables, self.positions, self.out)
        self.addresses = [array.ctypes.data for array in arrays]
        self.pools = [PoolAddresses(**{n: a.ctypes.data for n, a in arrays.items()}) for arrays in layers]
        self.layer = 0

    def __call__(self) -> None:
        """Attention of the next layer."""
        self.layer = (self.layer + 1) % len(self.pools)
        query, tables, positions, out = self.addresses
        pools = self.pools[self.layer]
        self.kernels.paged_attention(query, pools, tables, self.width, positions, self.plan, out)


def bench_attention(kernels: CpuKernels, num_sequences: int, context: int, prefill: int, repeat: int) -> None:
    """Decode at ``num_sequences x context`` and one prefill of ``prefill`` tokens."""
    config = kernels.config
    block = config.block_size
    needed = max(num_sequences * -(-context // block), 10 * -(-2048 // block), -(-prefill // block))
    per_layer = needed * pool_nbytes_per_block(config)
    layers = make_pools(config, max(2, int(3e8) // per_layer), needed)
    kv = config.kv_dtype.value
    for sequences, length in ((num_sequences, context), (10, 2048), (1, context), (1, 2048)):
        bench = AttentionBench(kernels, sequences, length - 1, 1, layers)
        nbytes = sequences * length * pool_nbytes_per_block(config) / block
        report(f"decode {sequences}x{length} {kv} parts={bench.plan.parts}", bench, repeat, nbytes, "GB/s")
    operations = 2.0 * prefill * (prefill + 1) * config.head_dim * config.num_heads
    report(f"prefill {prefill} {kv}", AttentionBench(kernels, 1, 0, prefill, layers), repeat, operations, "GF/s")


def bench_rows(kernels: CpuKernels, num_rows: int, repeat: int) -> None:
    """Time the row kernels at ``num_rows`` rows of bf16 activations."""
    config = kernels.config
    hidden, inter = config.hidden_size, config.intermediate_size
    rng = np.random.default_rng(2)
    residual = rng.normal(size=(num_rows, hidden)).astype(np.float32)
    delta = np.zeros((num_rows, hidden), ml_dtypes.bfloat16)
    gain = np.ones(hidden, np.float32)
    out = np.zeros((num_rows, hidden), ml_dtypes.bfloat16)
    gate_up = rng.normal(size=(num_rows, 2 * inter)).astype(ml_dtypes.bfloat16)
    act = np.zeros((num_rows, inter), ml_dtypes.bfloat16)
    arguments = [a.ctypes.data for a in (residual, delta, gain, out)]
    report(
        f"add_rms_norm rows={num_rows}",
        lambda: kernels.add_rms_norm(*arguments, num_rows, 1e-5, delta_is_bf16=True),
        repeat,
        num_rows * hidden * 12.0,
        "GB/s",
    )
    gate_address, act_address = gate_up.ctypes.data, act.ctypes.data
    report(
        f"swiglu rows={num_rows}",
        lambda: kernels.swiglu(gate_address, act_address, num_rows),
        repeat,
        num_rows * inter * 6.0,
        "GB/s",
    )


def bench_rope(kernels: CpuKernels, num_rows: int, repeat: int) -> None:
    """Rotation and KV write of ``num_rows`` tokens."""
    config = kernels.config
    rng = np.random.default_rng(3)
    arrays = allocate_pools(config, -(-num_rows // config.block_size))
    qkv = rng.normal(size=(num_rows, config.qkv_size)).astype(ml_dtypes.bfloat16)
    angles = rng.normal(size=(2, num_rows, config.head_dim // 2)).astype(np.float32)
    index = np.arange(num_rows, dtype=np.int32)
    query = np.zeros((num_rows, config.num_heads * config.head_dim), np.float32)
    pools = PoolAddresses(**{name: array.ctypes.data for name, array in arrays.items()})
    tail = [a.ctypes.data for a in (angles[0], angles[1], index, index, query)]
    nbytes = num_rows * (2.0 * config.qkv_size + 4.0 * config.num_heads * config.head_dim)
    qkv_address = qkv.ctypes.data
    name = f"rope_kv_write rows={num_rows} {config.kv_dtype.value}"
    report(name, lambda: kernels.rope_kv_write(qkv_address, pools, *tail, num_rows), repeat, nbytes, "GB/s")


def bench_sampling(vocab_size: int, num_rows: int, repeat: int, num_threads: int) -> None:
    """Time sampling of ``num_rows`` rows, spread like a language model's logits."""
    rng = np.random.default_rng(4)
    sampler = Sampler(vocab_size, num_threads=num_threads)
    logits = rng.normal(size=(num_rows, vocab_size)).astype(np.float32) * 3
    for name, temperature, top_k, top_p, min_p in (
        ("greedy", 0.0, 0, 1.0, 0.0),
        ("temperature", 1.0, 0, 1.0, 0.0),
        ("top_p", 0.8, 0, 0.95, 0.0),
        ("top_k+top_p+min_p", 0.8, 50, 0.95, 0.05),
    ):
        full = [np.full(num_rows, x) for x in (temperature, top_k, top_p, min_p)]
        rows = Settings(*full, np.arange(num_rows, dtype=np.uint64), np.arange(num_rows))
        label = f"sample {name} {num_rows}x{vocab_size}"
        report(label, lambda rows=rows: sampler.sample(logits.ctypes.data, rows), repeat, 4.0 * logits.size, "GB/s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", nargs="+", default=["fp32", "bf16", "fp16", "int8", "fp8"], help="KV formats")
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args(arguments)
    layer = threads.configure(args.threads)
    print(layer)
    for number, kv in enumerate(args.kv):
        shape = (args.heads, args.kv_heads, args.head_dim, args.hidden, args.intermediate, args.block_size)
        config = KernelConfig(*shape, KVDtype(kv), "bf16")
        start = time.perf_counter()
        kernels = load_kernels(config, num_threads=layer.num_threads)
        print(f"kernels for {kv} loaded in {time.perf_counter() - start:.1f} s")
        bench_attention(kernels, args.sequences, args.context, args.prefill, args.repeat)
        for num_rows in (1, args.sequences, 512):
            bench_rope(kernels, num_rows, args.repeat)
            if number == 0:
                bench_rows(kernels, num_rows, args.repeat)
    for num_rows in (1, args.sequences):
        bench_sampling(args.vocab, num_rows, args.repeat, layer.num_threads)


if __name__ == "__main__":
    main()
