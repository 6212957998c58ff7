"""What a server reaches without the proxy of its environment, by SGLang's HTTP client."""

import os

import pytest
from requests.utils import should_bypass_proxies

from sglang_scout.plugin.fixes import before_kv_manager
from sglang_scout.plugin.launch import reach_directly

OWN = ("http://127.0.0.1:1/health", "http://localhost:1", "http://[::1]:1", "http://10.1.2.3:1")
HUB, ALSO, PAIR = "https://huggingface.co/x", "http://also:1/x", "http://10.9.9.9:8998/route"


@pytest.fixture(autouse=True)
def proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")


def direct(*urls):
    return [should_bypass_proxies(url, no_proxy=None) for url in urls]


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY", None])
def test_a_launcher_reaches_itself_directly_and_the_hub_by_the_proxy(monkeypatch, name):
    if name:
        monkeypatch.setenv(name, "also")
    assert not any(direct(*OWN, HUB, PAIR))
    reach_directly("10.1.2.3")
    assert all(direct(*OWN)) and direct(ALSO, HUB, PAIR) == [name is not None, False, False]


def test_without_a_proxy_for_any_host_it_stays_so(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    reach_directly("10.1.2.3")
    assert all(direct(*OWN, HUB, PAIR))


def test_a_scheduler_reaches_the_other_server_directly():
    before_kv_manager()
    assert os.environ["no_proxy"] == "*" and all(direct(*OWN, PAIR))
