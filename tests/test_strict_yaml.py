"""The YAML reader behind tables and manifests: what it takes, and what it refuses with the line."""

from __future__ import annotations

import contextlib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.strict_yaml import parse


def test_every_value_stays_text() -> None:
    assert parse("a: 1\nb: [2.5, 0x10, yes]\nc: {d: 2020-01-01}") == {
        "a": "1",
        "b": ["2.5", "0x10", "yes"],
        "c": {"d": "2020-01-01"},
    }


def test_null_is_none_unless_quoted() -> None:
    assert parse("[null, ~, 'null', \"~\", '']") == [None, None, "null", "~", ""]
    assert parse("a:\nnull: b") == {"a": None, "null": "b"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("# nothing", "the file is empty"),
        ("a: 1\n---\nb: 1", "more than one YAML document"),
        ("a: 1\na: 2", "line 2 repeats the key 'a'"),
        ("- {a: 1,\n   b: {c: 1, c: 2}}", "line 2 repeats the key 'c'"),
        ("a: &x 1\nb: *x", "line 1 has an anchor, alias or tag"),
        ("a: 1\nb: *x", "line 2 has an anchor, alias or tag"),
        ("a: &x [1]", "anchor, alias or tag"),
        ("a: !!int 1", "anchor, alias or tag"),
        ("!!python/object/apply:os.system [true]", "anchor, alias or tag"),
        ("[a]: 1", "line 1 has a key that is no plain scalar"),
        ("&k a: 1", "key that is no plain scalar"),
        ("[" * 9 + "]" * 9, "too deep; expected at most 8 levels"),
        ("{a: " * 100_000, "too deep"),
        ("a: b: c", "not YAML: .*\n.*line 1"),
        ("[1, 2", "not YAML"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"a: \xff", "not YAML"),
    ],
)
def test_the_rest_is_refused_with_its_line(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse(text)
    assert len(str(caught.value)) < 1000


def test_eight_levels_are_read() -> None:
    assert parse("[" * 8 + "x" + "]" * 8) == [[[[[[[["x"]]]]]]]]


@given(st.one_of(st.text(), st.binary(), st.text("{}[]:-,&*!|>'\"#?%@ \n\tabc1")))
def test_any_input_is_read_or_a_value_error(text: str | bytes) -> None:
    with contextlib.suppress(ValueError):
        parse(text)


VALUE = st.recursive(
    st.text("abc1~:# '", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab1", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
).filter(lambda value: _depth(value) <= 8)


def _depth(value: object) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, items), default=0)


@given(VALUE, st.booleans())
def test_what_another_writer_quotes_comes_back(value: object, flow: bool) -> None:
    assert parse(yaml.safe_dump(value, default_style='"', default_flow_style=flow)) == value
