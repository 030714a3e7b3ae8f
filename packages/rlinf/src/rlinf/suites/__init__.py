"""Suites that come with this package, as data; docs/playing.md tells how to write one."""
