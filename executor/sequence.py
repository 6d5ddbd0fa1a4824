"""One request while the engine owns it: its tokens, how far they are computed, and what memory it holds."""

from array import array
from typing import TYPE_CHECKING

from trtcb.executor.request import Request

Rank = tuple[float, float, int]  # class, place within it, and the number of the arrival, which makes it unique

if TYPE_CHECKING:
    from trtcb.executor.detokenizer import TextOutput
    from trtcb.executor.sampling_state import SamplingState


class Sequence:
    """Mutable state of one request. The scheduler owns the memory fields, the engine core the rest.

    There are no phases: a sequence has ``num_computed < num_tokens`` and each step computes some of the difference,
    whether it is a first prompt, the rest of one, what a prefix hit left over, or a restart after a pause.

    ``num_computed`` and ``num_tokens`` count what steps in flight compute and draw, ``token_ids`` are those known.
    """

    __slots__ = (
        "arrival_s",
        "blocks",
        "end_token_ids",
        "ended",
        "first_scheduled_s",
        "first_token_s",
        "generating",
        "keys",
        "last_token_s",
        "max_computed",
        "max_len",
        "num_cached_tokens",
        "num_computed",
        "num_pauses",
        "num_prompt_tokens",
        "num_published",
        "number",
        "rank",
        "request",
        "room",
        "sampling",
        "seed",
        "slot",
        "text",
        "token_ids",
    )

    def __init__(self, request: Request, *, max_tokens: int, seed: int, arrival_s: float) -> None:
        self.request = request
        self.seed = seed
        self.arrival_s = arrival_s
        self.token_ids = array("i", request.prompt_token_ids)  # prompt and output; what was streamed stays
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_len = self.num_prompt_tokens + max_tokens
        self.number = 0  # of its arrival; the scheduler counts them
        self.rank: Rank = (-request.priority, 0.0, 0)  # place in the active list, given by the queue policy
        self.ended = False  # a row of it that is still in flight is dropped

        self.slot = -1  # row of the slot table; -1 while nothing is held
        self.blocks: list[int] = []
        self.room = 0  # tokens that it can still compute before it needs another block or is at its limit
        self.num_computed = 0
        self.generating = False

        self.keys: list[bytes] = []  # hash chain over its full blocks; survives pauses, as the tokens do
        self.num_published = 0
        self.num_cached_tokens = 0  # prompt tokens that its first start found in the pool
        self.num_pauses = 0
        self.max_computed = 0  # most tokens it ever had computed: what lies below it after a pause is recomputation

        self.end_token_ids: frozenset[int] = frozenset()
        self.text: TextOutput | None = None
        self.sampling: SamplingState | None = None  # None: its logits are drawn from as they are
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = 0.0

    def __lt__(self, other: "Sequence") -> bool:
        return self.rank < other.rank

    @property
    def request_id(self) -> str:
        """The request's own name."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far. Of a generating sequence, all but the last one are computed."""
        return self.num_computed + 1 if self.generating else len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Output tokens known so far, over all pauses."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def started(self) -> bool:
        """Whether it holds a slot and blocks."""
        return self.slot >= 0

    @property
    def is_at_limit(self) -> bool:
        """Whether no further token is allowed."""
        return len(self.token_ids) >= self.max_len
