"""Turns text into a model's tokens and its tokens into text, piece by piece."""

import codecs
from collections.abc import Callable
from dataclasses import dataclass

from speedrun.base.errors import UserError

BYTES = 257  # vocabulary of the embedded corpus: the bytes, and 256 as the start of a document
GPT2 = 50257  # GPT-2's vocabulary, the last of which starts a document
GPT2_SIZES = (GPT2, 50304)  # as it is, and padded for the tensor cores


@dataclass(frozen=True)
class Vocabulary:
    """How a model's tokens are written.

    name: for people; size: ids from here on are padding and mean nothing; bos: the id that starts
    a document, or None; encode: a prompt's bytes -> ids, raises UserError; spell: id -> its bytes.
    """

    name: str
    size: int
    bos: int | None
    encode: Callable[[bytes], list[int]]
    spell: Callable[[int], bytes]

    def decoder(self) -> Callable[[int | None], str]:
        """A function that takes one id after the other, None at the end, and returns the text that
        each completes.

        A character whose bytes are spread over several tokens comes with the last of them; bytes
        that are no UTF-8 become the replacement character. The start of a document is a line end.
        """
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")

        def decode(id):
            if id is None:
                return utf8.decode(b"", final=True)
            return utf8.decode(b"\n" if id == self.bos else self.spell(id))

        return decode


def vocabulary_of(vocab_size: int, bos_id: int | None) -> tuple[Vocabulary, str | None]:
    """The Vocabulary of a model with `vocab_size` tokens, and why it is only numbers, if it is.

    bos_id: the document token that the model itself knows, which counts where the size tells none.
    """
    if vocab_size == BYTES:
        return Vocabulary("bytes", BYTES, 256, list, lambda id: bytes([id])), None
    if vocab_size not in GPT2_SIZES:
        why = f"no known vocabulary has {vocab_size} tokens, so their numbers are printed"
        return _numbers(vocab_size, bos_id), why
    try:
        import tiktoken

        gpt2 = tiktoken.get_encoding("gpt2")
    except (ImportError, OSError, ValueError) as error:
        why = (f"GPT-2's vocabulary cannot be had ({type(error).__name__}), so the tokens' numbers "
               "are printed; go online once, or set TIKTOKEN_CACHE_DIR to a folder that tiktoken "
               "has used as its cache")
        return _numbers(GPT2, GPT2 - 1), why

    def encode(text):
        return gpt2.encode_ordinary(text.decode("utf-8", "replace"))

    return Vocabulary("GPT-2", GPT2, GPT2 - 1, encode, gpt2.decode_single_token_bytes), None


def _numbers(size, bos):
    """Tokens as numbers with spaces between."""

    def encode(text):
        words = text.split()
        if not all(word.isdigit() and int(word) < size for word in words):
            raise UserError(f"the prompt must be numbers of tokens, 0 to {size - 1}, with spaces "
                            "between, because there is no vocabulary to read it with")
        return [int(word) for word in words]

    return Vocabulary("numbers", size, bos, encode, lambda id: b"%d " % id)
