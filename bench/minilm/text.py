"""Real English sentences that every Python carries: the standard library's docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

_MODULES = (
    "abc",
    "argparse",
    "array",
    "ast",
    "asyncio",
    "base64",
    "bisect",
    "calendar",
    "collections",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "email",
    "enum",
    "fractions",
    "functools",
    "gzip",
    "hashlib",
    "heapq",
    "html",
    "inspect",
    "itertools",
    "json",
    "logging",
    "math",
    "multiprocessing",
    "operator",
    "optparse",
    "os",
    "pathlib",
    "pickle",
    "platform",
    "pprint",
    "queue",
    "random",
    "re",
    "sched",
    "selectors",
    "shelve",
    "shlex",
    "shutil",
    "socket",
    "sqlite3",
    "ssl",
    "statistics",
    "string",
    "struct",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "tokenize",
    "trace",
    "types",
    "typing",
    "unittest",
    "urllib.request",
    "uuid",
    "warnings",
    "wave",
    "weakref",
    "xml.dom.minidom",
    "zipfile",
)
_PER_MODULE = 4


def sentences(count: int = 200) -> list[str]:
    """The first `count` sentences, at most four a module: deterministic for one Python version.

    Raises RuntimeError when this Python's docstrings hold fewer (a build stripped of docstrings has none).
    """
    found: list[str] = []
    for name in _MODULES:
        for _, sentence in zip(range(_PER_MODULE), _new_sentences(name, frozenset(found)), strict=False):
            found.append(sentence)
    if len(found) < count:
        raise RuntimeError(f"the standard library's docstrings hold {len(found)} sentences, {count} are needed")
    return found[:count]


def _new_sentences(module_name: str, known: frozenset[str]) -> Iterator[str]:
    seen = set(known)
    for docstring in _docstrings(module_name):
        for piece in re.split(r"(?<=[.!?])\s+|\n\s*\n", docstring):
            sentence = re.sub(r"\s+", " ", piece).strip()
            if _is_prose(sentence) and sentence not in seen:
                seen.add(sentence)
                yield sentence


def _docstrings(module_name: str) -> Iterator[str]:
    try:
        module = importlib.import_module(module_name)
    except ImportError:  # an optional part of the standard library, such as sqlite3 or ssl
        return
    yield inspect.getdoc(module) or ""
    for name, member in sorted(vars(module).items()):
        is_own = getattr(member, "__module__", "") == module_name
        if is_own and not name.startswith("_") and (inspect.isclass(member) or inspect.isfunction(member)):
            yield inspect.getdoc(member) or ""


def _is_prose(text: str) -> bool:
    is_sentence = 40 <= len(text) <= 220 and text[0].isupper() and text[-1] == "." and text.count(" ") >= 6
    is_whole = text.count("(") == text.count(")") and not text.endswith(("e.g.", "i.e."))
    return is_sentence and is_whole and not re.search(r"[<>{}=_|\\]", text)
