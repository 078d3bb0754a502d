"""Compares Braid with native logical replication on random schemas and statements."""
