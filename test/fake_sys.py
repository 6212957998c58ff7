"""/sys of a machine with two NUMA nodes of four cores with two SMT threads each, and a GPU on node 1."""

from sglang_scout.core import numa

TWO_NODES = {
    "devices/system/cpu/online": "0-15",
    **{
        f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 8},{cpu % 8 + 8}"
        for cpu in range(16)
    },
    "devices/system/node/node0/cpulist": "0-3,8-11",
    "devices/system/node/node0/distance": "10 21",
    "devices/system/node/node0/meminfo": "Node 0 MemTotal:  2097152 kB\nNode 0 MemFree:  1048576 kB",
    "devices/system/node/node1/cpulist": "4-7,12-15",
    "devices/system/node/node1/distance": "21 10",
    "devices/system/node/node1/meminfo": "Node 1 MemTotal:  4194304 kB\nNode 1 MemFree:  3145728 kB",
    "bus/pci/devices/0000:01:00.0/vendor": "0x10de",
    "bus/pci/devices/0000:01:00.0/class": "0x030200",
    "bus/pci/devices/0000:01:00.0/numa_node": "1",
    "bus/pci/devices/0000:01:00.0/local_cpulist": "4-7,12-15",
    "bus/pci/devices/0000:02:00.0/vendor": "0x10de",
    "bus/pci/devices/0000:02:00.0/class": "0x068000",  # an NVSwitch, not a GPU
    "fs/cgroup/cpu.max": "max 100000",
    "kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "70",
    "kernel/mm/hugepages/hugepages-2048kB/resv_hugepages": "6",
    "kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never",
    "class/infiniband/mlx5_0/node_type": "1: CA",
}


def use_sys(monkeypatch, folder, files=TWO_NODES):
    """Writes files below a folder, which becomes /sys for topology."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(numa, "SYS", folder)
