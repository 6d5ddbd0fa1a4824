"""Model files for the peers, all from the weights of one GGUF preset of trtcb, so that every system runs one model.

    python benchmarks/peer_models.py --peers ~/peers/envs --models ~/peers/models

First a Hugging Face folder (fp32 safetensors, config, tokenizer) is written. From it each peer that is installed makes
its own files, with its own converter and its own Python. The GGUF files for llama.cpp are quantised by the ``gguf``
package, as ``llama-quantize`` would: a tied embedding, which is also the head, stays at 8 bits in a Q4_0 file, because
rows of 576 are no multiple of the 256 that llama.cpp's own choice for it, Q6_K, needs. What is there is kept.
"""

import argparse
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import gguf
from safetensors.numpy import save_file

from trtcb.builder.gguf_checkpoint import GgufCheckpoint
from trtcb.builder.sources import resolve
from trtcb.errors import UsageError
from trtcb.spec import ModelSpec
from trtcb.tokenizer import TokenizerAssets

_OPENVINO = ("-m", "optimum.commands.optimum_cli", "export", "openvino", "--task", "text-generation-with-past")
_ORT = ("-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", "int4")
_ORT_OPTIONS = ("--extra_options", "int4_accuracy_level=4", "int4_block_size=32")


def write_hf_folder(checkpoint: GgufCheckpoint, folder: Path) -> None:
    """Write ``config.json``, fp32 ``model.safetensors`` and the tokenizer's files into the existing ``folder``."""
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.tensor_names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(checkpoint.spec), indent=1))
    write_tokenizer(checkpoint.assets, folder)


def hf_config(spec: ModelSpec) -> dict[str, object]:
    """Return ``config.json`` of a plain Llama."""
    if spec.rope_scaling is not None:
        raise UsageError(
            f"{spec.name} scales its rotary frequencies, which this script does not write: choose another."
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
        "dtype": "float32",
    }


def write_tokenizer(assets: TokenizerAssets, folder: Path) -> None:
    """Write what ``AutoTokenizer`` reads."""
    (folder / "tokenizer.json").write_bytes(assets.tokenizer_json)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **assets.special_tokens}
    if assets.chat_template is not None:
        config["chat_template"] = assets.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(assets.generation_config, indent=1))


def write_gguf(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Requantise the matrices of a GGUF file; metadata and vectors stay as they are."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != gguf.Keys.General.ARCHITECTURE:
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(
                field.name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None
            )
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        own = gguf.GGMLQuantizationType.Q8_0 if tensor.name == "token_embd.weight" else kind
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def made(target: Path, make: Callable[[Path], None], *, is_folder: bool = True) -> Path:
    """Return ``target``, made by ``make`` if it is not there; one that fails leaves nothing under its name."""
    if target.exists():
        return target
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
    if is_folder:
        part.mkdir(parents=True)
    make(part)
    part.rename(target)
    print(f"made {target}", flush=True)
    return target


def make_models(model: str, peers: Path, models: Path) -> None:
    """Make what the peers under ``peers`` need and ``models`` has not; raises what a converter's failure raises."""
    checkpoint = resolve(model, report=print)
    if not isinstance(checkpoint, GgufCheckpoint):
        raise UsageError(
            f"{model} is no GGUF model, and the peers' files are made from one: name such a preset or file."
        )
    models.mkdir(parents=True, exist_ok=True)
    hf = made(models / "hf", lambda folder: write_hf_folder(checkpoint, folder))

    def convert(peer: str, *arguments: str | Path) -> None:
        subprocess.run([peers / peer / "bin/python", *arguments], check=True)

    if (peers / "openvino").is_dir():
        for weights in ("int8", "fp16", "fp32"):
            export = (*_OPENVINO, "-m", hf, "--weight-format", weights)
            made(models / f"openvino-{weights}", lambda folder, export=export: convert("openvino", *export, folder))
    if (peers / "onnxruntime-genai").is_dir():
        made(
            models / "onnxruntime-int4",
            lambda folder: convert("onnxruntime-genai", *_ORT, "-i", hf, "-o", folder, *_ORT_OPTIONS),
        )
    if (peers / "llama.cpp").is_dir():
        for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0):
            made(
                models / f"{kind.name.lower()}.gguf",
                lambda file, kind=kind: write_gguf(checkpoint.path, file, kind),
                is_folder=False,
            )


def main() -> None:
    """Make all files that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a preset of trtcb that is a GGUF file, or such a file")
    parser.add_argument("--peers", type=Path, required=True, help="folder with one virtual environment a peer")
    parser.add_argument("--models", type=Path, required=True, help="where the files go")
    arguments = parser.parse_args()
    make_models(arguments.model, arguments.peers.absolute(), arguments.models.absolute())


if __name__ == "__main__":
    main()
