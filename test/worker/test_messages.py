from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.errors import WorkerError
from sglang_scout.worker import messages as m

STATS = m.Stats(items=1 << 60, pending=3)
FROM_PROCESS = [
    m.Hello(),
    m.Ready(isa="avx2", threads=4),
    m.Failed(error="ü" * m.MAX_TEXT_CHARS),
    m.Heartbeat(stats=STATS),
    m.Drained(stats=STATS),
]
FROM_SERVER = [
    m.Hello(),
    m.Register(arena_bytes=1 << 40, layout_version=1),
    m.Configure(
        cpus=list(range(512)), cpu_nodes=[0, 1] * 256, background_cpus=[600], threads_per_group=2, spin_us=50,
        populate=True, heartbeat_interval_s=0.2,
    ),
    m.Drain(),
    m.Stop(),
]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "kind"),
    [(x, m.FromProcess) for x in FROM_PROCESS] + [(x, m.FromServer) for x in FROM_SERVER],
)
def test_round_trip(message, kind):
    assert m.decode(m.encode(message), kind) == message
    if isinstance(message, m.Hello):
        return  # of both directions
    with pytest.raises(WorkerError, match="malformed"):
        m.decode(m.encode(message), m.FromServer if kind is m.FromProcess else m.FromProcess)


def test_wrong_version_size_and_fields_are_refused():
    hello = FROM_PROCESS[0]
    old = msgspec.structs.replace(hello, version=m.PROTOCOL_VERSION - 1)
    with pytest.raises(WorkerError, match="Hello of protocol 4, this is 5"):
        m.decode(m.encode(old), m.FromProcess)
    with pytest.raises(WorkerError, match="the cap is 65536"):
        m.encode(m.Failed(error="x" * 70000))
    extra = msgspec.msgpack.decode(m.encode(hello)) | {"more": 1}
    with pytest.raises(WorkerError, match="malformed"):
        m.decode(msgspec.msgpack.encode(extra), m.FromProcess)


@given(st.binary(max_size=200))
def test_noise_is_refused(data):
    with pytest.raises(WorkerError):
        m.decode(data, m.FromProcess)
