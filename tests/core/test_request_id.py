"""Request ids are random and unique, also across threads and processes."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

from app.core.inference import new_request_id


def test_ids_are_32_hexadecimal_digits_and_never_repeat() -> None:
    ids = [new_request_id() for _ in range(2000)]
    assert len(set(ids)) == 2000
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


def test_threads_get_different_ids() -> None:
    with ThreadPoolExecutor(8) as pool:
        batches = pool.map(lambda _: [new_request_id() for _ in range(500)], range(16))
    ids = [each for batch in batches for each in batch]
    assert len(set(ids)) == len(ids) == 8000


def test_a_forked_process_gets_other_ids() -> None:
    new_request_id()  # fills the buffer of unused ids
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.write(write_end, new_request_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 64).decode() != new_request_id()
    os.close(read_end)
    os.close(write_end)
