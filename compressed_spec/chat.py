"""Chat messages -> prompt, in DeepSeek-V4's own format.

DeepSeek-V4's tokenizer carries no chat template; its format lives in the checkpoint's `encoding/` folder. This module
writes that format: the text is meant to be encoded whole, its special tokens included, with nothing added.

    <bos>[effort][system]<User>question<Assistant></think>answer<eos>                    chat
    <bos>[effort][system]<User>question<Assistant><think>reasoning</think>answer<eos>    thinking

A conversation that ends with a user's turn ends with the opening of the assistant's turn.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Revision = Literal["v4", "0731"]


def _special(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"


BOS: Final = _special("begin\u2581of\u2581sentence")
EOS: Final = _special("end\u2581of\u2581sentence")
USER: Final = _special("User")
ASSISTANT: Final = _special("Assistant")
THINK: Final = "<think>"
END_THINK: Final = "</think>"
_REMINDER: Final = _special("latest_reminder")
_DSML: Final = "\uff5cDSML\uff5c"

_ROLES: Final = ("system", "user", "assistant", "tool", "latest_reminder", "developer")
_TASKS: Final = ("action", "query", "authority", "domain", "title", "read_url")

_EFFORT_ABSOLUTE: Final = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_EFFORT_BEYOND: Final = (
    "Reasoning Effort: Beyond maximum \u2014 exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose "
    "the problem into its most fundamental components, trace every causal chain to its root, and resolve the "
    "underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
# The 0731 checkpoints renamed the old maximum `high` and put a new one above it.
_EFFORTS: Final[Mapping[str, Mapping[str, str]]] = {
    "v4": {"high": "", "max": _EFFORT_ABSOLUTE},
    "0731": {"low": "", "high": _EFFORT_ABSOLUTE, "max": _EFFORT_BEYOND},
}

_TOOLS: Final = f"""

## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<{_DSML}tool_calls>" block like the following:

<{_DSML}tool_calls>
<{_DSML}invoke name="$TOOL_NAME">
<{_DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{_DSML}parameter>
...
</{_DSML}invoke>
<{_DSML}invoke name="$TOOL_NAME2">
...
</{_DSML}invoke>
</{_DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), \
you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

%s

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_RESPONSE_FORMAT: Final = """

## Response Format:

You MUST strictly adhere to the following schema to reply:
%s"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One stretch of text between role tokens: a message, or several of the user's side joined into one."""

    role: str
    text: str
    reasoning: str = ""
    task: str | None = None


def encode_chat(
    messages: Sequence[Message],
    *,
    thinking: bool = False,
    reasoning_effort: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    drop_thinking: bool = True,
    revision: Revision = "v4",
) -> str:
    """Write a conversation in DeepSeek-V4's format, byte for byte as the checkpoint's own encoder does.

    Args:
        messages: `{"role": ..., "content": ...}`, roles system, user, assistant, tool, latest_reminder and developer.
            `content` is text or a list of `{"type": "text", "text": ...}`. Assistants may carry `reasoning_content`,
            `tool_calls` and `wo_eos` (leave the turn open, to be continued); system and developer messages `tools` and
            `response_format`; tool messages `tool_call_id`; any message a `task`, DeepSeek's quick instructions.
        thinking: The assistant's turns open with `<think>` instead of `</think>`.
        reasoning_effort: Thinking only. v4: `high` (adds nothing) or `max`. 0731: `low` (adds nothing), `high`, `max`.
        tools: Tools in OpenAI's form, put on the first message if that is a system message, else on one before it.
        drop_thinking: Leave out the reasoning of turns before the last user message; so do their developer messages.
            Conversations with tools always keep both.
        revision: `0731` for V4-Flash-0731 and its successors, which read `reasoning_effort` differently.

    Returns:
        The prompt, BOS included.

    Raises:
        ValueError: On anything that the format has no place for.
    """
    if revision not in _EFFORTS:
        raise ValueError(f"revision {revision!r} is unknown; use one of {', '.join(_EFFORTS)}")
    if reasoning_effort is not None and not thinking:
        raise ValueError(f"reasoning_effort={reasoning_effort!r} needs thinking; pass thinking=True or leave it out")
    efforts = _EFFORTS[revision]
    if reasoning_effort is not None and reasoning_effort not in efforts:
        raise ValueError(
            f"reasoning_effort {reasoning_effort!r} is unknown to revision {revision}; use one of {', '.join(efforts)}"
        )
    messages = _with_tools(messages, tools)
    turns = _read_turns(messages)
    keep_all = not drop_thinking or any(message.get("tools") for message in messages)
    if thinking and not keep_all:
        last = _last_question(turns)
        turns = [turn for i, turn in enumerate(turns) if turn.role != "developer" or i >= last]
    last = _last_question(turns)
    pieces = [BOS, efforts[reasoning_effort] if reasoning_effort else ""]
    for i, turn in enumerate(turns):
        reasons = thinking and (keep_all or i >= last)
        if turn.role == "assistant" and reasons and turns[i - 1].task is None:
            pieces += [turn.reasoning, END_THINK]
        pieces.append(turn.text)
        if i + 1 == len(turns) or turns[i + 1].role in ("assistant", "latest_reminder"):
            pieces.append(_hand_over(turn, thinking=thinking, reasons=reasons))
    return "".join(pieces)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    thinking: bool = False,
    reasoning_effort: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    drop_thinking: bool = True,
    revision: Revision = "v4",
) -> list[int]:
    """Token ids of a conversation: by the tokenizer's own chat template if it has one, else by `encode_chat`.

    Options are those of `encode_chat`. A chat template is handed `thinking`, `enable_thinking`, `reasoning_effort` and
    `drop_thinking`, and has no use for `revision`.

    Raises:
        ValueError: On what `encode_chat` refuses; where the template refuses the messages or knows nothing of an option
            that was asked for; where a tokenizer without a template lacks DeepSeek-V4's special tokens.
    """
    if tokenizer.chat_template is None:
        text = encode_chat(
            messages,
            thinking=thinking,
            reasoning_effort=reasoning_effort,
            tools=tools,
            drop_thinking=drop_thinking,
            revision=revision,
        )
        needed = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK)
        missing = [t for t in needed if tokenizer.convert_tokens_to_ids(t) in (None, tokenizer.unk_token_id)]
        if missing:
            raise ValueError(
                f"this tokenizer has no chat template and lacks DeepSeek-V4's {', '.join(missing)}; give a plain prompt"
            )
        return list(tokenizer.encode(text, add_special_tokens=False))
    _check_messages(messages)
    template = tokenizer.get_chat_template(tools=tools)
    asked = {
        "thinking": (thinking, "thinking|enable_thinking"),
        "reasoning_effort": (reasoning_effort is not None, "reasoning_effort"),
        "drop_thinking": (not drop_thinking, "drop_thinking"),
        "tools": (bool(tools), "tools"),
    }
    for option, (wanted, variables) in asked.items():
        if wanted and not re.search(rf"\b({variables})\b", template):
            raise ValueError(f"this tokenizer's chat template knows nothing of {option}; leave it out")
    options: dict[str, Any] = {"thinking": thinking, "enable_thinking": thinking, "drop_thinking": drop_thinking}
    if reasoning_effort is not None:
        options["reasoning_effort"] = reasoning_effort
    try:
        ids = tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            add_generation_prompt=messages[-1]["role"] != "assistant",
            return_dict=False,
            **options,
        )
    except TemplateError as error:
        raise ValueError(f"this tokenizer's chat template refuses the messages: {error}") from error
    return list(ids)


def _hand_over(turn: _Turn, *, thinking: bool, reasons: bool) -> str:
    """What stands after a turn that the assistant answers: the opening of its turn, or the task's own token."""
    if turn.task == "action":
        return ASSISTANT + (THINK if thinking else END_THINK) + _special("action")
    if turn.task is not None:
        return _special(turn.task)
    if turn.role in ("user", "developer"):
        return ASSISTANT + (THINK if reasons else END_THINK)
    return ""


def _last_question(turns: Sequence[_Turn]) -> int:
    return max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise ValueError("messages is empty; give at least one")
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in _ROLES:
            raise ValueError(f"message {i} has the unknown role {role!r}; use one of {', '.join(_ROLES)}")
        task = message.get("task")
        if task is not None and task not in _TASKS:
            raise ValueError(f"message {i} has the unknown task {task!r}; use one of {', '.join(_TASKS)}")


def _with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """The messages, with `tools` on a system message in front. Inputs are left as they are."""
    _check_messages(messages)
    if not tools:
        return list(messages)
    if any(message.get("tools") for message in messages):
        raise ValueError("tools are given both as an argument and on a message; give them once")
    if messages[0]["role"] == "system":
        return [{**messages[0], "tools": tools}, *messages[1:]]
    return [{"role": "system", "tools": tools}, *messages]


def _read_turns(messages: Sequence[Message]) -> list[_Turn]:
    """Messages -> turns: users' and tools' messages in a row become one, and each turn's text is final."""
    turns: list[_Turn] = []
    call_order: dict[str, int] = {}
    for group in _groups(messages):
        message, role = group[0], group[0]["role"]
        if role == "assistant":
            if not turns or (turns[-1].role in ("system", "assistant") and turns[-1].task is None):
                raise ValueError("an assistant message answers no user message; put one before it")
            calls = [_tool_call(call) for call in message.get("tool_calls") or ()]
            if calls:
                ids = [call.get("id") for call in message["tool_calls"]]
                call_order = {call_id: i for i, call_id in enumerate(ids) if call_id}
            text = _text(message) + _block(calls) + ("" if message.get("wo_eos") else EOS)
        elif role in ("user", "tool"):
            role, text = "user", USER + "\n\n".join(_user_parts(group, call_order))
        elif role == "latest_reminder":
            text = _REMINDER + _text(message)
        else:
            text = _text(message)
            if role == "developer":
                if not text:
                    raise ValueError("a developer message has no content; give it some or leave it out")
                text = USER + text
            if message.get("tools"):
                text += _TOOLS % "\n".join(_json(_function(tool)) for tool in message["tools"])
            if message.get("response_format"):
                text += _RESPONSE_FORMAT % _json(message["response_format"])
        turns.append(
            _Turn(role=role, text=text, reasoning=message.get("reasoning_content") or "", task=message.get("task"))
        )
    return turns


def _groups(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages that share a turn: those of the user's side in a row. A task closes its user's turn to other users."""
    groups: list[list[Message]] = []
    for message in messages:
        joins = message["role"] in ("user", "tool") and groups and groups[-1][0]["role"] in ("user", "tool")
        if joins and (message["role"] == "tool" or groups[-1][0].get("task") is None):
            if message.get("task") is not None:
                raise ValueError(
                    f"task {message['task']!r} is on a message that joins the one before it; move it there"
                )
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


def _user_parts(group: Sequence[Message], call_order: Mapping[str, int]) -> list[str]:
    """Texts of a user's turn; tool results keep their places among them, but stand there in the order of the calls."""
    results = [message for message in group if message["role"] == "tool"]
    ordered = iter(sorted(results, key=lambda result: call_order.get(result.get("tool_call_id", ""), 0)))
    return [
        f"<tool_result>{_text(next(ordered))}</tool_result>" if message["role"] == "tool" else _text(message)
        for message in group
    ]


def _text(message: Message) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or not all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        raise ValueError(f"content of a {message['role']} message is not text; only text parts are supported")
    return "\n\n".join(part["text"] for part in content)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _function(tool: Any) -> Mapping[str, Any]:
    """The inner part of OpenAI's `{"type": "function", "function": {"name": ...}}`."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{tool!r} is no tool or tool call; write it as {{'function': {{'name': ..., ...}}}}")
    return function


def _tool_call(call: Any) -> str:
    function = _function(call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {"arguments": arguments}  # what a model once wrote need not be JSON: quote it as it was
    if not isinstance(arguments, Mapping):
        raise ValueError(f"arguments of the call to {function['name']} are no JSON object; name each of them")
    parameters = [
        f'<{_DSML}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else _json(value)}</{_DSML}parameter>"
        for name, value in arguments.items()
    ]
    return "\n".join([f'<{_DSML}invoke name="{function["name"]}">', "\n".join(parameters), f"</{_DSML}invoke>"])


def _block(calls: Sequence[str]) -> str:
    return "\n".join([f"\n\n<{_DSML}tool_calls>", *calls, f"</{_DSML}tool_calls>"]) if calls else ""
