"""What rows say of the device, by a stand-in for nvidia-smi."""

import pytest

from benchmark import nvidia_smi, rows


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Puts an nvidia-smi on an otherwise empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return put


def test_rows_of_a_device_say_what_nvidia_smi_says(says):
    says('echo "NVIDIA H100 80GB HBM3, 81559 MiB, 580.1, 1980 MHz, 2619 MHz, 700.00 W, 5"')
    found = rows.environment("test", cuda=True)["nvidia_smi"]
    assert set(found) == set(nvidia_smi.ABOUT)
    assert found["memory.total"] == "81559 MiB" and found["pcie.link.gen.current"] == "5"
    assert "nvidia_smi" not in rows.environment("test")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "not installed"),
        ("echo no devices; exit 9", "status 9: no devices"),
        ("echo a, b", "status 0"),
        ("exit 0", "status 0"),
    ],
)
def test_rows_say_why_nothing_is_known(says, script, reason):
    if script is not None:
        says(script)
    found = rows.environment("test", cuda=True)["nvidia_smi"]
    assert set(found) == {"absent"} and reason in found["absent"]
    assert nvidia_smi.used_mib() is None


def test_memory_is_waited_for_until_it_is_free(says):
    says("echo 812")
    assert nvidia_smi.used_mib() == 812
    left = [70_000, 30_000, 812]
    assert nvidia_smi.wait_free(700, 60.0, lambda: left.pop(0)) and left == []
    assert not nvidia_smi.wait_free(700, 0.0, lambda: 70_000)
    assert nvidia_smi.wait_free(None, 0.0, lambda: 70_000)
    assert nvidia_smi.wait_free(700, 0.0, lambda: None)
