"""Tools: commands other than training that run or measure something.

Verify, dry run, simulate, profile, upcycle, extend context, benchmarks of a cluster. Imports train
and what is below.
"""
