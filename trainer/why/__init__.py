"""Where the time of a fit goes, and what replay would bring."""
