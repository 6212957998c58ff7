"""Prints every message that an operator or a client can meet, read from the code, with ``{places}`` for values and
``<one | another>`` for branches.

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

PACKAGE = Path(__file__).resolve().parents[1] / "python" / "sglang_scout"
KINDS = {
    "refused at start": "ConfigError _refuse",
    "reasons of a refusal": "_check_kept",
    "HTTP answer": "HTTPException FINISH_ABORT answer_error aborted refuse _wrong",
    "error log": "logger.error logger.exception",
    "warning log": "logger.warning _warn_once",
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
ANSWERED = (
    "plugin/http.py",
    "plugin/halves.py",
)  # SGLang answers their ValueErrors with status 400
Names = dict[str, str]


class Message(NamedTuple):
    kind: str
    file: str
    line: int
    text: str


def kind_of(call: ast.Call, file: str) -> str:
    name = ast.unparse(call.func)
    if name == "ValueError" and file in ANSWERED:
        return "HTTP answer"
    kind = KIND_OF.get(name, "fatal" if re.fullmatch(r"\w+(Error|Exit)", name) else "")
    return "" if kind == "HTTP answer" and not file.startswith("plugin/") else kind


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
        case ast.Dict():
            return "\n    or ".join(text_of(value, names) for value in node.values)
        case ast.IfExp():
            return f"<{text_of(node.body, names)} | {text_of(node.orelse, names)}>"
    name = ast.unparse(node)
    return names.get(name, f"{{{name}}}")


def words_in(text: str) -> str:
    return re.sub(r"{[^{}]*}|%s|[^A-Za-z]", "", text)


def assigned(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=to)], value=ast.Tuple(elts=values)):
            return list(zip(to, values, strict=False))
        case ast.Assign(targets=[to], value=value) | ast.AugAssign(target=to, value=value):
            return [(to, value)]
    return []


def calls_in(scope: ast.AST, constants: Names) -> Iterator[tuple[ast.Call, Names]]:
    """Calls of a function or module, with the texts of its variables. Texts that a variable is given before the next
    call that uses it are branches. Constants that it gives texts to are added."""
    names, used = dict(constants), set[str]()
    for one in sorted(ast.walk(scope), key=lambda one: getattr(one, "lineno", 0)):
        for to, value in assigned(one):
            text, name = text_of(value, names), ast.unparse(to)
            if isinstance(one, ast.AugAssign):
                names[name] = names.get(name, "") + text
            elif words_in(text):
                is_branch = name in names and name not in used
                names[name] = f"<{names[name]} | {text}>" if is_branch else text
                used.discard(name)
                constants |= {name: text} if name.isupper() else {}
        if isinstance(one, ast.Call):
            yield one, names
            used |= {x.id for x in ast.walk(one) if isinstance(x, ast.Name)}


def messages() -> Iterator[Message]:
    for path in sorted(PACKAGE.rglob("*.py")):
        file, tree, found = str(path.relative_to(PACKAGE)), ast.parse(path.read_text()), {}
        functions = ast.FunctionDef | ast.AsyncFunctionDef
        nodes, constants = [x for x in ast.walk(tree) if isinstance(x, functions)], dict[str, str]()
        for scope in (tree, *nodes):  # inner ones last
            for call, names in calls_in(scope, constants):
                if kind := kind_of(call, file):
                    texts = (text_of(one, names) for one in call.args)
                    text = max(texts, key=lambda text: len(words_in(text)), default="")
                    found[call.lineno] = Message(kind, file, call.lineno, text)
        yield from found.values()


def main() -> None:
    word = "".join(sys.argv[1:])
    found = (x for x in sorted(messages()) if words_in(x.text))
    shown = [x for x in found if word in f"{x.kind} {x.file} {x.text}"]
    for one in shown:
        print(f"{one.kind}: {one.file}:{one.line}\n    {one.text}")
    counts = Counter(one.kind for one in shown)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"; {len(shown)} in all")


if __name__ == "__main__":
    main()
