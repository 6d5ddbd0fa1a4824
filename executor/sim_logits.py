"""Logits for the runtime without a model: noise from a hash, and above it the token that the hash is.

Edits are applied twice, on purpose: from a batch's packed arrays, as a runtime must, and from a request's parameters,
as they are defined. The token law holds one against the other.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from trtcb.executor.request import SamplingParams
from trtcb.executor.runtime import Float32, Int32, LogitEdits, StepLogprobs

_SPREAD = 4.0  # of the noise
_LEAD = 0.75  # of the favourite over all noise: less than most penalties


def pseudo_logits(digest: bytes, favourite: int, vocab_size: int) -> Float32:
    """Make a row ``[vocab_size]`` whose largest logit is the favourite's."""
    noise = np.frombuffer(hashlib.shake_128(digest).digest(4 * vocab_size), "<u4")
    logits = (noise * (_SPREAD / 2**32) - _SPREAD / 2).astype(np.float32)
    logits[favourite] = _SPREAD / 2 + _LEAD
    return logits


def edited(logits: Float32, edits: LogitEdits | None, row: int) -> Float32:
    """Return a row's logits with a step's edits of row number ``row`` applied."""
    if edits is None:
        return logits
    logits = logits.copy()
    its = slice(edits.bias_start[row], edits.bias_start[row + 1])
    np.add.at(logits, edits.bias_ids[its], edits.bias[its])
    its = slice(edits.token_start[row], edits.token_start[row + 1])
    seen, counts = edits.token_ids[its], edits.output_counts[its]
    values = logits[seen]
    values = np.where(values > 0, values / edits.repetition[row], values * edits.repetition[row])
    values -= edits.frequency[row] * counts.astype(np.float32)
    logits[seen] = np.where(counts > 0, values - edits.presence[row], values)
    return logits


def best_after_edits(
    logits: Float32, tokens: Sequence[int], num_prompt: int, params: SamplingParams, eos_token_ids: Collection[int]
) -> int:
    """Apply a request's parameters one token at a time, in place, and return the best token."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    for token, bias in params.logit_bias:
        logits[token] += np.float32(bias)
    if len(tokens) - num_prompt < params.min_tokens:
        logits[[end for end in ends if end < len(logits)]] = -np.inf
    output = Counter(tokens[num_prompt:])
    for token in set(tokens):
        factor = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= np.float32(params.frequency_penalty) * np.float32(output[token])
        logits[token] -= np.float32(params.presence_penalty if output[token] else 0)
    return int(logits.argmax())


def log_softmax(logits: Float32) -> Float32:
    """Log-probabilities of a row."""
    shifted = logits - logits.max()
    logprobs: Float32 = shifted - np.log(np.exp(shifted).sum())
    return logprobs


def step_logprobs(logits: Sequence[Float32], tokens: Int32, counts: Int32 | None) -> StepLogprobs | None:
    """Tell of a step's rows what ``counts`` (``SamplingRows.num_logprobs``) asks for."""
    if counts is None:
        return None
    rows = [log_softmax(row) for row in logits]
    width = max(0, int(counts.max(initial=0)))
    best = [np.argsort(-row, kind="stable")[:width] for row in rows]
    return StepLogprobs(
        drawn=np.array([row[token] for row, token in zip(rows, tokens, strict=True)], np.float32),
        top_ids=np.array(best, np.int32).reshape(len(rows), -1),
        top=np.array([row[ids] for row, ids in zip(rows, best, strict=True)], np.float32).reshape(len(rows), -1),
    )
