"""DeepSeek-V4's chat format: the golden files of DeepSeek's encoder, then cases spelled out by hand."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compressed_spec.chat import encode_chat, render_chat

GOLDEN = Path(__file__).parent / "data" / "encoding_golden"

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIAL = [
    BOS,
    EOS,
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<｜latest_reminder｜>",
    "｜DSML｜",
    "<｜action｜>",
]

ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very thorough in your thinking and "
    "comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all "
    "potential paths, edge cases, and adversarial scenarios.\nExplicitly write out your entire deliberation process, "
    "documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no "
    "assumption is left unchecked.\n\n"
)
BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\nYou MUST reason with the utmost "
    "depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most "
    "fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any "
    "surface symptom.\nDo not stop reasoning until you have independently verified the solution from multiple angles "
    "and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
HI: dict[str, Any] = {"role": "user", "content": "Hi"}
TWO_TURNS: list[dict[str, Any]] = [
    SYSTEM,
    HI,
    {"role": "assistant", "reasoning_content": "A greeting.", "content": "Hello!"},
    {"role": "user", "content": "2+2?"},
]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def golden(number: int) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Messages, options and expected text of one of DeepSeek's own cases; number 4 alone is in chat mode."""
    given = json.loads((GOLDEN / f"input_{number}.json").read_text(encoding="utf-8"))
    options: dict[str, Any] = {"thinking": number != 4}
    if isinstance(given, dict):
        options["tools"], given = given["tools"], given["messages"]
    return given, options, (GOLDEN / f"output_{number}.txt").read_bytes().decode()


def byte_tokenizer(special: list[str]) -> PreTrainedTokenizerFast:
    """A token a byte, and one for each special string."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": special})
    return fast


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(SPECIAL)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_T37_golden_text(number: int) -> None:
    messages, options, expected = golden(number)
    before = copy.deepcopy((messages, options))
    assert encode_chat(messages, **options) == expected
    assert (messages, options) == before


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_T37_golden_token_ids(number: int, tokenizer: PreTrainedTokenizerFast) -> None:
    messages, options, expected = golden(number)
    ids = render_chat(tokenizer, messages, **options)
    assert ids == tokenizer.encode(expected, add_special_tokens=False)
    assert ids[0] == tokenizer.convert_tokens_to_ids(BOS)
    assert ids.count(tokenizer.convert_tokens_to_ids(EOS)) == expected.count(EOS)
    assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        pytest.param([HI], {}, "<｜User｜>Hi<｜Assistant｜></think>", id="chat"),
        pytest.param([SYSTEM, HI], {"thinking": True}, "Be brief.<｜User｜>Hi<｜Assistant｜><think>", id="thinking"),
        pytest.param(
            TWO_TURNS,
            {},
            f"Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello!{EOS}<｜User｜>2+2?<｜Assistant｜></think>",
            id="two turns, chat",
        ),
        pytest.param(
            TWO_TURNS,
            {"thinking": True},
            f"Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello!{EOS}<｜User｜>2+2?<｜Assistant｜><think>",
            id="two turns, earlier reasoning dropped",
        ),
        pytest.param(
            TWO_TURNS,
            {"thinking": True, "drop_thinking": False},
            "Be brief.<｜User｜>Hi<｜Assistant｜><think>A greeting.</think>"
            f"Hello!{EOS}<｜User｜>2+2?<｜Assistant｜><think>",
            id="two turns, earlier reasoning kept",
        ),
        pytest.param(
            [HI, {"role": "assistant", "content": "Hel", "wo_eos": True}],
            {},
            "<｜User｜>Hi<｜Assistant｜></think>Hel",
            id="assistant turn to be continued",
        ),
        pytest.param(
            [HI, {"role": "user", "content": [{"type": "text", "text": "there"}, {"type": "text", "text": "you"}]}],
            {},
            "<｜User｜>Hi\n\nthere\n\nyou<｜Assistant｜></think>",
            id="users in a row, text parts",
        ),
        pytest.param(
            [SYSTEM | {"response_format": {"type": "object"}}, HI],
            {},
            "Be brief.\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
            '{"type": "object"}<｜User｜>Hi<｜Assistant｜></think>',
            id="response format",
        ),
        pytest.param(
            [HI | {"task": "action"}],
            {"thinking": True},
            "<｜User｜>Hi<｜Assistant｜><think><｜action｜>",
            id="action task",
        ),
        pytest.param(
            [HI | {"task": "query"}, {"role": "assistant", "content": "hi"}],
            {"thinking": True},
            f"<｜User｜>Hi<｜query｜>hi{EOS}",
            id="query task",
        ),
        pytest.param(
            [HI, {"role": "assistant", "content": "Hello!", "task": "title"}, {"role": "assistant", "content": "Hi"}],
            {},
            f"<｜User｜>Hi<｜Assistant｜></think>Hello!{EOS}<｜title｜>Hi{EOS}",
            id="title task",
        ),
        pytest.param(
            [
                {"role": "developer", "content": "Search."},
                {"role": "assistant", "reasoning_content": "Why?", "content": "Done."},
                HI,
            ],
            {"thinking": True, "drop_thinking": False},
            f"<｜User｜>Search.<｜Assistant｜><think>Why?</think>Done.{EOS}<｜User｜>Hi<｜Assistant｜><think>",
            id="developer kept with reasoning",
        ),
        pytest.param(
            [SYSTEM, {"role": "developer", "content": "Search."}, HI],
            {"thinking": True},
            "Be brief.<｜User｜>Hi<｜Assistant｜><think>",
            id="earlier developer dropped with reasoning",
        ),
        pytest.param(
            [SYSTEM, {"role": "developer", "content": "Search."}],
            {"thinking": True},
            "Be brief.<｜User｜>Search.<｜Assistant｜><think>",
            id="last developer kept",
        ),
    ],
)
def test_T37_cases(messages: list[dict[str, Any]], options: dict[str, Any], expected: str) -> None:
    assert encode_chat(messages, **options) == BOS + expected


@pytest.mark.parametrize(
    ("revision", "effort", "prefix"),
    [
        ("v4", None, ""),
        ("v4", "high", ""),
        ("v4", "max", ABSOLUTE),
        ("0731", None, ""),
        ("0731", "low", ""),
        ("0731", "high", ABSOLUTE),
        ("0731", "max", BEYOND),
    ],
)
def test_T37_reasoning_effort(revision: Any, effort: str | None, prefix: str) -> None:
    text = encode_chat([SYSTEM, HI], thinking=True, reasoning_effort=effort, revision=revision)
    assert text == f"{BOS}{prefix}Be brief.<｜User｜>Hi<｜Assistant｜><think>"


def test_T37_tool_calls_and_results() -> None:
    """Results stand in the order of the calls, with the user's next words after them, and reasoning is kept."""
    messages: list[dict[str, Any]] = [
        SYSTEM,
        {"role": "user", "content": "Sums?"},
        {
            "role": "assistant",
            "reasoning_content": "Two calls.",
            "content": "Adding.",
            "tool_calls": [
                call("add", {"a": 1, "b": [2, None], "note": 'say "ü"', "ok": True}, "x"),
                call("add", '{"a": 0.5}', "y"),
                call("add", "not JSON", "z"),
            ],
        },
        {"role": "tool", "tool_call_id": "z", "content": "third"},
        {"role": "tool", "tool_call_id": "x", "content": "first"},
        {"role": "tool", "tool_call_id": "y", "content": [{"type": "text", "text": "second"}]},
        {"role": "user", "content": "And?"},
    ]
    text = encode_chat(messages, thinking=True, tools=[ADD])
    schema = '{"name": "add", "parameters": {"type": "object"}}'
    assert text.startswith(f"{BOS}Be brief.\n\n## Tools\n\n")
    assert f"\n\n### Available Tool Schemas\n\n{schema}\n\nYou MUST" in text
    assert text.partition("invoke tool calls.\n")[2] == (
        "<｜User｜>Sums?<｜Assistant｜><think>Two calls.</think>Adding.\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">[2, null]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="note" string="true">say "ü"</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="ok" string="false">true</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">0.5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="arguments" string="true">not JSON</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        f"</｜DSML｜tool_calls>{EOS}<｜User｜><tool_result>first</tool_result>\n\n<tool_result>second</tool_result>\n\n"
        "<tool_result>third</tool_result>\n\nAnd?<｜Assistant｜><think>"
    )


def test_T37_tools_without_a_system_message() -> None:
    text = encode_chat([HI], tools=[ADD])
    assert text.startswith(f"{BOS}\n\n## Tools\n\n")
    assert text.endswith("invoke tool calls.\n<｜User｜>Hi<｜Assistant｜></think>")
    assert text == encode_chat([{"role": "system", "tools": [ADD]}, HI])


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "messages is empty"),
        ([{"content": "Hi"}], {}, "unknown role None"),
        ([{"role": "bot", "content": "Hi"}], {}, "unknown role 'bot'"),
        ([HI], {"thinking": True, "reasoning_effort": "low"}, "'low' is unknown to revision v4"),
        ([HI], {"thinking": True, "reasoning_effort": "huge", "revision": "0731"}, "use one of low, high, max"),
        ([HI], {"reasoning_effort": "max"}, "needs thinking"),
        ([HI], {"revision": "v5"}, "revision 'v5' is unknown"),
        ([HI | {"task": "sing"}], {}, "unknown task 'sing'"),
        ([HI, HI | {"task": "query"}], {}, "joins the one before"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "content of a user message is not text"),
        ([{"role": "user", "content": 7}], {}, "content of a user message is not text"),
        ([{"role": "developer"}], {}, "developer message has no content"),
        ([{"role": "assistant", "content": "Hi"}], {}, "answers no user message"),
        ([SYSTEM, {"role": "assistant", "content": "Hi"}], {}, "answers no user message"),
        ([HI], {"tools": [{"name": "add"}]}, "is no tool"),
        ([SYSTEM | {"tools": [ADD]}, HI], {"tools": [ADD]}, "both as an argument and on a message"),
        ([HI, {"role": "assistant", "tool_calls": [call("add", "[1]", "x")]}], {}, "no JSON object"),
    ],
)
def test_bad_input_is_refused(messages: list[dict[str, Any]], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        encode_chat(messages, **options)


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("thinking", [False, True])
def test_a_tokenizer_with_a_template_uses_it(thinking: bool) -> None:
    tokenizer = byte_tokenizer([])
    tokenizer.chat_template = TEMPLATE + "{% if enable_thinking %}<think>{% endif %}"
    ids = render_chat(tokenizer, [SYSTEM, HI], thinking=thinking)
    assert all(type(token) is int for token in ids)
    assert tokenizer.decode(ids) == "[system]Be brief.[user]Hi[assistant]" + "<think>" * thinking
    assert tokenizer.decode(render_chat(tokenizer, TWO_TURNS[:3])).endswith("[assistant]Hello!")


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([HI], {"thinking": True}, "knows nothing of thinking"),
        ([HI], {"reasoning_effort": "max"}, "knows nothing of reasoning_effort"),
        ([HI], {"drop_thinking": False}, "knows nothing of drop_thinking"),
        ([HI], {"tools": [ADD]}, "knows nothing of tools"),
        ([HI, {"role": "tool", "content": "4"}], {}, "no such role"),
        ([], {}, "messages is empty"),
    ],
)
def test_a_template_is_not_asked_for_what_it_lacks(
    messages: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    tokenizer = byte_tokenizer([])
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(ValueError, match=message):
        render_chat(tokenizer, messages, **options)


def test_a_tokenizer_without_template_or_special_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no chat template and lacks DeepSeek-V4's <｜User｜>; give a plain prompt"):
        render_chat(byte_tokenizer([token for token in SPECIAL if "User" not in token]), [HI])
