"""A drafter of the user's own, by import path."""

import importlib
import inspect
from collections.abc import Callable

from compressed_spec.drafting.base import Drafter
from compressed_spec.target import TargetModel


def load_drafter(path: str, model: TargetModel) -> Drafter:
    """The drafter that "module.path:ClassName" or "module.ClassName" names, made with `(model)` or `()`.

    It gets the model if its first parameter is called `model`, or has no default. Raises ValueError, naming the path,
    if the module cannot be imported or has no such class, or if that cannot be made or is no drafter.
    """
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if not module_name or not name:
        raise ValueError(f"Drafter {path!r} is no import path: write 'package.module:ClassName'.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"Drafter {path!r} cannot be imported ({type(error).__name__}: {error}): check the path, and that its "
            "folder is on PYTHONPATH."
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ValueError(f"Drafter {path!r}: module {module_name} has no class {name}; check the name.")
    try:
        drafter = factory(model) if _takes_model(factory) else factory()
    except Exception as error:
        raise ValueError(
            f"Drafter {path!r} cannot be made with (model) or (): {type(error).__name__}: {error}."
        ) from error
    if not isinstance(drafter, Drafter):
        raise ValueError(f"Drafter {path!r} needs the methods start, propose, observe and release, and lacks some.")
    return drafter


def _takes_model(factory: Callable[..., object]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
        return False
    first = parameters[0] if parameters and parameters[0].kind in positional else None
    return first is not None and (first.name == "model" or first.default is inspect.Parameter.empty)
