"""Where the driver's library is looked for, and that a linker finds it where it was put."""

import shutil
import subprocess

import pytest

import driver_library


@pytest.fixture
def driver(tmp_path):
    """Folders with a libcuda.so.1 each."""

    def make(name):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "libcuda.so.1").touch()
        return folder / "libcuda.so.1"

    return make


def test_a_loaded_library_is_taken_before_what_is_only_there(driver, tmp_path):
    loaded, listed, placed = driver("loaded"), driver("listed"), driver("placed")
    maps = f"7f00-7f01 r-xp 00000000 08:01 42    {loaded}\n7f02-7f03 rw-p 0 00:00 0\n"
    known = f"\tlibcuda.so.1 (libc6,x86-64) => {listed}\n"
    folders = [str(tmp_path / "none"), str(placed.parent)]
    assert driver_library.find(maps, known, folders) == loaded
    assert driver_library.find("", known, folders) == listed
    assert driver_library.find("", "", folders) == placed
    assert driver_library.find("", "", folders[:1]) is None


def test_libraries_of_other_names_and_machines_are_not_it(driver, tmp_path):
    other = driver("other")
    (tmp_path / "libcudart.so.12").touch()
    maps = f"7f00-7f01 r-xp 00000000 08:01 42    {tmp_path}/libcudart.so.12\n"
    known = f"\tlibcuda.so.1 (libc6) => {other}\n"
    assert driver_library.find(maps, known, []) is None


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_a_linker_finds_it_in_the_folder(tmp_path, monkeypatch):
    library, folder = tmp_path / "libcuda.so.1", tmp_path / "folder"
    make = ["cc", "-shared", "-x", "c", "-"]
    link = [*make, "-lcuda", "-o", tmp_path / "kernels.so"]
    empty = {"input": b"", "capture_output": True}
    assert subprocess.run([*make, "-o", library], **empty).returncode == 0
    monkeypatch.setattr(driver_library, "find", lambda *_: library)
    for _ in range(2):
        assert driver_library.link(folder) == library
    monkeypatch.setenv("LIBRARY_PATH", "")
    if subprocess.run(link, **empty).returncode == 0:
        pytest.skip("the linker finds a driver of this machine")
    monkeypatch.setenv("LIBRARY_PATH", str(folder))
    assert subprocess.run(link, **empty).returncode == 0


def test_where_there_is_none_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(driver_library, "find", lambda *_: None)
    assert driver_library.link(tmp_path / "folder") is None
    assert not (tmp_path / "folder").exists()
