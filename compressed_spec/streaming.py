"""Token ids in, text out, as early as the text is certain.

A token need not end where a character ends, and what was written may turn out to be the beginning of a stop string:
both are held back until they are decided, so that text, once given, is never taken back.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """The stop string that ended a text.

    Attributes:
        stop_string: The one that completed first; of several that completed together, the one that began first.
        token_index: Index, from 0 over everything pushed, of the token in which it completed.
    """

    stop_string: str
    token_index: int


class TextStream:
    """Turns one sequence of token ids into text, piece by piece.

    All pieces together are `tokenizer.decode(ids, clean_up_tokenization_spaces=False)` of all ids, cut before the first
    stop string, however the ids are grouped. Work a token does not grow with the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_strings: str | Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """
        Args:
            tokenizer: A tokenizer of transformers.
            stop_strings: Text ends before the first of these; one, or several.
            skip_special_tokens: Special tokens leave no text.

        Raises:
            ValueError: If a stop string is empty or no string.
        """
        self._stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        if not all(isinstance(stop, str) and stop for stop in self._stops):
            raise ValueError(f"stop_strings {self._stops!r} holds something empty or not text; leave it out")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decoder: _Decoder
        if backend is not None and isinstance(backend.decoder, decoders.ByteLevel):
            self._decoder = _ByteLevelDecoder(backend, skip_special_tokens)
        else:
            self._decoder = _WindowDecoder(tokenizer, skip_special_tokens)
        self._held = ""
        self._num_tokens = 0
        self._flushed = False
        self._stopped: StopMatch | None = None

    @property
    def stopped(self) -> StopMatch | None:
        """The stop string that was found, if any. From then on there is no more text."""
        return self._stopped

    def push(self, token_ids: int | Iterable[int]) -> str:
        """Take one token or several and return the text that is now certain. Tokens after a stop string are ignored.

        Raises:
            ValueError: After `flush`.
        """
        if self._flushed:
            raise ValueError("this stream was flushed; make a new TextStream for another text")
        pieces = []
        for token_id in (token_ids,) if isinstance(token_ids, int) else token_ids:
            if self._stopped is not None:
                break
            self._num_tokens += 1
            pieces.append(self._release(self._decoder.push(token_id)))
        return "".join(pieces)

    def flush(self) -> str:
        """End the text and return what was held back. A second call returns nothing."""
        if self._flushed or self._stopped is not None:
            self._flushed = True
            return ""
        self._flushed = True
        text = self._release(self._decoder.flush())
        return text if self._stopped is not None else text + self._held

    def _release(self, text: str) -> str:
        """Append decoded text to what is held, look for stop strings, and let go of what cannot begin one."""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._stopped = StopMatch(stop_string=stop, token_index=self._num_tokens - 1)
            return text[:start]
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        starts = range(max(0, len(text) - longest), len(text))
        keep = next((i for i in starts if any(stop.startswith(text[i:]) for stop in self._stops)), len(text))
        self._held = text[keep:]
        return text[:keep]


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteLevelDecoder:
    """For byte-level BPE (DeepSeek's kind): tokens are bytes, and an incremental UTF-8 decoder is exact.

    Both Python and the tokenizers library replace each maximal part of an ill-formed sequence by one U+FFFD.
    """

    def __init__(self, backend: Tokenizer, skip_special_tokens: bool) -> None:
        self._backend = backend
        # The alphabet of byte-level BPE: printable Latin-1 stands for itself, other bytes for 256, 257, ... in order.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        other = [byte for byte in range(0x100) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(other)}
        added = backend.get_added_tokens_decoder().items() if skip_special_tokens else ()
        self._skipped = {token_id for token_id, token in added if token.special}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        # Added tokens are stored as they read; where one leaves the alphabet, its own text is meant.
        known = all(letter in self._byte_of for letter in token)
        return self._utf8.decode(bytes(self._byte_of[letter] for letter in token) if known else token.encode())

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For any other tokenizer: decode the last piece of text with and without the tokens that follow it.

    The piece before gives a decoder its context (a leading space is dropped at the start of a text alone). Byte tokens
    (`<0xE4>`) are read together up to the last of their run, for only the whole run says what they mean.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items() if skip_special_tokens else ()
        self._skipped = {token_id for token_id, token in added if token.special}
        self._before: list[int] = []
        self._new: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._new.append(token_id)
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return "" if token is not None and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token) else self.flush()

    def flush(self) -> str:
        if not self._new:
            return ""
        given = self._decode(self._before)
        text = self._decode(self._before + self._new)[len(given) :]
        self._before = self._new if text else self._before + self._new
        self._new = []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text
