"""Fakes with the contracts of the real things, and faults on order; shipped, so that users can test against them."""
