"""The native kernel on several threads and in several processes."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch

from kernel_calls import PLAIN, SPLIT, cached_view, each_isa, same
from kvbits.attend import Call, native
from views import SMALL, Shape, query_for, view_of

pytestmark = pytest.mark.usefixtures("threads_stay")


@each_isa
@pytest.mark.parametrize("queries", (1, 40))
def test_the_number_of_threads_does_not_matter(queries: int, isa: str) -> None:
    view = cached_view(PLAIN, (1500, queries))
    call = Call(query_for(view, PLAIN, queries), view, 0.125)
    results = []
    for threads in (1, 2, 3, 4, 5):
        torch.set_num_threads(threads)
        results.append(native.run(call))
        assert torch.equal(results[-1], native.run(call)), "one number of threads always gives the same bits"
        assert same(results[-1], results[0], SPLIT)


def test_python_threads_do_not_disturb_each_other() -> None:
    schemes = ("kivi4", "nf3", "fp8", "int8", "k=hqq2-channel,v=nf4", "int2", "exact", "kivi2")
    calls = []
    for scheme in schemes:
        view = view_of(PLAIN, (400, 3), f"{scheme},{SMALL}")
        calls.append(Call(query_for(view, PLAIN, 3), view, 0.125))
    torch.set_num_threads(2)
    right = [native.run(call) for call in calls]
    start, wrong = threading.Barrier(len(calls)), []

    def work(index: int) -> None:
        torch.set_num_threads(2)  # a thread starts with torch's default
        start.wait()
        for _ in range(10):
            if not torch.equal(native.run(calls[index]), right[index]):
                wrong.append(schemes[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("isa", ["scalar"], indirect=True)
def test_other_python_threads_run_during_a_call(isa: str) -> None:
    """Were the GIL held, no stamp would fall into the call between the moment it begins and the moment it returns."""
    shape = Shape(2, 4, 128, 128)
    view = view_of(shape, (4000, 64), "int4", batch=1)
    call = Call(query_for(view, shape, 64), view, 0.1)
    stamps: list[float] = []
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            stamps.append(time.perf_counter())
            time.sleep(0.0005)

    torch.set_num_threads(1)
    native.run(call)
    counter = threading.Thread(target=count)
    counter.start()
    try:
        begin = time.perf_counter()
        native.run(call)
        end = time.perf_counter()
    finally:
        stop.set()
        counter.join()
    inside = [begin, *(stamp for stamp in stamps if begin < stamp < end), end]
    longest = max(after - before for before, after in itertools.pairwise(inside))
    assert end - begin > 0.05, "too short to tell"
    assert longest < (end - begin) / 2


def in_child(results: Connection, call: Call, threads: int) -> None:
    torch.set_num_threads(threads)
    results.send(native.run(call).flatten().tolist())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("threads", (1, 2, 3))
def test_a_forked_process_can_attend(threads: int) -> None:
    """A child has none of the threads that its parent's OpenMP counts on, and must not wait for them."""
    view = view_of(PLAIN, (600, 3))
    call = Call(query_for(view, PLAIN, 3), view, 0.125)
    torch.set_num_threads(threads)
    right = native.run(call)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=in_child, args=(there, call, threads))
    child.start()
    try:
        assert here.poll(60), "the child hangs"
        assert here.recv() == right.flatten().tolist()
        child.join(30)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert torch.equal(native.run(call), right)  # and the parent goes on
