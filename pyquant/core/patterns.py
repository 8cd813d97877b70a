"""Regular expressions and globs from untrusted recipes: matched in time that their text bounds.

Python's `re` backtracks: 're:(a+)+b' against a name of 34 letters takes minutes. Here a pattern is parsed by the
standard library and then walked as a graph: every pair (node, place in the name) is visited at most once, so the cost
is at most their product (Thompson, "Regular expression search algorithm", CACM 1968). Look-ahead works the same way;
what no such walk can do (backreferences, conditions, atomic groups) is refused. Names of layers have one line.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from fnmatch import translate
from typing import Any, Final

from pyquant.errors import ArgumentError

try:  # the parser of `re`, under its name since Python 3.11
    from re import _constants as _sre  # type: ignore[attr-defined]
    from re import _parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_constants as _sre
    import sre_parse as _parser

MAX_TEXT: Final = 1024  # characters of a regular expression
MAX_NODES: Final = 4096  # of its graph, repetitions written out
MAX_STEPS: Final = 100_000  # visits for one name
MAX_EXPRESSIONS: Final = 1024  # in one config
MAX_GLOBS: Final = 32_768

_CATEGORIES: Final[dict[Any, Callable[[str], bool]]] = {
    _sre.CATEGORY_DIGIT: str.isdecimal,
    _sre.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    _sre.CATEGORY_SPACE: str.isspace,
    _sre.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    _sre.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    _sre.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}
_REPEATS: Final = (_sre.MAX_REPEAT, _sre.MIN_REPEAT)


class Expression:
    """A regular expression that matches whole names.

    text   the expression, at most 1 024 characters; flags (?i), (?s), (?m), (?x), (?u) at its beginning.
    Raises ArgumentError ('config') for one that does not parse, is too large, or uses what no linear walk can do.

    Example:
        >>> Expression("(a+)+b").matches("a" * 34), Expression("(?!lm_).*head").matches("head")
        (False, True)
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_TEXT:
            raise _refused(text, f"{len(text)} characters", f"regular expressions of at most {MAX_TEXT} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of sets that a later Python may read otherwise
                tree = _parser.parse(text)
        except (re.error, OverflowError, RecursionError, ValueError) as error:
            raise _refused(text, str(error) or "nested too deeply", "a regular expression that compiles") from None
        flags = tree.state.flags
        if flags & ~(re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.UNICODE):
            raise _refused(text, "a flag", "the flags i, m, s, u and x")
        self._graph = _Graph(text, bool(flags & re.IGNORECASE))
        try:
            self._start = self._graph.build(tree, _ACCEPT)
        except RecursionError:
            raise _refused(text, "nested too deeply", "a regular expression of fewer groups") from None

    def matches(self, name: str) -> bool:
        """Whether the expression matches the whole name. Raises ArgumentError where that takes too many steps."""
        return self._graph.reaches(self._start, name, 0, at=len(name), steps=[0])


_ACCEPT: Final = 0  # the node at which a match ends


class _Graph:
    """Nodes as (kind, argument, nodes that follow); node 0 accepts."""

    def __init__(self, text: str, ignore_case: bool) -> None:
        self.text, self.ignore_case = text, ignore_case
        self.nodes: list[tuple[str, Any, tuple[int, ...]]] = [("accept", None, ())]

    def add(self, kind: str, argument: Any, *after: int) -> int:
        if len(self.nodes) >= MAX_NODES:
            raise _refused(self.text, "too many repetitions", f"at most {MAX_NODES} parts with repetitions written out")
        self.nodes.append((kind, argument, after))
        return len(self.nodes) - 1

    # ---- from the parser's tree, last item first: each item knows what follows it

    def build(self, items: Iterable[Any], after: int) -> int:
        for kind, argument in reversed(list(items)):
            after = self._item(kind, argument, after)
        return after

    def _item(self, kind: Any, argument: Any, after: int) -> int:
        if kind in (_sre.LITERAL, _sre.NOT_LITERAL, _sre.ANY, _sre.IN):
            return self.add("letter", self._letter(kind, argument), after)
        if kind is _sre.BRANCH:
            return self.add("either", None, *(self.build(option, after) for option in argument[1]))
        if kind is _sre.SUBPATTERN:
            _, added, removed, inner = argument
            if added or removed:
                raise _refused(self.text, "a flag inside", "flags at the beginning")
            return self.build(inner, after)
        if kind in _REPEATS:
            low, high, inner = argument
            return self._repeat(low, high, inner, after)
        if kind is _sre.AT:
            return self.add("place", argument, after)
        if kind in (_sre.ASSERT, _sre.ASSERT_NOT):
            direction, inner = argument
            width = inner.getwidth()[0] if direction < 0 else None
            return self.add("look", (self.build(inner, _ACCEPT), width, kind is _sre.ASSERT), after)
        construct = str(kind).lower().replace("_", " ")
        raise _refused(self.text, construct, "no backreferences, conditions, or atomic and possessive parts")

    def _repeat(self, low: int, high: Any, inner: Any, after: int) -> int:
        start = after
        if high is _sre.MAXREPEAT:
            start = self.add("either", None)
            self.nodes[start] = ("either", None, (self.build(inner, start), after))
        else:
            self._check_repetitions(high)
            for _ in range(high - low):
                start = self.add("either", None, self.build(inner, start), after)
        self._check_repetitions(low)
        for _ in range(low):
            before = len(self.nodes)
            start = self.build(inner, start)
            if len(self.nodes) == before:  # nothing to repeat
                break
        return start

    def _check_repetitions(self, count: int) -> None:
        if count > MAX_NODES:
            raise _refused(self.text, f"{count} repetitions", f"at most {MAX_NODES}")

    def _letter(self, kind: Any, argument: Any) -> Callable[[str], bool]:
        if kind is _sre.ANY:
            return lambda c: True
        items = argument if kind is _sre.IN else [(kind, argument)]
        negated = bool(items) and items[0][0] is _sre.NEGATE
        tests = [self._member(*item) for item in items if item[0] is not _sre.NEGATE]
        if not self.ignore_case:
            return lambda c: any(test(c) for test in tests) is not negated
        return lambda c: any(test(form) for test in tests for form in {c, c.lower(), c.upper()}) is not negated

    def _member(self, kind: Any, argument: Any) -> Callable[[str], bool]:
        if kind is _sre.LITERAL:
            return lambda c: c == chr(argument)
        if kind is _sre.NOT_LITERAL:
            return lambda c: c != chr(argument)
        if kind is _sre.RANGE:
            low, high = argument
            return lambda c: len(c) == 1 and low <= ord(c) <= high
        return _CATEGORIES[argument]

    # ---- the walk

    def reaches(self, start: int, name: str, begin: int, *, at: int | None, steps: list[int]) -> bool:
        """Whether node 0 is reached from `start` at letter `begin`: at letter `at`, or anywhere (None)."""
        waiting = [(start, begin)]
        seen = {(start, begin)}
        while waiting:
            node, i = waiting.pop()
            steps[0] += 1
            if steps[0] > MAX_STEPS:
                raise _refused(self.text, f"more than {MAX_STEPS} steps for {name[:80]!r}", "a simpler expression")
            kind, argument, after = self.nodes[node]
            if kind == "accept" and (at is None or i == at):
                return True
            if (
                (kind == "letter" and (i >= len(name) or not argument(name[i])))
                or (kind == "place" and not _is_place(argument, name, i))
                or (kind == "look" and not self._look(argument, name, i, steps))
            ):
                continue
            i += kind == "letter"
            for following in after:
                if (following, i) not in seen:
                    seen.add((following, i))
                    waiting.append((following, i))
        return False

    def _look(self, argument: tuple[int, int | None, bool], name: str, i: int, steps: list[int]) -> bool:
        start, width, expected = argument
        if width is None:
            return self.reaches(start, name, i, at=None, steps=steps) is expected
        return (width <= i and self.reaches(start, name, i - width, at=i, steps=steps)) is expected


def _is_place(kind: Any, name: str, i: int) -> bool:
    if kind in (_sre.AT_BEGINNING, _sre.AT_BEGINNING_STRING):
        return i == 0
    if kind in (_sre.AT_END, _sre.AT_END_STRING):
        return i == len(name)
    word = _CATEGORIES[_sre.CATEGORY_WORD]
    edge = (i > 0 and word(name[i - 1])) is not (i < len(name) and word(name[i]))
    return edge is (kind is _sre.AT_BOUNDARY)


def _refused(text: str, got: str, allowed: str) -> ArgumentError:
    return ArgumentError("config", f"key 're:{text[:100]}': {got}"[:240], allowed)


class Globs:
    """Globs by their literal beginnings or ends, so that a name meets only those that can match it.

    keys   globs; * also crosses dots; ? and [...] as in fnmatch.
    Raises ArgumentError for more than 32 768.

    Example:
        >>> Globs(["encoder.*.query", "*.1"]).matching("encoder.1")
        ['*.1']
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = list(keys)
        if len(self._keys) > MAX_GLOBS:
            raise ArgumentError("config", f"{len(self._keys)} globs", f"at most {MAX_GLOBS}; names are faster")
        # beginning or end -> (longest other literal, number) of its globs
        self._by_beginning: dict[str, list[tuple[str, int]]] = {}
        self._by_end: dict[str, list[tuple[str, int]]] = {}
        self._tests: dict[int, Callable[[str], object]] = {}
        for i, key in enumerate(self._keys):
            pieces = re.split(r"[*?]", key.partition("[")[0])
            begin, end = pieces[0], "" if "[" in key else pieces[-1]
            by_end = len(end) > len(begin)
            where, part = (self._by_end, end) if by_end else (self._by_beginning, begin)
            where.setdefault(part, []).append((max(pieces[:-1] if by_end else pieces[1:], key=len, default=""), i))
        self._beginnings = sorted({len(part) for part in self._by_beginning})
        self._ends = sorted({len(part) for part in self._by_end})

    def matching(self, name: str) -> list[str]:
        """The globs that match a name, in their order."""
        candidates = [self._by_beginning.get(name[:length], ()) for length in self._beginnings if length <= len(name)]
        candidates += [self._by_end.get(name[len(name) - length :], ()) for length in self._ends if length <= len(name)]
        candidate_indices = sorted(i for of_part in candidates for literal, i in of_part if literal in name)
        return [self._keys[i] for i in candidate_indices if self._test(i)(name)]

    def _test(self, i: int) -> Callable[[str], object]:
        """The comparison of one glob; made when a name first gets so far."""
        if i not in self._tests:
            key = self._keys[i]
            if "?" in key or "[" in key:
                self._tests[i] = re.compile(translate(key)).fullmatch
            else:
                self._tests[i] = _Stars(key).fits if "*" in key else key.__eq__
        return self._tests[i]


class _Stars:
    """A glob of literals and stars: each literal is looked for behind the one before it, once."""

    def __init__(self, key: str) -> None:
        self.first, *middle, self.last = key.split("*")
        self.middle = [part for part in middle if part]

    def fits(self, name: str) -> bool:
        if not (name.startswith(self.first) and name.endswith(self.last)):
            return False
        at, end = len(self.first), len(name) - len(self.last)
        for part in self.middle:
            at = name.find(part, at, end)
            if at < 0:
                return False
            at += len(part)
        return at <= end
