"""Writes what is generated in docs: blocks between `<!-- generated: NAME -->` and `<!-- end -->`.

.venv/bin/python scripts/reference.py
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import yaml

from sglang_scout.core.config import KEYS, PUBLIC_KEYS
from sglang_scout.plugin.hooks import FIELDS, ROLES, Hook, hooks_of
from sglang_scout.plugin.status import METRICS
from sglang_scout.policy import policies

DOCS = Path(__file__).resolve().parents[1] / "docs"


def table(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    names = head.split(", ")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def split_default(text: str, default: object) -> tuple[str, str]:
    """The default, as the end of a help says or else as it is, and the help without it."""
    text, computed, words = text.removesuffix(".").partition(" Default: ")
    if computed:
        return words, text.removesuffix(".")
    default = list(default) if isinstance(default, tuple) else default
    return "none" if default is None else f"`{str(default).lower()}`", text


def flags() -> str:
    rows = []
    for name, (_, value, text) in FIELDS.items():
        default, about = split_default(text, value)
        rows.append((f"`--{name.replace('_', '-')}`", default, about))
    return table("flag, default, what it does and when to change it", rows)


def keys(head: str, names: Iterable[str]) -> str:
    """With the policies that know the key, if it is not for all."""
    rows = []
    for name in names:
        key = KEYS[name]
        default, about = split_default(key.help, key.default)
        owners = ", ".join(f"`{policy}`" for policy, own in policies().items() if name in own)
        owned = () if key.is_general else (owners,)
        values = ", ".join(f"`{choice}`" for choice in key.choices) or key.values
        rows.append((f"`{name}`", *owned, default, values, about))
    return table(head, rows)


def metrics() -> str:
    rows = (
        (f"`{name}{'_total' * (kind == 'counter')}`", kind, unit, text)
        for name, (kind, unit, text) in METRICS.items()
    )
    return table("name, kind, unit, meaning", rows)


def target(hook: Hook) -> str:
    if isinstance(hook.target, str):
        return f"`{hook.target}`"
    return ", ".join(f"{version}: `{name}`" for version, name in hook.target.items())


def hooks() -> str:
    found = [hook for role in ROLES for hook in hooks_of(role)]
    rows = {(", ".join(hook.roles), target(hook), hook.why) for hook in found}
    return table("server, target, why", sorted(rows))


def alerts() -> str:
    """The runbook."""
    found, groups = [], yaml.safe_load((DOCS / "monitoring" / "alerts.yml").read_text())["groups"]
    for rule in groups[0]["rules"]:
        notes, severity = rule["annotations"], rule["labels"]["severity"]
        meaning, action = notes["description"].split("\n")
        when, meaning = f"{notes['when']} ({severity}).", f"{notes['summary']} {meaning}"
        lines = f"- When: {when}", f"- Meaning: {meaning}", f"- What to do: {action}"
        fill = partial(textwrap.fill, width=120, subsequent_indent="  ", break_on_hyphens=False)
        filled = list(map(fill, lines))
        found.append("\n".join([f"### {rule['alert']}", "", *filled]))
    return "\n\n".join(found)


ABOUT = "default, values, what it does and when to change it"
BLOCKS: dict[str, Callable[[], str]] = {
    "flags": flags,
    "keys": lambda: keys(f"key, {ABOUT}", PUBLIC_KEYS),
    "keys of single policies": lambda: keys(f"key, policy, {ABOUT}", (k for k in KEYS if not KEYS[k].is_general)),
    "metrics": metrics,
    "hooks": hooks,
    "alerts": alerts,
}  # fmt: skip
TABLE = re.compile(r"<!-- table .*?<!-- end -->", re.DOTALL)  # benchmark/tables writes these
MARK = re.compile(r"<!-- (?:generated: .*|end) -->")
BLOCK = re.compile(r"(<!-- generated: ([\w ]+) -->\n)((?:(?!<!-- ).)*)(<!-- end -->)", re.DOTALL)


def generated() -> dict[Path, str]:
    """All files that have generated parts, as they should be.

    Raises:
        ValueError: a mark without its other half; or a block that is in no page, in several, or unknown.
    """
    files, found = {}, []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        here = [block[1] for block in BLOCK.findall(text)]
        if 2 * len(here) != len(MARK.findall(TABLE.sub("", text))):
            need = "a block needs `<!-- generated: NAME -->` and `<!-- end -->`"
            raise ValueError(f"{page}: {need}")
        if here:
            files[page] = text
        found += here
    if sorted(found) != sorted(BLOCKS):
        raise ValueError(
            f"{DOCS}: {sorted(BLOCKS)} must be in one page, once; found: {sorted(found)}"
        )
    new = lambda m: f"{m[1]}\n{BLOCKS[m[2]]()}\n\n{m[4]}"  # noqa: E731
    return {page: BLOCK.sub(new, text) for page, text in files.items()}


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text)
