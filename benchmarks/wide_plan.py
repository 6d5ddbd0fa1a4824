"""Writes a plan with the matrices of Llama-2-7B and random weights, of as many of its 32 layers as wanted.

    python benchmarks/wide_plan.py engines/wide.plan --layers 4 --weight-dtype int4
    python benchmarks/decode.py engines/wide.plan --batch 1

A step of such a model is the same work layer after layer, so how fast it reads its weights shows with a few of them.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from trtcb.builder.compiler import CompileOptions
from trtcb.builder.cpu import CpuCompiler
from trtcb.builder.presets import load_preset
from trtcb.builder.random_weights import RandomCheckpoint
from trtcb.plan_format import PlanHeader
from trtcb.plan_writer import Section, write_plan
from trtcb.spec import BuildLimits, KVDtype, WeightDtype


def main() -> None:
    """Build the plan, in a minute or so a layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--weight-dtype", choices=[kind.value for kind in WeightDtype], default="int4")
    parser.add_argument("--kv-dtype", choices=[kind.value for kind in KVDtype], default="fp8")
    arguments = parser.parse_args()

    spec = load_preset("llama-2-7b").spec
    spec = replace(spec, name=f"{spec.name}, {arguments.layers} layers", num_layers=arguments.layers)
    checkpoint = RandomCheckpoint(spec)
    limits = BuildLimits(max_batch_size=8, max_num_tokens=512, max_seq_len=2048)
    options = CompileOptions(WeightDtype(arguments.weight_dtype), KVDtype(arguments.kv_dtype), limits)
    compiler = CpuCompiler()
    compiled = compiler.compile(checkpoint, options)
    header = PlanHeader(
        target="cpu",
        fingerprint=compiled.fingerprint,
        model=spec,
        weight_dtype=options.weight_dtype.value,
        kv_dtype=options.kv_dtype,
        limits=limits,
        source={"model": checkpoint.source, "digest": checkpoint.digest},
        versions=compiled.versions,
    )
    tokenizer = (
        Section.of_bytes("tokenizer", checkpoint.assets.tokenizer_json),
        Section.of_bytes("tokenizer_config", checkpoint.assets.config_json()),
    )
    write_plan(arguments.plan, header, (*compiled.sections, *tokenizer), compiled.tensors)
    print(f"{arguments.plan}: {arguments.plan.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
