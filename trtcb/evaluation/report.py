"""An evaluation as text and as plain values for JSON."""

from typing import Any

from trtcb.evaluation.divergence import Divergence
from trtcb.evaluation.drift import CLEAR_GAP, Drift
from trtcb.evaluation.evaluation import Evaluation, Needle
from trtcb.evaluation.needle import ANSWERS
from trtcb.plan_format import PlanHeader

_QUARTILES = {"lower quartile": 0.25, "median": 0.5, "upper quartile": 0.75}


def types_of(header: PlanHeader) -> str:
    """What a plan computes in, in words."""
    return f"weights {header.weight_dtype}, KV {header.kv_dtype.value}"


def short_form(drift: Drift | None) -> str:
    """One line of the most important figures."""
    if drift is None:
        return "nothing to compare with"
    return (
        f"top-1 {drift.top1:.1%}, KL {drift.mean_kl:.5f}, "
        f"perplexity {drift.plan.perplexity:.3f} ({drift.perplexity_ratio - 1:+.2%}), over {drift.num_tokens:,} tokens"
    )


def text_report(found: Evaluation) -> str:
    """Tables of everything that was measured."""
    parts = [_text_table(found)]
    if found.needles:
        parts.append(_needle_table(found.needles))
    if found.divergence is not None:
        parts.append(_divergence_table(found.divergence))
    return "\n\n".join(parts)


def to_json(found: Evaluation) -> dict[str, Any]:
    """The same with every digit, and the parts that the tables sum up."""
    drift = found.drift
    return {
        "num_tokens": found.likelihood.num_tokens,
        "perplexity": found.likelihood.perplexity,
        "drift": None if drift is None else _drift_json(drift),
        "needles": [_needle_json(needle) for needle in found.needles],
        "divergence": None if found.divergence is None else _divergence_json(found.divergence),
    }


def _text_table(found: Evaluation) -> str:
    rows = [("tokens scored", f"{found.likelihood.num_tokens:,}"), ("perplexity", f"{found.likelihood.perplexity:.4f}")]
    if (drift := found.drift) is not None:
        clear = "no such token" if drift.top1_clear is None else f"{drift.top1_clear:.2%}"
        rows += [
            ("  reference", f"{drift.reference.perplexity:.4f} (plan {drift.perplexity_ratio - 1:+.3%})"),
            ("mean KL", f"{drift.mean_kl:.5f} nats"),
            ("top-1", f"{drift.top1:.2%}"),
            ("  where clear", f"{clear} (the reference's best logit leads by {CLEAR_GAP} or more)"),
            ("  near-ties", f"{drift.near_ties:.2%} of the tokens are not clear"),
        ]
    return "\n".join(f"{name:<16} {value}" for name, value in rows)


def _needle_table(needles: tuple[Needle, ...]) -> str:
    lines = [f"needle: facts whose own answer is the likeliest of {len(ANSWERS)} (mean lead over the best other, nats)"]
    for needle in needles:
        scores = [("plan", needle.plan)] + ([] if needle.reference is None else [("reference", needle.reference)])
        shown = ", ".join(f"{name} {s.num_right} of {len(s.margins)} ({s.mean_margin:+.2f})" for name, s in scores)
        lines.append(f"{needle.plan.length:>6,} tokens    {shown}")
    return "\n".join(lines)


def _divergence_table(divergence: Divergence) -> str:
    total = len(divergence.firsts)
    lines = [f"greedy text: tokens like the reference's before the first that differs, {total} prompts"]
    for name, share in _QUARTILES.items():
        value = divergence.quantile(share)
        lines.append(f"{name:<16} {'all' if value is None else value}")
    lines.append(f"{'never':<16} {divergence.num_never} of {total} within {divergence.num_new}")
    return "\n".join(lines)


def _drift_json(drift: Drift) -> dict[str, Any]:
    return {
        "reference_perplexity": drift.reference.perplexity,
        "perplexity_ratio": drift.perplexity_ratio,
        "mean_kl": drift.mean_kl,
        "top1": drift.top1,
        "top1_clear": drift.top1_clear,
        "near_ties": drift.near_ties,
        "clear_gap": CLEAR_GAP,
    }


def _needle_json(needle: Needle) -> dict[str, Any]:
    scores = {"plan": needle.plan, "reference": needle.reference}
    return {
        "length": needle.plan.length,
        **{
            name: None if score is None else {"num_right": score.num_right, "margins": score.margins}
            for name, score in scores.items()
        },
    }


def _divergence_json(divergence: Divergence) -> dict[str, Any]:
    quartiles = {name.replace(" ", "_"): divergence.quantile(share) for name, share in _QUARTILES.items()}
    return {"num_new": divergence.num_new, **quartiles, "never": divergence.num_never, "firsts": divergence.firsts}
