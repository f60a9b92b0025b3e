"""A small byte-level BPE tokenizer for tiny checkpoints, trained on a short text of our own."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# DeepSeek's own special tokens (fullwidth bars, lower one eighth blocks), so that its chat format works unchanged.
BOS_TOKEN = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS_TOKEN = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_SPECIAL_TOKENS = (
    BOS_TOKEN,
    EOS_TOKEN,
    "<\uff5c\u2581noise\u2581\uff5c>",
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
    "<think>",
    "</think>",
)
SMALLEST_VOCABULARY = 256 + len(_SPECIAL_TOKENS)

_TEXT = """
A tree of guesses grows from the last word that is certain. Every branch is a sentence that might be said next, and
every branch remembers its own past. The model reads all of them at once and keeps the one that it would have written
by itself. Nothing is lost when the other branches are forgotten, because nothing of theirs was ever kept.
The window slides over the newest words. Older words are pressed together, four at a time, and then the attention picks
the few that matter; still older ones are pressed together by the hundred, and all of them are read. A word that closes
a window makes a new entry, and the entry belongs to the branch that made it, to no other.
First the draft head looks at the stream and at the token, and proposes what may follow. Then the target checks each
proposal in turn: if it agrees, the token is accepted, and if it does not, its own token takes the place of the guess.
So the text is the same text, with or without the guesses; only the waiting is shorter.
In the morning the river was grey, and the boats lay still along the quay. A woman counted the crates, wrote a number
on a slip of paper, and gave it to the boy who ran up the hill. By noon the wind had turned. The boats went out one
after the other, their sails brown and patched, and the boy watched them until they were as small as gulls.
def add(left, right): return left + right
for index in range(10): print(index, index * index)
One, two, three, four, five, six, seven, eight, nine, ten. 0 1 2 3 4 5 6 7 8 9 10 11 12 16 32 64 128 256 512 1024.
What is a number? A number is a thing that you can count with. What is a word? A word is a thing that you can say.
"""


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json with exactly `vocab_size` tokens.

    A vocabulary too small for all bytes and the special tokens gets no tokenizer: such checkpoints speak ids only.

    Raises:
        ValueError: the text is too short for so many tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        return
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}: the tiny tokenizer has {tokenizer.get_vocab_size()} tokens at most"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": EOS_TOKEN,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
