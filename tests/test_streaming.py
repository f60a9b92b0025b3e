"""Streamed text against the tokenizer's own decode of the whole, for any grouping of the tokens."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from compressed_spec.streaming import StopMatch, TextStream

CORPUS = [
    "the cat sat on the mat",
    "naïve café, déjà vu",
    "你好世界。今天天气很好",
    "😀😁 family: 👩‍👩‍👧",
    "<tool>call</tool>",
]
ADDED = ["<end>", "<café>", "<a b>"]  # the first is special; the second is misread by every byte-level decoder


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(ADDED[0], special=True)])
    tokenizer.add_tokens(ADDED[1:])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return wrap(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama's kind: words, a mark for the space before, and one token a byte for everything else."""
    words = ["▁", "▁the", "▁cat", "cat", "s", "é", "▁你", "好", "", "<unk>"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return wrap(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["▁the", "▁cat", "s", "▁", "é"])}, "s"))
    tokenizer.decoder = decoders.Metaspace()
    return wrap(tokenizer)


def word_pieces() -> PreTrainedTokenizerFast:
    vocab = {w: i for i, w in enumerate(["[UNK]", "the", "cat", "##s", "##é", "mat"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return wrap(tokenizer)


def byte_ids(tokenizer: PreTrainedTokenizerFast) -> dict[int, int]:
    """The token of each byte that UTF-8 uses, read off the letters that stand for a character's bytes."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    characters = [chr(code) for code in [*range(0x800), *range(0x800, 0x110000, 0x800)] if not 0xD800 <= code < 0xE000]
    letters = {b: letter for c in characters for b, letter in zip(c.encode(), spell(c)[0][0], strict=True)}
    return {byte: int(tokenizer.convert_tokens_to_ids(letter)) for byte, letter in letters.items()}


TOKENIZERS = {make.__name__: make() for make in (byte_level, byte_fallback, metaspace, word_pieces)}
BYTES = TOKENIZERS["byte_level"]
BYTE_IDS = byte_ids(BYTES)
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
TEXTS = st.one_of(st.text(), st.text("ab<>你好é😀👩‍ \n"), st.lists(st.sampled_from(CORPUS)).map("".join))


def token_ids(data: st.DataObject, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of a text, or any ids at all: then most byte sequences are ill-formed."""
    if tokenizer is BYTES and data.draw(st.booleans()):
        ids = tokenizer.encode(data.draw(TEXTS))
    else:
        ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    return list(ids)


def spelled(raw: bytes) -> list[int]:
    return [BYTE_IDS[byte] for byte in raw]


def grouped(data: st.DataObject, ids: Sequence[int]) -> list[Sequence[int]]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    return [ids[a:b] for a, b in pairwise(cuts)]


def streamed(stream: TextStream, groups: Sequence[Sequence[int]]) -> str:
    return "".join([*(stream.push(group) for group in groups), stream.flush()])


def decoded(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """End, start and text of the stop string that completes first: read off a text letter by letter."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return end, end - len(stop), stop
    return None


@every_tokenizer
@given(data=st.data(), skip=st.booleans())
@settings(deadline=None, max_examples=150)
def test_T34_chunks_are_the_decoded_text(tokenizer: PreTrainedTokenizerFast, data: st.DataObject, skip: bool) -> None:
    ids = token_ids(data, tokenizer)
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    assert streamed(stream, grouped(data, ids)) == decoded(tokenizer, ids, skip)
    assert stream.stopped is None


@every_tokenizer
def test_T34_every_token(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [token for i in range(len(tokenizer)) for token in (i, len(tokenizer) - 1 - i)]
    assert streamed(TextStream(tokenizer), [ids]) == decoded(tokenizer, ids)


def test_T34_a_token_without_text_does_not_hide_what_is_before_it() -> None:
    """Llama's decoder drops a leading space: the text before an empty token still says that this one is not."""
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("▁the", "", "▁cat")]
    assert streamed(TextStream(tokenizer), [ids]) == decoded(tokenizer, ids) == "the cat"


@given(text=TEXTS)
@settings(deadline=None)
def test_T34_text_is_given_as_soon_as_its_last_byte_is_there(text: str) -> None:
    raw, stream, given_text = text.encode(), TextStream(BYTES), ""
    for i, token in enumerate(spelled(raw)):
        given_text += stream.push(token)
        assert given_text == raw[: i + 1].decode(errors="ignore")
    assert stream.flush() == ""


def test_T34_ill_formed_bytes() -> None:
    """A sequence that was held back and then breaks off is one U+FFFD; so is what is left at the end."""
    start = spelled("😀".encode()[:3])
    stream = TextStream(BYTES)
    assert [stream.push(token) for token in start] == ["", "", ""]
    assert stream.push(spelled(b"a")) == "\ufffda"
    assert stream.push(start) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_T29_stop_string(data: st.DataObject) -> None:
    ids = token_ids(data, BYTES)
    text = decoded(BYTES, ids)
    letters = st.sampled_from(sorted(set(text) - {"\ufffd"} | {"a"}))
    pieces = st.builds(lambda i, n: text[i : i + n], st.integers(0, len(text)), st.integers(1, 6))
    stops = data.draw(
        st.lists(st.one_of(st.text(letters, max_size=4), pieces).filter(lambda s: s and "\ufffd" not in s), max_size=4)
    )
    stream = TextStream(BYTES, stop_strings=stops)
    result = streamed(stream, grouped(data, ids))
    expected = first_stop(text, stops)
    if expected is None:
        assert (result, stream.stopped) == (text, None)
    else:
        index = next(i for i in range(len(ids)) if first_stop(decoded(BYTES, ids[: i + 1]), stops))
        assert result == text[: expected[1]]
        assert stream.stopped == StopMatch(stop_string=expected[2], token_index=index)


@every_tokenizer
def test_T29_stop_string_with_every_kind_of_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [token for token in range(len(tokenizer)) if decoded(tokenizer, [token]).strip().isalpha()][:4]
    text = decoded(tokenizer, ids)
    stream = TextStream(tokenizer, stop_strings=text[2:4])
    assert streamed(stream, [ids]) == text[: text.index(text[2:4])]
    assert stream.stopped is not None


def test_T34_the_beginning_of_a_stop_string_is_held_back() -> None:
    stream = TextStream(BYTES, stop_strings=["</tool>", "<end>"])
    assert stream.push(spelled(b"a <")) == "a "
    assert stream.push(spelled(b"/to")) == ""
    assert stream.push(spelled(b"<")) == "</to"
    assert stream.push(spelled(b"en")) == ""
    assert stream.push(spelled(b"t<")) == "<ent"
    assert stream.stopped is None
    assert stream.flush() == "<"


def test_T29_nothing_follows_a_stop_string() -> None:
    ids = spelled(b"one STOP two")
    stream = TextStream(BYTES, stop_strings="STOP")
    assert stream.push(ids[:6]) == "one "
    assert stream.push(ids[6:]) == ""
    assert stream.stopped == StopMatch(stop_string="STOP", token_index=7)
    assert stream.push(ids) == ""
    assert stream.flush() == ""


def test_T29_a_stop_string_completed_by_the_tail() -> None:
    stream = TextStream(BYTES, stop_strings="a\ufffd")
    assert stream.push(spelled(b"a\xc3")) == ""
    assert stream.flush() == ""
    assert stream.stopped == StopMatch(stop_string="a\ufffd", token_index=1)


def test_work_a_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, lengths = TOKENIZERS["metaspace"], []
    decode = tokenizer.decode

    def counted(ids: list[int], **options: Any) -> Any:
        lengths.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream = TextStream(tokenizer)
    assert stream.push([0, 1, 2] * 100).startswith("the cats the")
    assert len(lengths) <= 2 * 300
    assert max(lengths) <= 2
    monkeypatch.setattr(BYTES, "decode", None)
    assert TextStream(BYTES).push(spelled(b"a")) == "a"


@pytest.mark.parametrize("stops", ["", [""], ["a", ""], [1]])
def test_bad_stop_strings_are_refused(stops: Any) -> None:
    with pytest.raises(ValueError, match="stop_strings"):
        TextStream(BYTES, stop_strings=stops)


def test_a_flushed_stream_takes_no_more() -> None:
    stream = TextStream(BYTES)
    stream.flush()
    with pytest.raises(ValueError, match="was flushed"):
        stream.push(0)
