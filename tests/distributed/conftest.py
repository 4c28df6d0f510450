"""One pool of four processes for all tests of a run; a test that wants two takes the first two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    found = RankPool(4)
    yield found
    found.close()
