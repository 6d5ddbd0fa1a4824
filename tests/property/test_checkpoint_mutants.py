"""Damaged model files: whatever happens to the bytes, the answer is a quick trtcb error or a usable model."""

import random
import time
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.unit.hf_folder import write_folder
from tests.unit.tiny_gguf import SPEC, metadata_of, random_tensors, stored_tensors, write_gguf
from trtcb.builder.gguf import GgufFile
from trtcb.builder.gguf_checkpoint import GgufCheckpoint
from trtcb.builder.hf import HfCheckpoint
from trtcb.errors import PlanError, TrtcbError
from trtcb.tokenizer import Tokenizer

SMALL = replace(SPEC, hidden_size=64, intermediate_size=64, head_dim=16, num_layers=1)
MUTANTS = 400
HOSTILE = [0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


def mutate(content: bytes, header: int, rng: random.Random) -> bytes:
    """One to four edits of the header: flipped bits, hostile 32- and 64-bit numbers, cut, doubled or swapped pieces."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(min(header, len(data)))
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + 8] = rng.choice(HOSTILE).to_bytes(8, "little")
            case 2:
                data[at : at + 4] = (rng.choice(HOSTILE) & 0xFFFFFFFF).to_bytes(4, "little")
            case 3:
                del data[at : at + rng.randrange(1, 64)]
            case 4:
                data[at:at] = data[at : at + rng.randrange(1, 64)]
            case _:
                del data[at:]
        if not data:
            break
    return bytes(data)


def survive(action) -> bool:
    """Whether ``action`` worked; anything but a trtcb error is the test's failure, and so is taking long or much."""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        action()
    except TrtcbError:
        return False
    finally:
        elapsed = time.perf_counter() - start
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 32 << 20
        assert elapsed < 2.0  # the target is 0.05 s untraced on an idle core
    return True


def use(checkpoint) -> None:
    for name in checkpoint.tensor_names():
        assert checkpoint.tensor(name).shape == checkpoint.shape(name)
    Tokenizer(checkpoint.assets).encode("the 12 <s> é", add_special_tokens=True)


def use_file(path: Path) -> None:
    use(GgufCheckpoint(path))


def test_gguf_mutants(tmp_path):
    tensors = stored_tensors(SMALL, random_tensors(SMALL)) | {"rope_freqs.weight": np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "good.gguf", tensors, metadata_of(SMALL))
    content, header = path.read_bytes(), GgufFile(path).header_bytes
    assert survive(lambda: use(GgufCheckpoint(path)))
    rng = random.Random(20)
    survivors = 0
    for _ in range(MUTANTS):
        mutant = tmp_path / "mutant.gguf"
        mutant.write_bytes(mutate(content, header, rng))
        survivors += survive(partial(use_file, mutant))
        mutant.unlink()
    assert survivors < MUTANTS / 2


def test_every_truncation_of_a_gguf_header_is_refused(tmp_path):
    path = write_gguf(tmp_path / "good.gguf", stored_tensors(SMALL, random_tensors(SMALL)), metadata_of(SMALL))
    content, header = path.read_bytes(), GgufFile(path).header_bytes
    for length in [*range(0, header, 7), header, len(content) - 1]:
        mutant = tmp_path / "mutant.gguf"
        mutant.write_bytes(content[:length])
        with pytest.raises(PlanError):
            GgufFile(mutant)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_folder_mutants(tmp_path, file):
    folder = write_folder(tmp_path / "m", random_tensors(SMALL), config=config_of_small())
    assert survive(lambda: use(HfCheckpoint(folder)))
    path = folder / file
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little") if file == "model.safetensors" else len(content)
    rng = random.Random(file)
    for _ in range(MUTANTS // 3):
        path.unlink()  # a new file: the old one may still be mapped
        path.write_bytes(mutate(content, header, rng))
        survive(lambda: use(HfCheckpoint(folder)))


def config_of_small():
    return {
        "hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    }  # fmt: skip
