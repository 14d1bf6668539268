"""What the configuration's types say, in words: valid values, keys and the place of a path."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from lagzero.config import Block
from lagzero.nearest import nearest

Path = tuple[str | int, ...]


def dotted(path: Path) -> str:
    """Write a path as the user writes it: ``data.train.0.size``."""
    return ".".join(str(part) for part in path)


def field_type(field: FieldInfo) -> Any:
    """Return a field's type with its limits attached."""
    if not field.metadata:
        return field.annotation
    return Annotated[(field.annotation, *field.metadata)]  # pyright: ignore[reportInvalidTypeForm]


def strip(kind: Any) -> tuple[Any, list[Any]]:
    """Split ``Annotated`` into the bare type and its limits."""
    limits: list[Any] = []
    while get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        for limit in more:
            limits += limit.metadata if isinstance(limit, FieldInfo) else [limit]
    return kind, limits


def options(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    bare, limits = strip(kind)
    if not limits and get_origin(bare) in (Union, types.UnionType):
        return get_args(bare)
    return (kind,)


def block_of(kind: Any) -> type[Block] | None:
    """Return the block that a type holds, if it holds one."""
    for option in options(kind):
        bare, _ = strip(option)
        if isinstance(bare, type) and issubclass(bare, Block):
            return bare
    return None


def child(kind: Any, part: str | int) -> Any | None:
    """Return the type found one step down a path, or None when there is no such step."""
    block = block_of(kind)
    if block is not None and isinstance(part, str):
        field = block.model_fields.get(part)
        return None if field is None else field_type(field)
    for option in options(kind):
        bare, _ = strip(option)
        args = get_args(bare)
        if get_origin(bare) is list and isinstance(part, int):
            return args[0]
        if get_origin(bare) is tuple and isinstance(part, int) and part < len(args):
            return args[part]
        if get_origin(bare) is dict and isinstance(part, str):
            return args[1]
    return None


def locate(root: Any, location: Sequence[str | int]) -> tuple[Path, Any]:
    """Turn a validator's location into the user's path and the type expected there.

    Names that the validator adds for the members of a union are left out. The last part stays
    even when it is no known key.
    """
    path: list[str | int] = []
    kind: Any = root
    for place, part in enumerate(location):
        below = child(kind, part)
        if below is not None:
            path.append(part)
            kind = below
        elif place == len(location) - 1 and block_of(kind) is not None:
            return (*path, part), None
    return tuple(path), kind


def describe(kind: Any) -> str:
    """Say what values a type allows: ``a whole number > 0 or null``."""
    return " or ".join(_describe_one(option) for option in options(kind))


def _describe_one(kind: Any) -> str:
    bare, limits = strip(kind)
    origin, args = get_origin(bare), get_args(bare)
    if bare is type(None):
        return "null"
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(str(arg) for arg in args)
    if origin is list:
        at_least = [limit.min_length for limit in limits if isinstance(limit, MinLen)]
        start = f"a list of at least {at_least[0]}" if at_least else "a list"
        return f"{start} ({_describe_one(args[0])} each)"
    if origin is tuple:
        return f"a list of {len(args)} ({_describe_one(args[0])} each)"
    if origin is dict:
        return "a block of keys"
    if isinstance(bare, type) and issubclass(bare, Block):
        return "a block with " + ", ".join(bare.model_fields)
    words: dict[Any, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
    }
    return " ".join([words.get(bare, "any value"), _range(limits)]).strip()


def _range(limits: Sequence[Any]) -> str:
    signs: list[str] = []
    for limit in limits:
        match limit:
            case Gt(gt=bound):
                signs.append(f"> {bound:g}")
            case Ge(ge=bound):
                signs.append(f">= {bound:g}")
            case Lt(lt=bound):
                signs.append(f"< {bound:g}")
            case Le(le=bound):
                signs.append(f"<= {bound:g}")
            case _:
                pass
    return " and ".join(signs)


def keys(root: type[Block], above: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Yield every key below a block, depth first; items of a list appear as index 0."""
    for name, field in root.model_fields.items():
        yield (*above, name), field
        kind = field_type(field)
        block, at = block_of(kind), (*above, name)
        if block is None:
            item = child(kind, 0)
            block, at = (None if item is None else block_of(item)), (*at, 0)
        if block is not None:
            yield from keys(block, at)


def blocks(kind: Any, value: Any, at: Path = ()) -> Iterator[tuple[Path, type[Block], Any]]:
    """Yield every block of keys in plain values of a type: its path, its type and its values."""
    block = block_of(kind)
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        if block is not None:
            yield at, block, value
    elif isinstance(value, list):
        pairs = enumerate(cast("list[Any]", value))
    for part, item in pairs:
        below = child(kind, part)
        if below is not None:
            yield from blocks(below, item, (*at, part))


def suggest(root: type[Block], path: Path) -> str:
    """Say what an unknown key probably meant: a near name here, or the same name elsewhere."""
    _, kind = locate(root, path[:-1])
    block = block_of(kind) or root
    name = str(path[-1])
    near = nearest(name, block.model_fields, cutoff=0.7)
    if near:
        return f"did you mean {near}?"
    elsewhere = [known for known, _ in keys(root) if known[-1] == name]
    if elsewhere:
        return f"did you mean {' or '.join(dotted(known) for known in elsewhere)}?"
    near = nearest(name, block.model_fields, cutoff=0.5)
    hint = f"did you mean {near}? " if near else ""
    return f"{hint}valid keys here: {', '.join(block.model_fields)}"
