"""How much memory the host can spare, by its files and those of its control groups."""

from vllm_coserve.memory.host_memory import spare_host_bytes


def test_spare_host_memory_is_what_the_tightest_limit_leaves(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 50 kB\n")
    (proc / "self/cgroup").write_text("0::/pod/container\n")
    assert spare_host_bytes(proc, cgroups) == 50 << 10, "no control groups of version 2"
    for path, limit, used in (("pod", "max", 7), ("pod/container", "40000", 39000)):
        folder = cgroups / path
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 10\nactive_file 200\ninactive_file 3000\n")
    assert spare_host_bytes(proc, cgroups) == 40_000 - 39_000 + 3200
    (cgroups / "pod/memory.max").write_text("5000\n")
    (cgroups / "pod/memory.current").write_text("4000\n")
    assert spare_host_bytes(proc, cgroups) == 4200
    (proc / "self/cgroup").write_text("3:memory:/old\n")
    assert spare_host_bytes(proc, cgroups) == 50 << 10
    assert spare_host_bytes() > 0
