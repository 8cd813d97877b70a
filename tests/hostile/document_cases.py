"""Documents under 1 MB that once took minutes or gigabytes, or raised errors that are not ours."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from pyquant.core.patterns import Expression
from pyquant.io import strict_json
from pyquant.nn.match import FqnConfig
from pyquant.ops import tuned
from pyquant.recipe import Recipe

SIZE = 2**20 - 64
YAML = 2**19 - 64
TOML = 2**17 - 64


def many(form: str, count: int) -> str:
    return ",".join(form.replace("#", str(i)) for i in range(count))


TEXTS: dict[str, tuple[str, str]] = {
    "yaml base 60": ("yaml", "calib_params: {num_calib_batches: " + "1:" * (YAML // 2 - 30) + "1}"),
    "yaml digits": ("yaml", "a: " + "9" * (YAML - 8)),
    "yaml negative digits": ("yaml", "ptq_only: -" + "9" * 5000),
    "yaml hexadecimal": ("yaml", "ptq_only: 0x" + "F" * (YAML - 32)),
    "yaml octal": ("yaml", "ptq_only: 0" + "7" * 5000),
    "yaml float digits": ("yaml", "calib_params: {percentile: " + "9" * 5000 + ".5}"),
    "yaml large float": ("yaml", "calib_params: {percentile: 1e999}"),
    "yaml date": ("yaml", "provenance: {gpu: 2001-99-99}"),
    "yaml directives": ("yaml", "%TAG !a! x\n" * (YAML // 12) + "---\na: 1"),
    "yaml flow depth": ("yaml", "[" * YAML),
    "yaml block depth": ("yaml", "- " * (YAML // 2)),
    "yaml indents": ("yaml", "".join(" " * i + "a:\n" for i in range(1000))),
    "yaml comment": ("yaml", "#" * YAML),
    "yaml one scalar": ("yaml", "a" * YAML),
    "yaml long key": ("yaml", "a" * (YAML - 4) + ": 1"),
    "yaml quoted": ("yaml", "a: '" + "''" * (YAML // 2 - 8) + "'"),
    "yaml escapes": ("yaml", 'a: "' + "\\u0041" * (YAML // 6 - 8) + '"'),
    "yaml entries": ("yaml", "a:\n" + "- \n" * (YAML // 3 - 8)),
    "yaml pairs": ("yaml", "{" + many("a#", 65_000) + "}"),
    "yaml documents": ("yaml", "---\n" * (YAML // 4)),
    "yaml aliases": ("yaml", "a: &a [1]\n" + "".join(f"b{i}: [{','.join(['*a'] * 9)}]\n" for i in range(9))),
    "yaml anchors only": ("yaml", many("&a# x", 50_000).join("[]")),
    "yaml merge": ("yaml", "a: {<<: {b: 1}}"),
    "yaml tags": ("yaml", "a: !!python/object/apply:os.getcwd []"),
    "yaml null": ("yaml", "a: \0"),
    "yaml surrogate": ("yaml", "a: \ud800"),
    "yaml rules": ("yaml", "layers:\n" + "".join(f"  a{i}: W8A8\n" for i in range(33_000))),
    "yaml large": ("yaml", "#" * SIZE),
    "json rules": ("json", '{"layers":{' + many('"a#":"W8A8"', 60_000) + "}}"),
    "json different rules": ("json", '{"layers":{' + many('"a#":"W4A8(group_size=#)"', 25_000) + "}}"),
    "json globs": ("json", '{"layers":{' + many('"a*#*b":"W8A8"', 45_000) + "}}"),
    "json expressions": ("json", '{"layers":{' + many('"re:(a#+)+b":"W8A8"', 40_000) + "}}"),
    "json skipped": ("json", '{"selective_quantizer_params":{"skip_modules":[' + many('"a#"', 50_000) + "]}}"),
    "json chains": ("json", '{"chains":[' + many('["a#","b"]', 50_000) + "]}"),
    "json depth": ("json", '{"a":' + "[" * (SIZE - 16)),
    "json lists": ("json", '{"a":[' + "[]," * (SIZE // 3 - 16) + "[]]}"),
    "json objects": ("json", '{"a":[' + "{}," * (SIZE // 3 - 16) + "{}]}"),
    "json keys": ("json", "{" + many('"#":0', 90_000) + "}"),
    "json digits": ("json", '{"ptq_only":' + "9" * 5000 + "}"),
    "json escapes": ("json", '{"a":"' + "\\u0041" * (SIZE // 6 - 8) + '"}'),
    "json unknown key": ("json", '{"' + "a" * (SIZE - 16) + '":1}'),
    "toml dotted": ("toml", "a" + ".a" * (TOML // 2 - 4) + "=1"),
    "toml dotted quoted": ("toml", '"a"' + '."a"' * (TOML // 4 - 4) + "=1"),
    "toml dotted table": ("toml", "[" + ".".join(["a"] * 20_000) + "]\n" + "b=1\n" * 1000),
    "toml dots in strings": ("toml", 'a=["' + "." * 60_000 + "\"]\nb='''" + ".'\n" * 9000 + "'''"),
    "toml dotted behind a string": ("toml", "a='''\n\"'''\nb" + ".c" * 60_000 + "=1"),
    "toml dotted behind a comment": ("toml", "# '''\nb" + ".c" * 60_000 + "=1"),
    "toml shallow": ("toml", "\n".join(f"b{i}.c.d.e.f.g.h=1" for i in range(6000))),
    "toml keys": ("toml", "[layers]\n" + "".join(f'a{i}="W8A8"\n' for i in range(9000))),
    "toml hexadecimal": ("toml", "ptq_only=0x" + "F" * 60_000),
    "toml digits": ("toml", "ptq_only=" + "9" * 5000),
    "toml float digits": ("toml", "calib_params={percentile=0x" + "F" * 5000 + "}"),
    "toml depth": ("toml", "a=" + "[" * (TOML - 8)),
    "toml inline depth": ("toml", "a=" + "{a=" * (TOML // 3 - 8)),
    "toml tables": ("toml", "[[a]]\n" * (TOML // 6)),
    "toml escapes": ("toml", 'a="' + "\\u0041" * (TOML // 6 - 8) + '"'),
    "toml date": ("toml", "provenance={gpu=1979-05-27}"),
    "toml large": ("toml", "#" * SIZE),
}


CONFIGS = ("yaml base 60", "yaml aliases", "yaml date", "yaml surrogate", "json digits", "json rules", "toml dotted")


def recipe(form: str, text: str) -> None:
    Recipe.loads(text, form, "some file")


def config(form: str, text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"c.{form}"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        Recipe.load_config(path)


def globs(form: str, count: int, layers: int = 100) -> None:
    found = [(f"layer.{i}.fc", nn.Linear(1, 1)) for i in range(layers)]
    rules = FqnConfig({form.replace("#", str(i)): None for i in range(count)} | {"*": None})
    for name, module in found:
        rules.decide(name, module)
    rules.check_used(found, [("layer", nn.Sequential())])


def expression(text: str, name: str) -> None:
    Expression(text).matches(name)


def table(text: str) -> None:
    tuned.parse(text.encode("utf-8", "surrogatepass"), "tuned.json")


def manifest(text: str) -> None:
    strict_json.loads(text.encode(), "manifest.json")


CASES: dict[str, Callable[[], None]] = {
    **{f"recipe: {name}": partial(recipe, *document) for name, document in TEXTS.items()},
    # the same reader stands behind the command line's file; a few show that it does
    **{f"config: {name}": partial(config, *TEXTS[name]) for name in CONFIGS},
    "globs with a common beginning": partial(globs, "layer*#*c", 30_000),
    "globs with a common end": partial(globs, "*#*c", 30_000),
    "globs with neither": partial(globs, "*#*", 30_000),
    "globs with sets": partial(globs, "[l]*[#]*", 3000),
    "globs of stars": partial(globs, "*l" * 400 + "#", 300),
    **{
        f"expression {text[:30]!r}": partial(expression, text, name)
        for text, name in {
            "(a+)+b": "a" * 34,
            "(a|a)*(a|aa)*c": "a" * 200,
            "(.*a){12}": "b" * 120,
            "(?:a?){60}a{60}": "a" * 60,
            "(a{60}){60}{60}": "a",
            "a{99999999999999999999}": "a",
            "((){4000}){4000}": "a",
            "(" * 400 + ")" * 400: "a",
            "((((((((a?){9}){9}){9}){9}){9}){9}){9}){9}": "a",
            "(?=(.*a)+)" * 40 + "b": "a" * 100,
            r"(a)\1": "aa",
            "(?>a+)b": "ab",
            "(?i:a)": "a",
            "a" * 2000: "a",
            "[": "a",
            "(?P<x>a)(?(x)b|c)": "ab",
            "\ud800+": "\ud800",
        }.items()
    },
    "tuned: digits": partial(table, '{"schema": 1, "gpus": ' + "9" * 401 + "}"),
    "tuned: us of 401 digits": partial(
        table, '{"schema": 1, "gpus": {"G": {"note": {}, "choices": [{"us": ' + "9" * 401 + "}]}}}"
    ),
    "tuned: lists": partial(table, '{"schema": 1, "gpus": [' + "[]," * (SIZE // 3) + "[]]}"),
    "tuned: a name that is no text": partial(table, r'{"schema": 1, "gpus": {"\ud800": {"note": {}, "choices": []}}}'),
    "manifest: lists": partial(manifest, '{"a":[' + "[]," * (5 * 2**20) + "[]]}"),
    "manifest: keys": partial(manifest, "{" + many('"#":0', 1_400_000) + "}"),
}
