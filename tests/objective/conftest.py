"""What the tests of a recorded objective share."""

from fixtures import one_thread  # noqa: F401 fixtures
