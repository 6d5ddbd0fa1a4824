"""Regenerates smollm2_reference.json: what transformers says about the shipped text, in fp32, for a GGUF file.

    python tests/golden/make_reference.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

The file it writes, all logits in fp32 and every gap the difference between the two largest logits (1e-4):

* ``prompts[i]``: ``prompt_ids``, then ``token_ids`` and ``gaps`` of the greedy continuation, which no end token stops;
* ``windows[i]``: consecutive pieces of eval.txt, each seen without the ones before it. ``argmax[j]`` and ``gaps[j]``
  belong to the logits after ``token_ids[: j + 1]``; ``mean_nll`` (nats) is over the tokens that have one before them.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

GOLDEN = Path(__file__).parent
DATA = GOLDEN.parents[1] / "trtcb" / "evaluation" / "data"
NUM_NEW_TOKENS = 64
NUM_EVAL_TOKENS = 4224
WINDOW_TOKENS = 1024


def load_model(gguf: Path) -> PreTrainedModel:
    """The dequantised fp32 model; ``from_pretrained(gguf_file=...)`` gives the same but also needs accelerate."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise SystemExit(f"{gguf}: the weights do not fit the model (missing {missing}, unexpected {unexpected}).")
    model.tie_weights()
    return model.eval()


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The file's tokenizer with digits split one by one: the GGUF loader ignores ``tokenizer.ggml.pre = smollm``."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, prompt: dict) -> list[int]:
    if "messages" not in prompt:
        return tokenizer(prompt["text"]).input_ids
    text = tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def argmax_and_gaps(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """``logits: [T, V]`` -> the best token and its lead over the second, each ``[T]``."""
    top = logits.topk(2)
    gaps = top.values[:, 0] - top.values[:, 1]
    return top.indices[:, 0].tolist(), [round(gap, 4) for gap in gaps.tolist()]


def greedy(model: PreTrainedModel, prompt_ids: Sequence[int]) -> Iterator[tuple[int, float]]:
    inputs, cache = torch.tensor([prompt_ids]), None
    for _ in range(NUM_NEW_TOKENS):
        output = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        (token,), (gap,) = argmax_and_gaps(output.logits[0])
        yield token, gap
        inputs, cache = torch.tensor([[token]]), output.past_key_values


def continue_prompt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: dict) -> dict:
    prompt_ids = encode(tokenizer, prompt)
    token_ids, gaps = zip(*greedy(model, prompt_ids), strict=True)
    return {"name": prompt["name"], "prompt_ids": prompt_ids, "token_ids": token_ids, "gaps": gaps}


def score_window(model: PreTrainedModel, token_ids: list[int]) -> dict:
    inputs = torch.tensor(token_ids)
    logits = model(inputs[None], use_cache=False).logits[0]
    argmax, gaps = argmax_and_gaps(logits)
    mean_nll = torch.nn.functional.cross_entropy(logits[:-1].double(), inputs[1:]).item()
    return {"token_ids": token_ids, "argmax": argmax, "gaps": gaps, "mean_nll": round(mean_nll, 6)}


def to_json(reference: dict) -> str:
    """Compact, but with one line for each prompt and window, so that a diff shows which one changed."""

    def line(value: object) -> str:
        return json.dumps(value, separators=(",", ":"))

    def rows(values: list[dict]) -> str:
        return "[\n" + ",\n".join(line(value) for value in values) + "\n]"

    parts = [f'"{key}":{rows(value) if isinstance(value, list) else line(value)}' for key, value in reference.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="Regenerate smollm2_reference.json with transformers.")
    parser.add_argument("gguf", type=Path, help="the SmolLM2-135M-Instruct .gguf file")
    parser.add_argument("--output", type=Path, default=GOLDEN / "smollm2_reference.json")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the same order of sums whatever the number of cores
    model, tokenizer = load_model(args.gguf), load_tokenizer(args.gguf)
    prompts = json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))
    text_ids = tokenizer((DATA / "eval.txt").read_text(encoding="utf-8")).input_ids[:NUM_EVAL_TOKENS]
    windows = [text_ids[start : start + WINDOW_TOKENS] for start in range(0, len(text_ids), WINDOW_TOKENS)]
    reference = {
        "file": args.gguf.name,
        "sha256": hashlib.sha256(args.gguf.read_bytes()).hexdigest(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "prompts": [continue_prompt(model, tokenizer, prompt) for prompt in prompts],
        "windows": [score_window(model, window) for window in windows],
    }
    args.output.write_text(to_json(reference), encoding="utf-8")


if __name__ == "__main__":
    main()
