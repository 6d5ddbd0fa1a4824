"""The call list of one step: what a compiler leaves of the ONNX graph, and what call-by-call runtimes bind.

A program is straight-line code over named row-major values, which are written again layer after layer. Each is
``[rows, width]`` where ``rows`` is the number of tokens of the step (``"tokens"``) or of rows that want logits
(``"logits"``). Operators:

===================  ================  =============  ==============================================================
op                   inputs            outputs        meaning
===================  ================  =============  ==============================================================
``embedding``        --                residual fp32  rows of the weight by ``input_ids``
``rms_norm``         residual          hidden         normalise with ``eps``; the weight is the gain
``add_rms_norm``     residual, delta   hidden         residual += delta in place, then the norm
``linear``           x                 y              ``x @ weight.T``, weight ``[N, K]``; int8 with its scales ``[N]``;
                                                      int4: codes ``[N, K / 2]``, scales and zeros ``[N, K / 32]``
``quantize``         x fp32            y int8         rotate rows and round them, see ``plugins/cpu/quantized.py``;
                                                      to int8_g32 in groups, see ``plugins/cpu/grouped.py``
``rope_kv_write``    qkv               query fp32     rotate q and k by tables cos and sin; write k and v of ``layer``
``paged_attention``  query             context        causal attention of ``layer`` over the pool
``swiglu``           gate, up in a row  hidden        ``silu(gate) * up``
``gather_rows``      residual, delta   residual       ``(residual + delta)[logit_index]``
===================  ================  =============  ==============================================================

``rope_kv_write`` folds ``1/sqrt(head_dim)`` into the query. The last ``linear`` writes ``logits`` in fp32.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Rows = Literal["tokens", "logits"]


@dataclass(frozen=True, slots=True)
class Value:
    """One intermediate of the step: ``[rows, width]`` of a type.

    ``fp32``, ``bf16``, ``int8`` with a scale a row, or ``int8_g32`` with a scale for each 32 elements of a row.
    """

    name: str
    rows: Rows
    width: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Call:
    """One operator application. ``weights`` are tensor names in the plan's weight section."""

    op: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    attributes: dict[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Program:
    """All calls of one step in execution order; the last call writes the value named ``logits``."""

    calls: tuple[Call, ...]
    values: tuple[Value, ...]

    def value(self, name: str) -> Value:
        """Look a value up by name; ``KeyError`` if the program has none such."""
        for value in self.values:
            if value.name == name:
                return value
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a plan section."""
        return {
            "values": [[v.name, v.rows, v.width, v.dtype] for v in self.values],
            "calls": [
                {"op": c.op, "inputs": c.inputs, "outputs": c.outputs, "weights": c.weights, "attributes": c.attributes}
                for c in self.calls
            ],
        }

    @staticmethod
    def from_json(data: Any) -> "Program":
        """Inverse of :meth:`to_json`; raises ``TypeError``, ``ValueError`` or ``KeyError`` on foreign data."""
        return Program(
            calls=tuple(
                Call(_text(c["op"]), _texts(c["inputs"]), _texts(c["outputs"]), _texts(c["weights"]), _numbers(c))
                for c in data["calls"]
            ),
            values=tuple(_value(*fields) for fields in data["values"]),
        )


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise TypeError(f"{data!r} is not a name")
    return data


def _texts(data: Any) -> tuple[str, ...]:
    if not isinstance(data, list | tuple):
        raise TypeError(f"{data!r} is not a list of names")
    return tuple(map(_text, data))


def _numbers(call: Any) -> dict[str, int | float]:
    attributes = call["attributes"]
    if not isinstance(attributes, dict) or any(type(number) not in (int, float) for number in attributes.values()):
        raise TypeError(f"{attributes!r} are not attributes")
    return attributes


def _value(name: Any, rows: Any, width: Any, dtype: Any) -> Value:
    if rows not in ("tokens", "logits") or type(width) is not int or width < 1:
        raise ValueError(f"value {name!r} has no shape")
    return Value(_text(name), rows, width, _text(dtype))
