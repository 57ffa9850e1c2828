"""The fastest way on this machine is measured once, and stored under everything that it depends on."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from slipstream.costs.hardware import available_cores
from slipstream.kernels.cpu.native import instruction_sets
from slipstream.kernels.cpu.torch_ops import CpuOps
from slipstream.worker.start import cpu_choice
from slipstream.worker.start.cpu_choice import CpuChoice, Timing, choose_cpu, measure_cpu
from tests.support.waiting import PATIENCE_S, wait_for


def timing(kernels="a", weights="bfloat16", num_threads=2, decode_ms=1.0, prompt_ms=1.0):
    return Timing(
        kernels=kernels,
        weights=weights,
        num_threads=num_threads,
        decode_ms=decode_ms,
        prompt_ms=prompt_ms,
    )


CHOICE = CpuChoice(isa="avx2", dtype="float32", num_threads=3, timings=(timing(num_threads=3),))


@pytest.fixture
def measured(monkeypatch):
    """How many times it was measured; the answer is made up."""
    calls = []

    def measure():
        calls.append(1)
        return CHOICE

    monkeypatch.setattr(cpu_choice, "measure_cpu", measure)
    return calls


def test_a_measurement_on_this_machine(monkeypatch):
    monkeypatch.setattr(
        cpu_choice, "ROUNDS", 2
    )  # more are for the best times, which nothing here depends on
    choice = measure_cpu()
    assert choice.isa in instruction_sets()
    assert choice.dtype in ("bfloat16", "float32")
    assert 1 <= choice.num_threads <= available_cores()
    assert all(t.decode_ms > 0 and t.prompt_ms > 0 for t in choice.timings)
    assert {t.weights for t in choice.timings} == {"int8", "bfloat16", "float32"}
    assert "bfloat16" in choice.reason
    assert "float32" in choice.reason


def test_the_choice_is_measured_once_and_remembered(tmp_path, measured):
    told = []
    first, second = (
        choose_cpu(tmp_path / "machine", measuring=lambda: told.append(len(measured)))
        for _ in range(2)
    )
    assert first == second == CHOICE
    assert len(measured) == 1
    assert told == [0]  # once, and before
    choose_cpu(tmp_path / "machine", measure=True)
    assert len(measured) == 2
    assert len(list((tmp_path / "machine").iterdir())) == 1


def test_of_processes_that_start_together_one_measures(tmp_path, measured, monkeypatch):
    """Here they are threads. Both find nothing; the second then waits for what the first measures."""
    reads, go, read = [], Event(), cpu_choice._read

    def measure():
        measured.append(1)
        assert go.wait(PATIENCE_S)
        return CHOICE

    monkeypatch.setattr(cpu_choice, "measure_cpu", measure)
    monkeypatch.setattr(cpu_choice, "_read", lambda path: reads.append(read(path)) or reads[-1])
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(choose_cpu, tmp_path) for _ in range(2)]
        wait_for(
            lambda: len(reads) == 3,
            "they do not look before they measure and again when nobody else does",
        )
        go.set()
        assert [one.result() for one in both] == [CHOICE] * 2
    assert (len(measured), reads) == (1, [None, None, None, CHOICE])


def test_one_that_measures_and_never_ends_is_not_waited_for(tmp_path, measured, monkeypatch):
    monkeypatch.setattr(cpu_choice, "PATIENCE_S", 0.05)
    stopped = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        assert choose_cpu(tmp_path) == CHOICE
    finally:
        os.close(stopped)


@pytest.mark.parametrize("name", ["cpu_name", "cpu_features", "available_cores"])
def test_another_machine_is_measured_anew(tmp_path, measured, monkeypatch, name):
    choose_cpu(tmp_path)
    monkeypatch.setattr(cpu_choice, name, lambda: "another")
    choose_cpu(tmp_path)
    assert len(measured) == 2


@pytest.mark.parametrize("damage", ["", "[]", '{"isa": null}', '{"timings": [{"x": 1}]}'])
def test_a_damaged_record_is_measured_anew(tmp_path, measured, damage):
    choose_cpu(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(damage)
    assert choose_cpu(tmp_path) == CHOICE
    assert len(measured) == 2
    assert choose_cpu(tmp_path) == CHOICE
    assert len(measured) == 2


def test_where_nothing_can_be_kept(tmp_path, measured):
    (tmp_path / "file").write_text("")
    assert choose_cpu(tmp_path / "file" / "machine") == CHOICE


def test_the_best_is_chosen(monkeypatch):
    """The instruction set by int8 products, the type by dense ones, and few threads only if they are much faster."""
    speed = {"x": 3.0, "y": 1.0, "z": 2.0, "bfloat16": 2.0, "float32": 1.0}

    def time(candidates):
        ms = [
            speed[isa if weights == "int8" else weights] * threads_cost[n]
            for isa, weights, n in candidates
        ]
        return [timing(isa, w, n, m, m) for (isa, w, n), m in zip(candidates, ms, strict=True)]

    monkeypatch.setattr(cpu_choice, "instruction_sets", lambda: ["x", "y", "z"])
    monkeypatch.setattr(cpu_choice, "_time", time)
    threads_cost = {4: 1.0, 2: 0.9}
    choice = cpu_choice._measure(4)
    assert (choice.isa, choice.dtype, choice.num_threads) == ("y", "float32", 4)
    threads_cost = {4: 1.0, 2: 0.5}
    assert cpu_choice._measure(4).num_threads == 2
    assert dataclasses.replace(choice, isa=None).reason == choice.reason


def test_without_the_library_torchs_threads_are_measured(monkeypatch):
    """Each candidate with as many threads as it says."""
    threads = set()
    product = CpuOps.linear

    def linear(*args):
        threads.add(torch.get_num_threads())
        return product(*args)

    monkeypatch.setattr(cpu_choice, "has_cpu_kernels", lambda: False)
    monkeypatch.setattr(cpu_choice, "ROUNDS", 1)
    monkeypatch.setattr(CpuOps, "linear", linear)
    before = torch.get_num_threads()
    choice = cpu_choice._measure(2)
    torch.set_num_threads(before)
    assert choice.isa is None
    assert {t.kernels for t in choice.timings} == {"torch"}
    assert threads == {1, 2}


def test_what_is_measured_without_the_library_is_not_stored_as_the_librarys(monkeypatch):
    """A stored measurement would make every later engine run by torch, at half the speed."""
    with_library = cpu_choice._identity()
    monkeypatch.setattr(cpu_choice, "has_cpu_kernels", lambda: False)
    assert cpu_choice._identity() != with_library


def test_processors_whose_features_are_not_listed_are_told_apart_by_what_they_run(monkeypatch):
    """A home directory may be shared by ARM machines, of which Linux names no model."""
    found = set()
    for isas in (["portable", "neon"], ["portable", "neon", "neon-i8mm"]):
        monkeypatch.setattr(cpu_choice, "instruction_sets", lambda isas=isas: isas)
        found.add(cpu_choice._identity())
    assert len(found) == 2
