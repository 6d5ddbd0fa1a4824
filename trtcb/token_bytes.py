"""What single tokens stand for, in bytes: half a character has no text of its own."""

import re

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Bytes of each token of a tokenizer, by its spelling in the vocabulary.

    Two spellings are known, by the tokenizer's decoder: GPT-2's, where a letter stands for each byte, and
    SentencePiece's, with a mark for the space and ``<0x41>`` for bytes. Added tokens are spelled as they are.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._byte_of_letter = _byte_alphabet() if is_byte_level else None

    def __call__(self, token_id: int) -> bytes:
        """Bytes of one token, none for an id outside the vocabulary."""
        if token_id in self._added:
            return self._added[token_id].encode()
        spelling = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_of_letter is not None:
            if all(letter in self._byte_of_letter for letter in spelling):
                return bytes(self._byte_of_letter[letter] for letter in spelling)
            return spelling.encode()
        single = _BYTE_TOKEN.fullmatch(spelling)
        return bytes([int(single[1], 16)]) if single else spelling.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Letters that stand for bytes in GPT-2's vocabulary: printable ones for themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
