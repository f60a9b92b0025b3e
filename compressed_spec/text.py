"""Text in, text out: the tokenizer's side of decoding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from compressed_spec.decode import Chunk, Decoder, StopCheck
from compressed_spec.generate import stream
from compressed_spec.streaming import TextStream


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside a checkpoint. Raises ValueError if there is none, or it cannot be read."""
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json: put the model's tokenizer there, or decode token ids in Python."
        )
    try:
        # Not AutoTokenizer, which parses config.json too and refuses compression ratios other than 4 and 128.
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # whatever the library raises, the user's remedy is the same
        raise ValueError(f"The tokenizer in {folder} cannot be read ({error}): download it again.") from error
    return tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """A round of one request: its tokens, the text that is now certain, and the finish reason if it ends here.

    num_accepted: how many of the tokens were drafted; they come first.
    """

    request: int
    text: str
    token_ids: tuple[int, ...]
    num_accepted: int
    finish_reason: str | None


class TextDecoder:
    """Follows a decoder's chunks and turns each request's tokens into text, with stop strings if given.

    Give `stop_check(i)` to request i before it is submitted.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_requests: int, stop_strings: Sequence[str] = ()) -> None:
        self._new_stream = partial(TextStream, tokenizer, stop_strings=stop_strings)
        self._streams = [self._new_stream() for _ in range(num_requests)]
        self._num_pushed = [0] * num_requests
        self._texts = [""] * num_requests
        self._num_given = [0] * num_requests

    def stop_check(self, request: int) -> StopCheck:
        """A check that ends the request's text at the token in which a stop string completes."""

        def check(output_ids: Sequence[int], token_ids: Sequence[int]) -> int | None:
            if self._num_pushed[request] != len(output_ids):
                # The round before came to nothing after this check had seen its tokens: back to the text as it is.
                self._streams[request] = self._new_stream()
                self._texts[request] = self._streams[request].push(output_ids)
            self._texts[request] += self._streams[request].push(token_ids)
            self._num_pushed[request] = len(output_ids) + len(token_ids)
            match = self._streams[request].stopped
            return None if match is None else match.token_index + 1 - len(output_ids)

        return check

    def chunks(self, decoder: Decoder) -> Iterator[TextChunk]:
        """The decoder's chunks with their text; all of a request's texts together are its final text."""
        yield from map(self.follow, stream(decoder))

    def follow(self, chunk: Chunk) -> TextChunk:
        """A chunk with the text that it makes certain; each chunk once, in order."""
        request = chunk.request
        if chunk.finish_reason is not None:
            self._texts[request] += self._streams[request].flush()
        given, self._num_given[request] = self._num_given[request], len(self._texts[request])
        return TextChunk(
            request=request,
            text=self._texts[request][given:],
            token_ids=chunk.token_ids,
            num_accepted=chunk.num_accepted,
            finish_reason=chunk.finish_reason,
        )
