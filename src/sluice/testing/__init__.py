"""Fakes and conformance suites that sluice ships for its own tests and for plugins' tests."""
