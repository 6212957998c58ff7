from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import WorkerError
from sglang_scout.worker import messages as m

TOKEN = "ab" * 16
CONFIGURE = m.Configure(
    token=TOKEN, epoch=3, arena_bytes=1 << 40, layout_version=1, cpus=list(range(512)),
    cpu_nodes=[0, 1] * 256,
    threads_per_group=2, spin_us=50, populate=True, heartbeat_interval_s=0.2,
)  # fmt: skip
FROM_WORKER = [
    m.Hello(token=TOKEN, pid=1, epoch=2),
    m.Ready(token=TOKEN, isa="avx2", threads=4),
    m.Failed(token=TOKEN, error="ü" * m.MAX_TEXT_CHARS),
    m.Heartbeat(token=TOKEN, number=1, stats=m.Stats(items=1 << 60)),
]
FROM_CLIENT = [CONFIGURE, m.Stop(token=TOKEN)]


@pytest.mark.parametrize(
    ("message", "kind"),
    [(x, m.FromWorker) for x in FROM_WORKER] + [(x, m.FromClient) for x in FROM_CLIENT],
)
def test_round_trip(message, kind):
    assert m.decode(m.encode(message), kind, TOKEN) == message
    with pytest.raises(WorkerError, match="malformed"):
        m.decode(m.encode(message), m.FromClient if kind is m.FromWorker else m.FromWorker, TOKEN)


def test_wrong_token_version_size_and_fields_are_refused():
    hello = FROM_WORKER[0]
    with pytest.raises(WorkerError, match="boot token of another worker"):
        m.decode(m.encode(hello), m.FromWorker, "cd" * 16)
    old = msgspec.structs.replace(hello, version=m.PROTOCOL_VERSION - 1)
    with pytest.raises(WorkerError, match="Hello of protocol 3, this is 4"):
        m.decode(m.encode(old), m.FromWorker, TOKEN)
    with pytest.raises(WorkerError, match="70000 bytes, the cap is 65536"):
        m.decode(b"x" * 70000, m.FromWorker, TOKEN)
    with pytest.raises(WorkerError, match="the cap is 65536"):
        m.encode(m.Failed(token=TOKEN, error="x" * 70000))
    extra = msgspec.msgpack.decode(m.encode(hello)) | {"more": 1}
    with pytest.raises(WorkerError, match="malformed"):
        m.decode(msgspec.msgpack.encode(extra), m.FromWorker, TOKEN)


@given(st.binary(max_size=200))
def test_noise_is_refused(data):
    with pytest.raises(WorkerError):
        m.decode(data, m.FromWorker, TOKEN)
