"""Signs of a busy machine: for made-up figures, and for this process."""

import subprocess
import time
from dataclasses import replace

import pytest

from specjax.bench import machine
from specjax.bench.machine import CpuTime, Machine, Moment, count_gpu_processes, cpu_share

IDLE = Machine(load=0.0, num_processors=2, num_cpus=2, cpu_share=1.0, num_gpu_processes=0)
# (seconds, ran, waited) of this process on two cores, as measured, the share that follows, and
# whether other programs were running.
SHARES = [
    (4, 6.1, 1.2, 0.84, False),
    (4, 0.1, 0.0, 1.0, False),
    (4, 3.4, 4.2, 0.45, True),
    (4, 5.6, 3.0, 0.7, True),
]


@pytest.mark.parametrize("seconds, ran, waited, share, is_busy", SHARES)
def test_share_of_the_cpu_time_that_was_asked_for(seconds, ran, waited, share, is_busy):
    half = CpuTime(seconds / 2, ran / 2, waited / 2)
    found = cpu_share([half, half], num_cpus=2)
    assert found == pytest.approx(share, abs=0.01)
    assert bool(replace(IDLE, cpu_share=found).doubts) == is_busy


def test_threads_that_wait_for_each_other_are_no_other_program():
    """Three threads on one core, or sixteen on eight, can use all cores but no more."""
    assert cpu_share([CpuTime(1, 1.0, 2.0)], num_cpus=1) == 1
    assert cpu_share([CpuTime(1, 7.8, 8.2)], num_cpus=8) > machine.MIN_SHARE
    assert cpu_share([], num_cpus=2) is None and cpu_share([CpuTime(1, 0, 0)], 2) is None


DOUBTS = [
    ({"load": 3.0, "cpu_share": 0.86}, None),  # what ran before has ended
    ({"load": 3.0, "cpu_share": 0.45}, "got 45% of the CPU time that it asked for (load 3.0 on 2"),
    ({"load": 1.2, "cpu_share": None}, None),
    ({"load": 2.4, "cpu_share": None}, "other programs were running (load 2.4 on 2 processors"),
    ({"num_gpu_processes": 2}, "2 other processes were on the GPU"),
]


@pytest.mark.parametrize("look, words", DOUBTS)
def test_what_is_doubted(look, words):
    line = replace(IDLE, **look).line
    if words is None:
        assert line is None
    else:
        assert words in line and line.startswith("DO NOT TRUST THESE TIMES")
        assert "Acceptance and outputs do not depend on it" in line


LISTED = [
    ("3,4", 1, "3", "4242\n", 0),
    ("3,4", 1, "3", "4242\n17\n18\n", 2),
    ("3,4", 1, "3", "None\n", 0),
    ("3,4", 2, "3,4", "4242\n17\n4242\n", 1),
    ("", 2, "0,1", "4242\n4242\n", 0),
]


@pytest.mark.parametrize("visible, count, ids, listed, others", LISTED)
def test_this_process_is_not_another_one_on_the_gpus(
    monkeypatch, visible, count, ids, listed, others
):
    def run(command, **_):
        assert f"--id={ids}" in command
        return subprocess.CompletedProcess(command, 0, stdout=listed)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machine.subprocess, "run", run)
    assert count_gpu_processes(count) == others


def test_without_nvidia_smi_nobody_is_on_the_gpu(monkeypatch):
    monkeypatch.setattr(machine, "_NVIDIA_SMI", ("/no/such/nvidia-smi",))
    assert count_gpu_processes(1) == 0


@pytest.mark.skipif(not Moment.now().threads, reason="the system does not count waiting")
def test_a_span_counts_what_threads_did_in_it():
    start, used = Moment.now(), time.thread_time()
    while time.thread_time() - used < 0.05:
        pass
    span = CpuTime.since(start)
    assert span.ran >= 0.045 and span.waited >= 0
    assert span.seconds >= 0.05 and CpuTime.since(Moment.now()).ran < span.ran


def test_times_of_a_system_without_them_are_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_THREADS", tmp_path)
    assert cpu_share([CpuTime.since(Moment.now())], num_cpus=2) is None
