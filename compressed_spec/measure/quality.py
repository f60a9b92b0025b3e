"""Whether answers are whole, in the form asked for and right. Generated code is parsed, never run."""

import ast
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from compressed_spec.measure.datasets import Prompt, Task
from compressed_spec.training.gate import has_loop, is_well_formed

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Of one answer; None where its task does not ask for it."""

    correct: bool | None
    well_formed: bool | None
    looping: bool


def judge(task: Task, prompt: Prompt, text: str, token_ids: Sequence[int]) -> Judgement:
    """An answer's text (without special tokens) and tokens against what its prompt asked for."""
    correct = well_formed = None
    if task is Task.MATH:
        well_formed = is_well_formed(text)
        if prompt.answer is not None:
            wanted, found = final_number(prompt.answer), final_number(text)
            correct = found is not None and found == wanted
    elif task is Task.CODE:
        well_formed = defines_function(text)
    return Judgement(correct=correct, well_formed=well_formed, looping=has_loop(token_ids))


def final_number(text: str) -> str | None:
    """The number after the last `####`, else the last one at all, plainly written: "1200" for "1,200.0" and "$1200"."""
    _, mark, after = text.rpartition("####")
    numbers = _NUMBER.findall(after)
    if not numbers:
        return None
    number = (numbers[0] if mark else numbers[-1]).replace(",", "").replace("$", "")
    whole, _, fraction = number.partition(".")
    sign, digits = ("-", whole[1:]) if whole.startswith("-") else ("", whole)
    digits, fraction = digits.lstrip("0") or "0", fraction.rstrip("0")
    if digits == "0" and not fraction:
        sign = ""
    return sign + digits + (f".{fraction}" if fraction else "")


def defines_function(text: str) -> bool:
    """Whether the answer, or its first fenced block, is Python that defines a function."""
    fenced = _FENCE.search(text)
    code = text if fenced is None else fenced.group(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes and the like: they are the model's
            tree = ast.parse(code.strip("\n"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(tree))
