"""Upstream's fit with the loop run by Lightning."""
