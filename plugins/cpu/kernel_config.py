"""What a set of CPU kernels is compiled for."""

from dataclasses import dataclass

from trtcb.errors import UsageError
from trtcb.spec import KVDtype, ModelSpec


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Model shape, KV format and activation type (``"fp32"`` or ``"bf16"``); raises ``UsageError`` if unsupported.

    An activation is what a product takes. What products give is of the same type, or fp32 with ``fp32_results``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    block_size: int
    kv_dtype: KVDtype
    activation: str
    fp32_results: bool = False

    def __post_init__(self) -> None:
        for name, unit, least in (
            ("head_dim", 16, 32),
            ("hidden_size", 16, 16),
            ("intermediate_size", 16, 16),
            ("block_size", 32, 32),
            ("num_heads", self.num_kv_heads or 1, 1),
            ("num_kv_heads", 1, 1),
        ):
            value = getattr(self, name)
            if value < least or value % unit:
                raise UsageError(
                    f"The CPU target needs {name} to be a multiple of {unit}, at least {least}, not {value}."
                )
        if self.activation not in ("fp32", "bf16"):
            raise UsageError(f"The CPU target computes in fp32 or bf16 activations, not {self.activation}.")

    @staticmethod
    def of(
        model: ModelSpec, kv_dtype: KVDtype, activation: str, block_size: int, *, fp32_results: bool = False
    ) -> "KernelConfig":
        """Return the configuration that a model's plan needs."""
        return KernelConfig(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            block_size=block_size,
            kv_dtype=kv_dtype,
            activation=activation,
            fp32_results=fp32_results,
        )

    @property
    def results(self) -> str:
        """Type of what products give."""
        return "fp32" if self.fp32_results else self.activation

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Width of a row of fused projections: queries, then keys, then values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
