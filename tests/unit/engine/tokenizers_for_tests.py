"""Small tokenizers of the kinds in the field, built in memory."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = (
    "the sea and the river, the end. Stop here! naïve café über alles — “quoted” 文字 漢字 한국어 русский текст "
    "😀😁🌊🌙👩‍👩‍👧 🇨🇭 END </s> ###\n\n" * 3
)
SPECIAL = "<|special|>"


def byte_level(vocab_size: int = 320) -> Tokenizer:
    """GPT-2's kind. Its merges cross the bytes of characters, so tokens begin and end inside them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: words with a visible space, which is stripped from the text's beginning, and byte tokens for
    what the vocabulary lacks."""
    words = ["▁the", "▁sea", "▁end", "the", "▁", "!", ".", ",", "S", "t", "o", "p", "h", "e", "r", "n", "d", "文"]
    vocab = {word: index for index, word in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    return tokenizer
