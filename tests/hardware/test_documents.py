"""A user's file is read without trust; what is wrong is said with file, line and key."""

import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distplan.hardware.documents import Document, load, load_mapping, no_other_keys, take, write_atomically
from distplan.hardware.errors import DistplanError, DocumentError
from distplan.hardware.units import parse_bytes


def written(tmp_path, text, name="file.yaml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{after}: &{after} [*{before},*{before},*{before},*{before},*{before},*{before},*{before}]\n"
    for before, after in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", ":3: duplicate key 'a', first at line 1"),
        ("a:\n  b: c: d\n", ":2: is not valid YAML"),
        ("a:\n\tb: 1\n", ":2: is not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", ":1: the tag .* is not allowed"),
        ("a: !!binary aGk=\n", ":1: the tag .* is not allowed"),
        ("a: 1\n---\nb: 2\n", ":2: holds a second document"),
        ("a: &x {b: 1}\nc: {<<: *x}\n", ":2: merge keys"),
        ("a: &x [*x]\n", ":1: the alias \\*x has no finished anchor"),
        ("? [a, b]\n: 1\n", "a key must be a word"),
        (BOMB, "once its aliases are expanded"),
        ("a: [" + "*z," * 3 + "]\n", "no finished anchor"),
        ("[" * 40 + "]" * 40, "levels deep"),
        ("[" * 100_000, "deep|nesting"),
        ("a: 1e999\n", ":1: .* absurdly large"),
        ("a: " + "9" * 5000 + "\n", ":1: .* absurdly large"),
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        (b"\x00\x01\xff\xfe", "not a text file"),
        (b"a: \x00\n", "not valid YAML"),
    ],
)
def test_hostile_yaml_is_one_clear_error(tmp_path, text, said):
    path = written(tmp_path, text)
    with pytest.raises(DocumentError, match=said) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1,\n "a": 2}', ":2: a: duplicate key"),
        ('{"a": {"b": 1,\n "b": 2}}', ":2: a.b: duplicate key"),
        ('{"a": NaN}', "NaN is not allowed"),
        ('{"a": -Infinity}', "-Infinity is not allowed"),
        ('{"a": 1e999}', "absurdly large"),
        ('{"a": ' + "9" * 5000 + "}", "absurdly large"),
        ('{"a": 1,\n\n}', ":3: is not valid JSON"),
        ("{'a': 1}", ":1: is not valid JSON"),
        ("a: 1", "is not valid JSON"),
        ("[" * 100_000, "levels deep"),
        ('{"a":' * 100 + "1" + "}" * 100, "levels deep"),
        ("\ufeff", "the file is empty"),
        ("null", "the file is empty"),
    ],
)
def test_hostile_json_is_one_clear_error(tmp_path, text, said):
    with pytest.raises(DocumentError, match=said):
        load(written(tmp_path, text, "config.json"))


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "huge.yaml"
    with path.open("wb") as stream:
        stream.truncate(2**30)  # sparse
    with pytest.raises(DocumentError, match="too large"):
        load(path)


def test_what_is_no_file_is_one_clear_error(tmp_path):
    with pytest.raises(DocumentError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(DocumentError, match="No such file"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(DocumentError, match="not a regular file"):
        load("/dev/zero")
    with pytest.raises(DocumentError, match="not a path"):
        load("a\0b")


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@given(plain.filter(lambda value: value is not None), st.sampled_from([None, 2, "\t"]))
def test_json_reads_as_the_standard_library_does(tmp_path_factory, value, indent):
    text = json.dumps(value, indent=indent)
    document = load(written(tmp_path_factory.mktemp("json"), text, "x.json"))
    assert document.value == json.loads(text)
    # and every key stands on the line that the document says
    lines = text.split("\n")
    for keys, line in document.lines.items():
        if keys and isinstance(keys[-1], str):
            assert json.dumps(keys[-1]) in lines[line - 1]


def test_words_stay_words_and_numbers_are_numbers(tmp_path):
    text = "a: no\nb: 1e9\nc: '12'\nd: 1_000\ne: ~\nf: 0x10\ng: 12:30\nh: .nan\ni: true\n"
    assert load(written(tmp_path, text)).value == {
        "a": "no", "b": 1e9, "c": "12", "d": 1000, "e": None, "f": 16, "g": "12:30", "h": ".nan", "i": True,
    }  # fmt: skip


def document(tmp_path, text="layers: 80\nmemory: 80 GiB\nbad: 80\nname: x\nsp: true\nnothing: ~\n") -> Document:
    return load_mapping(written(tmp_path, text))


def test_take_reads_typed_values(tmp_path):
    doc = document(tmp_path)
    assert take(doc, "layers", int) == 80
    assert take(doc, "layers", float) == 80.0
    assert take(doc, "memory", parse_bytes) == 80 * 2**30
    assert take(doc, "sp", bool) is True
    assert take(doc, "absent", int, default=3) == 3
    assert take(doc, "nothing", int, default=None) is None


@pytest.mark.parametrize(
    ("key", "kind", "options", "said"),
    [
        ("layer", int, {}, "'layer' is missing; is 'layers' meant"),
        ("bad", parse_bytes, {}, ":3: bad: 80 has no unit"),
        ("name", int, {}, ":4: name: expected a whole number, got text 'x'"),
        ("sp", int, {}, ":5: sp: expected a whole number, got true or false"),
        ("nothing", int, {}, ":6: nothing: is null"),
        ("layers", int, {"maximum": 10}, ":1: layers: 80 is too large, at most 10"),
        ("layers", int, {"minimum": 100}, ":1: layers: 80 is too small"),
        ("name", str, {"choices": ("xy", "z")}, ":4: name: 'x' is not one of xy, z"),
        ("layers", Document, {}, "expected keys and values, got a whole number"),
    ],
)
def test_take_points_at_the_line(tmp_path, key, kind, options, said):
    with pytest.raises(DocumentError, match=said):
        take(document(tmp_path), key, kind, **options)


def test_an_unknown_key_suggests_the_known_one(tmp_path):
    with pytest.raises(DocumentError, match=":1: layers: unknown key; did you mean num_layers"):
        no_other_keys(document(tmp_path), ("num_layers", "memory", "bad", "name", "sp", "nothing"))


def test_writing_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "strategy.yaml"
    path.write_text("old")
    path.chmod(0o640)
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    write_atomically(link, "newer")
    assert link.is_symlink() and path.read_text() == "newer"
    with pytest.raises(UnicodeEncodeError):  # an error of ours while writing
        write_atomically(path, "\ud800")
    assert path.read_text() == "newer"
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "strategy.yaml"]  # nothing left beside


def test_an_unwritable_place_is_one_clear_error(tmp_path):
    for target in (tmp_path, tmp_path / "absent" / "x.yaml", "/proc/x.yaml"):
        with pytest.raises(DistplanError, match=r"cannot be written|is a folder"):
            write_atomically(target, "text")
