"""The bytes that single tokens stand for. A character may be spread over several of them."""

from __future__ import annotations

import json
import re
from functools import lru_cache

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")  # how a vocabulary with byte fallback spells one


class Spelling:
    """Of one tokenizer. Without one no token has any bytes."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer) if tokenizer else set()
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._added = tokenizer.get_added_tokens_decoder() if tokenizer else {}

    def of(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token].content).encode()
        symbols = (self._tokenizer.id_to_token(token) if self._tokenizer else None) or ""
        if self._byte_level:
            return b"".join(bytes([_bytes()[symbol]]) if symbol in _bytes() else symbol.encode() for symbol in symbols)
        if self._byte_fallback and (byte := _BYTE.match(symbols)):
            return bytes([int(byte.group(1), 16)])
        return symbols.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


@lru_cache(maxsize=1)
def _bytes() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others are spelled from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return {part["type"] for part in decoder.get("decoders", [decoder])}
