"""Hooks that do not apply and other SGLang releases are refused; SGLang itself would only log it."""

import importlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt import plugins

from sglang_scout.core.flags import ADAPTERS, UNTESTED_OVERRIDE
from sglang_scout.plugin import hooks, launch


def test_a_missing_hook_target_is_named(monkeypatch):
    registry = hooks.HookRegistry
    for name, empty in (("_hooks", type(registry._hooks)(list)), ("_patched", set())):
        monkeypatch.setattr(registry, name, empty)
    monkeypatch.setattr(registry, "apply_hooks", lambda: None)
    hook = hooks.Hook("managers.scheduler.Scheduler.on_idle", "before", print, (), "")
    with pytest.raises(RuntimeError, match=r"target .*ServerArgs\.gone is not in this SGLang"):
        hooks.apply([hook._replace(target="server_args.ServerArgs.gone")])
    with pytest.raises(RuntimeError, match=r"were not applied: sglang\.srt\..*\.on_idle"):
        hooks.apply([hook])


def test_models_do_not_write_k_and_v_where_they_rotate_k():
    name = "enable_fused_set_kv_buffer"
    hooks.apply(hook for hook in hooks.hooks_of("decode") if str(hook.target).endswith(name))
    qwen3_moe = importlib.import_module("sglang.srt.models.qwen3_moe")
    assert getattr(qwen3_moe, name)(None) is False, "SGLang's looks at the pool of a running server"


def test_another_sglang_is_refused_and_not_just_logged(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    monkeypatch.delitem(sys.modules, "sglang_scout.plugin.hooks", raising=False)
    monkeypatch.delattr("sglang_scout.plugin.hooks", raising=False)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(sys, "argv", ["launch_server", "--kv-offload", "scout"])
    monkeypatch.delenv(UNTESTED_OVERRIDE, raising=False)
    supported = " and ".join(map(re.escape, ADAPTERS))
    with pytest.raises(SystemExit, match=f"cannot serve with --kv-offload: .* {supported};"):
        plugins.load_plugins()


def loaded(code: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """SGLang loads its plugins with these command line words, in a process of its own."""
    code += "from sglang.srt import plugins; plugins.load_plugins()\n"
    code += "from sglang.srt.server_args import prepare_server_args as made\n"
    code += "made(sys.argv[1:]).resolve_once()"
    words = *words, "--kv-offload", "scout", "--disaggregation-mode", "prefill", "--device", "cpu"
    env = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}", *words],
        capture_output=True,
        text=True,
        env=env,
    )


def test_what_cannot_be_imported_is_refused_and_not_just_logged():
    done = loaded("sys.modules['sglang_scout._native'] = None\n")  # as on a CPU without AVX2
    assert done.returncode == 1
    assert "cannot serve with --kv-offload: " in done.stderr and "_native" in done.stderr
    assert done.stderr.rstrip().endswith("run `sglang-scout doctor`, which says what to install")


def test_an_untested_sglang_is_tried_as_the_default(tiny_model):
    """Which it is like, or lacks what the hooks need, as 0.5.15.post1 does."""
    code = "import importlib.metadata as m; real = m.version\n"
    code += "m.version = lambda name: '9.9' if name == 'sglang' else real(name)\n"
    done = loaded(code, "--model-path", str(tiny_model("qwen3")), **{UNTESTED_OVERRIDE: "1"})
    default = next(iter(ADAPTERS))
    if hooks.RELEASE == default:
        assert done.returncode == 0, done.stderr
        assert (
            f"sglang 9.9 is untested with this sglang-scout, which treats it as {default}; if"
            in done.stderr
        )
    else:
        assert done.returncode == 1 and "cannot serve with --kv-offload: " in done.stderr


def test_kernels_load_without_a_driver_also_in_a_scheduler():
    """SGLang 0.5.23's are linked with the driver's library, and a scheduler imports them before it loads plugins."""
    code = """
import importlib, multiprocessing
from sglang.srt import plugins
plugins.load_plugins()
import sgl_kernel
child = multiprocessing.get_context("spawn").Process(target=importlib.import_module, args=("sgl_kernel",))
child.start()
child.join()
raise SystemExit(child.exitcode)
"""
    environment = {k: x for k, x in os.environ.items() if k != "LD_LIBRARY_PATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_adapters_have_the_names_that_the_plugin_uses():
    folder = Path(hooks.__file__).parent
    used = set(re.findall(r"\badapter\.(\w+)", "".join(p.read_text() for p in folder.glob("*.py"))))
    for adapter in ADAPTERS.values():
        text = (folder / f"{adapter}.py").read_text()
        made = re.findall(r"^(?:def (\w+)\(|((?:\w+, )*\w+) = )", text, re.MULTILINE)
        names = {name for one in made for part in one for name in part.split(", ")}
        assert "row_of" in used and used <= names


def test_a_scheduler_hears_what_the_launcher_may_run_on(monkeypatch):
    """SGLang binds a scheduler to a NUMA node before it loads the plugin there."""
    monkeypatch.setenv(launch.ROLE_ENV, "")
    assert launch.launched_as() is None
    monkeypatch.setenv(launch.ROLE_ENV, json.dumps(["decode", os.getpid(), [3, 1, 64]]))
    for parent, found in (
        (None, None),  # the launcher, or a server started by one of its children
        (SimpleNamespace(pid=os.getpid() + 1), None),  # a scheduler of such a server
        (SimpleNamespace(pid=os.getpid()), ("decode", os.getpid(), {1, 3, 64})),
    ):
        monkeypatch.setattr(multiprocessing, "parent_process", lambda parent=parent: parent)
        assert launch.launched_as() == found
