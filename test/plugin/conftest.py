"""The plugin's tests import SGLang, which reads its environment then."""

import os
from importlib.util import find_spec

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]
