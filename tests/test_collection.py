import gc
import threading

import pytest

from onnxtrain.collection import collection_paused


@pytest.fixture(autouse=True)
def _as_before():
    gc.unfreeze()  # what pytest has collected
    yield
    gc.enable()
    gc.freeze()


def test_nothing_is_collected_inside_also_after_an_error():
    def fail():
        with collection_paused():
            with collection_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert gc.isenabled()


def test_collections_that_are_off_stay_off():
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_the_last_of_several_threads_ends_the_pause():
    begun, may_end = threading.Event(), threading.Event()

    def work():
        with collection_paused():
            begun.set()
            may_end.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(10)
    with collection_paused():
        pass
    assert not gc.isenabled()
    may_end.set()
    thread.join()
    assert gc.isenabled()


def test_what_lasts_is_old_and_is_found_when_it_is_garbage():
    gc.collect()
    with collection_paused(lasting=True):
        made = [[] for _ in range(1000)]
        for item in made:
            item.append(item)
    assert len(gc.get_objects(generation=0)) < 1000
    assert any(item is made[0] for item in gc.get_objects(generation=2))
    del made, item
    assert gc.collect() >= 1000


def test_what_a_program_has_frozen_stays_frozen():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with collection_paused(lasting=True):
            pass
        assert gc.get_freeze_count() == count > 0
    finally:
        gc.unfreeze()
