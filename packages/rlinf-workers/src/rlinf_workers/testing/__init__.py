"""Conformance suites and helpers for tests of flows, backends, engines, policies, launchers and weight syncs."""
