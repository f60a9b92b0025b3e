"""Judgements of answers; generated code is never run."""

from pathlib import Path

import pytest

from compressed_spec.measure.datasets import Prompt, Task
from compressed_spec.measure.quality import defines_function, final_number, judge

PROMPT = Prompt(id="0", text="How many?", answer="2+2=<<2+2=4>>4\n#### 1,204")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1204", "1204"),
        ("so 5.\n#### 1,204", "1204"),
        ("#### $1,204.00", "1204"),
        ("#### 1204\nand 7 more words", "1204"),
        ("2 and 3 make 1204.", "1204"),
        ("#### -3", "-3"),
        ("#### -0.0", "0"),
        ("#### 007", "7"),
        ("#### 0.50", "0.5"),
        ("#### .", None),
        ("none", None),
        ("5 apples #### none", None),
    ],
)
def test_final_numbers(text: str, number: str | None) -> None:
    assert final_number(text) == number


def test_math() -> None:
    right = judge(Task.MATH, PROMPT, "It is 1204.\n#### 1204", [1, 2, 3])
    assert (right.correct, right.well_formed, right.looping) == (True, True, False)
    wrong = judge(Task.MATH, PROMPT, "It is 1204.\n#### 1205", [1, 2, 3])
    assert (wrong.correct, wrong.well_formed) == (False, True)
    unformed = judge(Task.MATH, PROMPT, "It is 1204", [*range(8)] * 4)
    assert (unformed.correct, unformed.well_formed, unformed.looping) == (True, False, True)


def test_code(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    deed = f"open({str(ran)!r}, 'w')"
    for text in (
        f"def f(x):\n    return x\n\n{deed}\n",
        f"Here it is:\n```python\n{deed}\nasync def f(): pass\n```\nDone.",
        f"```\nclass A:\n    def f(self): {deed}\n",
    ):
        assert defines_function(text)
    for text in (deed, "def f(x) return x", "x = 1", "no code", "", "def f():\n  return '\0'", "(" * 5000, "\ud800"):
        assert not defines_function(text)
    assert not ran.exists()
    found = judge(Task.CODE, PROMPT, "def f(): pass", [])
    assert (found.correct, found.well_formed) == (None, True)


def test_chat_asks_for_no_form() -> None:
    found = judge(Task.CHAT, PROMPT, "Hello", [1])
    assert (found.correct, found.well_formed, found.looping) == (None, None, False)
