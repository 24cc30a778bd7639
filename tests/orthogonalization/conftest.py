"""What the tests of the orthogonalization share."""

from fixtures import one_thread, warned  # noqa: F401 fixtures
