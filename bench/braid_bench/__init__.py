"""The measuring of Braid against PostgreSQL's own logical replication, on one machine, in one run.

Needs Python's standard library and the PostgreSQL installation that is measured. `bench/run` starts it as
`python3 -m braid_bench`; what can be chosen is in plan.py, what is reached for in goals.py.
"""
