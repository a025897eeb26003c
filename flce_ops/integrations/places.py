"""Private names of other libraries that this package replaces by its own functions.

A library promises nothing about private names, so each is checked first: that it exists, that it takes the known
arguments, and that the function which should look it up still does.
"""

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any


@dataclass(frozen=True)
class Place:
    """A private name of a library, and what this package expects of the object with that name."""

    module: str
    name: str  # dotted if it belongs to a class
    arguments: tuple[str, ...]  # the names of its arguments, in order
    caller: str | None = None  # dotted, in the same module: the function that looks up the name when it runs

    def get(self) -> Any:
        """The object at that place, or None."""
        return look_up(self.module, self.name)

    def set(self, value: Any) -> None:
        owner, _, attribute = self.name.rpartition(".")
        setattr(look_up(self.module, owner), attribute, value)

    def what_is_wrong(self) -> str | None:
        where = f"{self.module}.{self.name}"
        found = self.get()
        if found is None:
            return f"{where} is not there"
        arguments = tuple(inspect.signature(callable_of(found)).parameters)
        if arguments != self.arguments:
            return f"expected {where} to take {self.arguments}, got {arguments}"
        if self.caller is not None:
            caller = look_up(self.module, self.caller)
            if caller is None or self.name not in names_in(inspect.unwrap(caller).__code__):
                return f"expected {self.module}.{self.caller} to call {self.name}, which it does not"
        return None


class Replacements:
    """The functions that replace private names of one library, for the whole process."""

    def __init__(self, library: str, tested: str, functions: Mapping[Place, Any]) -> None:
        """library: its distribution's name. tested: the version that the tests run."""
        self.library, self.tested, self.functions = library, tested, functions
        self.originals: dict[Place, Any] = {}  # the functions that were replaced, also after take_away
        self.in_place = False

    def check(self) -> None:
        """NotImplementedError with the name of a place that is not as known."""
        for place in () if self.in_place else self.functions:
            wrong = place.what_is_wrong()
            if wrong is not None:
                raise NotImplementedError(
                    f"{self.library} {importlib.metadata.version(self.library)}: {wrong}. flce_ops knows it in "
                    f"{self.library} {self.tested}; train without patch, or with that version"
                )

    def put(self) -> None:
        """Replaces all names, or none if one is not as known."""
        if self.in_place:
            return
        self.check()
        for place, function in self.functions.items():
            self.originals[place] = place.get()
            place.set(function)
        self.in_place = True

    def take_away(self) -> None:
        if not self.in_place:
            raise ValueError(f"{self.library} is not patched")
        for place, original in self.originals.items():
            place.set(original)
        self.in_place = False


def look_up(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or "." not in error.name or not module.startswith(error.name):
            raise  # the library, or a module that it imports, is not installed
        return None
    for part in name.split(".") if name else ():
        found = getattr(found, part, None)
    return found


def callable_of(found: Any) -> Callable:
    """The function itself, or forward of an autograd Function."""
    return found.forward if isinstance(found, type) and hasattr(found, "forward") else found


def names_in(code: CodeType) -> Iterator[str]:
    """The names that a function and its inner functions look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_in(inner)
