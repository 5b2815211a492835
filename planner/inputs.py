"""What a user typed -> values: counts, lists, ranges, words. Every refusal says what would be right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from distplan.costmodel.strategy import STRUCTURE
from distplan.hardware.errors import DistplanError, UnitError, did_you_mean

MAX_GPUS = 1 << 20
MAX_COUNTS = 4096
MAX_DEGREE = 1 << 20


class InputError(DistplanError):
    """A value on the command line that cannot be used; the message begins with the option."""


def gpu_counts(text: str, *, node: int) -> tuple[int, ...]:
    """'64', '8,16,32' or '64..512'. A range means whole nodes of `node` GPUs, and below a node 1, 2, 4 …"""
    counts: list[int] = []
    for item in _items("--gpus", text):
        first, dots, last = item.partition("..")
        low = _whole("--gpus", first, least=1, most=MAX_GPUS)
        if not dots:
            counts.append(low)
            continue
        high = _whole("--gpus", last, least=1, most=MAX_GPUS)
        if high < low:
            raise InputError(f"--gpus {item}: the range is empty; write {high}..{low}")
        counts += _range_of_nodes(low, high, node)
    if len(set(counts)) > MAX_COUNTS:
        raise InputError(f"--gpus {text}: {len(set(counts)):,} counts are too many, at most {MAX_COUNTS:,}")
    return tuple(sorted(set(counts)))


def _range_of_nodes(low: int, high: int, node: int) -> list[int]:
    small = [1 << n for n in range(node.bit_length()) if low <= 1 << n < node and 1 << n <= high]
    whole = list(range(max(low + (-low) % node, node), high + 1, node))
    if not small and not whole:
        raise InputError(f"--gpus {low}..{high}: holds no whole number of nodes (of {node} GPUs)")
    return small + whole


def whole_numbers(option: str, text: str, *, least: int = 1, most: int = MAX_DEGREE) -> tuple[int, ...]:
    """'4', '4,8' or '1..8', in the order given, each once."""
    values: list[int] = []
    for item in _items(option, text):
        first, dots, last = item.partition("..")
        low = _whole(option, first, least=least, most=most)
        high = _whole(option, last, least=least, most=most) if dots else low
        if high < low:
            raise InputError(f"{option} {item}: the range is empty; write {high}..{low}")
        if high - low >= MAX_COUNTS:
            raise InputError(f"{option} {item}: a range of {high - low + 1:,} values, at most {MAX_COUNTS:,}")
        values += range(low, high + 1)
    return tuple(dict.fromkeys(values))


def layers_by_hand(option: str, text: str) -> tuple[int, ...]:
    """'15,16,16,17' or '15,16*2,17': a number for every chunk."""
    layers: list[int] = []
    for item in _items(option, text):
        each, star, times = item.partition("*")
        count = _whole(option, times, least=1, most=MAX_COUNTS) if star else 1
        layers += [_whole(option, each, least=0, most=MAX_DEGREE)] * count
    return tuple(layers)


def one_number(option: str, text: str, *, least: int = 1, most: int = MAX_DEGREE) -> int:
    values = whole_numbers(option, text, least=least, most=most)
    if len(values) != 1:
        raise InputError(f"{option} {text}: one value is expected here")
    return values[0]


def decimals(option: str, text: str | None) -> list[float] | None:
    """'1.2' or '1,1.2,1.7'; what they must be is the reader's to say."""
    if text is None:
        return None
    try:
        return [float(item) for item in _items(option, text)]
    except ValueError:
        raise InputError(f"{option} {text}: expected a number or several, as in 1.2 or 1,1.5") from None


def words(option: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """'selective,full': each a word of `known`; '-' and '_' and case do not matter."""
    by_name = {_folded(word): word for word in known}
    values = []
    for item in _items(option, text):
        if _folded(item) not in by_name:
            near = did_you_mean(item, known)
            raise InputError(f"{option} {item}: unknown value{near or '; known: ' + ', '.join(known)}")
        values.append(by_name[_folded(item)])
    return tuple(dict.fromkeys(values))


def one_word(option: str, text: str, known: Collection[str]) -> str:
    values = words(option, text, known)
    if len(values) != 1:
        raise InputError(f"{option} {text}: one value is expected here")
    return values[0]


def quantity(option: str, text: str | None, parse: Callable[[object], float]) -> float | None:
    """A number with its unit; the parser's message with the option before it."""
    if text is None:
        return None
    try:
        return parse(text)
    except UnitError as error:
        raise InputError(f"{option} {error}") from None


def dimension(field: str, option: str, text: str) -> tuple[object, ...]:
    """The values that the user allows for one field of Strategy, of the field's own type."""
    if field == "stage_layers":
        return (layers_by_hand(option, text),)
    if field == "zero":
        return whole_numbers(option, text, least=0, most=3)
    if field in STRUCTURE:
        return words(option, text, STRUCTURE[field])
    return whole_numbers(option, text)


def _items(option: str, text: str) -> Sequence[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise InputError(f"{option} '{text}': a value is missing")
    return items


def _whole(option: str, text: str, *, least: int, most: int) -> int:
    digits = text.strip().replace("_", "")
    if not (digits.lstrip("+-").isascii() and digits.lstrip("+-").isdigit() and len(digits) < 20):
        raise InputError(f"{option} '{text}': a whole number is expected")
    value = int(digits)
    if value < least:
        raise InputError(f"{option} {value}: at least {least} is needed")
    if value > most:
        raise InputError(f"{option} {value}: at most {most:,} makes sense")
    return value


def _folded(word: str) -> str:
    return word.lower().replace("_", "-")
