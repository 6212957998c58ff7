"""Command lines in documents and outputs: found, and given to the programs' own parsers."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

MODULES = {"sglang.launch_server": "server", "sglang_router.launch_router": "router"}
INFINIBAND = "/sys/class/infiniband"
# What depends on the machine: replaced by what any machine has.
HERE = {"--kv-offload-host-gb": "0.05", "--kv-offload-cpus": str(min(os.sched_getaffinity(0)))}


def words_of(line: str) -> list[str]:
    """Of a shell's line, up to where it is sent to the background or its output elsewhere."""
    words = shlex.split(line, comments=True)
    return words[: next((i for i, x in enumerate(words) if x in ("&", "|", ">")), None)]


def program(words: list[str]) -> tuple[str, list[str]] | None:
    """Which of the parsers is meant, and its words."""
    for i, word in enumerate(words):
        if word in MODULES and words[i - 1] == "-m":
            return MODULES[word], words[i + 1 :]
        if word.endswith("sglang-scout"):
            return "scout", words[i + 1 :]
    return None


def of_shell(text: str):
    lines = text.replace("\\\n", " ").splitlines()
    starts = re.compile(r"-m sglang|^\S*sglang-scout \w")
    return [words_of(x) for x in lines if starts.search(x) and "…" not in x]


def parse(name: str, words: list[str], model: str) -> None:
    """As the program that is started with these words does; raises what it raises."""
    words = [x for word in words for x in (word.split("=", 1) if word.startswith("--") else [word])]
    for flag, value in {"--model-path": model, **(HERE if name == "server" else {})}.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    if name == "router":
        from sglang_router.launch_router import parse_router_args

        parse_router_args(words)._validate_router_args()
    elif name == "scout":
        from sglang_scout.cli import _parser

        _parser(words).parse_args(words)
    else:
        from sglang.srt.server_args import prepare_server_args

        os.environ.pop("SGLANG_SCOUT_ROLE", None)
        made = prepare_server_args(words if "--device" in words else [*words, "--device", "cuda"])
        getattr(made, "resolve_once", lambda: None)()
        assert os.environ.get("SGLANG_SCOUT_ROLE") or "--kv-offload" not in words, "not hooked"


def parsed(commands: Mapping[str, object], model: str, folder: Path) -> tuple[dict[str, str], str]:
    """What became of each command, "" if its program takes it, and what was said. In a process of its own: the plugin
    changes SGLang's classes for good."""
    file = folder / "outcome.json"
    done = subprocess.run(
        [sys.executable, __file__, model, file],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=280,
        env={k: x for k, x in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    assert file.exists(), done.stderr[-4000:]
    return json.loads(file.read_text()), done.stderr


def main() -> None:
    """The child process: what became of each command, by its place."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # As on a machine with an RDMA device, which SGLang looks for.
    has, names = os.path.isdir, os.listdir
    os.path.isdir = lambda path: path == INFINIBAND or has(path)
    os.listdir = lambda path=".": ["mlx5_0"] if path == INFINIBAND else names(path)
    outcome = {}
    for place, (name, words) in json.load(sys.stdin).items():
        try:
            parse(name, words, sys.argv[1])
            outcome[place] = ""
        except (Exception, SystemExit) as error:
            outcome[place] = f"{type(error).__name__}: {error}"
    Path(sys.argv[2]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
