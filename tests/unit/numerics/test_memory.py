"""Free memory as the system reports it, and tensors that cost nothing until they are used."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from lagzero.engine.attention import KVCache, KVShape
from lagzero.numerics import memory
from lagzero.numerics.memory import empty, free_bytes, free_system_bytes, lazy_zeros

CPU = torch.device("cpu")
GIB = 1 << 30
MEMINFO = f"MemTotal: {16 * GIB >> 10} kB\nMemFree: 9 kB\nMemAvailable:   {8 * GIB >> 10} kB\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", MEMINFO)
    return tmp_path


def write(file: Path, text: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def group_v2(folder: Path, limit: object, current: int, inactive: int = 0) -> None:
    write(folder / "memory.max", limit)
    write(folder / "memory.current", current)
    write(folder / "memory.stat", f"anon 5\ninactive_file {inactive}\nactive_file 7")


def test_caches_that_the_kernel_would_give_up_count_as_free(root: Path):
    assert free_system_bytes(root) == 8 * GIB


@pytest.mark.parametrize("path", ["/", "/jobs/mine", "/of/the/host"])
def test_a_limit_of_the_group_or_of_its_parent_bounds_it(root: Path, path: str):
    """A container sees its own group at the mount, whatever path /proc names."""
    write(root / "proc/self/cgroup", f"0::{path}")
    group_v2(root / "sys/fs/cgroup", 4 * GIB, 3 * GIB, inactive=GIB // 2)
    group_v2(root / "sys/fs/cgroup/jobs/mine", "max", 2 * GIB)
    assert free_system_bytes(root) == 1.5 * GIB


def test_the_tightest_group_decides_and_none_is_ever_below_zero(root: Path):
    write(root / "proc/self/cgroup", "0::/a/b")
    group_v2(root / "sys/fs/cgroup/a", 7 * GIB, GIB)
    group_v2(root / "sys/fs/cgroup/a/b", 3 * GIB, GIB)
    assert free_system_bytes(root) == 2 * GIB
    group_v2(root / "sys/fs/cgroup/a", GIB, GIB + 1)
    assert free_system_bytes(root) == 0


def test_the_first_version_of_groups_is_read_too(root: Path):
    write(root / "proc/self/cgroup", "12:cpu,cpuacct:/x\n4:memory:/docker/1\n1:name=systemd:/")
    top = root / "sys/fs/cgroup/memory"
    write(top / "memory.limit_in_bytes", 3 * GIB)
    write(top / "memory.usage_in_bytes", 2 * GIB)
    write(top / "memory.stat", f"inactive_file 9\ntotal_inactive_file {GIB}")
    assert free_system_bytes(root) == 2 * GIB


def test_without_the_kernels_files_half_of_all_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": 10}.get)
    assert free_system_bytes(tmp_path) == 500

    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(memory.os, "sysconf", unknown)
    assert free_system_bytes(tmp_path) == GIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_has_memory():
    assert 1 << 20 < free_bytes(CPU) < 1 << 50


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cache_takes_memory_only_where_it_is_asked_or_written_and_gives_it_back():
    """In a process that keeps freed memory, on its compute thread: np.zeros writes it all."""
    program = """
        from concurrent.futures import ThreadPoolExecutor
        import torch
        from lagzero.engine.attention import KVCache, KVShape
        from lagzero.numerics.allocator import keep_freed_memory

        def resident():
            lines = open("/proc/self/status").read().splitlines()
            return next(int(l.split()[1]) for l in lines if l.startswith("VmRSS")) >> 10

        assert keep_freed_memory()
        shapes = {layer: KVShape(4, 64) for layer in range(4)}
        before = resident()
        sizes = shapes, 512, 32, torch.float32, torch.device("cpu")  # 8 * 16 MiB
        cache = ThreadPoolExecutor(1).submit(KVCache, *sizes).result()
        made = resident()
        cache.take(1)  # 1 of 16 stretches: 8 * 1 MiB
        taken = resident()
        cache.keys[0].fill_(1)
        written = resident()
        del cache
        print(made - before, taken - made, written - taken, resident() - written)
    """
    run = [sys.executable, "-c", textwrap.dedent(program)]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    made, taken, written, freed = map(int, out.split())
    assert made < 8
    assert 7 <= taken < 22  # in huge pages 16, and what two threads take
    assert 13 <= written < 24
    assert freed <= -21


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_zeros_are_zeros_that_can_be_written(dtype: torch.dtype):
    tensor = lazy_zeros((3, 5, 7), dtype, CPU)
    assert (tensor.shape, tensor.dtype) == ((3, 5, 7), dtype)
    assert not tensor.any()
    tensor[1].fill_(2)
    assert tensor.float().sum() == 70
    assert lazy_zeros((0, 4), dtype, CPU).shape == (0, 4)


def test_a_cache_takes_the_memory_of_pages_before_they_are_used_and_keeps_what_is_there():
    cache = KVCache({0: KVShape(2, 16), 1: KVShape(2, 16)}, 64, 8, torch.float32, CPU)
    layers = [*cache.keys.values(), *cache.values.values()]
    cache.take(3)
    for layer in layers:
        layer[:4] = 7  # 1 of 16 stretches
    for asked in (4, 4, 5, 30, 64):
        cache.take(asked)
        assert all((layer[:4] == 7).all() and not layer[4:].any() for layer in layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16], ids=str)
@pytest.mark.parametrize("size", [(), (0,), (1,), (3, 5, 7), (1000, 33)], ids=str)
def test_tensors_without_contents_are_aligned(size: tuple[int, ...], dtype: torch.dtype):
    made = [empty(size, dtype) for _ in range(5)]
    for number, each in enumerate(made):
        assert each.shape == size and each.dtype == dtype and each.is_contiguous()
        assert each.data_ptr() % 64 == 0 or not each.numel()
        each.fill_(number)
    assert all(bool((each == number).all()) for number, each in enumerate(made))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="is of glibc")
def test_freed_memory_serves_the_next_of_its_size():
    code = """
        import torch
        from lagzero.numerics.allocator import keep_freed_memory
        from lagzero.numerics.memory import empty
        kept = keep_freed_memory()
        places, small = set(), []
        for _ in range(20):
            large = empty((1 << 20,))
            small.append(torch.ones(3))  # what is made beside it and stays
            places.add(large.data_ptr())
            del large
        print(len(places) if kept else 1)
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    assert int(subprocess.run(run, check=True, capture_output=True, text=True).stdout) <= 3
