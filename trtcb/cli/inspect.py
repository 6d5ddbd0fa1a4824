"""``trtcb inspect``: what a plan says about itself."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from trtcb.errors import PlanError
from trtcb.memory import format_size
from trtcb.plan import Plan
from trtcb.program import Call, Program
from trtcb.spec import KVDtype


def inspect(
    plan: Annotated[Path, typer.Argument(help="A plan file.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check the SHA-256 of every section too.")] = False,
    calls: Annotated[bool, typer.Option("--calls", help="List every call of the program.")] = False,
) -> None:
    """Show what is inside a plan: header, sections, and the calls of one step."""
    with Plan.open(plan, verify="full" if verify else "header") as opened:
        program = _program(opened)
        if as_json:
            json.dump(_facts(opened, program), sys.stdout, indent=2)
            print()
        else:
            _print(opened, program, list_calls=calls)
            if verify:
                print("\nEvery section matches its SHA-256.")


def _program(plan: Plan) -> Program | None:
    if not plan.has_section("program"):
        return None
    try:
        return Program.from_json(json.loads(bytes(plan.section("program"))))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlanError(f"{plan.path} cannot be used: section 'program' is not a call list ({error})") from None


def _facts(plan: Plan, program: Program | None) -> dict[str, Any]:
    header = plan.header
    return {
        "path": str(plan.path),
        "size": plan.size,
        **header.to_json(),
        "num_params": header.model.num_params,
        "kv_bytes_per_token": header.model.kv_bytes_per_token(header.kv_dtype),
        "sections": [{"name": s.name, "offset": s.offset, "size": s.size, "sha256": s.sha256} for s in plan.sections],
        "num_tensors": len(plan.tensors),
        "network": _network(plan),
        "program": None if program is None else {"num_calls": len(program.calls), "calls_by_op": _by_op(program)},
    }


def _print(plan: Plan, program: Program | None, *, list_calls: bool) -> None:
    header, model = plan.header, plan.header.model
    per_token = model.kv_bytes_per_token(header.kv_dtype)
    share = per_token / model.kv_bytes_per_token(KVDtype.FP16)
    limits = header.limits
    rows = {
        "plan": f"{plan.path}  {format_size(plan.size)}",
        "target": f"{header.target}  {_pairs(header.fingerprint)}",
        "model": f"{model.name}  {model.num_params / 1e6:,.1f} M parameters, vocabulary {model.vocab_size:,}",
        "shape": f"{model.num_layers} layers, hidden {model.hidden_size}, inner {model.intermediate_size}, "
        f"{model.num_heads} query and {model.num_kv_heads} KV heads of {model.head_dim}",
        "weights": f"{header.weight_dtype}  {len(plan.tensors)} tensors",
        "KV cache": f"{header.kv_dtype.value}  {per_token:,} bytes a token ({share:.3f} of fp16)",
        "limits": f"batch {limits.max_batch_size}, {limits.max_num_tokens} tokens a step, "
        f"sequences of {limits.max_seq_len} tokens, blocks of {limits.block_size}",
        "source": _pairs(header.source),
        "built with": _pairs(header.versions),
    }
    for name, value in rows.items():
        print(f"{name:<11} {value}".rstrip())
    print("\nsection              offset          size  sha256")
    for section in plan.sections:
        print(f"{section.name:<16} {section.offset:>10}  {format_size(section.size):>12}  {section.sha256[:16]}")
    if program is not None:
        _print_program(program, list_calls=list_calls)
    network = _network(plan)
    if network is not None:
        _print_network(network)


def _network(plan: Plan) -> dict[str, Any] | None:
    """What the compiler found in the network of an engine; None for a plan without one."""
    if not plan.has_section("network"):
        return None
    try:
        network: dict[str, Any] = json.loads(bytes(plan.section("network")))
        if not all(type(count) is int for count in network["layers"].values()):
            raise ValueError("layers are counted")
        if not all(isinstance(shapes, list) for profile in network["profiles"] for shapes in profile.values()):
            raise ValueError("a profile has lists of shapes")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(f"{plan.path} cannot be used: section 'network' is not one ({error})") from None
    return network


def _print_network(network: dict[str, Any]) -> None:
    print(f"\nnetwork: {sum(network['layers'].values()):,} layers")
    for kind, count in network["layers"].items():
        print(f"  {kind:<20} {count:>4}")
    for index, profile in enumerate(network["profiles"]):
        print(f"\nprofile {index}: least, likeliest, greatest shape")
        for name, shapes in profile.items():
            if not name.startswith("layers."):
                print(f"  {name:<20} {', '.join(str(shape) for shape in shapes)}")


def _print_program(program: Program, *, list_calls: bool) -> None:
    print(f"\nprogram: {len(program.calls)} calls a step")
    for op, count in _by_op(program).items():
        print(f"  {op:<20} {count:>4}")
    if list_calls:
        print()
        for index, call in enumerate(program.calls):
            print(f"  {index:>4}  {_line(call)}")


def _line(call: Call) -> str:
    given = ", ".join((*call.inputs, *call.weights))
    extra = f"  {_pairs({k: str(v) for k, v in call.attributes.items()})}" if call.attributes else ""
    return f"{', '.join(call.outputs)} = {call.op}({given}){extra}"


def _by_op(program: Program) -> dict[str, int]:
    return dict(Counter(call.op for call in program.calls))


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
