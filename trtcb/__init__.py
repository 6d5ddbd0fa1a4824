"""trtcb: an ahead-of-time engine builder and a readable in-flight-batching executor with faithful capacity policies.

``LLM(plan).generate(prompts, params)`` and ``AsyncLLM`` run a plan without HTTP; the command ``trtcb`` builds and
serves.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtcb.executor.llm import LLM, AsyncLLM
    from trtcb.executor.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, because `import trtcb` is part of every command's start-up and numba alone costs 0.4 s.
    if name in ("LLM", "AsyncLLM"):
        from trtcb.executor import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from trtcb.executor.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'trtcb' has no attribute {name!r}")
