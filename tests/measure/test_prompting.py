"""Templates: the checkpoint's own, a chat, or none."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from compressed_spec.chat import render_chat
from compressed_spec.measure.datasets import Prompt, Task
from compressed_spec.measure.prompting import prompting_for
from compressed_spec.models.deepseek_v4.load import DEMO
from compressed_spec.text import load_tokenizer

PROMPTS = [Prompt(id="0", text="What is {this}?")]


def tokenizer(folder: Path, **settings: object) -> PreTrainedTokenizerBase:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    path = folder / "tokenizer_config.json"
    raw = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return load_tokenizer(folder)


def test_the_demos_own_template() -> None:
    demo = load_tokenizer(DEMO)
    found = prompting_for(demo, "auto", Task.MATH)
    assert (found.kind, found.template) == ("template", demo.init_kwargs["prompt_template"])
    wanted = str(found.template).format(question="What is {this}?")
    (ids,) = found.encode(demo, PROMPTS)
    assert ids[0] == demo.bos_token_id
    assert demo.decode(ids[1:]) == wanted


def test_code_may_have_a_template_of_its_own(tmp_path: Path) -> None:
    own = tokenizer(tmp_path, code_prompt_template="Task: {question}\nCode:\n")
    assert prompting_for(own, "auto", Task.CODE).template == "Task: {question}\nCode:\n"
    assert prompting_for(own, "auto", Task.CHAT).template == own.init_kwargs["prompt_template"]
    plain = tokenizer(tmp_path, code_prompt_template=None)
    assert prompting_for(plain, "auto", Task.CODE).template == plain.init_kwargs["prompt_template"]


def test_chat_and_raw(tmp_path: Path) -> None:
    some = tokenizer(tmp_path, prompt_template=None, code_prompt_template=None)
    raw = prompting_for(some, "auto", Task.MATH)
    assert (raw.kind, raw.template) == ("raw", None)
    assert raw.encode(some, PROMPTS) == [some("What is {this}?")["input_ids"]]
    chat = prompting_for(some, "chat", Task.MATH)
    assert chat.encode(some, PROMPTS) == [render_chat(some, [{"role": "user", "content": "What is {this}?"}])]
    some.chat_template = "{{ messages[0].content }}!"
    assert prompting_for(some, "auto", Task.MATH).kind == "chat"
    assert prompting_for(some, "raw", Task.MATH).kind == "raw"


@pytest.mark.parametrize("template", [None, "no place", 3])
def test_a_template_that_is_not_there_is_refused(tmp_path: Path, template: object) -> None:
    some = tokenizer(tmp_path, prompt_template=template, code_prompt_template=None)
    with pytest.raises(ValueError, match="--prompt-format"):
        prompting_for(some, "template", Task.MATH)
