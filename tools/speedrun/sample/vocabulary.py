"""Turns text into a model's tokens and its tokens into bytes of text."""

from collections.abc import Callable
from dataclasses import dataclass

from speedrun.base.errors import UserError
from speedrun.scripts.sizes import BYTE_VOCABULARIES

GPT2 = 50257  # GPT-2's vocabulary, the last of which starts a document
GPT2_SIZES = (GPT2, 50304)  # as it is, and padded for the tensor cores


@dataclass(frozen=True)
class Vocabulary:
    """How a model's tokens are written.

    name: for people; size: ids from here on are padding and mean nothing; bos: the id that starts
    a document, or None; encode: a prompt's bytes -> ids, raises UserError; bytes_of: an id that
    is not bos -> its bytes; note: why they are only numbers, if they are.
    """

    name: str
    size: int
    bos: int | None
    encode: Callable[[bytes], list[int]]
    bytes_of: Callable[[int], bytes]
    note: str = ""

    def spell(self, id: int) -> bytes:
        """The bytes of a token, perhaps a part of a character; those of bos are a line end."""
        return b"\n" if id == self.bos else self.bytes_of(id)


def vocabulary_of(vocab_size: int, bos_id: int | None) -> Vocabulary:
    """The Vocabulary of a model with `vocab_size` tokens.

    bos_id: the document token that the model itself knows, which counts where the size tells none.
    """
    if vocab_size in BYTE_VOCABULARIES:
        return Vocabulary("bytes", 257, 256, list, lambda id: bytes([id]))
    if vocab_size not in GPT2_SIZES:
        note = f"no known vocabulary has {vocab_size} tokens, so their numbers are printed"
        return _numbers(vocab_size, bos_id, note)
    try:
        import tiktoken

        gpt2 = tiktoken.get_encoding("gpt2")
    except (ImportError, OSError, ValueError) as error:
        return _numbers(GPT2, GPT2 - 1, (
            f"GPT-2's vocabulary cannot be had ({type(error).__name__}), so the tokens' numbers "
            "are printed; go online once, or set TIKTOKEN_CACHE_DIR to a folder that tiktoken "
            "has used as its cache"))
    return Vocabulary("GPT-2", GPT2, GPT2 - 1,
                      lambda text: gpt2.encode_ordinary(text.decode("utf-8", "replace")),
                      gpt2.decode_single_token_bytes)


def _numbers(size, bos, note):
    """Tokens as numbers with spaces between."""

    def encode(text):
        words = text.split()
        if not all(word.isdigit() and int(word) < size for word in words):
            raise UserError(f"the prompt must be numbers of tokens, 0 to {size - 1}, with spaces "
                            "between, because there is no vocabulary to read it with")
        return [int(word) for word in words]

    return Vocabulary("numbers", size, bos, encode, lambda id: b"%d " % id, note)
