import gc
import threading
import time

import numpy as np
import pytest

from kernels import _cpu
from kernels.recycled import MIN_RECYCLED_BYTES, recycled_array, recycled_arrays, release_idle, thread_times

NUM = 400_000


def test_memory_is_used_again_by_the_next_array_of_its_size():
    release_idle()
    first = recycled_array(NUM, np.int64)
    place = first.ctypes.data
    view = first[10:20]
    del first
    assert recycled_array(NUM, np.int64).ctypes.data != place  # a view still needs it
    del view
    assert recycled_array((2, NUM // 2), np.float64).ctypes.data == place


def test_idle_memory_goes_back_to_the_system():
    release_idle()
    arrays = [recycled_array(NUM, np.int64) for _ in range(3)]
    assert release_idle() == 0
    del arrays
    assert 24 * NUM <= release_idle() <= 27 * NUM
    assert release_idle() == 0


def test_no_more_than_256_mib_stay_idle():
    release_idle()
    arrays = [recycled_array(16 * 2**20, np.uint8) for _ in range(20)]
    del arrays
    assert 240 * 2**20 <= release_idle() <= 256 * 2**20


def test_arrays_of_many_threads_keep_what_was_written():
    def write(seed):
        rng = np.random.default_rng(seed)
        held = []
        for _ in range(60):
            size = int(rng.integers(MIN_RECYCLED_BYTES, 4 * MIN_RECYCLED_BYTES))
            held.append(recycled_array(size, np.uint8))
            held[-1][:] = seed
            if len(held) > 5:
                wrong.append(int((held.pop(int(rng.integers(5))) != seed).sum()))

    wrong: list[int] = []
    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert wrong == [0] * (8 * 55)


def test_several_arrays_share_a_piece_and_no_byte():
    arrays = recycled_arrays(
        [(3, np.int64), ((0, 4), np.float32), ((5, 2), np.float32), ((), np.int32), (NUM, np.int64)]
    )
    assert [array.shape for array in arrays] == [(3,), (0, 4), (5, 2), (), (NUM,)]
    for number, array in enumerate(arrays):
        array[...] = number
    assert all((array == number).all() for number, array in enumerate(arrays))
    assert recycled_arrays([((0, 3), np.float32)])[0].shape == (0, 3)
    with pytest.raises(ValueError, match="num_bytes: is 0"):
        _cpu.allocate(0)


def test_times_of_a_thread_go_on_while_it_computes_and_stop_while_it_sleeps():
    began = thread_times()
    while thread_times()[1] - began[1] < 0.02:
        pass
    computed = thread_times()
    time.sleep(0.05)
    slept = thread_times()
    assert computed[0] - began[0] >= 0.02
    assert slept[0] - computed[0] >= 0.05
    assert slept[1] - computed[1] < 0.02
    assert slept[2] >= began[2]
