"""Audits: what normalization does to a run, and what is wrong with its dumps."""
