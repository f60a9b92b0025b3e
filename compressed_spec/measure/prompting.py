"""How a data set's prompts are put to a model: in its own template, as a chat, or as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from compressed_spec.chat import render_chat
from compressed_spec.measure.datasets import Prompt, Task

PromptFormat = Literal["auto", "template", "chat", "raw"]
_PLACE = "{question}"
# Keys of tokenizer_config.json; a task without one of its own takes the first.
_TEMPLATE = "prompt_template"
_TASK_TEMPLATES = {Task.CODE: "code_prompt_template"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompting:
    """kind: "template", "chat" or "raw". template: the text around `{question}`, or the chat template, if any."""

    kind: str
    template: str | None

    def encode(self, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids, one list a prompt. Raises ValueError where `render_chat` does."""
        if self.kind == "chat":
            return [render_chat(tokenizer, [{"role": "user", "content": prompt.text}]) for prompt in prompts]
        texts = [
            prompt.text if self.template is None else self.template.replace(_PLACE, prompt.text) for prompt in prompts
        ]
        return [list(tokenizer(text, verbose=False)["input_ids"]) for text in texts]


def prompting_for(tokenizer: PreTrainedTokenizerBase, kind: PromptFormat, task: Task) -> Prompting:
    """What "auto" comes to: the checkpoint's own template, else the tokenizer's chat template, else nothing.

    Raises ValueError if "template" is asked for and tokenizer_config.json has no `prompt_template`, or an unusable one.
    """
    settings = tokenizer.init_kwargs
    template = settings.get(_TASK_TEMPLATES.get(task, _TEMPLATE), settings.get(_TEMPLATE))
    if kind == "auto":
        kind = "template" if template is not None else "chat" if tokenizer.chat_template is not None else "raw"
    if kind == "raw":
        return Prompting(kind=kind, template=None)
    if kind == "chat":
        chat = tokenizer.chat_template
        return Prompting(kind=kind, template=chat if isinstance(chat, str) else None)
    if not isinstance(template, str) or _PLACE not in template:
        raise ValueError(
            f"tokenizer_config.json has no {_TEMPLATE} with {_PLACE} in it: use --prompt-format chat or raw."
        )
    return Prompting(kind=kind, template=template)
