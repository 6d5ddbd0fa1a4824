"""From a step's logits to its tokens, on the CPU, whichever engine computed them."""

from trtcb.executor.last_tokens import LastTokens
from trtcb.executor.runtime import Batch, Int32, StepLogprobs, StepOutput
from trtcb.plugins.cpu.logits import LogitEditor
from trtcb.plugins.cpu.sampling import Sampler


class TokenDrawer:
    """Edits logits, samples, tells logprobs, and remembers what was drawn. Sees all steps of an engine in order."""

    def __init__(self, vocab_size: int) -> None:
        self._sampler = Sampler(vocab_size)
        self._editor = LogitEditor(vocab_size)
        self._last_tokens = LastTokens()

    def input_ids(self, batch: Batch) -> Int32:
        """Input ids ``[T]`` of a step, all of them known."""
        return self._last_tokens.input_ids(batch)

    def draw(self, batch: Batch, logits: int) -> StepOutput:
        """Draw from fp32 ``[NL, vocab]`` at an address, which are left as they were; -1 where they are not numbers."""
        sampling = batch.sampling
        if sampling.edits is None:
            tokens = self._sampler.sample(logits, sampling)
        else:
            with self._editor.edited(logits, sampling.edits):
                tokens = self._sampler.sample(logits, sampling)
        self._last_tokens.drew(batch, tokens)
        if sampling.num_logprobs is None:
            return StepOutput(tokens)
        return StepOutput(tokens, StepLogprobs(*self._editor.logprobs(logits, tokens, sampling.num_logprobs)))
