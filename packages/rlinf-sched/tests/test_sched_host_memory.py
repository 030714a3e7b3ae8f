"""Main memory as far as a cgroup allows, from files of both versions."""

import os

from rlinf_sched.cluster import Cluster
from rlinf_sched.host_memory import free_bytes, machine_bytes, usable_bytes


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_machine_s_memory_is_what_the_system_says():
    assert machine_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert Cluster.cpu_slots(2).devices[1].memory_bytes == usable_bytes() // 2


def test_a_limit_counts_where_it_is_less(tmp_path):
    assert usable_bytes(cgroup=tmp_path) == machine_bytes()
    write(tmp_path, memory__max="max")
    assert usable_bytes(cgroup=tmp_path) == machine_bytes()
    write(tmp_path, memory__max=1 << 20)
    assert usable_bytes(cgroup=tmp_path) == 1 << 20


def test_version_1_says_that_there_is_no_limit_by_a_number(tmp_path):
    write(tmp_path / "memory", memory__limit_in_bytes=9223372036854771712)
    assert usable_bytes(cgroup=tmp_path) == machine_bytes()
    write(tmp_path / "memory", memory__limit_in_bytes=1 << 20)
    assert usable_bytes(cgroup=tmp_path) == 1 << 20


def test_free_memory_is_what_the_cgroup_leaves(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable:     800 kB\n")

    def free():
        return free_bytes(meminfo=meminfo, cgroup=tmp_path)

    assert free() == 800 * 1024
    write(tmp_path, memory__max="max", memory__current=300_000, memory__stat="anon 1\ninactive_file 100000\nfile 2")
    assert free() == 800 * 1024
    write(tmp_path, memory__max=500_000)
    assert free() == 300_000
    write(tmp_path, memory__max=100_000)
    assert free() == 0


def test_files_that_can_be_dropped_are_free_in_version_1_too(tmp_path):
    meminfo, stat = tmp_path / "meminfo", "inactive_file 1\ntotal_inactive_file 1000"
    meminfo.write_text("MemAvailable: 800 kB\n")
    files = {"memory__limit_in_bytes": 5000, "memory__usage_in_bytes": 3000, "memory__stat": stat}
    write(tmp_path / "memory", **files)
    assert free_bytes(meminfo=meminfo, cgroup=tmp_path) == 3000
