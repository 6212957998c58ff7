"""Prints every message that an operator or a client can meet, read from the code, with ``{places}`` for values and
``<one | another>`` for choices.

.venv/bin/python scripts/messages.py [WORD]    # those with this word in their kind, file or text
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "sglang_scout"
NATIVE = ROOT / "sgl-kernel" / "src"
KINDS = {
    "ConfigError": "refused at start",
    "HTTPException": "HTTP answer",
    "FINISH_ABORT": "HTTP answer",
    "answer_error": "HTTP answer",
    "aborted": "HTTP answer",
    "refuse": "HTTP answer",
    "logger.error": "error log",
    "logger.exception": "error log",
    "logger.warning": "warning log",
    "_warn_once": "warning log",
}
TO_CLIENTS = (
    "plugin/http.py",
    "plugin/halves.py",
)  # SGLang answers their ValueErrors with status 400
THROW = re.compile(r"throw (?:std|nb)::\w+\((.*?)\);", re.DOTALL)
Names = dict[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Message(NamedTuple):
    kind: str
    file: str
    line: int
    text: str


class Scope(NamedTuple):
    """A function or module, without the functions in it: its calls, each with the strings known there by name."""

    node: ast.AST
    calls: list[tuple[ast.Call, Names]]
    names: Names


def kind_of(call: ast.Call, file: str) -> str:
    name = ast.unparse(call.func)
    if name == "ValueError" and file in TO_CLIENTS:
        return "HTTP answer"
    return KINDS.get(name, "fatal" if re.fullmatch(r"\w+(Error|Exit)", name) else "")


def either(texts: list[str]) -> str:
    texts = list(dict.fromkeys(texts))
    return texts[0] if len(texts) == 1 else f"<{' | '.join(texts)}>"


def text_of(node: ast.AST, names: Names) -> str:
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(text_of(part, names) for part in node.values)
        case ast.FormattedValue():
            return text_of(node.value, names)
        case ast.BinOp(op=ast.Add()):
            return text_of(node.left, names) + text_of(node.right, names)
        case ast.BinOp(op=ast.BitOr()):
            return either([text_of(node.left, names), text_of(node.right, names)])
        case ast.IfExp():
            return either([text_of(node.body, names), text_of(node.orelse, names)])
        case ast.BoolOp() | ast.Dict():
            return either([text_of(value, names) for value in node.values])
    name = ast.unparse(node)
    return names.get(name, f"{{{name}}}")


def has_words(text: str) -> bool:
    while text != (text := re.sub(r"{[^{}]*}|%s", "", text)):
        pass
    return re.search("[A-Za-z]{2}", text) is not None


def assigned(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=to)], value=ast.Tuple(elts=values)):
            return list(zip(to, values, strict=False))
        case ast.Assign(targets=[to], value=value) | ast.AugAssign(target=to, value=value):
            return [(to, value)]
        case ast.For(target=ast.Tuple(elts=[_, to]), iter=ast.Call(ast.Attribute(value))):
            return [(to, value)]  # for name, text in TEXTS.items()
    return []


def scope_of(node: ast.AST, outer: Names) -> Scope:
    own, left = [], list(ast.iter_child_nodes(node))
    while left:
        own.append(one := left.pop())
        left += () if isinstance(one, Function) else ast.iter_child_nodes(one)
    own.sort(key=lambda one: getattr(one, "lineno", 0))
    found: dict[
        str, list[str]
    ] = {}  # texts given to a variable since it was last used: in branches
    calls, names = [], dict(outer)
    for one in own:
        for to, value in assigned(one):
            text, name = text_of(value, names), ast.unparse(to)
            if isinstance(one, ast.AugAssign):
                names[name] = names.get(name, "") + text
            elif has_words(text) or isinstance(one, ast.For):
                found.setdefault(name, []).append(text)
                names[name] = either(found[name])
            else:
                names.pop(name, None)
            if isinstance(value, ast.Dict):
                pairs = zip(value.keys, value.values, strict=True)
                names |= {
                    f"{name}[{ast.unparse(key)}]": text_of(x, names) for key, x in pairs if key
                }
        if isinstance(one, ast.Call):
            calls.append((one, dict(names)))
            for used in ast.walk(one):
                found.pop(ast.unparse(used) if isinstance(used, ast.Name) else "", None)
    return Scope(node, calls, names)


def scopes(node: ast.AST, outer: Names) -> Iterator[Scope]:
    """Of ``node``, and of the functions in it."""
    scope = scope_of(node, outer)
    yield scope
    for one in ast.walk(node):
        if isinstance(one, Function) and one is not node:
            yield scope_of(one, scope.names)


def argument(call: ast.Call, names: Names) -> str:
    """The text among the arguments: the first one with words, or else the last one."""
    texts = [text_of(one, names) for one in call.args]
    return next(filter(has_words, texts), "".join(texts[-1:]))


def of_callers(message: Message, helper: ast.AST, callers: list[Scope]) -> list[Message]:
    """A message with what each caller gives for the parameters of the function that has it; none if it has none of
    these."""
    if not isinstance(helper, Function):
        return []
    names = [one.arg for one in helper.args.args]
    defaults = dict(zip(reversed(names), reversed(helper.args.defaults), strict=False))
    found = []
    for call, known in (call for scope in callers for call in scope.calls):
        if ast.unparse(call.func) == helper.name:
            given = defaults | dict(zip(names, call.args, strict=False))
            given |= {keyword.arg or "": keyword.value for keyword in call.keywords}
            text = message.text
            for name, value in given.items():
                text = text.replace(f"{{{name}}}", text_of(value, known))
            found.append(message._replace(text=text))
    return found if any(f"{{{name}}}" in message.text for name in names) else []


def python_messages() -> Iterator[Message]:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    shared: Names = {}
    for tree in trees.values():
        shared |= {
            k: v for k, v in scope_of(tree, {}).names.items() if k.partition("[")[0].isupper()
        }
    for path, tree in trees.items():
        file, here = str(path.relative_to(PACKAGE)), list(scopes(tree, shared))
        for scope in here:
            for call, names in scope.calls:
                if kind := kind_of(call, file):
                    message = Message(kind, file, call.lineno, argument(call, names))
                    yield from of_callers(message, scope.node, here) or [message]


def native_messages() -> Iterator[Message]:
    for path in sorted(NATIVE.glob("*.*")):
        for found in THROW.finditer(text := path.read_text()):
            line = text.count("\n", 0, found.start()) + 1
            yield Message("C++", path.name, line, " ".join(found[1].split()))


def main() -> None:
    word = "".join(sys.argv[1:])
    messages = sorted({*python_messages(), *native_messages()})
    shown = [x for x in messages if has_words(x.text) and word in f"{x.kind} {x.file} {x.text}"]
    for one in shown:
        print(f"{one.kind}: {one.file}:{one.line}\n    {one.text}")
    counts = Counter(one.kind for one in shown)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"; {len(shown)} in all")


if __name__ == "__main__":
    main()
