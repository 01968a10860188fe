"""The part of YAML that says one thing only: mappings, lists and text.

Kernel tables and manifests use no more. Aliases, tags, repeated keys and nesting without end are refused, and
every value stays the text that stands in the file: a digest of digits is no number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import yaml

_MAX_DEPTH = 8


def parse(text: str | bytes) -> object:
    """The one document in `text` as dicts, lists and strings; an empty value, `null` or `~` is None.

    Raises ValueError, with the line, for anything else.
    """
    # Reading events in C and building values here takes half the time of yaml.load.
    import yaml

    try:
        events = yaml.parse(text, Loader=yaml.CLoader if yaml.__with_libyaml__ else yaml.Loader)
        next(events)  # the start of the stream
        if isinstance(next(events), yaml.StreamEndEvent):
            raise ValueError("the file is empty")
        document = _value(next(events), events, depth=1)
        next(events)  # the end of the document
        if not isinstance(next(events), yaml.StreamEndEvent):
            raise ValueError("the file holds more than one YAML document")
    except (yaml.YAMLError, UnicodeError) as error:
        raise ValueError(f"not YAML: {error}") from None
    return document


def _value(event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> object:
    import yaml

    if getattr(event, "anchor", None) or getattr(event, "tag", None):
        raise ValueError(f"line {_line(event)} has an anchor, alias or tag; expected none")
    if isinstance(event, yaml.ScalarEvent):
        is_null = event.implicit[0] and event.value in ("", "~", "null")
        return None if is_null else event.value
    if depth > _MAX_DEPTH:
        raise ValueError(f"line {_line(event)} is too deep; expected at most {_MAX_DEPTH} levels")
    if isinstance(event, yaml.SequenceStartEvent):
        return list(_items(events, depth))
    return _mapping(events, depth)


def _items(events: Iterator[yaml.Event], depth: int) -> Iterator[object]:
    import yaml

    while not isinstance(item := next(events), yaml.SequenceEndEvent):
        yield _value(item, events, depth + 1)


def _mapping(events: Iterator[yaml.Event], depth: int) -> dict[str, object]:
    import yaml

    mapping: dict[str, object] = {}
    while not isinstance(key := next(events), yaml.MappingEndEvent):
        if not isinstance(key, yaml.ScalarEvent) or key.anchor or key.tag:
            raise ValueError(f"line {_line(key)} has a key that is no plain scalar")
        if key.value in mapping:
            raise ValueError(f"line {_line(key)} repeats the key {key.value[:100]!r}")
        mapping[key.value] = _value(next(events), events, depth + 1)
    return mapping


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0
