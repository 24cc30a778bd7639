"""What the tests of the network step share."""

from fixtures import one_thread, warned  # noqa: F401 fixtures
