import gc
import threading
import tracemalloc

from peft_folders import BASE, INCARNATION, RUN
from scripted_proxy import ScriptedProxy

from bucket_grpo.bucket_sync.current import claim
from bucket_grpo.bucket_sync.publisher import Publisher
from bucket_grpo.bucket_sync.retention import Janitor, RetentionRules
from bucket_grpo.bucket_sync.stager import Stager
from bucket_grpo.bucket_sync.stores import MountedStore

WINDOW = 8


def test_neither_memory_nor_objects_nor_threads_grow(tmp_path, adapter):
    """What a run of 800 steps publishes, with retention and a replica that stages and evicts."""
    (tmp_path / "bucket").mkdir()
    store = MountedStore(tmp_path / "bucket")
    claim(store, RUN, INCARNATION)
    proxy = ScriptedProxy()
    stager = Stager(store, None, tmp_path / "staging", BASE)
    janitor = Janitor(
        store, RUN, INCARNATION, lambda: {ref.key for ref in proxy.announced[-2:]}, RetentionRules(WINDOW)
    )
    publisher = Publisher(
        store, proxy.url, run=RUN, incarnation=INCARNATION, base_model=BASE, max_staleness=4,
        on_live=lambda number: stager.evict(stager.stage(proxy.announced[-1]).ref),
    )  # fmt: skip
    folder = adapter(width=16_384)
    version_bytes = (folder / "adapter_model.safetensors").stat().st_size
    marks: dict[int, int] = {}
    most_objects = 0
    tracemalloc.start()
    try:
        for number in range(1, 201):
            publisher.submit(number, 4 * number, folder)
            if number % 10 == 0:
                publisher.wait_live(number, timeout=10)
                janitor.sweep()
                most_objects = max(most_objects, len(store.list(f"{RUN}/{INCARNATION}/")))
            if number in (50, 200):
                gc.collect()
                marks[number] = tracemalloc.get_traced_memory()[0]
        threads = threading.active_count()
    finally:
        tracemalloc.stop()
        publisher.close(timeout=10)
        proxy.stop()
    assert version_bytes > 250_000
    assert (marks[200] - marks[50]) / 150 < 10_000, "something grows with every publish"
    assert most_objects <= WINDOW
    assert janitor.deleted + WINDOW == publisher.stats()["publishes"]
    assert list((tmp_path / "staging").iterdir()) == []
    assert threads < 12
